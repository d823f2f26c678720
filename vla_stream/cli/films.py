"""Films of episodes, for people: a few successes and a few failures of an evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from vla_stream import tasks
from vla_stream.cli.inspect import contact_sheet
from vla_stream.config import Config
from vla_stream.environments.protocol import EnvironmentBatch, Observations
from vla_stream.errors import InputError
from vla_stream.evaluation import Outcomes

OF_EACH = 4  # successes, and failures
FRAME_MS, LAST_FRAME_MS = 80, 1000


def make_folder(folder: Path) -> None:
    """Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise InputError(f"--video {folder}: cannot be made ({exc.strerror}), expected a folder of yours") from exc


def shoot(
    folder: Path, config: Config, outcomes: Outcomes, actions: Mapping[int, np.ndarray], tell: Callable[[str], None]
) -> list[Path]:
    """Leave `success-<seed>.gif` and `failure-<seed>.gif` in the folder, for the first few of each: all cameras side by
    side, one frame per environment step. What an earlier evaluation left there under these names is replaced.

    The episodes are played once more, here, with the actions f32[T, H, A] that the policy took: a simulator in which
    they then end otherwise is not filmed, and `tell` hears of it."""
    from workers import environment_apart

    saved = []
    parts = tasks.dealt(config.environment, config.evaluation.episodes)
    chosen = {
        *np.flatnonzero(outcomes.success)[:OF_EACH].tolist(),
        *np.flatnonzero(~outcomes.success)[:OF_EACH].tolist(),
    }
    for task, numbers in parts.items():
        mine = sorted(chosen.intersection(numbers))
        if not mine:
            continue
        with contextlib.closing(environment_apart.make_batch(tasks.config_for(config, task), 1)) as batch:
            for number in mine:
                seed = config.evaluation.seed + number
                frames, success = _replay(batch, seed, actions[number])
                if success != outcomes.success[number] or len(frames) != outcomes.steps[number] + 1:
                    tell(
                        f"seed {seed}: the same actions led elsewhere, so there is no film; the simulator is not exact"
                    )
                    continue
                kind = "success" if success else "failure"
                file = folder / f"{kind}-{seed}.gif"
                _save(file, frames, f"{kind}, return {outcomes.returns[number]:.2f}")
                saved.append(file)
    return saved


def _replay(batch: EnvironmentBatch, seed: int, actions_THA: np.ndarray) -> tuple[list[Observations], bool]:
    """What one row saw, and whether it succeeded."""
    row, success = np.ones(1, dtype=bool), False
    frames = [batch.reset(row, np.array([seed], dtype=np.uint64)).take([0])]
    for action in actions_THA.reshape(-1, actions_THA.shape[-1]):
        result = batch.step(action[None], row)
        frames.append(result.observations.take([0]))
        success |= bool(result.success[0])
        if result.terminated[0] or result.truncated[0]:
            break
    return frames, success


def _save(file: Path, frames: list[Observations], outcome: str) -> None:
    first, *others = (contact_sheet([frame], [f"{frames[0].instruction[0]}: {outcome}"]) for frame in frames)
    durations = [FRAME_MS] * len(others) + [LAST_FRAME_MS]
    first.save(file, save_all=True, append_images=others, duration=durations, loop=0)
