"""What compares the rows of one group (rows of one slot: same task, same first state), as pure functions on tensors.

Legend of shape suffixes: T chunk steps, B rows of the group.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Length = Literal["own", "max"]

# Far below the standard deviation of any two returns that differ.
EPSILON = 1e-6


def until_first_end(valid_TB: Tensor, ends_TB: Tensor) -> Tensor:
    """bool[T, B]: valid chunk steps up to the row's first end, that one included."""
    earlier_TB = (ends_TB & valid_TB).long().cumsum(0) - (ends_TB & valid_TB).long()
    return valid_TB & (earlier_TB == 0)


def episode_returns(rewards_TB: Tensor, counted_TB: Tensor) -> Tensor:
    """Σ_t r_t of each row [B] over the chunk steps that count; what others hold is never read."""
    return torch.where(counted_TB, rewards_TB, 0.0).sum(0)


def all_equal(returns_B: Tensor) -> bool:
    """Whether a group has nothing to compare. False where a return is not a number."""
    return bool((returns_B == returns_B[0]).all())


def grpo_advantages(returns_B: Tensor, *, std: bool) -> Tensor:
    """GRPO (arXiv 2402.03300): (R − mean) ÷ (std + 1e-6) with the unbiased std; `std` False: R − mean, as Dr. GRPO
    (arXiv 2503.20783). At least two rows."""
    centred_B = returns_B - returns_B.mean()
    return centred_B / (returns_B.std(correction=1) + EPSILON) if std else centred_B


def rloo_advantages(returns_B: Tensor) -> Tensor:
    """RLOO (arXiv 2402.14740): R_i − the mean of the other rows' returns. At least two rows."""
    others = len(returns_B) - 1
    return returns_B - (returns_B.sum() - returns_B) / others


def length_weights(elements_B: Tensor, length: Length) -> tuple[Tensor, Tensor]:
    """Factor of the loss, and part of the divisor, of each element of a row [B], from the rows' numbers of elements.

    own: L = mean_i 1/T_i Σ_t, every row weighs the same however long it is. max: L = mean_i 1/T_max Σ_t, T_max that of
    the longest row, every element weighs the same. A row's parts of the divisor add up to 1 in both.
    """
    shares_B = 1 / elements_B.clamp(min=1)
    if length == "own":
        return shares_B, shares_B
    return (1 / elements_B.max().clamp(min=1)).expand_as(shares_B), shares_B
