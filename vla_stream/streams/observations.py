"""Observations as bytes: `image.<camera>` u8[B, h, w, 3], `state` f32[B, S], and the B instructions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_stream.broker.codec import Piece, pieces, unpack
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage

MAX_ROWS = 4096
MAX_INSTRUCTION_CHARACTERS = 2000


def pack_observations(observations: Observations) -> bytes:
    """One packet for all rows."""
    return b"".join(observation_pieces(observations))


def observation_pieces(observations: Observations, **others: np.ndarray) -> list[Piece]:
    """The same packet in pieces, images uncopied; `others` go with it."""
    arrays = {f"image.{camera}": image for camera, image in observations.images.items()}
    return pieces({**arrays, "state": observations.state, **others}, {"instruction": list(observations.instruction)})


def unpack_observations(data: bytes | memoryview, rows: int | None = None) -> Observations:
    """The inverse, as views into `data`. `rows`: the number that must be there. Raises BadMessage."""
    return checked_observations(*unpack(data), rows)


def checked_observations(
    arrays: dict[str, np.ndarray], meta: Mapping[str, Any], rows: int | None = None
) -> Observations:
    """What `unpack` found, as observations. Raises BadMessage: anything else is in it, or another number of rows."""
    instruction = meta.get("instruction")
    if not isinstance(instruction, list) or len(instruction) > MAX_ROWS:
        raise BadMessage("observations lack a list of instructions")
    if not all(isinstance(item, str) and len(item) <= MAX_INSTRUCTION_CHARACTERS for item in instruction):
        raise BadMessage(f"an instruction is not a text of at most {MAX_INSTRUCTION_CHARACTERS} characters")
    if rows is not None and len(instruction) != rows:
        raise BadMessage(f"observations have {len(instruction)} rows, expected {rows}")
    state = arrays.pop("state", None)
    if state is None or state.dtype != np.float32 or state.ndim != 2 or len(state) != len(instruction):
        raise BadMessage(f"observations' state is {describe(state)}, expected f32[{len(instruction)}, S]")
    if not np.isfinite(state).all():
        raise BadMessage("observations' state holds NaN or infinity")
    images = {}
    for name, image in arrays.items():
        expected = image.dtype == np.uint8 and image.ndim == 4 and image.shape[-1] == 3
        if not name.startswith("image.") or not expected or len(image) != len(instruction):
            raise BadMessage(f"{name} is {describe(image)}, expected image.<camera> u8[{len(instruction)}, h, w, 3]")
        images[name.removeprefix("image.")] = image
    return Observations(images, state, instruction)


def describe(array: np.ndarray | None) -> str:
    """`float32[4, 8]`, for error messages."""
    return "missing" if array is None else f"{array.dtype}{list(array.shape)}"
