"""The algorithms, each a composition of three functions: which chunk steps it trains, what each of them is worth, and
what the policy loses on it. All of them work on any policy, in buffered and in streaming updates.

    ppo   every step · GAE by a critic · clipped ratio, corrected for old data
    appo  every step · V-trace by a critic · clipped ratio, weighted by V-trace's ρ
    grpo  rows up to their end, where they differ · (R − mean) ÷ std · as ppo
    rloo  the same · R − mean of the others · as ppo
    rft   rows that succeeded · nothing · imitation

Legend of shape suffixes: T chunk steps, B rows of one slot, N samples, H actions per chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vla_stream.config import Algorithm
from vla_stream.learning import groups, losses
from vla_stream.learning.advantages import gae
from vla_stream.learning.segments import Segment
from vla_stream.learning.vtrace import vtrace


@dataclass(frozen=True, slots=True)
class Rollout:
    """A segment as tensors [T, B] on the host, with what the weights say that the update starts with.

    trained     bool: the chunk steps to learn from
    elements    how many elements of the loss each has
    log_ratios  log π_prox − log μ of whole chunks, where trained
    values, successors  V of the observation and of the next one, see `successor_values`; 0 without a critic
    """

    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    trained: Tensor
    elements: Tensor
    log_ratios: Tensor
    values: Tensor
    successors: Tensor


class Credit(NamedTuple):
    """What each chunk step is worth, all f32[T, B].

    advantages  of the policy loss, before they are normalised
    returns     what V is to tell
    weights     factor of each element's policy loss, and `shares` of its other terms and its part in the divisor
    """

    advantages: Tensor
    returns: Tensor
    weights: Tensor
    shares: Tensor


class Elements(NamedTuple):
    """What the policy loss is made of, per element (see losses.py). chunk_log_ratios: log π_prox − log μ of the whole
    chunk that the element is of."""

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    chunk_log_ratios: Tensor
    advantages: Tensor
    mask: Tensor


class Recipe(NamedTuple):
    """An algorithm. trained: the chunk steps bool[T, B] of a segment that it learns from. policy_losses: loss and
    importance weight of each element; None: it imitates."""

    trained: Callable[[Segment], Tensor]
    credit: Callable[[Algorithm, Rollout], Credit]
    policy_losses: Callable[[Algorithm, Elements], tuple[Tensor, Tensor]] | None


def looks_first(algorithm: Algorithm) -> bool:
    """Whether samples need a pass without gradients before the update, for V or π_prox."""
    return algorithm.has_critic or (
        RECIPES[algorithm.name].policy_losses is not None and not algorithm.guesses_proximal
    )


# ---- which chunk steps


def every_step(segment: Segment) -> Tensor:
    """All in which a row took part."""
    return torch.from_numpy(segment.valid)


def rows_that_differ(segment: Segment) -> Tensor:
    """Each row up to its first success or end; none at all of a group whose returns are equal."""
    counted_TB = _episodes(segment)
    returns_B = groups.episode_returns(torch.from_numpy(segment.rewards), counted_TB)
    return counted_TB & (not groups.all_equal(returns_B))


def rows_that_succeeded(segment: Segment) -> Tensor:
    """Each of these up to its first success."""
    counted_TB = _episodes(segment)
    return counted_TB & (torch.from_numpy(segment.success) & counted_TB).any(0)


def _episodes(segment: Segment) -> Tensor:
    ends_TB = torch.from_numpy(segment.success | segment.terminated | segment.truncated)
    return groups.until_first_end(torch.from_numpy(segment.valid), ends_TB)


# ---- what each is worth


def gae_credit(algorithm: Algorithm, rollout: Rollout) -> Credit:
    """GAE; the return is advantage + V."""
    advantages_TB = gae(
        rollout.rewards,
        rollout.values,
        rollout.successors,
        rollout.terminated,
        rollout.truncated,
        rollout.trained,
        algorithm.gamma,
        algorithm.gae_lambda,
    )
    ones_TB = torch.ones_like(advantages_TB)
    return Credit(advantages_TB, advantages_TB + rollout.values, ones_TB, ones_TB)


def vtrace_credit(algorithm: Algorithm, rollout: Rollout) -> Credit:
    """V-trace; its weights are left to `vtrace_losses`, so that advantages are normalised before they are weighted."""
    traced = vtrace(
        rollout.log_ratios,
        rollout.rewards,
        rollout.values,
        rollout.successors,
        rollout.terminated,
        rollout.truncated,
        rollout.trained,
        algorithm.gamma,
        algorithm.vtrace_lambda,
        algorithm.vtrace_rho_cap,
        algorithm.vtrace_gradient_rho_cap,
    )
    ones_TB = torch.ones_like(traced.gains)
    return Credit(traced.gains, traced.errors + rollout.values, ones_TB, ones_TB)


def grpo_credit(algorithm: Algorithm, rollout: Rollout) -> Credit:
    """The row's return beside the group's."""
    return _group_credit(algorithm, rollout, lambda returns: groups.grpo_advantages(returns, std=algorithm.group_std))


def rloo_credit(algorithm: Algorithm, rollout: Rollout) -> Credit:
    """The row's return beside those of the others."""
    return _group_credit(algorithm, rollout, groups.rloo_advantages)


