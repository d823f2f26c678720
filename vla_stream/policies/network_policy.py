"""What policies on a pretrained network share: how it is run and trained, and a value head beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
import xxhash
from pydantic import Field
from torch import Tensor, nn

from vla_stream.environments.protocol import Observations
from vla_stream.policies import networks
from vla_stream.policies.partly_trained import PartlyTrained
from vla_stream.policies.recompute import recompute
from vla_stream.policies.transfer import to_device
from vla_stream.sections import Section


class NetworkOptions(Section):
    """Options that do not depend on which network it is."""

    cameras: list[str] | None = Field(
        default=None,
        description="Cameras to look at, in the checkpoint's order. Default: all, in the environment's.",
    )
    words: int = Field(default=48, ge=2, description="Tokens of an instruction that are read.")
    lora_rank: int = Field(default=32, ge=1, description="Rank of the adapters of `train: lora`.")
    temperature: float = Field(default=1.0, gt=0, description="Of what training samples from.")
    evaluation_temperature: float = Field(
        default=0.0, ge=0, description="Of what evaluation samples from, by what is seen; 0: the mode, always."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of the network's sums (autocast); weights and log-probs are float32."
    )
    compile: bool = Field(default=False, description="torch.compile: pays off with few fixed batch sizes.")
    gradient_checkpointing: bool = Field(
        default=False, description="Compute layers again for their gradients: less memory, a third more time."
    )


class NetworkPolicy(PartlyTrained):
    """Base of such a policy. Whoever derives makes its network, calls `add_value_head`, and at last `close_network`."""

    def __init__(self, options: NetworkOptions) -> None:
        super().__init__()
        self._low_precision = options.precision != "float32"
        self._compiled, self._recomputed = options.compile, options.gradient_checkpointing

    @property
    def low_precision(self) -> bool:
        """See the protocol."""
        return self._low_precision

    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        """See the protocol. `value` is the head alone: training it cannot move the actions."""
        value = list(self.value_head.parameters())
        ids = {id(parameter) for parameter in value}
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad and id(parameter) not in ids]
        return {"policy": trained, "value": value}

    def add_value_head(self, width: int) -> None:
        """From a feature of so many numbers to a value."""
        self.value_head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1))

    def values_of(self, features: Tensor) -> Tensor:
        """Values [B] of features [B, W], whose gradient ends there."""
        values: Tensor = self.value_head(features.detach()).squeeze(-1)
        return values

    def close_network(self, network: nn.Module, parts: Iterable[nn.Module]) -> None:
        """What is trained is known now. parts: those of the network that may be compiled."""
        self.close_base()
        if self._recomputed:
            for layer in networks.layers(network):
                recompute(layer)
        if self._compiled:
            for part in parts:
                part.compile()

    def autocast(self) -> torch.autocast:
        """The context that the network is run in."""
        return torch.autocast(self._head.device.type, torch.bfloat16, enabled=self._low_precision)

    def host(self, array: np.ndarray) -> Tensor:
        """The array on the policy's device, as it is."""
        return to_device(array, self._head.device)

    def tensor(self, array: np.ndarray) -> Tensor:
        """The array on the policy's device, in its precision."""
        return self.host(array).to(self._head.dtype)

    @property
    def _head(self) -> Tensor:
        weight = self.value_head[0].weight
        assert isinstance(weight, Tensor)
        return weight


def as_array(tensor: Tensor) -> np.ndarray:
    """f32 on the host."""
    result: np.ndarray = tensor.float().cpu().numpy()
    return result


def keys_of(observations: Observations) -> np.ndarray:
    """A noise key u64[B] for each row, by what it sees: the same whenever it is asked."""
    keys = np.empty(len(observations), dtype=np.uint64)
    for row in range(len(observations)):
        digest = xxhash.xxh64(observations.state[row].tobytes())
        for image in observations.images.values():
            digest.update(np.ascontiguousarray(image[row]).data)
        digest.update(observations.instruction[row].encode())
        keys[row] = digest.intdigest()
    return keys
