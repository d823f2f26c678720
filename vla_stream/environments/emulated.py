"""A simulator that only takes its time: seeded waiting times, real payload bytes, no physics. For profiles and benches.

    images       {camera: u8[B, size, size, 3]} of noise that differs from step to step; state f32[B, S] of noise
    actions      f32[B, A], ignored. A row ends, terminated, after max_steps; it has succeeded by a coin of its seed
    a step       takes the longest of its active rows' times, each lognormal, plus `row_ms` per active row
    a reset      takes `reset_ms`, however many rows are reset together

The simulator's clock runs ahead of the wall's and is waited for when an image is read, that is once per chunk instead
of once per step: 32 such processes would else wake up a few thousand times a second for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from vla_stream.config import Section
from vla_stream.emulation import Claim, Devices
from vla_stream.environments.chunks import check_actions
from vla_stream.environments.protocol import Observations, Specification, StepResult
from vla_stream.errors import EnvironmentFailed, InputError

DeviceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
_SHIFTS = 4096  # images are windows into this many bytes more than they need, so that each is another one


class Emulated:
    """B emulated environments."""

    class Options(Section):
        """Options of `environment.options` when `environment.name` is emulated."""

        cameras: list[str] = Field(default=["front"], min_length=1, description="Names of the cameras.")
        image_size: int = Field(default=224, ge=1, le=1024, description="Width and height of every image in pixels.")
        state_dims: int = Field(default=8, ge=1, description="S: numbers in the state.")
        action_dims: int = Field(default=7, ge=1, description="A: numbers in an action.")
        step_ms: float = Field(default=0.0, ge=0, description="Mean time of one environment's step in milliseconds.")
        step_sigma: float = Field(default=0.0, ge=0, description="Standard deviation of that time's logarithm.")
        row_ms: float = Field(
            default=0.0, ge=0, description="Added to a step for each active row: simulators on a GPU."
        )
        reset_ms: float = Field(default=0.0, ge=0, description="Time of a reset in milliseconds.")
        devices: list[DeviceName] = Field(
            default_factory=list, description="Device of each batch, first come, first served, for simulators on a GPU."
        )
        stragglers: int = Field(default=0, ge=0, description="Batches of the run that are slow, whichever come first.")
        straggler_factor: float = Field(default=20.0, gt=0, description="How much slower they are.")
        folder: Path | None = Field(default=None, description="Folder of the devices. Default: one per user and host.")

    rows_per_process: ClassVar[int | None] = None
    whole_batch: ClassVar[bool] = False

    def __init__(self, rows: int, max_steps: int, options: Emulated.Options) -> None:
        size = (options.image_size, options.image_size)
        self.specification = Specification(
            dict.fromkeys(options.cameras, size), options.state_dims, options.action_dims
        )
        self.rows, self.max_steps = rows, max_steps
        self._options = options
        claims = [Claim(options.devices, "simulator", options.folder)] if options.devices else []
        self._devices = Devices([claim.name for claim in claims], options.folder)
        self._slowdown = 1.0
        if options.stragglers:
            try:
                claims.append(Claim([str(n) for n in range(options.stragglers)], "straggler", options.folder))
                self._slowdown = options.straggler_factor
            except InputError:
                pass  # others are the slow ones
        self._claims = claims
        random = np.random.default_rng(0)
        self._noise = random.integers(0, 256, rows * size[0] * size[1] * 3 + _SHIFTS, dtype=np.uint8)
        self._state = random.standard_normal((rows, options.state_dims)).astype(np.float32)
        self._steps = np.full(rows, max_steps)
        self._step_ms = np.zeros((rows, max_steps))
        self._success = np.zeros(rows, dtype=bool)
        self._owed_s, self._since_s = 0.0, 0.0  # simulated and not yet waited for, and since when
        self._shift = 0

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """See the protocol: times and success of the whole episode from the row's seed alone."""
        for row in map(int, np.flatnonzero(mask)):
            random = np.random.default_rng(int(seeds[row]))
            self._step_ms[row] = lognormal_ms(random, self._options.step_ms, self._options.step_sigma, self.max_steps)
            self._success[row] = random.random() < 0.5
            self._steps[row] = 0
        if mask.any():
            self._owe(self._options.reset_ms)
        return self._observations()

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """See the protocol. Raises EnvironmentFailed for a bad action, or a row that ended and was not reset."""
        check_actions("emulated", actions, active, self.rows, self.specification.action_dims)
        index = np.flatnonzero(active)
        if (self._steps[index] >= self.max_steps).any():
            raise EnvironmentFailed("emulated: step of a row that is not running; reset it first")
        if len(index):
            longest_ms = float(self._step_ms[index, self._steps[index]].max())
            self._owe(longest_ms + self._options.row_ms * len(index))
        self._steps[index] += 1
        ended = active & (self._steps >= self.max_steps)
        success = ended & self._success
        nothing = np.zeros(self.rows, dtype=bool)
        return StepResult(self._observations(), success.astype(np.float32), ended, nothing, success)

    def close(self) -> None:
        """Give the device back. Idempotent."""
        self._claims = []

    def _owe(self, milliseconds: float) -> None:
        if self._owed_s == 0:
            self._since_s = time.monotonic()
        self._owed_s += milliseconds * self._slowdown / 1000

    def _pay(self) -> None:
        owed_s, self._owed_s = self._owed_s, 0.0
        self._devices.compute(owed_s, self._since_s)

    def _observations(self) -> Observations:
        self._shift = (self._shift + 61) % _SHIFTS
        height, width = next(iter(self.specification.cameras.values()))
        stop = self._shift + self.rows * height * width * 3
        image = self._noise[self._shift : stop].reshape(self.rows, height, width, 3)
        images = _Images(self, dict.fromkeys(self.specification.cameras, image))
        return Observations(images, self._state, ["emulate"] * self.rows)


class _Images(Mapping[str, np.ndarray]):
    """Images that are there when their simulator's time has passed."""

    def __init__(self, environment: Emulated, images: Mapping[str, np.ndarray]) -> None:
        self._environment, self._images = environment, images

    def __getitem__(self, camera: str) -> np.ndarray:
        image = self._images[camera]
        self._environment._pay()
        return image

    def __iter__(self) -> Iterator[str]:
        return iter(self._images)

    def __len__(self) -> int:
        return len(self._images)


def lognormal_ms(random: np.random.Generator, mean_ms: float, sigma: float, count: int) -> np.ndarray:
    """f64[count] waiting times exp(N(ln mean − σ²/2, σ)), whose mean is `mean_ms`."""
    times: np.ndarray = mean_ms * np.exp(sigma * random.standard_normal(count) - sigma**2 / 2)
    return times
