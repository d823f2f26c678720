"""The codec: what is packed comes back; what is damaged, foreign or absurd is a BadMessage and nothing else (F27)."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from vla_stream.broker import codec
from vla_stream.broker.codec import DTYPES, MAX_PACKET_BYTES, digest_of, pack, seal, unpack, unseal
from vla_stream.errors import BadMessage

# Derandomised: CI must not flake, and a found example belongs into a test of its own.
SETTINGS = settings(derandomize=True, database=None, deadline=None, max_examples=150)

any_array = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda kind: arrays(kind, array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)
any_arrays = st.dictionaries(st.text(max_size=8), any_array, max_size=4)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)


def packet_with(described: object, meta: object = None, body: bytes = b"") -> bytes:
    """A packet with the right framing around any header."""
    header = msgpack.packb([described, {} if meta is None else meta])
    start = 4 + len(header) + (-(4 + len(header)) % codec.ALIGNMENT)
    return (len(header).to_bytes(4, "little") + header).ljust(start, b"\0") + body


def sample_packet() -> bytes:
    image = np.arange(2 * 3 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3, 3)
    return pack({"image": image, "state": np.ones((2, 5), np.float32)}, {"instruction": ["go", "stop"]})


@pytest.mark.parametrize("kind", sorted(DTYPES))
def test_arrays_of_every_dtype_come_back_equal(kind: str) -> None:
    original = np.array([[0, 1, 1], [1, 0, 1]]).astype(kind)
    returned, _ = unpack(pack({"a": original}))
    assert returned["a"].dtype == original.dtype
    assert np.array_equal(returned["a"], original)


def test_big_endian_strided_and_zero_dimensional_arrays_come_back_equal() -> None:
    original = {
        "big": np.array([1.5, -2.0], dtype=">f8"),
        "strided": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2],
        "reversed": np.arange(5, dtype=np.uint8)[::-1],
        "scalar": np.float32(3.5) * np.ones((), np.float32),
        "empty": np.zeros((0, 7), np.float16),
    }
    returned, _ = unpack(pack(original))
    for name, array in original.items():
        assert returned[name].shape == array.shape
        assert np.array_equal(returned[name], array)


@SETTINGS
@given(any_arrays, st.dictionaries(st.text(max_size=8), plain, max_size=3))
def test_whatever_can_be_packed_comes_back(originals: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    returned, returned_meta = unpack(pack(originals, meta))
    assert returned_meta == meta
    assert returned.keys() == originals.keys()
    for name, original in originals.items():
        assert returned[name].dtype == original.dtype and returned[name].shape == original.shape
        assert returned[name].tobytes() == original.tobytes()


def test_unpacked_arrays_are_aligned_read_only_views() -> None:
    packet = pack({"odd": np.zeros(3, np.uint8), "wide": np.ones(4, np.float64)})
    returned, _ = unpack(packet)
    assert np.shares_memory(returned["wide"], np.frombuffer(packet, np.uint8))
    # The packet itself may lie anywhere in memory; within it every array starts at a multiple of the alignment.
    start = np.frombuffer(packet, np.uint8).ctypes.data
    assert all((array.ctypes.data - start) % codec.ALIGNMENT == 0 for array in returned.values())
    with pytest.raises(ValueError, match="read-only"):
        returned["wide"][0] = 2.0


@pytest.mark.parametrize(
    "array",
    [
        np.array([{"a": 1}], dtype=object),
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([1 + 2j]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
        np.zeros(2, dtype=[("x", "<f4")]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_dtypes_that_need_pickle_or_have_no_plain_meaning_are_refused(array: np.ndarray) -> None:
    with pytest.raises(BadMessage, match=r"array a: dtype .* cannot travel"):
        pack({"a": array})


@SETTINGS
@given(st.integers(0, len(sample_packet()) - 1))
def test_f27_a_packet_cut_anywhere_is_refused(length: int) -> None:
    with pytest.raises(BadMessage):
        unpack(sample_packet()[:length])


def test_f27_a_packet_with_bytes_behind_its_end_is_refused() -> None:
    with pytest.raises(BadMessage, match="from its header"):
        unpack(sample_packet() + b"\0")


@settings(SETTINGS, max_examples=600)
@given(st.integers(0, 8 * len(sample_packet()) - 1))
def test_f27_a_flipped_bit_gives_arrays_or_a_bad_message(bit: int) -> None:
    damaged = bytearray(sample_packet())
    damaged[bit // 8] ^= 1 << (bit % 8)
    only_arrays_or_bad_message(bytes(damaged))


@settings(SETTINGS, max_examples=400)
@given(st.binary(max_size=200))
def test_f27_arbitrary_bytes_give_arrays_or_a_bad_message(data: bytes) -> None:
    only_arrays_or_bad_message(data)
    only_arrays_or_bad_message(len(data).to_bytes(4, "little") + data)


def only_arrays_or_bad_message(packet: bytes) -> None:
    try:
        returned, meta = unpack(packet)
    except BadMessage as exc:
        assert "\n" not in str(exc)
        return
    assert isinstance(meta, dict)
    assert sum(array.nbytes for array in returned.values()) <= len(packet)


swapped = plain | st.binary(max_size=4) | st.floats()


@settings(SETTINGS, max_examples=400)
@given(swapped | st.lists(swapped | st.tuples(swapped, swapped, swapped), max_size=3), swapped)
def test_f27_a_header_of_swapped_types_gives_arrays_or_a_bad_message(described: object, meta: object) -> None:
    only_arrays_or_bad_message(packet_with(described, meta, bytes(64)))


@settings(SETTINGS, max_examples=300)
@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(-2, 2**64 - 1) | st.integers(0, 4), max_size=10))
def test_f27_a_header_with_any_shape_gives_arrays_or_a_bad_message(kind: str, shape: list[int]) -> None:
    only_arrays_or_bad_message(packet_with([["a", kind, shape]], body=bytes(64)))


@pytest.mark.parametrize(
    "shape",
    [[2**62], [2**40, 2**40], [0, 2**62, 2**62], [0, 2**64 - 1], [-1], [1.0], ["3"], [None], [1] * 9, [True]],
    ids=str,
)
def test_f27_absurd_shapes_are_refused(shape: list[object]) -> None:
    with pytest.raises(BadMessage):
        unpack(packet_with([["a", "|u1", shape]], body=bytes(16)))


@pytest.mark.parametrize("kind", ["|O", "<U4", "|S4", "<c8", "<M8[D]", ">f4", "f4", "", 7, None, []], ids=repr)
def test_f27_foreign_dtypes_in_a_header_are_refused(kind: object) -> None:
    with pytest.raises(BadMessage):
        unpack(packet_with([["a", kind, [1]]], body=bytes(16)))


def test_f27_a_header_that_claims_more_than_there_is_allocates_nothing_for_it() -> None:
    nested_lists = b"\xdd\x00\x0f\xff\xff" * 1000  # lists of a million items, one in the other
    hostile = [
        packet_with([["a", "<f8", [MAX_PACKET_BYTES // 8]]]),
        (1 << 20).to_bytes(4, "little") + nested_lists.ljust(1 << 20, b"\xc0"),
        b"\xff\xff\xff\xff" + b"\0" * 64,
        packet_with([["a", "|u1", [0]]] * (codec.MAX_ARRAYS + 1)),
    ]
    tracemalloc.start()
    try:
        for packet in hostile:
            with pytest.raises(BadMessage):
                unpack(packet)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


# ---- sealed fields


def test_sealed_fields_come_back_typed_and_readable() -> None:
    raw = seal(3, {"id": "s/1", "n": 8, "share": 0.25, "count": np.int64(7), "data": b"\x00\xff", "word": "größer"})
    assert raw[b"n"] == b"8" and raw[b"share"] == b"0.25" and raw[b"count"] == b"7"
    fields = unseal(3, raw)
    assert fields.text("id") == "s/1"
    assert fields.integer("n") == 8
    assert fields.data("data") == b"\x00\xff"
    assert fields.text("word") == "größer"
    assert fields.has("data") and not fields.has("other")


@pytest.mark.parametrize("name", ["schema", "digest"])
def test_a_message_cannot_have_a_field_that_the_seal_would_overwrite(name: str) -> None:
    with pytest.raises(ValueError, match=f"field {name} is set by seal"):
        seal(1, {name: "x"})


def test_f27_an_entry_of_another_schema_is_refused_with_both_numbers() -> None:
    with pytest.raises(BadMessage, match="schema b'2', expected 1; all workers need one release"):
        unseal(1, seal(2, {"id": "x"}))


def test_f27_an_entry_without_schema_is_refused() -> None:
    with pytest.raises(BadMessage, match="schema missing"):
        unseal(1, {b"hello": b"world"})


def test_f17_an_entry_without_fields_is_named_as_trimmed() -> None:
    with pytest.raises(BadMessage, match="trimmed"):
        unseal(1, {})


FIELDS = {"id": "simulator-0/x", "n": 8, "data": b"abc"}


@pytest.mark.parametrize("name", sorted(seal(1, FIELDS)))
@pytest.mark.parametrize("change", ["flip", "cut", "grow", "remove"])
def test_f27_damage_in_any_field_is_noticed(name: bytes, change: str) -> None:
    raw = seal(1, FIELDS)
    value = raw.pop(name)
    if change != "remove":
        raw[name] = {"flip": bytes([value[0] ^ 1]) + value[1:], "cut": value[:-1], "grow": value + b"0"}[change]
    with pytest.raises(BadMessage):
        unseal(1, raw)


def test_f27_swapped_and_added_fields_are_noticed() -> None:
    raw = seal(1, {"a": "1", "b": "2"})
    with pytest.raises(BadMessage, match="digest"):
        unseal(1, raw | {b"a": raw[b"b"], b"b": raw[b"a"]})
    with pytest.raises(BadMessage, match="digest"):
        unseal(1, raw | {b"c": b"3"})


def test_moving_bytes_between_a_name_and_its_value_changes_the_digest() -> None:
    assert seal(1, {"ab": "c"})[b"digest"] != seal(1, {"a": "bc"})[b"digest"]
    assert seal(1, {"a": "1", "b": "2"})[b"digest"] != seal(1, {"a": "1b=1:2"})[b"digest"]


@pytest.mark.parametrize(
    ("value", "read", "message"),
    [
        (b"12a", lambda f: f.integer("x"), "field x is b'12a', expected an integer"),
        (b"1" * 30, lambda f: f.integer("x"), "field x has 30 bytes"),
        (b"-1", lambda f: f.integer("x"), "field x is -1, expected 0 to"),
        (b"5", lambda f: f.integer("x", 1, 4), "field x is 5, expected 1 to 4"),
        (b"\xff", lambda f: f.text("x"), "expected UTF-8"),
        (b"abc", lambda f: f.text("x", 2), "field x has 3 bytes, expected at most 2"),
        (b"", lambda f: f.data("y"), "entry lacks the field y"),
    ],
)
def test_a_field_of_another_type_or_size_is_a_bad_message_that_names_it(value: bytes, read: Any, message: str) -> None:
    fields = unseal(1, seal(1, {"x": value}))
    with pytest.raises(BadMessage, match=message):
        read(fields)


@SETTINGS
@given(st.dictionaries(st.binary(max_size=8), st.binary(max_size=16), max_size=6))
def test_f27_arbitrary_fields_are_a_bad_message(raw: dict[bytes, bytes]) -> None:
    with pytest.raises(BadMessage):
        unseal(1, raw)


def test_the_digest_is_pinned_so_that_releases_understand_one_another() -> None:
    assert digest_of(b"vla-stream") == "147e417a41fbdd8a"
    assert seal(1, {"id": "x", "n": 8})[b"digest"] == b"13c23f81052f2877"
