"""What policies on a pretrained network share: how it is run and trained, a value head beside it, and how both become a
folder that `checkpoint` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import xxhash
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vla_stream.environments.protocol import Observations
from vla_stream.errors import InputError
from vla_stream.policies import networks
from vla_stream.policies.partly_trained import PartlyTrained
from vla_stream.policies.recompute import recompute
from vla_stream.policies.transfer import to_device
from vla_stream.sections import Section

HEADS = "heads.safetensors"  # in a folder that was exported: what is not the network's


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
        self._reads_statistics = "statistics" in type(options).model_fields

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

    def close_network(self, network: nn.Module, parts: Iterable[nn.Module], folder: Path | None) -> None:
        """What is trained is known now. parts: those of the network that may be compiled; folder: that it comes from,
        whose heads are taken if it was exported with some. Raises InputError: they are of another shape."""
        self._inside = next(name for name, child in self.named_children() if child is network) + "."
        if folder is not None and (folder / HEADS).is_file():
            self._load_heads(folder / HEADS)
        self.close_base()
        if self._recomputed:
            for layer in networks.layers(network):
                recompute(layer)
        if self._compiled:
            for part in parts:
                part.compile()

    def write_with_heads(self, network: nn.Module, folder: Path, write: Callable[[], None]) -> None:
        """For a policy's own `write(folder)`, which leaves there what `checkpoint` reads: the network in its published
        layout, by `write`, with adapters merged, in float32, and the heads beside it. It is of no use afterwards."""
        heads = self._heads()
        networks.merge_adapters(network)
        network.float()
        write()
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in heads.items()}, folder / HEADS)

    def _heads(self) -> dict[str, Tensor]:
        """What no published folder has. Statistics are in the folder's own files, where these have any."""
        found: dict[str, Tensor] = {n: p for n, p in self.named_parameters() if not n.startswith(self._inside)}
        if not self._reads_statistics:
            found |= {n: b for n, b in self.named_buffers() if not n.startswith(self._inside) and n != "base_digest"}
        return found

    def _load_heads(self, file: Path) -> None:
        ours, theirs = self._heads(), load_file(file)
        for name, tensor in ours.items():
            if name in theirs and theirs[name].shape != tensor.shape:
                raise InputError(
                    f"{file}: {name} is {list(theirs[name].shape)}, expected {list(tensor.shape)}: it was exported for "
                    "another robot, chunk or policy.options; use those, or remove the file for new heads"
                )
        with torch.no_grad():
            for name in ours.keys() & theirs.keys():
                ours[name].copy_(theirs[name])

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
