"""Losses as pure functions on tensors: per element, then summed with the number that the sum is divided by.

Gradients are divided once per optimiser step and loss term by the number of all valid elements of that step, however
the step is split; means per part would weigh the elements of short parts more.

Legend of shape suffixes: N samples (chunk steps of one row), H actions per chunk, A action dims. "Elements" are what
one probability ratio is formed of: [N, H] with granularity action, [N] with chunk, [N, H, A] with token. All tensors
without a suffix are per element and of one shape.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Granularity = Literal["action", "chunk", "token"]
AboveCap = Literal["cap", "mask"]


class Sum(NamedTuple):
    """The sum of a loss over its valid elements, and what it is divided by: how many these are (both scalars)."""

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


def behaviour_weights(proximal: Tensor, behaviour: Tensor, cap: float, above: AboveCap = "cap") -> Tensor:
    """w = π_prox ÷ μ from log-probs, detached. Above the cap it is the cap, or with `mask` 0: the element then adds
    nothing to a sum and still counts in its divisor."""
    weights = (proximal - behaviour).detach().exp()
    return weights.clamp(max=cap) if above == "cap" else torch.where(weights > cap, 0.0, weights)


def interpolated_proximal(
    logprobs: Tensor, behaviour: Tensor, behaviour_version: Tensor, proximal_version: int
) -> Tensor:
    """A-3PO (arXiv 2512.06547), detached: log π_prox ≈ log μ + α (log π_θ − log μ).

    α = clamp((v_prox − v_μ) ÷ (v_θ − v_μ), 0, 1) with v_θ = v_prox + 1, and 0 where v_θ = v_μ: the staler the data, the
    nearer π_prox is to π_θ. Data of the version that the update starts with has π_prox = μ.
    """
    distance = (proximal_version + 1 - behaviour_version).to(behaviour.dtype)  # 0: −1 ÷ 0 is clamped to 0
    return torch.lerp(behaviour, logprobs.detach(), ((distance - 1) / distance).clamp(0, 1))


def clipped_losses(
    logprobs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, clip: float, dual_clip: float | None = None
) -> Tensor:
    """PPO (arXiv 1707.06347): −min(r·A, clip(r, 1 ± ε)·A), r = π_θ ÷ π_prox; 0 where masked.

    dual_clip (arXiv 1912.09729): where A < 0, the loss is at most −c·A.
    """
    # Masked before exp, so that what stands in an element that was not executed cannot turn into inf · 0.
    ratio = torch.where(mask, logprobs - proximal, 0.0).exp()
    gain = torch.where(mask, advantages, 0.0)
    surrogate = torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain)
    if dual_clip is not None:
        surrogate = torch.where(gain < 0, torch.maximum(surrogate, dual_clip * gain), surrogate)
    return -surrogate


def log_losses(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """REINFORCE: −A · log π_θ; 0 where masked. With w = min(π_θ ÷ μ, C) as weight it is the truncated importance
    sampling of IMPALA (arXiv 1802.01561) and CISPO (arXiv 2506.13585)."""
    return -torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs, 0.0)


def k3(logprobs: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """The estimator k3 (joschu.net/blog/kl-approx.html) of KL(π_θ ‖ π_ref): e^d − 1 − d, d = log π_ref − log π_θ; 0
    where masked."""
    difference = torch.where(mask, reference - logprobs, 0.0)
    return difference.exp() - 1 - difference


def weighted_sum(elements: Tensor, mask: Tensor, weights: Tensor, shares: Tensor) -> Sum:
    """Σ weight · loss over the valid elements, and Σ share, what it is divided by."""
    # Both are masked before they meet: 0 · inf has no gradient.
    weighted = torch.where(mask, weights, 0.0) * torch.where(mask, elements, 0.0)
    return Sum(weighted.sum(), torch.where(mask, shares, 0.0).sum())


def masked_sum(elements: Tensor, mask: Tensor) -> Sum:
    """The same with weights and shares of 1."""
    return Sum(torch.where(mask, elements, 0.0).sum(), mask.sum())


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float, delta: float) -> Sum:
    """Clipped value loss (PPO2): Σ max(H(R − V), H(R − V_old − clip(V − V_old, ±c))), H the Huber loss with δ."""
    moved_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    loss_N = torch.maximum(_huber(returns_N - values_N, delta), _huber(returns_N - moved_N, delta))
    return Sum(loss_N.sum(), torch.tensor(loss_N.numel(), device=loss_N.device))


def _huber(error: Tensor, delta: float) -> Tensor:
    size = error.abs()
    return torch.where(size <= delta, 0.5 * size.square(), delta * (size - 0.5 * delta))
