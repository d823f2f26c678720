"""Environments of another interpreter than ours (`simulators.python`): asked about, tried out, and played from here.

Workers run there as a whole. This is for the commands that need an environment and a policy, or an environment and a
person: `check`, `eval`, `demos`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np

from vla_stream import plugins, tasks
from vla_stream.config import Config
from vla_stream.environments.conformance import Report
from vla_stream.environments.late_images import LateImages
from vla_stream.environments.protocol import EnvironmentBatch, Observations, Specification, StepResult
from vla_stream.streams.observations import checked_observations
from workers import environment_probe, interpreters
from workers.environment_host import Child
from workers.environment_process import FLAGS


@dataclass(frozen=True, slots=True)
class About:
    """What is known of an environment class. offers: which of PLAIN it has; reports: of each task once it was tried
    out."""

    class_name: str
    rows_per_process: int | None
    whole_batch: bool
    offers: tuple[str, ...] = ()
    reports: Mapping[str, Report] = field(default_factory=dict)


def ask(config: Config, question: Literal["look", "try"] = "look") -> About:
    """Of the config's environment and all its tasks, in `simulators.python`, or here. Raises InputError: for the
    environment, its options and what it needs; for an interpreter that is not there or cannot run vla-stream."""
    python = config.simulators.python
    parts = {task: tasks.config_for(config, task).environment for task in tasks.names(config.environment)}
    if python is None:
        answer: Any = environment_probe.look(parts)
        tried = parts if question == "try" else {}
        reports = {task: environment_probe.try_out(environment) for task, environment in tried.items()}
    else:
        # As for a reset: a simulator that is imported only for its version may take long, but not for ever.
        limit_s = config.simulators.start_deadline_s if question == "look" else None
        described = json.dumps({task: environment.model_dump(mode="json") for task, environment in parts.items()})
        module, limit_key = environment_probe.__name__, "simulators.start_deadline_s"
        answer = interpreters.ask(python, "simulators.python", module, question, described, limit_s, limit_key)
        reports = {task: Report(**report) for task, report in answer.get("reports", {}).items()}
    return About(
        answer["class_name"], answer["rows_per_process"], answer["whole_batch"], tuple(answer["offers"]), reports
    )


def make_batch(config: Config, most_rows: int) -> EnvironmentBatch:
    """The environment of a config with one task, with so many rows, or as many as one process may hold: in this
    process, or in a child of `simulators.python`. Raises InputError."""
    about = ask(config)
    rows = most_rows if about.rows_per_process is None else min(most_rows, about.rows_per_process)
    python = config.simulators.python
    if python is None:
        return plugins.make_batch(config.environment, rows)
    members: dict[str, Any] = {"whole_batch": about.whole_batch}
    for name in about.offers:
        members[name] = _plain(name)
    # A class of its own: whether a batch is an Expert is seen by its methods, and its name stands in messages.
    return cast(EnvironmentBatch, type(about.class_name, (BatchApart,), members)(config, rows, python))


def specification(config: Config, task: str | None = None) -> Specification:
    """The shapes of a config's environment, which is made for that. task: None is the first, whose shapes all have.
    Raises InputError."""
    name = tasks.names(config.environment)[0] if task is None else task
    with contextlib.closing(make_batch(tasks.config_for(config, name), 1)) as batch:
        return batch.specification


class BatchApart:
    """B rows of an environment in a child process of another interpreter, as an EnvironmentBatch.

    Images are asked for when they are read, which must be before the next step or reset. One that hangs or dies is not
    replaced: EnvironmentFailed."""

    whole_batch: ClassVar[bool]

    def __init__(self, config: Config, rows: int, python: Path) -> None:
        self.rows, self.max_steps = rows, config.environment.max_steps
        self._child = Child(config.environment, config.simulators, range(rows), python)
        try:
            self.specification = self._child.await_specification()
        except BaseException:
            self.close()
            raise
        self._name = config.environment.name
        self._images = LateImages(self._name, (), None)

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        self._images.expire()
        return self._observations(*self._child.ask("reset", {"mask": mask, "seeds": seeds}))

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        self._images.expire()
        arrays, meta = self._child.ask("step", {"actions": actions, "active": active})
        flags = {name: arrays.pop(name) for name in FLAGS}
        self._images = LateImages(self._name, self.specification.cameras, self._look)
        return StepResult(replace(self._observations(arrays, meta), images=self._images), **flags)

    def close(self) -> None:
        self._child.kill()

    def _look(self) -> Mapping[str, np.ndarray]:
        """What the cameras see since the last step."""
        return self._observations(*self._child.ask("observe", {})).images

    def ask_plain(self, name: str) -> np.ndarray:
        """What one of PLAIN answers."""
        return self._child.ask(name, {})[0][name].copy()

    def _observations(self, arrays: dict[str, np.ndarray], meta: Mapping[str, Any]) -> Observations:
        # Copies: arrays in a packet are read-only, and torch takes no such ones.
        return checked_observations({name: array.copy() for name, array in arrays.items()}, meta, self.rows)


def _plain(name: str) -> Any:
    return lambda batch: batch.ask_plain(name)
