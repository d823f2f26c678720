"""A policy of which a part is trained, and only that part travels.

Adapters, or an action expert, are some percent of a VLA; the rest is the same on every host, from its checkpoint. So
what is published and checkpointed are the trained parameters, the policy's own buffers (statistics), and a digest of
all that is not trained: weights never land on another base than the one that they were trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from vla_stream.errors import InputError


class PartlyTrained(nn.Module):
    """Base of such a policy: whoever derives calls `close_base` at the end of its constructor."""

    base_digest: Tensor

    def close_base(self) -> None:
        """What needs no gradient now is the base. Buffers of submodules belong to it, and follow from its config."""
        base = {name: parameter for name, parameter in self.named_parameters() if not parameter.requires_grad}
        self.register_buffer("base_digest", _digest(base))
        own = self._buffers.keys() - self._non_persistent_buffers_set
        self._travelling = {name for name, _ in self.named_parameters()} - base.keys() | own

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """What travels."""
        state = super().state_dict(*args, **kwargs)
        return {name: tensor for name, tensor in state.items() if name in self._travelling}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """See torch; always strict. Raises InputError, before anything is changed, for weights of another base: no
        worker that starts again would fare better."""
        if state_dict.keys() != self._travelling:
            names = sorted(state_dict.keys() ^ self._travelling)
            raise InputError(
                f"{len(names)} weights are missing, or not trained here, first: {names[0]}; use the same policy.options"
            )
        if not torch.equal(state_dict["base_digest"].cpu(), self.base_digest.cpu()):
            raise InputError(
                "the weights were trained on another base than this policy's; use the same policy.options.checkpoint"
            )
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def _digest(parameters: Mapping[str, Tensor]) -> Tensor:
    """i64[1]: xxh64 over names and bytes."""
    digest = xxhash.xxh64()
    for name, parameter in sorted(parameters.items()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return torch.tensor([digest.intdigest() - 2**63])
