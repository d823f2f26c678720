"""Observations as bytes: rows of images, states and sentences that agree with each other."""

from __future__ import annotations

import numpy as np
import pytest

from vla_stream.broker.codec import pack
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage
from vla_stream.streams.observations import describe, pack_observations, unpack_observations

ROWS = 3
IMAGE = np.arange(ROWS * 4 * 5 * 3, dtype=np.uint8).reshape(ROWS, 4, 5, 3)
STATE = np.linspace(0, 1, ROWS * 2, dtype=np.float32).reshape(ROWS, 2)
WORDS = ["touch the red cube", "touch the green cube", "berühre den blauen Würfel"]
OBSERVATIONS = Observations({"front": IMAGE, "wrist": IMAGE[:, :2]}, STATE, WORDS)


def test_observations_come_back_equal() -> None:
    returned = unpack_observations(pack_observations(OBSERVATIONS), ROWS)
    assert returned.images.keys() == {"front", "wrist"}
    assert np.array_equal(returned.images["front"], IMAGE)
    assert np.array_equal(returned.images["wrist"], IMAGE[:, :2])
    assert np.array_equal(returned.state, STATE)
    assert returned.instruction == WORDS


def test_unpacked_images_are_views_into_the_packet() -> None:
    packet = pack_observations(OBSERVATIONS)
    assert np.shares_memory(unpack_observations(packet).images["front"], np.frombuffer(packet, np.uint8))


def test_f27_another_number_of_rows_than_announced_is_refused() -> None:
    with pytest.raises(BadMessage, match="observations have 3 rows, expected 4"):
        unpack_observations(pack_observations(OBSERVATIONS), 4)


@pytest.mark.parametrize(
    ("arrays", "meta", "message"),
    [
        ({"state": None}, {}, "state is missing"),
        ({"state": STATE[:2]}, {}, r"state is float32\[2, 2\], expected f32\[3, S\]"),
        ({"state": STATE.astype(np.float64)}, {}, "state is float64"),
        ({"state": np.full_like(STATE, np.nan)}, {}, "state holds NaN"),
        (
            {"image.front": IMAGE[:2]},
            {},
            r"image.front is uint8\[2, 4, 5, 3\], expected image.<camera> u8\[3, h, w, 3\]",
        ),
        ({"image.front": IMAGE.astype(np.float32)}, {}, "image.front is float32"),
        ({"image.front": IMAGE[..., :1]}, {}, "image.front is"),
        ({"image.front": IMAGE[..., 0]}, {}, "image.front is"),
        ({"depth": IMAGE}, {}, "depth is"),
        ({}, {"instruction": None}, "lack a list of instructions"),
        ({}, {"instruction": "go"}, "lack a list of instructions"),
        ({}, {"instruction": [1, 2, 3]}, "an instruction is not a text"),
        ({}, {"instruction": ["x" * 2001] * 3}, "an instruction is not a text of at most 2000"),
        ({}, {"instruction": WORDS[:2]}, "observations have 2 rows, expected 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_f27_arrays_and_sentences_that_do_not_agree_are_refused(
    arrays: dict[str, np.ndarray | None], meta: dict[str, object], message: str
) -> None:
    merged = {"image.front": IMAGE, "state": STATE} | arrays
    present = {name: array for name, array in merged.items() if array is not None}
    with pytest.raises(BadMessage, match=message):
        unpack_observations(pack(present, {"instruction": WORDS} | meta), ROWS)


def test_arrays_are_described_by_type_and_shape() -> None:
    assert describe(STATE) == "float32[3, 2]"
    assert describe(None) == "missing"
