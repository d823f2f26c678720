"""Gradient checkpointing for transformers' decoder layers that write to a cache of keys and values.

transformers' own takes the cache away from such a layer, since computing it again would add to the cache again; and it
works in training mode only, where a policy never is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute(layer: nn.Module) -> None:
    """Let a layer, from now on, keep only its inputs for the way back, and be computed again there.

    Its first argument is a tensor; the cache, if it has one, comes as `cache`."""
    forward = layer.forward
    attention: Any = getattr(layer, "self_attn", None)

    def recomputed(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden, *args, **kwargs)
        cache = kwargs.pop("cache", None)
        if cache is None:
            return checkpoint(forward, hidden, *args, use_reentrant=False, **kwargs)
        index = attention.layer_idx
        known = len(cache.layers) > index and cache.layers[index].get_seq_length() > 0
        before = (cache.layers[index].keys, cache.layers[index].values) if known else ()

        def alone(hidden: Tensor, *before: Tensor) -> tuple[Any, ...]:
            seen = _Seen(before)
            return forward(hidden, *args, cache=seen, **kwargs), *seen.new

        output, keys, values = checkpoint(alone, hidden, *before, use_reentrant=False)
        cache.update(keys, values, index)
        return output

    layer.forward = recomputed


class _Seen:
    """In a cache's place while one layer is computed: gives what was there before, and keeps what is new."""

    def __init__(self, before: tuple[Tensor, ...]) -> None:
        self._before = before
        self.new: tuple[Tensor, ...] = ()

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.new = keys, values
        if not self._before:
            return keys, values
        return torch.cat([self._before[0], keys], dim=-2), torch.cat([self._before[1], values], dim=-2)
