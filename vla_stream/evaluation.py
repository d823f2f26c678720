"""How good is a policy: mode actions on fixed seeds, and the statistics to compare two of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from vla_stream.environments.protocol import EnvironmentBatch, Observations
from vla_stream.policies.protocol import Policy


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What happened on each of N seeds, in their order.

    success  bool[N]: succeeded at least once
    returns  f64[N]: sum of the rewards, not discounted
    steps    i64[N]: environment steps until the episode ended
    """

    success: np.ndarray
    returns: np.ndarray
    steps: np.ndarray

    @classmethod
    def blank(cls, number: int) -> Self:
        """Nothing has happened yet."""
        return cls(np.zeros(number, dtype=bool), np.zeros(number), np.zeros(number, dtype=np.int64))

    def put(self, index: np.ndarray, played: Outcomes) -> None:
        """The outcomes at i64[M] `index` are the first M of `played`."""
        for ours, theirs in (
            (self.success, played.success),
            (self.returns, played.returns),
            (self.steps, played.steps),
        ):
            ours[index] = theirs[: len(index)]


def evaluate(
    policy: Policy,
    batch: EnvironmentBatch,
    chunk: int,
    seeds: Sequence[int] | np.ndarray,
    instruction_override: Callable[[str], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Outcomes:
    """Play one episode per seed with the policy's mode.

    The policy always sees all rows of the batch (a short last round repeats its last seed), so that a seed gives the
    same outcome whichever others it is played with, on one thread and one kind of machine.
    instruction_override: from the environment's sentence to the one that the policy is given instead.
    progress: called with the number of seeds played, and of how many.
    """
    wanted = np.asarray(seeds, dtype=np.uint64)
    outcomes = Outcomes.blank(len(wanted))
    for first in range(0, len(wanted), batch.rows):
        part = np.arange(first, min(first + batch.rows, len(wanted)))
        padded = np.minimum(np.arange(first, first + batch.rows), len(wanted) - 1)
        played = _play(policy, batch, chunk, wanted[padded], instruction_override)
        outcomes.put(part, played)
        if progress:
            progress(int(part[-1]) + 1, len(wanted))
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
    while running.any():
        act = policy.act(_instructed(observations, instruction_override), None)
        for step in range(chunk):
            result = batch.step(act.actions[:, step], everyone if batch.whole_batch else running)
            outcomes.success[:] |= running & result.success
            outcomes.returns[running] += result.reward[running]
            outcomes.steps[running] += 1
            running &= ~(result.terminated | result.truncated)
            observations = result.observations
            if not running.any():
                break
    return outcomes


def _instructed(observations: Observations, override: Callable[[str], str] | None) -> Observations:
    if override is None:
        return observations
    return replace(observations, instruction=[override(sentence) for sentence in observations.instruction])
