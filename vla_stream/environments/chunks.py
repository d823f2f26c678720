"""Execute action chunks on an EnvironmentBatch, and check what it returns. Suffixes: see protocol.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vla_stream.environments.protocol import Observations, Specification, StepResult
from vla_stream.errors import EnvironmentFailed


class Steppable(Protocol):
    """The part of an EnvironmentBatch that chunks need."""

    specification: Specification

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations: ...

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Outcome of one chunk for B rows; rows that were not active hold zeros and False.

    observations  what to act on next: after the reset where a row was reset
    final         observations of the rows `final_rows` i64[N], truncated in this chunk, before any reset (None if none)
    executed      bool[B, H]: the action was executed; there is no reset inside a chunk, so the rest after an end is not
    rewards       f32[B]: sum over the executed actions; terminated, truncated, success bool[B]
    at_end        bool[B]: success in the last executed action
    """

    observations: Observations
    final: Observations | None
    final_rows: np.ndarray
    executed: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    at_end: np.ndarray


def run_chunk(
    batch: Steppable,
    actions_BHA: np.ndarray,
    active: np.ndarray,
    reset_rows: np.ndarray,
    reset_seeds: np.ndarray,
) -> ChunkResult:
    """Step the rows where active bool[B] through their chunk f32[B, H, A], until each ends.

    Afterwards those that ended and stand in reset_rows bool[B] are reset from reset_seeds u64[B].
    Raises EnvironmentFailed when the environment returns something its specification does not allow.
    """
    rows, chunk, _ = actions_BHA.shape
    executed = np.zeros((rows, chunk), dtype=bool)
    rewards = np.zeros(rows, dtype=np.float32)
    terminated, truncated, success, at_end = (np.zeros(rows, dtype=bool) for _ in range(4))
    finals: list[tuple[np.ndarray, Observations]] = []
    running = active.copy()
    observations: Observations | None = None
    for step in range(chunk):
        if not running.any() and observations is not None:
            break
        result = batch.step(actions_BHA[:, step], running)
        check_result(result, batch.specification, rows)
        observations = result.observations
        executed[:, step] = running
        rewards += np.where(running, result.reward, 0.0)
        success |= running & result.success
        at_end[running] = result.success[running]
        ended = running & (result.terminated | result.truncated)
        if not ended.any():
            continue
        # A row that is both is terminated: there is nothing after it to bootstrap from.
        terminated |= ended & result.terminated
        cut = ended & ~result.terminated
        truncated |= cut
        if cut.any():
            finals.append((np.flatnonzero(cut), observations.take(np.flatnonzero(cut))))
        running &= ~ended
    assert observations is not None
    resets = reset_rows & (terminated | truncated)
    if resets.any():
        observations = reset_checked(batch, resets, reset_seeds)
    final_rows = np.concatenate([row for row, _ in finals]) if finals else np.empty(0, dtype=np.int64)
    final = Observations.concatenate([part for _, part in finals]) if finals else None
    return ChunkResult(observations, final, final_rows, executed, rewards, terminated, truncated, success, at_end)


def reset_checked(batch: Steppable, mask: np.ndarray, seeds: np.ndarray) -> Observations:
    """`batch.reset`, with its observations checked."""
    observations = batch.reset(mask, seeds)
    check_observations(observations, batch.specification, len(mask))
    return observations


def check_result(result: StepResult, specification: Specification, rows: int) -> None:
    """Raises EnvironmentFailed: wrong shape, wrong dtype, NaN."""
    for name in ("terminated", "truncated", "success"):
        flag = getattr(result, name)
        if flag.shape != (rows,) or flag.dtype != np.bool_:
            raise EnvironmentFailed(f"step returned {name} {flag.dtype}{list(flag.shape)}, expected bool[{rows}]")
    if result.reward.shape != (rows,) or not np.isfinite(result.reward).all():
        raise EnvironmentFailed(f"step returned reward {result.reward!r}, expected {rows} finite numbers")
    check_observations(result.observations, specification, rows)


def check_actions(subject: str, actions: np.ndarray, active: np.ndarray, rows: int, dims: int) -> None:
    """Raises EnvironmentFailed for actions of another shape or dtype than f32[rows, dims], or not finite where active.

    subject: the environment's name."""
    if actions.shape != (rows, dims) or actions.dtype != np.float32:
        raise EnvironmentFailed(
            f"{subject}: got actions {actions.dtype}{list(actions.shape)}, expected float32[{rows}, {dims}]"
        )
    if active.shape != (rows,) or active.dtype != np.bool_:
        raise EnvironmentFailed(f"{subject}: got active {active.dtype}{list(active.shape)}, expected bool[{rows}]")
    wrong = np.flatnonzero(active & ~np.isfinite(actions).all(axis=1))
    if len(wrong):
        raise EnvironmentFailed(f"{subject}: got action {actions[wrong[0]]} in row {wrong[0]}, expected finite ones")


def check_observations(observations: Observations, specification: Specification, rows: int) -> None:
    """Raises EnvironmentFailed. Images are left to `read_images`: reading them here could render them."""
    state = observations.state
    if state.shape != (rows, specification.state_dims) or state.dtype != np.float32:
        expected = f"float32[{rows}, {specification.state_dims}]"
        raise EnvironmentFailed(f"state is {state.dtype}{list(state.shape)}, expected {expected}")
    if not np.isfinite(state).all():
        raise EnvironmentFailed("state holds NaN or infinity")
    if len(observations.instruction) != rows or set(observations.images) != set(specification.cameras):
        raise EnvironmentFailed(
            f"{len(observations.instruction)} instructions and cameras {sorted(observations.images)}, "
            f"expected {rows} and {sorted(specification.cameras)}"
        )


def read_images(observations: Observations, specification: Specification) -> Observations:
    """The same with plain, checked images; reading may render them. Raises EnvironmentFailed: wrong shape or dtype."""
    images = dict(observations.images)
    for camera, (height, width) in specification.cameras.items():
        image, shape = images[camera], (len(observations), height, width, 3)
        if image.shape != shape or image.dtype != np.uint8:
            raise EnvironmentFailed(f"image {camera} is {image.dtype}{list(image.shape)}, expected uint8{list(shape)}")
    return Observations(images, observations.state, observations.instruction)
