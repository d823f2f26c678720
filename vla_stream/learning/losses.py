"""Losses as pure functions on tensors. Each returns the *sum* over its valid elements and their number.

Gradients are divided once per optimiser step and loss term by the number of all valid elements of that step, however
the step is split; means per part would weigh the elements of short parts more.

Legend of shape suffixes: N samples (chunk steps of one row), H actions per chunk, A action dims. "Elements" are what
one probability ratio is formed of: [N, H] with granularity action, [N] with chunk, [N, H, A] with token.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Granularity = Literal["action", "chunk", "token"]


class Sum(NamedTuple):
    """The sum of a loss over its valid elements, and how many elements these are (both scalars)."""

    total: Tensor
    elements: Tensor


def to_elements(values_NHA: Tensor, executed_NH: Tensor, granularity: Granularity) -> Tensor:
    """Log-probs or entropies per element; actions that were not executed add nothing to a chunk's sum."""
    if granularity == "token":
        return values_NHA
    if granularity == "action":
        return values_NHA.sum(-1)
    return torch.where(executed_NH, values_NHA.sum(-1), 0.0).sum(-1)


def element_mask(executed_NH: Tensor, action_dims: int, granularity: Granularity) -> Tensor:
    """Which elements count: those of executed actions; with granularity chunk, chunks with any executed action."""
    if granularity == "token":
        return executed_NH[..., None].expand(*executed_NH.shape, action_dims)
    return executed_NH if granularity == "action" else executed_NH.any(-1)


def per_element(values_N: Tensor, mask: Tensor) -> Tensor:
    """The value of a sample, for each of its elements: [N] → the shape of `mask`."""
    return values_N.reshape(-1, *[1] * (mask.dim() - 1)).expand(mask.shape)


def behaviour_weights(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """w = min(π_prox ÷ μ, cap) from log-probs per element, detached."""
    return (proximal - behaviour).detach().exp().clamp(max=cap)


def policy_loss(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float,
    cap: float,
) -> Sum:
    """Decoupled PPO (arXiv 2110.00641, 2505.24298): Σ −w · min(r·A, clip(r, 1 ± ε)·A), r = π_θ ÷ π_prox.

    All tensors are per element and of one shape. Elements whose w exceeds the cap stay in, with the cap as weight.
    """
    # Masked before exp, so that what stands in an element that was not executed cannot turn into inf · 0.
    ratio = torch.where(mask, logprobs - proximal, 0.0).exp()
    weight = torch.where(mask, behaviour_weights(proximal, behaviour, cap), 0.0)
    gain = torch.where(mask, advantages, 0.0)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    return Sum(-(weight * surrogate).sum(), mask.sum())


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float, delta: float) -> Sum:
    """Clipped value loss (PPO2): Σ max(H(R − V), H(R − V_old − clip(V − V_old, ±c))), H the Huber loss with δ."""
    moved_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    loss_N = torch.maximum(_huber(returns_N - values_N, delta), _huber(returns_N - moved_N, delta))
    return Sum(loss_N.sum(), torch.tensor(loss_N.numel(), device=loss_N.device))


def masked_sum(elements: Tensor, mask: Tensor) -> Sum:
    """Sum over the valid elements: the entropy term."""
    return Sum(torch.where(mask, elements, 0.0).sum(), mask.sum())


def _huber(error: Tensor, delta: float) -> Tensor:
    size = error.abs()
    return torch.where(size <= delta, 0.5 * size.square(), delta * (size - 0.5 * delta))
