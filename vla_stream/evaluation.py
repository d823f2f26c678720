"""How good is a policy: its episodes on fixed seeds, and the statistics to compare two of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from vla_stream import tasks

if TYPE_CHECKING:
    from vla_stream.config import Config, Environment
    from vla_stream.environments.protocol import EnvironmentBatch, Observations
    from vla_stream.policies.protocol import Policy


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What happened on each of N seeds, in their order.

    success        bool[N]: succeeded at least once
    success_at_end bool[N]: succeeded in the last step
    returns        f64[N]: sum of the rewards, not discounted
    steps          i64[N]: environment steps until the episode ended
    instructions   N sentences, as the environment gave them
    """

    success: np.ndarray
    success_at_end: np.ndarray
    returns: np.ndarray
    steps: np.ndarray
    instructions: np.ndarray

    @classmethod
    def blank(cls, number: int) -> Self:
        """Nothing has happened yet."""
        never = np.zeros(number, dtype=bool)
        words = np.full(number, "", dtype=object)
        return cls(never, never.copy(), np.zeros(number), np.zeros(number, dtype=np.int64), words)

    def put(self, index: np.ndarray, played: Outcomes) -> None:
        """The outcomes at i64[M] `index` are the first M of `played`."""
        for ours, theirs in (
            (self.success, played.success),
            (self.success_at_end, played.success_at_end),
            (self.returns, played.returns),
            (self.steps, played.steps),
            (self.instructions, played.instructions),
        ):
            ours[index] = theirs[: len(index)]


@dataclass(frozen=True, slots=True)
class Plan:
    """Who plays which of an evaluation's seeds. Its tickets go round: those of the next checkpoint play the same again.

    rows:   of each ticket, each with a seed of its own
    first:  seed number 0
    parts:  of each ticket its task, and the numbers of its seeds, at most `rows`
    order:  of each ticket the number of its task among the config's
    """

    rows: int
    first: int
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, config: Config) -> Self:
        """Seeds are dealt to the config's tasks like tickets (see tasks.py), then to tickets."""
        rows, names = config.simulators.envs_per_slot, tasks.names(config.environment)
        dealt = tasks.dealt(config.environment, config.evaluation.episodes)
        pieces = {task: [tuple(mine[i : i + rows]) for i in range(0, len(mine), rows)] for task, mine in dealt.items()}
        order = tasks.round_of(tuple((task, len(parts)) for task, parts in pieces.items()))
        waiting = {task: iter(parts) for task, parts in pieces.items()}
        parts = tuple((task, next(waiting[task])) for task in order)
        return cls(rows, config.evaluation.seed, parts, tuple(names.index(task) for task in order))

    def part(self, ticket: int) -> tuple[str, tuple[int, ...]]:
        """Of any ticket, counted from 1."""
        return self.parts[(ticket - 1) % len(self.parts)]

    def seeds(self, ticket: int) -> np.ndarray:
        """Reset seeds u64[rows]. The last rows of a task's last ticket repeat one: what they play does not count."""
        _, mine = self.part(ticket)
        numbers = np.array([*mine, *[mine[-1]] * (self.rows - len(mine))], dtype=np.uint64)
        return numbers + np.uint64(self.first)

    def turns_of(self, environment: Environment, name: str) -> tasks.Turns:
        """The tickets of one task: see `tasks.turns_of`."""
        return tasks.Turns(tasks.names(environment).index(name), self.order) if name else tasks.EVERY_TICKET


def evaluate(
    policy: Policy,
    batch: EnvironmentBatch,
    chunk: int,
    seeds: Sequence[int] | np.ndarray,
    instruction_override: Callable[[str], str] | None = None,
) -> Outcomes:
    """Play one episode per seed with the policy's mode, here: `vla-stream eval` has workers do it.

    The policy always sees all rows of the batch (a short last round repeats its last seed), so that a seed gives the
    same outcome whichever others it is played with, on one thread and one kind of machine.
    instruction_override: from the environment's sentence to the one that the policy is given instead.
    """
    wanted = np.asarray(seeds, dtype=np.uint64)
    outcomes = Outcomes.blank(len(wanted))
    for first in range(0, len(wanted), batch.rows):
        part = np.arange(first, min(first + batch.rows, len(wanted)))
        padded = np.minimum(np.arange(first, first + batch.rows), len(wanted) - 1)
        outcomes.put(part, _play(policy, batch, chunk, wanted[padded], instruction_override))
    return outcomes


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Confidence interval of a success rate (Wilson 1927); z = 1.96 gives 95 %. (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    rate, correction = successes / trials, z * z / trials
    centre = rate + correction / 2
    half = z * math.sqrt(rate * (1 - rate) / trials + correction / (4 * trials))
    return max(0.0, (centre - half) / (1 + correction)), min(1.0, (centre + half) / (1 + correction))


def mcnemar(before: np.ndarray, after: np.ndarray, *, mid_p: bool = False) -> float:
    """Two-sided p-value that success on the same seeds, bool[N] each, did not change (McNemar 1947).

    Exact binomial test of the seeds whose outcome changed. `mid_p` counts the observed table half (Lancaster 1961),
    which is less conservative for few changes.
    """
    gained = int((~before & after).sum())
    changed = gained + int((before & ~after).sum())
    fewer = min(gained, changed - gained)
    tail = sum(math.comb(changed, k) for k in range(fewer + 1))
    # Whole numbers until the end: 0.5 ** changed would be 0 for more than a thousand seeds.
    tables: int = 2**changed
    p = min(1.0, 2 * tail / tables)
    return p - math.comb(changed, fewer) / tables if mid_p else p


def _play(
    policy: Policy,
    batch: EnvironmentBatch,
    chunk: int,
    seeds: np.ndarray,
    instruction_override: Callable[[str], str] | None,
) -> Outcomes:
    """One round: one episode in each row of the batch."""
    everyone = np.ones(batch.rows, dtype=bool)
    running = everyone.copy()
    outcomes = Outcomes.blank(batch.rows)
    observations = batch.reset(everyone, seeds)
    outcomes.instructions[:] = observations.instruction
    while running.any():
        act = policy.act(instructed(observations, instruction_override), None)
        for step in range(chunk):
            result = batch.step(act.actions[:, step], everyone if batch.whole_batch else running)
            outcomes.success[:] |= running & result.success
            outcomes.success_at_end[running] = result.success[running]
            outcomes.returns[running] += result.reward[running]
            outcomes.steps[running] += 1
            observations = result.observations
            running &= ~(result.terminated | result.truncated)
            if not running.any():
                break
    return outcomes


def instructed(observations: Observations, override: Callable[[str], str] | None) -> Observations:
    """With other sentences."""
    if override is None:
        return observations
    return replace(observations, instruction=[override(sentence) for sentence in observations.instruction])


def replacer(words: Mapping[str, str]) -> Callable[[str], str] | None:
    """Replaces whole words of a sentence, all at once; None for no words."""
    if not words:
        return None
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, words))})\b")
    return lambda sentence: pattern.sub(lambda match: words[match[0]], sentence)