def no_credit(algorithm: Algorithm, rollout: Rollout) -> Credit:
    """Imitation asks for none."""
    zeros_TB = torch.zeros_like(rollout.rewards)
    return Credit(zeros_TB, zeros_TB, zeros_TB, zeros_TB)


def _group_credit(algorithm: Algorithm, rollout: Rollout, advantages: Callable[[Tensor], Tensor]) -> Credit:
    """The returns' comparison, the same in all chunk steps of a row."""
    returns_B = groups.episode_returns(rollout.rewards, rollout.trained)
    lengths_B = torch.where(rollout.trained, rollout.elements, 0.0).sum(0)
    rows_B = (advantages(returns_B), returns_B, *groups.length_weights(lengths_B, algorithm.length_of_rows))
    return Credit(*(row_B.expand_as(rollout.rewards) for row_B in rows_B))


# ---- what the policy loses


def corrected_losses(algorithm: Algorithm, elements: Elements) -> tuple[Tensor, Tensor]:
    """PPO's clipped ratio to π_prox with weight w = π_prox ÷ μ, or without it; or −A · log π_θ with w = π_θ ÷ μ."""
    logprobs, proximal, behaviour, _, advantages, mask = elements
    cap, above = algorithm.behaviour_weight_cap, algorithm.behaviour_weight_above_cap
    if algorithm.correction == "tis":
        weights = losses.behaviour_weights(logprobs, behaviour, cap, above)
        return losses.log_losses(logprobs, advantages, mask), weights
    clipped = losses.clipped_losses(logprobs, proximal, advantages, mask, algorithm.clip, algorithm.dual_clip)
    if algorithm.correction == "none":
        return clipped, torch.ones_like(clipped)
    return clipped, losses.behaviour_weights(proximal, behaviour, cap, above)


def vtrace_losses(algorithm: Algorithm, elements: Elements) -> tuple[Tensor, Tensor]:
    """PPO's clipped ratio to π_prox with V-trace's weight min(ρ̄_pg, π_prox ÷ μ) of the whole chunk."""
    logprobs, proximal, _, chunk_log_ratios, advantages, mask = elements
    clipped = losses.clipped_losses(logprobs, proximal, advantages, mask, algorithm.clip, algorithm.dual_clip)
    return clipped, chunk_log_ratios.exp().clamp(max=algorithm.vtrace_gradient_rho_cap)


RECIPES = {
    "ppo": Recipe(every_step, gae_credit, corrected_losses),
    "appo": Recipe(every_step, vtrace_credit, vtrace_losses),
    "grpo": Recipe(rows_that_differ, grpo_credit, corrected_losses),
    "rloo": Recipe(rows_that_differ, rloo_credit, corrected_losses),
    "rft": Recipe(rows_that_succeeded, no_credit, None),
}
