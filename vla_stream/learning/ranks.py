"""What the processes of one trainer do together: sums over all of them, and where the weights lie.

    Alone     one process, which has all segments of an update
    Replicas  each rank has its part of the segments, and all weights: data parallel. Gradients are summed once per
              optimiser step. That is what DDP does under `no_sync`; its own hooks would reduce at every backward pass,
              of which a streaming update makes many per step, and wait for parameters that a warm-up does not train
    Shards    each has its part of the weights, gradients and moments, too (FSDP2, `fully_shard`)

All ranks call the same methods in the same order: each is a collective. torch.distributed is imported where there are
several ranks only, and its process group must be there before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from vla_stream.environments.protocol import Observations
from vla_stream.errors import InputError
from vla_stream.policies.protocol import Evaluation, LowPrecision, Policy, ShardedInParts

MOST_TEXT_BYTES = 500  # of a sentence that one rank tells the others
MOST_AT_ONCE = 1 << 24  # elements of one reduction: it needs as much memory again

Like = Callable[[str], "Tensor | None"]


class Passes(Protocol):
    """The part of a policy that an update asks."""

    def evaluate(
        self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]
    ) -> Evaluation: ...

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor: ...


class Alone:
    """One rank: nobody has to be asked.

    rank, count  this process's number, and how many there are
    beside       whether passes may run beside gradients on a GPU, see beside.py
    """

    rank = 0
    count = 1
    beside = True

    def prepare(self, policy: Policy) -> Passes:
        """Give all ranks the weights of rank 0's policy. It is asked through what this returns from then on; its
        parameters may be others than before."""
        return policy

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, element by element."""
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """The maximum over all ranks, element by element."""
        return tensor

    def most(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        return number

    def first(self, text: str | None) -> str | None:
        """What the first rank says that says something."""
        return text

    def gather(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """The host tensors of all ranks, by rank. They differ in their first dimension at most."""
        return [tensors]

    def backward(self, loss: Tensor, parameters: Sequence[Parameter]) -> None:
        """Add the gradients of this rank's part of a loss to those of `parameters` and of no others."""
        loss.backward(inputs=parameters)  # type: ignore[no-untyped-call]

    def gradients(self, loss: Tensor, parameters: Sequence[Parameter], *, again: bool) -> Sequence[Tensor | None]:
        """The same gradients, not added to anything. again: of the same passes, more will be asked."""
        return torch.autograd.grad(loss, parameters, retain_graph=again, allow_unused=True)

    def reduce(self, parameters: Sequence[Parameter]) -> None:
        """Turn each rank's part of the gradients into their sum."""

    def clip(self, parameters: Sequence[Parameter], most: float) -> float:
        """Scale gradients down to this norm; returns what it was."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, most))

    def exchange(self, parameter: Parameter, weight: Tensor) -> None:
        """Each has the other's values afterwards."""
        parameter.data, weight.data = weight.data, parameter.data

    def whole(self, tensor: Tensor) -> Tensor:
        """All of it on the host of rank 0; other ranks may get nothing."""
        return tensor.detach().cpu()

    def share(self, state: Mapping[str, Tensor] | None, like: Like) -> dict[str, Tensor]:
        """Rank 0's tensors on all ranks, where and as those lie that `like` names. state: None on other ranks."""
        assert state is not None
        return {name: _beside(tensor, like(name)) for name, tensor in state.items()}


class Replicas(Alone):
    """All ranks of the process group have all weights."""

    def __init__(self, device: torch.device) -> None:
        from torch import distributed

        self._dist, self._device = distributed, device
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    def prepare(self, policy: Policy) -> Passes:
        current = policy.state_dict()
        policy.load_state_dict(self.share(current if self.rank == 0 else None, current.get))
        return policy

    def total(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, self._dist.ReduceOp.SUM)

    def largest(self, tensor: Tensor) -> Tensor:
        return self._reduced(tensor, self._dist.ReduceOp.MAX)

    def most(self, number: int) -> int:
        return int(self.largest(torch.tensor(number)))

    def first(self, text: str | None) -> str | None:
        who = self.count if text is None else self.rank
        first = -self.most(-who)
        return None if first == self.count else self._told(text or "", first)

    def gather(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        rows = torch.tensor([len(tensor) for tensor in tensors])
        all_rows = [torch.empty_like(rows) for _ in range(self.count)]
        self._dist.all_gather(all_rows, rows)
        row_bytes = [tensor[:1].nbytes or tensor.new_empty(1, *tensor.shape[1:]).nbytes for tensor in tensors]
        sizes = [[count * size for count, size in zip(each.tolist(), row_bytes, strict=True)] for each in all_rows]
        # All in one, since each exchange costs a round trip; of one size, since not every backend knows others.
        packet = torch.zeros(max(map(sum, sizes)), dtype=torch.uint8)
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        packet[: sum(sizes[self.rank])] = torch.cat(flat)
        packets = [torch.empty_like(packet) for _ in range(self.count)]
        self._dist.all_gather(packets, packet)
        return [
            [
                part.clone().view(tensor.dtype).reshape(-1, *tensor.shape[1:])
                for part, tensor in zip(torch.split(each[: sum(size)], size), tensors, strict=True)
            ]
            for each, size in zip(packets, sizes, strict=True)
        ]

    @torch.no_grad()
    def reduce(self, parameters: Sequence[Parameter]) -> None:
        by_dtype: dict[torch.dtype, list[Parameter]] = {}
        for parameter in parameters:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for bucket in (bucket for alike in by_dtype.values() for bucket in _buckets(alike)):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            # A rank may have no gradient where another's rows have one, and none where nobody has stays none.
            there = gradients[0].new_tensor([parameter.grad is not None for parameter in bucket])
            flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), there])
            self._dist.all_reduce(flat)
            *parts, there = torch.split(flat, [*(gradient.numel() for gradient in gradients), len(bucket)])
            for parameter, gradient, part, some in zip(bucket, gradients, parts, there.tolist(), strict=True):
                if some:
                    parameter.grad = gradient.copy_(part.view_as(gradient))

    def whole(self, tensor: Tensor) -> Tensor:
        return super().whole(tensor) if self.rank == 0 else torch.empty(0)

    def share(self, state: Mapping[str, Tensor] | None, like: Like) -> dict[str, Tensor]:
        shapes = None
        if state is not None:
            shapes = {name: (str(item.dtype).removeprefix("torch."), tuple(item.shape)) for name, item in state.items()}
        shared = {}
        for name, (kind, shape) in self._described(shapes).items():
            there = like(name)
            device = torch.device("cpu") if there is None else self._device
            if state is None:
                tensor = torch.empty(shape, dtype=getattr(torch, kind), device=device)
            else:
                tensor = state[name].detach().to(device).contiguous()
            if tensor.numel():
                self._dist.broadcast(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, 0)
            shared[name] = self._placed(tensor, there)
        return shared

    def _placed(self, tensor: Tensor, like: Tensor | None) -> Tensor:
        return _beside(tensor, like)

    def _described(self, shapes: Mapping[str, tuple[str, tuple[int, ...]]] | None) -> dict[str, Any]:
        packed = b"" if shapes is None else json.dumps(shapes).encode()
        size = torch.tensor(len(packed))
        self._dist.broadcast(size, 0)
        data = torch.zeros(int(size), dtype=torch.uint8)
        if packed:
            data = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._dist.broadcast(data, 0)
        described: dict[str, Any] = json.loads(bytes(data.numpy()))
        return described

    def _reduced(self, tensor: Tensor, operation: Any) -> Tensor:
        reduced = tensor.detach().clone()
        self._dist.all_reduce(reduced, operation)
        return reduced

    def _told(self, text: str, rank: int) -> str:
        data = np.zeros(MOST_TEXT_BYTES, dtype=np.uint8)
        encoded = text.encode()[:MOST_TEXT_BYTES]
        data[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        told = torch.from_numpy(data)
        self._dist.broadcast(told, rank)
        return bytes(told.numpy()).rstrip(b"\0").decode(errors="replace")


class Shards(Replicas):
    """Each rank has its part of every weight, once all have made the whole policy. Needs torch ≥ 2.6.

    Mixed precision: what a low-precision policy names as `layers_to_shard` is gathered and computed in bfloat16, and
    its gradients are reduced in float32; heads and log-probs stay in float32.
    """

    beside = False  # both would gather weights, on two streams

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        from torch.distributed import fsdp, tensor
        from torch.distributed.device_mesh import init_device_mesh

        self._fsdp, self._tensor = fsdp, tensor
        self._mesh = init_device_mesh(device.type, (self.count,))
        self._parameters: list[Parameter] = []

    def prepare(self, policy: Policy) -> Passes:
        assert isinstance(policy, nn.Module)
        super().prepare(policy)
        for name, parameter in policy.named_parameters():
            if parameter.dim() == 0:
                raise InputError(
                    f"trainer.parallel is fsdp but the policy's parameter {name} is a scalar, which has no parts; make "
                    "it a tensor of one element, or set parallel to ddp"
                )
        passes = _Passes(policy)
        halves = isinstance(policy, LowPrecision) and policy.low_precision
        half = self._fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        mixed = half if halves else self._fsdp.MixedPrecisionPolicy()
        # Weights of the whole are given back after each pass: they would be old ones after the next optimiser step.
        for layer in policy.layers_to_shard() if isinstance(policy, ShardedInParts) else ():
            self._fsdp.fully_shard(layer, mesh=self._mesh, reshard_after_forward=True, mp_policy=mixed)
        self._fsdp.fully_shard(passes, mesh=self._mesh, reshard_after_forward=True)
        self._parameters += [parameter for parameter in passes.parameters() if parameter.requires_grad]
        return passes

    def backward(self, loss: Tensor, parameters: Sequence[Parameter]) -> None:
        # FSDP2 reduces by the mean over ranks.
        (loss * self.count).backward()  # type: ignore[no-untyped-call]
        wanted = set(parameters)
        for parameter in self._parameters:
            if parameter not in wanted:
                parameter.grad = None

    def gradients(self, loss: Tensor, parameters: Sequence[Parameter], *, again: bool) -> Sequence[Tensor | None]:
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        (loss * self.count).backward(retain_graph=again)  # type: ignore[no-untyped-call]
        found = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient
        return found

    def reduce(self, parameters: Sequence[Parameter]) -> None:
        """Done, pass by pass."""

    def clip(self, parameters: Sequence[Parameter], most: float) -> float:
        norm: Any = torch.nn.utils.clip_grad_norm_(parameters, most)
        return float(norm.full_tensor())

    @torch.no_grad()
    def exchange(self, parameter: Parameter, weight: Tensor) -> None:
        # FSDP2 gathers from the memory that it knows.
        before = parameter.clone()
        parameter.copy_(weight)
        weight.copy_(before)

    def whole(self, tensor: Tensor) -> Tensor:
        """One tensor at a time is whole on every device."""
        placed: Any = tensor.detach()
        return super().whole(placed.full_tensor() if isinstance(placed, self._tensor.DTensor) else placed)

    def _placed(self, tensor: Tensor, like: Tensor | None) -> Tensor:
        if not isinstance(like, self._tensor.DTensor):
            return _beside(tensor, like)
        return self._tensor.distribute_tensor(
            tensor.to(self._device), like.device_mesh, like.placements, src_data_rank=None
        )


class _Passes(nn.Module):
    """A policy whose passes are those of a module: FSDP2 gathers weights before one and frees them after it."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, name: str, *arguments: Any) -> Any:
        """A tensor or a tuple of them, since FSDP2 looks for no others. Cloned: it warns of views."""
        outcome = getattr(self.policy, name)(*arguments)
        if isinstance(outcome, Evaluation):
            return outcome.logprobs.clone(), outcome.entropy.clone(), outcome.values.clone()
        return outcome

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        return Evaluation(*self("evaluate", observations, actions, extras))

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        loss: Tensor = self("imitation_loss", observations, actions, valid)
        return loss


def _beside(tensor: Tensor, like: Tensor | None) -> Tensor:
    return tensor if like is None else tensor.to(like.device)


def _buckets(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """Some at a time, so that a copy of them is small beside all."""
    buckets: list[list[Parameter]] = [[]]
    elements = 0
    for parameter in parameters:
        if elements and elements + parameter.numel() > MOST_AT_ONCE:
            buckets.append([])
            elements = 0
        buckets[-1].append(parameter)
        elements += parameter.numel()
    return buckets


ALONE = Alone()
