"""Advantages and returns as pure functions on tensors.

Legend of shape suffixes: T chunk steps, B rows, N rows that were truncated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Of `RunningMoments`: an update weighs this much of the one after it, so that about the last ten count.
DECAY = 0.9
# Of `RunningMoments`: the first success after many failures is hundreds of their standard deviations away.
MOST_DEVIATIONS = 10.0


def successor_values(values_TB: Tensor, closing_B: Tensor, final_N: Tensor, final_index_N2: Tensor) -> Tensor:
    """V(s_next) [T, B] of every chunk step, where s_next is the observation before any reset.

    s_next is the next chunk step's observation (`closing_B` after the last one), except for the chunk steps and rows in
    `final_index_N2`, whose s_next was recorded before the row was reset: there `final_N` is its value.
    """
    successors_TB = torch.cat([values_TB[1:], closing_B[None]])
    successors_TB[final_index_N2[:, 0], final_index_N2[:, 1]] = final_N
    return successors_TB


def gae(
    rewards_TB: Tensor,
    values_TB: Tensor,
    successors_TB: Tensor,
    terminated_TB: Tensor,
    truncated_TB: Tensor,
    valid_TB: Tensor,
    gamma: float,
    lam: float,
) -> Tensor:
    """Advantages [T, B] of generalised advantage estimation (arXiv 1506.02438), with truncation.

    δ_t = r_t + γ (1 − terminated) V(s_next) − V_t
    A_t = δ_t + γλ (1 − terminated or truncated) A_{t+1}

    `successors_TB` is V(s_next), see `successor_values`. Chunk steps that are not valid (a held row) get 0 and pass
    nothing back; what their rewards and values hold, and V(s_next) of terminated steps, is never read.
    """
    zero = torch.zeros_like(values_TB)
    bootstrap_TB = torch.where(terminated_TB, zero, successors_TB)
    deltas_TB = torch.where(valid_TB, rewards_TB + gamma * bootstrap_TB - values_TB, zero)
    goes_on_TB = valid_TB & ~(terminated_TB | truncated_TB)
    advantages_TB = torch.zeros_like(values_TB)
    following_B = zero[0]
    for t in reversed(range(len(values_TB))):
        following_B = deltas_TB[t] + gamma * lam * torch.where(goes_on_TB[t], following_B, 0.0)
        advantages_TB[t] = following_B
    return advantages_TB


def normalise(advantages: Tensor) -> Tensor:
    """(A − mean) ÷ std over all elements, std with divisor n; float64 inside. For the whole batch of one update.

    Called once per update, never on a minibatch: a minibatch of failures alone would lose its sign.
    """
    exact = advantages.double()
    # 1e-8: equal advantages (nothing to learn from) become 0 rather than amplified rounding.
    return ((exact - exact.mean()) / (exact.std(correction=0) + 1e-8)).to(advantages.dtype)


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Mean and variance of the advantages of earlier updates, for an update whose own are not all known yet.

    `weight` is how many advantages they stand for, those of older updates counted as less (DECAY)."""

    weight: float = 0.0
    mean: float = 0.0
    variance: float = 1.0

    def scale(self, advantages: Tensor) -> Tensor:
        """(A − mean) ÷ std, at most MOST_DEVIATIONS from 0; float64 inside."""
        scaled = (advantages.double() - self.mean) / (math.sqrt(self.variance) + 1e-8)
        return scaled.clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS).to(advantages.dtype)

    def after(self, advantages: Tensor) -> RunningMoments:
        """The moments after an update with these advantages."""
        exact = advantages.double()
        old, new = DECAY * self.weight, float(len(exact))
        share = new / (old + new)
        shift = float(exact.mean()) - self.mean
        variance = (1 - share) * self.variance + share * float(exact.var(correction=0))
        return RunningMoments(old + new, self.mean + share * shift, variance + share * (1 - share) * shift**2)
