"""Several tasks in one run: which ticket is whose, and which environment batch plays what.

Tickets go round: of every Σ weights consecutive ones each task has as many as its weight, spread evenly. A ticket that
fails is given out again under its number, so its task gets what it is due; and while tickets of a slow task are under
way or wait, the others get ahead of it by (1 + η)·B at most (see the script GRANT). So each task's part of the trained
segments is its weight's, however long its episodes take. A run without tasks has one, whose name is empty.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.config import Config, Environment
    from vla_stream.environments.protocol import Specification

ALONE = ""  # name of the task of a run that lists none


@dataclass(frozen=True, slots=True)
class Turns:
    """One task among those of a run: its number, and whose turn it is, ticket by ticket, going round."""

    task: int = 0
    order: tuple[int, ...] = (0,)


EVERY_TICKET = Turns()


@functools.cache
def round_of(shares: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """One round in which each name stands as often as its share, spread evenly (smooth weighted round robin)."""
    total, due = sum(share for _, share in shares), dict.fromkeys((name for name, _ in shares), 0)
    turns = []
    for _ in range(total):
        for name, share in shares:
            due[name] += share
        chosen = max(due, key=lambda name: due[name])
        due[chosen] -= total
        turns.append(chosen)
    return tuple(turns)


def names(environment: Environment) -> tuple[str, ...]:
    """In the config's order; (ALONE,) without tasks."""
    return tuple(environment.tasks) or (ALONE,)


def shares(environment: Environment) -> Mapping[str, float]:
    """What part of the trained segments each task has; they add up to 1."""
    turns = _tickets(environment)
    return {name: turns.count(name) / len(turns) for name in names(environment)}


def task_of(environment: Environment, number: int) -> str:
    """The task of a ticket, or of whatever else is counted from 1."""
    turns = _tickets(environment)
    return turns[(number - 1) % len(turns)]


def dealt(environment: Environment, count: int) -> dict[str, list[int]]:
    """So many evaluations or demonstrations, counted from 0: which are whose, for tasks that have any."""
    parts: dict[str, list[int]] = {}
    for number in range(count):
        parts.setdefault(task_of(environment, number + 1), []).append(number)
    return parts


def turns_of(environment: Environment, name: str) -> Turns:
    """The tickets of one task."""
    numbers = {task: number for number, task in enumerate(names(environment))}
    return Turns(numbers[name], tuple(numbers[task] for task in _tickets(environment)))


def of_batches(config: Config, simulator: str) -> list[str]:
    """The task of each environment batch of this simulator: they are dealt round, over the simulators' numbers."""
    found = re.search(r"[0-9]+$", simulator)
    count = config.simulators.env_batches
    return _batches(config.environment, (int(found[0]) if found else 0) * count, count)


def left_out(config: Config, simulators: int) -> list[str]:
    """Tasks that so many simulators, numbered from 0, have no environment batch for."""
    served = _batches(config.environment, 0, simulators * config.simulators.env_batches)
    return [name for name in names(config.environment) if name not in served]


def check_whole_batch(config: Config, whole_batch: bool) -> None:
    """A batch that begins with all its slots or not at all could wait for ever, where its tickets come one by one, or
    where one that comes back finds no room for the others: raises InputError."""
    strict = config.flow.max_staleness == 0
    if whole_batch and config.simulators.slots > 1 and (config.environment.tasks or strict):
        why = "flow.max_staleness is 0" if strict else "environment.tasks is set"
        raise InputError(
            f"{why} and {config.environment.name} steps whole batches, but simulators.slots is "
            f"{config.simulators.slots}; set slots to 1 and raise envs_per_slot"
        )


def check_shapes(seen: dict[str, Specification], name: str, specification: Specification) -> None:
    """One policy plays all tasks, so they look alike: raises InputError, else adds this one to those that were seen."""
    other, expected = next(iter(seen.items()), (name, specification))
    if specification != expected:
        raise InputError(
            f"environment.tasks.{name}: has other cameras, state or actions than {other} ({specification}, expected "
            f"{expected}); give both the same"
        )
    seen[name] = specification


def check_same_tickets(environment: Environment, other: Environment) -> None:
    """Another simulator of a run plays the same tickets: raises InputError where its tasks are called otherwise."""
    ours, theirs = (
        {name: task.weight for name, task in section.tasks.items()} or "none" for section in (environment, other)
    )
    if list(ours) != list(theirs) or ours != theirs:
        raise InputError(
            f"environment.tasks has the weights {theirs}, but in this run they are {ours}; list the same tasks in the "
            "same order with the same weights, since each ticket is one task's"
        )


def config_for(config: Config, name: str) -> Config:
    """The config as if this task were the only one."""
    if name == ALONE:
        return config
    return config.model_copy(update={"environment": config.environment.only(name)})


def _tickets(environment: Environment) -> tuple[str, ...]:
    return round_of(tuple((name, task.weight) for name, task in environment.tasks.items()) or ((ALONE, 1),))


def _batches(environment: Environment, first: int, count: int) -> list[str]:
    turns = round_of(tuple((name, task.batches) for name, task in environment.tasks.items()) or ((ALONE, 1),))
    return [turns[number % len(turns)] for number in range(first, first + count)]
