"""What changed between two versions of the weights: exact for any bits, and refused where it was damaged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from vla_stream.errors import BadMessage
from vla_stream.streams import deltas

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def weights(seed: int = 0, elements: int = 3000) -> dict[str, np.ndarray]:
    """Tensors of every width, any bits, one of them empty."""
    random = np.random.default_rng(seed)
    tensors = {
        f"of {width}": random.integers(0, 256, elements * width, np.uint8).view(t) for width, t in WIDTHS.items()
    }
    return {
        **tensors,
        "matrix": random.standard_normal((7, 30)).astype(np.float32),
        "empty": np.zeros((0, 4), np.float16),
    }


def changed(tensors: Mapping[str, np.ndarray], share: float, seed: int = 1) -> dict[str, np.ndarray]:
    """Any other bits in some places."""
    random = np.random.default_rng(seed)
    result = {}
    for name, tensor in tensors.items():
        flat = tensor.copy().reshape(-1).view(WIDTHS[tensor.dtype.itemsize])
        places = random.random(len(flat)) < share
        flat[places] = random.integers(0, 256, int(places.sum()) * tensor.itemsize, np.uint8).view(flat.dtype)
        result[name] = flat.view(tensor.dtype).reshape(tensor.shape)
    return result


def applied(old: bytes, delta: bytes) -> bytes:
    data = bytearray(old)
    deltas.apply(data, delta)
    return bytes(data)


@pytest.mark.parametrize("block", [1, 7, 1000, 1 << 24])
@pytest.mark.parametrize("share", [0.0, 0.0007, 0.05, 0.15])
def test_a_delta_turns_one_version_into_the_other_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, block: int, share: float
) -> None:
    monkeypatch.setattr(deltas, "_BLOCK", block)
    monkeypatch.setattr(deltas, "MAX_SHARE", 100.0)  # heads of tiny blocks are longer than what they hold
    tensors = weights()
    old, new = save(tensors), save(changed(tensors, share))
    delta = deltas.encode(old, new)
    assert delta is not None and applied(old, delta) == new
    assert (old == new) == (share == 0)


@pytest.mark.parametrize("place", [0, 254, 255, 256, 509, 510, 2999])
def test_a_single_change_is_found_wherever_it_is(place: int) -> None:
    old = {"w": np.zeros(3000, np.uint16)}
    new = {"w": old["w"].copy()}
    new["w"][place] = 0xFFFF
    delta = deltas.encode(save(old), save(new))
    assert delta is not None and len(delta) < 60 and applied(save(old), delta) == save(new)


def test_the_smallest_changes_of_a_twentieth_of_bf16_weights_are_less_than_a_twentieth_of_the_bytes() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 1 << 16, 400_000, np.uint16)
    new = old + np.where(random.random(len(old)) < 0.05, random.choice([-1, 1], len(old)), 0).astype(np.uint16)
    delta = deltas.encode(save({"w": old}), save({"w": new}))
    assert delta is not None and len(delta) < 0.025 * old.nbytes


def test_other_tensors_are_no_ground_for_a_delta() -> None:
    tensors = weights()
    for other in (
        {**tensors, "matrix": tensors["matrix"].T.copy()},
        {**tensors, "more": np.zeros(3, np.float32)},
        {name: tensor for name, tensor in tensors.items() if name != "matrix"},
    ):
        assert deltas.encode(save(tensors), save(other)) is None


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_where_most_has_changed_there_is_no_delta(share: float) -> None:
    tensors = weights()
    assert deltas.encode(save(tensors), save(changed(tensors, share))) is None


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_f27_a_damaged_delta_is_refused_or_gives_other_weights_of_the_same_size(data: st.DataObject) -> None:
    tensors = weights(elements=200)
    old = save(tensors)
    delta = bytearray(deltas.encode(old, save(changed(tensors, 0.05))) or b"")
    place = data.draw(st.integers(0, len(delta) - 1))
    if data.draw(st.booleans()):
        del delta[place:]
    else:
        delta[place] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BadMessage):
        assert len(applied(old, bytes(delta))) == len(old)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_f27_weights_with_a_damaged_header_are_refused_or_lie_within_their_bytes(data: st.DataObject) -> None:
    raw = bytearray(save(weights(elements=3)))
    header = 8 + int.from_bytes(raw[:8], "little")
    raw[data.draw(st.integers(0, header - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(BadMessage):
        assert all(0 <= tensor.start <= tensor.stop <= len(raw) for tensor in deltas.layout(bytes(raw)))


@pytest.mark.parametrize(
    "raw", [b"", b"\x01", b"\xff" * 16, (2).to_bytes(8, "little") + b"[]", (2).to_bytes(8, "little") + b"{]"]
)
def test_f27_what_is_not_safetensors_is_refused(raw: bytes) -> None:
    with pytest.raises(BadMessage):
        deltas.layout(raw)
