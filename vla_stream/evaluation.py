"""How good is a policy: its episodes on fixed seeds, and the statistics to compare two of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from vla_stream.environments.protocol import EnvironmentBatch, Observations
from vla_stream.policies.protocol import Policy
from vla_stream.seeds import derive


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


class Watcher(Protocol):
    """Looks on while episodes are played, round by round: one per row of the batch."""

    def see(self, observations: Observations, running: np.ndarray) -> None:
        """After a reset, and after each environment step. running bool[B]: rows that took part."""

    def end(self, seeds: np.ndarray, outcomes: Outcomes) -> None:
        """A round is over. seeds u64[n]: of the first n rows; others repeated the last one. outcomes: of all B."""


def evaluate(
    policy: Policy,
    batch: EnvironmentBatch,
    chunk: int,
    seeds: Sequence[int] | np.ndarray,
    instruction_override: Callable[[str], str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    *,
    noise_seed: int | None = None,
    watcher: Watcher | None = None,
) -> Outcomes:
    """Play one episode per seed with the policy's mode, or, with a noise_seed, with sampled actions; what is sampled
    follows from the noise_seed, the episode's seed and the chunk step.

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
        played = _play(policy, batch, chunk, wanted[padded], instruction_override, noise_seed, watcher)
        outcomes.put(part, played)
        if watcher is not None:
            watcher.end(wanted[part], played)
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
    noise_seed: int | None,
    watcher: Watcher | None,
) -> Outcomes:
    """One round: one episode in each row of the batch."""
    everyone = np.ones(batch.rows, dtype=bool)
    running = everyone.copy()
    outcomes = Outcomes.blank(batch.rows)
    observations = batch.reset(everyone, seeds)
    outcomes.instructions[:] = observations.instruction
    if watcher is not None:
        watcher.see(observations, running.copy())
    for chunk_step in itertools.count():
        if not running.any():
            return outcomes
        keys = None if noise_seed is None else _noise_keys(noise_seed, seeds, chunk_step)
        act = policy.act(_instructed(observations, instruction_override), keys)
        for step in range(chunk):
            result = batch.step(act.actions[:, step], everyone if batch.whole_batch else running)
            outcomes.success[:] |= running & result.success
            outcomes.success_at_end[running] = result.success[running]
            outcomes.returns[running] += result.reward[running]
            outcomes.steps[running] += 1
            observations = result.observations
            if watcher is not None:
                watcher.see(observations, running.copy())
            running &= ~(result.terminated | result.truncated)
            if not running.any():
                break
    raise AssertionError("episodes end")


def _noise_keys(noise_seed: int, seeds: np.ndarray, chunk_step: int) -> np.ndarray:
    keys = [derive("evaluation", noise_seed, int(seed) % 2**63, chunk_step) for seed in seeds]
    return np.array(keys, dtype=np.uint64)


def _instructed(observations: Observations, override: Callable[[str], str] | None) -> Observations:
    if override is None:
        return observations
    return replace(observations, instruction=[override(sentence) for sentence in observations.instruction])
