"""The shapes of a run: one canonical text, and nothing else decodes."""

from __future__ import annotations

import pytest

from vla_stream.environments.protocol import Specification
from vla_stream.errors import BadMessage
from vla_stream.streams.specification import specification_from_json, specification_to_json

SPECIFICATION = Specification({"wrist": (64, 48), "front": (48, 48)}, state_dims=8, action_dims=3, action_low=-0.5)


def test_a_specification_comes_back_equal() -> None:
    assert specification_from_json(specification_to_json(SPECIFICATION)) == SPECIFICATION


def test_equal_specifications_give_equal_texts_whatever_the_order_of_cameras() -> None:
    other = Specification({"front": (48, 48), "wrist": (64, 48)}, state_dims=8, action_dims=3, action_low=-0.5)
    assert specification_to_json(other) == specification_to_json(SPECIFICATION)


@pytest.mark.parametrize(
    "text",
    ["", "3", "[]", "{}", '{"cameras": 3}', '{"cameras": {"front": [48]}, "state_dims": 1, "action_dims": 1}',
     '{"cameras": {}, "state_dims": "x", "action_dims": 1, "action_low": 0, "action_high": 1}',
     '{"cameras": {}, "state_dims": 1e999, "action_dims": 1, "action_low": 0, "action_high": 1}'],
)  # fmt: skip
def test_f27_a_foreign_text_is_a_bad_message(text: str) -> None:
    with pytest.raises(BadMessage, match="does not decode"):
        specification_from_json(text)
