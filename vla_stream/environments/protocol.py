"""What a simulator must offer, and the observation that every environment and policy agree on.

Legend of shape suffixes, here and in the rest of the project:
    B rows (environments or samples), T chunk steps, H actions per chunk, A action dims, S state dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from pydantic import BaseModel


@dataclass(frozen=True, slots=True)
class Observations:
    """Observations of B rows, as every policy reads them.

    images:      camera name -> u8[B, height, width, 3], RGB, row 0 at the top.
    state:       f32[B, S], proprioception in the simulator's own units.
    instruction: B sentences in natural language.

    Example: Observations({"front": u8[4, 48, 48, 3]}, f32[4, 8], ["touch the red cube"] * 4)
    """

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    instruction: Sequence[str]

    def __len__(self) -> int:
        return len(self.instruction)

    @classmethod
    def blank(cls, specification: Specification, rows: int) -> Self:
        """So many rows of these shapes: black images, a state of zeros, no words."""
        images = {camera: np.zeros((rows, *size, 3), dtype=np.uint8) for camera, size in specification.cameras.items()}
        return cls(images, np.zeros((rows, specification.state_dims), dtype=np.float32), [""] * rows)

    def take(self, rows: Sequence[int] | np.ndarray) -> Self:
        """The given rows, copied, in the given order."""
        index = np.asarray(rows, dtype=np.int64)
        images = {camera: image[index] for camera, image in self.images.items()}
        return type(self)(images, self.state[index], [self.instruction[i] for i in index])

    def part(self, rows: slice) -> Observations:
        """The given rows, as views."""
        images = {camera: image[rows] for camera, image in self.images.items()}
        return Observations(images, self.state[rows], self.instruction[rows])

    @classmethod
    def concatenate(cls, parts: Sequence[Observations]) -> Self:
        """All rows of `parts`, which must agree on cameras and shapes, in order."""
        images = {camera: np.concatenate([part.images[camera] for part in parts]) for camera in parts[0].images}
        state = np.concatenate([part.state for part in parts])
        return cls(images, state, [sentence for part in parts for sentence in part.instruction])


@dataclass(frozen=True, slots=True)
class Specification:
    """Shapes that a policy and an environment must share.

    cameras: camera name -> (height, width). state_dims: S. action_dims: A. Actions lie in [action_low, action_high].
    """

    cameras: Mapping[str, tuple[int, int]]
    state_dims: int
    action_dims: int
    action_low: float = -1.0
    action_high: float = 1.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one environment step for B rows; rows that were not active hold zeros and False.

    observations: after the step and before any reset (there is no autoreset).
    reward f32[B]; terminated, truncated, success bool[B]. `success` is that of this step.
    """

    observations: Observations
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray


@dataclass(frozen=True, slots=True)
class Recorded:
    """How files of demonstrations that a simulator's own project publishes differ from what its environment shows here.

    images: camera → key in the file; state: keys, side by side; turned: images lie upside down, turned by 180°.
    An action is the file's, times action_scale plus action_offset: one number, or one of each action dim.
    """

    images: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    turned: bool = False
    action_scale: float | tuple[float, ...] = 1.0
    action_offset: float | tuple[float, ...] = 0.0


@runtime_checkable
class EnvironmentBatch(Protocol):
    """B environments of one kind, stepped together. There is no autoreset: whoever steps decides when to reset.

    A class also has the attribute `Options` (a pydantic model with a sentence per field, importable without the
    simulator's own packages) and is made as `Class(rows, max_steps, Options(...))`. It may have a class method
    `check_installed(options)`, which is called before any worker starts, takes seconds at most, and raises InputError
    when the simulator's packages or the files of the chosen task are missing. Another one, `recorded(options)`, may say
    what is `Recorded` in robomimic's HDF5 files of this simulator, without the simulator's packages.
    `rows` is B; `max_steps` is the horizon after which a row is truncated. `whole_batch` says that a subset cannot be
    stepped; `rows_per_process` bounds the rows that one process may hold (None: all of them).
    Observations are never written to afterwards; their images may be rendered only when they are read.
    """

    Options: ClassVar[type[BaseModel]]
    rows_per_process: ClassVar[int | None]
    whole_batch: ClassVar[bool]
    specification: Specification
    rows: int
    max_steps: int

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """Reset the rows where mask bool[B] is set, each from its seed u64[B] alone; return all rows' observations."""

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Step the rows where active bool[B] is set with actions f32[B, A]; the other rows stay untouched."""

    def close(self) -> None:
        """Release every resource. Idempotent."""


@runtime_checkable
class Expert(Protocol):
    """Optional: an environment that can demonstrate its task."""

    def expert_actions(self) -> np.ndarray:
        """The scripted expert's next action for every row, f32[B, A], in the environment's action range."""


@runtime_checkable
class Grounding(Protocol):
    """Optional: an environment that can label scenes for perception pre-training.

    It stands in for what the pre-training of a real VLM gives: knowing where the thing is that a sentence names.
    """

    def grounding_targets(self) -> np.ndarray:
        """Image coordinates of the named object in every row, f32[B, 2], x right and y down, each in [-1, 1]."""
