"""What a VLA must offer to generators and trainers. Shape suffixes: see environments/protocol.py.

A policy class is a `torch.nn.Module` with the attribute `Options` (a pydantic model, importable without torch) and is
made as `Class(Options(...), specification, chunk)`. Its `state_dict()` is what is published and checkpointed. An
option named `checkpoint` is a file or folder that the policy starts from; `run` has the options looked at before any
worker starts where it is set. policies/conformance.py tests all that is said here.
This file imports torch for its annotations only, so that reading a config never pays for torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel

from vla_stream.environments.protocol import Observations

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Act:
    """One decision for B rows, as numpy arrays on the host.

    actions  f32[B, H, A] in the environment's range
    logprobs f32[B, H, A] of the behaviour policy, per action dimension (losses sum to the granularity they use)
    values   f32[B], a metric only: the trainer computes its own
    extras   name -> array[B, ...]: what `evaluate` needs to recompute the log-probs (token ids, denoising chain)
    """

    actions: np.ndarray
    logprobs: np.ndarray
    values: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the current weights say about recorded decisions: logprobs and entropy [B, H, A], values [B], on device."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor


@runtime_checkable
class Policy(Protocol):
    """A VLA. Both methods run in eval mode (no dropout); `act` without gradients, `evaluate` with them."""

    Options: ClassVar[type[BaseModel]]

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        """Sample action chunks; row i's noise derives from noise_keys u64[B][i] alone. None: the mode, no sampling."""

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        """Log-probs, entropy and values of recorded actions f32[B, H, A], with gradients to all parameters."""

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        """Behaviour-cloning loss of demonstrated chunks f32[B, H, A]: mean over the elements where valid bool[B, H]."""

    def parameter_groups(self) -> Mapping[str, list[torch.nn.Parameter]]:
        """Trainable parameters as {"policy": [...], "value": [...]}, each parameter once."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> Any:
        """Take new weights over. A generator calls it between two batches only where a module of the policy has a
        load_state_dict of its own, or hooks for it (say, to copy into the memory of a captured graph). Where loading is
        torch's, it exchanges the tensors for new ones that were made ready in the background."""


@runtime_checkable
class GroundedPolicy(Protocol):
    """Optional: a policy whose perception can be pre-trained on scenes with a known target."""

    def grounding_loss(self, observations: Observations, targets: np.ndarray) -> Tensor:
        """Mean error of the predicted image coordinates f32[B, 2] in [-1, 1] of the object that the sentence names."""


@runtime_checkable
class NormalisedPolicy(Protocol):
    """Optional: a policy that normalises the state by statistics in its `state_dict()`, set once by the warm start."""

    def set_state_statistics(self, mean: np.ndarray, std: np.ndarray) -> None:
        """Mean f32[S] and standard deviation f32[S] of the demonstrations' state."""


@runtime_checkable
class ShardedInParts(Protocol):
    """Optional: a policy too large for one device, of which only some layers need be whole at a time."""

    def layers_to_shard(self) -> Sequence[torch.nn.Module]:
        """Modules that are called as such in every pass, whose output is all that leaves them (a cache does not)."""


@runtime_checkable
class LowPrecision(Protocol):
    """Optional: a policy that may compute in less than float32. Its act and evaluate then agree only about so well."""

    @property
    def low_precision(self) -> bool: ...


@runtime_checkable
class ManyDevices(Protocol):
    """Optional: a policy that trains on devices of its own, beside its process, and on how many. Without it: one."""

    @property
    def training_devices(self) -> int: ...


def row_noise(noise_keys: np.ndarray, size: int) -> np.ndarray:
    """Standard normal noise f32[B, size]; row i depends on noise_keys[i] only (Philox counter generator)."""
    noise = np.empty((len(noise_keys), size), dtype=np.float32)
    # A generator made by its key would first ask the system for entropy, which takes as long as all the rest.
    philox = np.random.Philox(key=0)
    generator, state = np.random.Generator(philox), philox.state
    for row, key in zip(noise, noise_keys, strict=True):
        state["state"]["key"][0] = key
        philox.state = state
        generator.standard_normal(dtype=np.float32, out=row)
    return noise
