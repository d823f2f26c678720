"""Gymnasium's spaces as plain arrays: which parts of an observation are numbers or images, and actions from f32[A].

gymnasium is imported inside the functions, so that this module can be read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_stream.errors import InputError

WHOLE = "observation"  # the key of an observation that is no dict
SMALLEST_IMAGE = 8  # pixels; smaller arrays of bytes are taken for numbers


@dataclass(frozen=True, slots=True)
class Part:
    """One part of an observation that is no dict itself. path: the keys that lead to it."""

    path: tuple[str, ...]
    space: Any

    def of(self, observation: Any) -> Any:
        for key in self.path:
            observation = observation[key]
        return observation

    @property
    def is_image(self) -> bool:
        return is_image(getattr(self.space, "dtype", None), getattr(self.space, "shape", None) or ())


def parts_of(space: Any) -> dict[str, Part]:
    """Key (a.b if nested) → part, in the space's own order."""
    return {".".join(path) or WHOLE: Part(path, inner) for path, inner in _leaves(space, ())}


def _leaves(space: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    from gymnasium.spaces import Dict

    if not isinstance(space, Dict):
        yield path, space
        return
    for key, inner in space.spaces.items():
        yield from _leaves(inner, (*path, str(key)))


def known(parts: Mapping[str, Part]) -> str:
    """For error messages: what the observation has."""
    return "it has " + ", ".join(f"{key} ({_kind(part.space)})" for key, part in parts.items())


def _kind(space: Any) -> str:
    shape = f"{list(space.shape)} {space.dtype}" if space.shape else ""
    return f"{type(space).__name__}{shape}"


# --- the state


def state_parts(parts: Mapping[str, Part], wanted: Sequence[str] | None, images: Sequence[str]) -> list[Part]:
    """The parts under the wanted keys, or all but images and texts. Raises InputError: unknown, or of no fixed size."""
    from gymnasium.spaces import Text

    if wanted is None:
        chosen = {
            key: part
            for key, part in parts.items()
            if key not in images and not part.is_image and not isinstance(part.space, Text)
        }
    else:
        chosen = {}
        for name in wanted:
            inside = {key: part for key, part in parts.items() if key == name or key.startswith(f"{name}.")}
            if not inside:
                raise InputError(f"environment.options.state: no part {name!r} in the observation; {known(parts)}")
            chosen |= inside
    for key, part in chosen.items():
        if not part.space.is_np_flattenable:
            raise InputError(
                f"environment.options.state: {key} is a {_kind(part.space)}, which is no fixed number of numbers; "
                f"list the parts to use; {known(parts)}"
            )
    return list(chosen.values())


def state_dims(parts: Sequence[Part]) -> int:
    """S; an observation without numbers is given a single zero, since policies expect a state."""
    from gymnasium.spaces import flatdim

    return max(1, sum(int(flatdim(part.space)) for part in parts))


def read_state(parts: Sequence[Part], observation: Any) -> np.ndarray:
    """f32[S]: numbers as they are, discrete choices as one-hot."""
    from gymnasium.spaces import flatten

    if not parts:
        return np.zeros(1, dtype=np.float32)
    flat = [np.asarray(flatten(part.space, part.of(observation)), dtype=np.float64) for part in parts]
    return np.concatenate(flat).astype(np.float32)


# --- images


def is_image(dtype: Any, shape: Sequence[int]) -> bool:
    """Whether it is u8[h, w], u8[h, w, 1 or 3] or u8[1 or 3, h, w]."""
    if dtype != np.uint8 or len(shape) not in (2, 3) or (len(shape) == 3 and not {1, 3} & {shape[0], shape[-1]}):
        return False
    return sorted(shape)[-2] >= SMALLEST_IMAGE


def as_rgb(image: np.ndarray) -> np.ndarray:
    """An image as u8[h, w, 3]."""
    if image.ndim == 2:
        image = image[:, :, None]
    elif image.shape[-1] not in (1, 3):
        image = np.moveaxis(image, 0, -1)
    return image if image.shape[-1] == 3 else np.repeat(image, 3, axis=-1)


def scaled(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """u8[h, w, 3] as u8[height, width, 3]; a pixel that gets smaller is the mean of what it was."""
    if image.shape[:2] == size:
        return image
    from PIL import Image

    height, width = size
    return np.array(Image.fromarray(np.ascontiguousarray(image)).resize((width, height), Image.Resampling.BILINEAR))


# --- actions


def action_reader(space: Any) -> tuple[int, Callable[[np.ndarray], Any]]:
    """A, and the function that makes the space's own action from f32[A]. Raises InputError for other kinds of spaces.

    Box: an action in [-1, 1] is clipped and scaled to the box's bounds; where a bound is missing it is taken as it is.
    Discrete(n): n numbers, of which the largest is chosen. MultiDiscrete: the same for each of its parts.
    MultiBinary: whether it is above 0.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return _box_reader(space)
    if isinstance(space, spaces.Discrete):
        return int(space.n), lambda action: int(space.start) + int(action.argmax())
    if isinstance(space, spaces.MultiDiscrete):
        counts = space.nvec.ravel()
        cuts = np.cumsum(counts)[:-1]

        def choose(action: np.ndarray) -> np.ndarray:
            chosen = np.array([part.argmax() for part in np.split(action, cuts)])
            return _shaped(chosen + space.start.ravel(), space)

        return int(counts.sum()), choose
    if isinstance(space, spaces.MultiBinary):
        return int(np.prod(space.shape)), lambda action: _shaped(action > 0, space)
    raise InputError(
        f"environment.options.id: its actions are {space}, expected Box, Discrete, MultiDiscrete or MultiBinary; "
        "wrap the environment so that it takes one of these"
    )


def _box_reader(space: Any) -> tuple[int, Callable[[np.ndarray], np.ndarray]]:
    low, high = (bound.astype(np.float64).ravel() for bound in (space.low, space.high))
    bounded = np.isfinite(low) & np.isfinite(high)
    # Halves first: the sum of two large bounds may be too large.
    bottom, top = np.where(bounded, low / 2, 0.0), np.where(bounded, high / 2, 0.0)
    middle, half = bottom + top, np.where(bounded, top - bottom, 1.0)
    whole = np.issubdtype(space.dtype, np.integer)

    def scale(action: np.ndarray) -> np.ndarray:
        value = np.clip(middle + half * np.where(bounded, np.clip(action, -1, 1), action), low, high)
        return _shaped(np.rint(value) if whole else value, space)

    return low.size, scale


def _shaped(flat: np.ndarray, space: Any) -> np.ndarray:
    shaped: np.ndarray = flat.astype(space.dtype).reshape(space.shape)
    return shaped
