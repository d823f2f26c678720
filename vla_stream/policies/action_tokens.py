"""Actions as tokens (OpenVLA, arXiv 2406.09246): each normalised action dim is one of 256 bins, and each bin a word.

    bin b holds edges[b] ≤ a < edges[b + 1], edges = linspace(-1, 1, 256)     255 intervals; a = 1 alone is in bin 255
    bin b stands for their middle; bin 255 for that of bin 254
    bin b is the token V − 1 − b of a vocabulary of V

# B rows, H actions, A action dims
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 256


def bins_of(actions: Tensor) -> Tensor:
    """Bins i64 of normalised actions; what lies beyond -1 or 1 belongs to the outermost."""
    edges = _edges(actions.device)
    return (torch.bucketize(actions.to(edges.dtype), edges, right=True) - 1).clamp(0, BINS - 1)


def actions_of(bins: Tensor) -> Tensor:
    """Normalised actions f64 that bins stand for."""
    edges = _edges(bins.device)
    middles = (edges[:-1] + edges[1:]) / 2
    return middles[bins.clamp(max=BINS - 2)]


def tokens_of(bins: Tensor, vocabulary: int) -> Tensor:
    """Token ids of bins; the other way round it is the same function."""
    return vocabulary - 1 - bins


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities of the bins, from logits [..., 256], or as many as there are choices."""
    return torch.log_softmax(logits / temperature, dim=-1)


def chosen(log_probabilities: Tensor, bins: Tensor) -> Tensor:
    """Those of the given bins [...], of log-probabilities [..., 256]."""
    return log_probabilities.gather(-1, bins.unsqueeze(-1)).squeeze(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Entropies [...] of distributions [..., 256]."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


def draw(log_probabilities: Tensor, normal: Tensor) -> Tensor:
    """Bins i64[...] by inverse transform sampling, from one standard normal number [...] for each distribution."""
    uniform: Tensor = torch.special.ndtr(normal.double())
    cumulated = log_probabilities.double().exp().cumsum(-1)
    # The last sum is 1 up to rounding: none is drawn beyond it, and none of probability 0.
    return (cumulated < uniform.clamp(min=1e-300).unsqueeze(-1) * cumulated[..., -1:]).sum(-1)


def _edges(device: torch.device) -> Tensor:
    return torch.linspace(-1, 1, BINS, dtype=torch.float64, device=device)
