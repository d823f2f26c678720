"""A small environment that fails on demand, found as `fakes:Class`. Its child processes must not pay for torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from vla_stream.config import Section
from vla_stream.environments.chunks import check_actions
from vla_stream.environments.protocol import Observations, Specification, StepResult

S, A = 3, 2
POISON = 77.0  # no position, goal or step is that large

Fault = Literal["", "hang", "raise", "nan", "shape", "dtype", "image", "kill", "exit", "poison"]


class Line:
    """Points on a line: the seed gives position and goal, the first action moves by up to 0.25, closeness is rewarded.

    A row is terminated, with success, within 0.1 of its goal. Its image is its position, 8-bit.
    """

    class Options(Section):
        fault: Fault = Field(default="", description="What a row does that was reset from fault_seed.")
        fault_seed: int = Field(default=0, description="That seed.")
        fault_step: int = Field(default=0, description="In this step since its reset; 0: in the reset.")
        fault_once: str = Field(default="", description="A file: fail while it exists, from fault_step on; remove it.")
        start: float | None = Field(default=None, description="First distance to the goal; default: by the seed.")
        step_s: float = Field(default=0.0, description="Duration of a step.")
        refuse: bool = Field(default=False, description="Cannot be made.")
        image_size: int = Field(default=16, description="Height and width of its image.")

    rows_per_process: ClassVar[int | None] = None
    whole_batch: ClassVar[bool] = False

    def __init__(self, rows: int, max_steps: int, options: Line.Options) -> None:
        if options.refuse:
            raise RuntimeError("no such line")
        self.rows, self.max_steps, self.options = rows, max_steps, options
        self.specification = Specification({"front": (options.image_size, options.image_size)}, S, A)
        self.seeds = np.zeros(rows, dtype=np.uint64)
        self.position, self.goal = np.zeros(rows), np.zeros(rows)
        self.steps = np.zeros(rows, dtype=np.int64)
        self.calls: list[tuple[str, list[int]]] = []

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        self.calls.append(("reset", np.flatnonzero(mask).tolist()))
        for row in np.flatnonzero(mask):
            random = np.random.default_rng(int(seeds[row]))
            self.seeds[row], self.steps[row] = seeds[row], 0
            self.position[row] = random.uniform(-1, 1)
            distance = random.uniform(0.2, 1.5) if self.options.start is None else self.options.start
            self.goal[row] = self.position[row] + distance
        return self._maybe_fail(self._observe(), mask)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        self.calls.append(("step", np.flatnonzero(active).tolist()))
        check_actions("line", actions, active, self.rows, A)
        if self.options.step_s:
            time.sleep(self.options.step_s)
        self.position[active] += 0.25 * np.clip(actions[active, 0], -1, 1)
        self.steps[active] += 1
        distance = np.abs(self.goal - self.position)
        reached = active & (distance < 0.1)
        observations = self._maybe_fail(self._observe(), active)
        return StepResult(
            observations,
            np.where(active, -distance, 0.0).astype(np.float32),
            reached,
            active & (self.steps >= self.max_steps),
            reached.copy(),
        )

    def close(self) -> None:
        self.calls.append(("close", []))

    def _observe(self) -> Observations:
        level = np.clip(128 + 60 * self.position, 0, 255).astype(np.uint8)
        size = self.options.image_size
        image = np.repeat(level, size * size * 3).reshape(self.rows, size, size, 3)
        state = np.stack([self.position, self.goal, self.steps / self.max_steps], axis=1).astype(np.float32)
        return Observations({"front": image}, state, [f"go to {goal:.2f}" for goal in self.goal])

    def _maybe_fail(self, good: Observations, touched: np.ndarray) -> Observations:
        options = self.options
        due = touched & (self.seeds == options.fault_seed) & (self.steps == options.fault_step)
        if options.fault_once:
            due = touched & (self.steps >= options.fault_step)
        if options.fault == "poison":
            due &= self.steps == 0  # what a policy is sure to be asked about
        if not options.fault or not due.any():
            return good
        if options.fault_once:
            try:
                Path(options.fault_once).unlink()
            except FileNotFoundError:
                return good
        match options.fault:
            case "hang":
                time.sleep(3600)
            case "raise":
                raise ValueError("the line broke")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "nan":
                return Observations(good.images, np.full_like(good.state, np.nan), good.instruction)
            case "poison":
                state = good.state.copy()
                state[np.flatnonzero(due)[0]] = POISON  # of one slot alone, also where two begin at once
                return Observations(good.images, state, good.instruction)
            case "shape":
                return Observations(good.images, good.state[:, :2], good.instruction)
            case "dtype":
                return Observations(good.images, good.state.astype(np.float64), good.instruction)
            case "image":
                return Observations(
                    {"front": good.images["front"][:, :8].astype(np.float32)}, good.state, good.instruction
                )
        raise AssertionError(options.fault)


class LineApart(Line):
    """The same, one row per process."""

    rows_per_process: ClassVar[int | None] = 1


class LinePairs(Line):
    """The same, two rows per process."""

    rows_per_process: ClassVar[int | None] = 2


class LineWhole(Line):
    """The same, as a device-vectorised simulator would be: all slots or none."""

    whole_batch: ClassVar[bool] = True


class OneByOne:
    """A batching strategy: one request per batch, at once."""

    wait_ms = 0.0

    def __init__(self, max_rows: int, max_wait_ms: float) -> None:
        self.batches: list[int] = []

    def takes(self, backlog: object, held: int, rows: int) -> float:
        return 1

    def served(self, rows: int, took_ms: float) -> None:
        self.batches.append(rows)
