"""A VLA that only takes its time, for profiles and benches: inference and training sleep on emulated devices.

    act              a + b·rows ms on its generator's device; the first generator takes the first of `devices`, …
    evaluate         with gradients: `sample_ms` per sample, shared by all `trainer_devices`; and after each optimiser
                     step `optimiser_step_ms`. Without gradients (π_prox, V) nothing: `sample_ms` covers all passes
    load_state_dict  on a generator: `load_ms` of its device, unless weights are loaded in the background

As on a GPU, training is launched and the trainer goes on: it waits where an optimiser step reads the gradients' norm,
and where weights are read. A pass without gradients needs no more than the weights, and waits for no gradient.

Under it is a real policy of a few hundred parameters, linear in the state, whose weights carry a ballast of
`weights_mb` that every optimiser step changes in part; so losses, versions and digests mean what they always mean.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from vla_stream.config import Section
from vla_stream.emulation import Claim, Devices, Stream
from vla_stream.environments.emulated import DeviceName
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.policies.protocol import Act, Evaluation, row_noise

_STD = 0.5
_LOG_2PI = math.log(2 * math.pi)


class Emulated(nn.Module):
    """The emulated policy."""

    class Options(Section):
        """Options of `policy.options` when `policy.name` is emulated."""

        batch_ms: float = Field(default=0.0, ge=0, description="a: time of one inference in milliseconds, …")
        row_ms: float = Field(default=0.0, ge=0, description="b: … and of each row in it.")
        sample_ms: float = Field(default=0.0, ge=0, description="Training time of one sample on one device, per epoch.")
        optimiser_step_ms: float = Field(default=0.0, ge=0, description="Time of one optimiser step.")
        load_ms: float = Field(
            default=0.0, ge=0, description="Time in which new weights get onto a generator's device."
        )
        load_in_background: bool = Field(default=True, description="They do while that device goes on inferring.")
        weights_mb: float = Field(default=8.0, ge=0, description="Size of the weights in units of 10⁶ bytes (bf16).")
        changed_share: float = Field(
            default=0.02, ge=0, le=1, description="Part of the weights that an optimiser step changes."
        )
        devices: list[DeviceName] = Field(default=["0"], description="Devices of the generators, one each.")
        trainer_devices: list[DeviceName] = Field(
            default=["1"], min_length=1, description="Devices that the trainer uses together; may be the generators'."
        )
        folder: Path | None = Field(default=None, description="Folder of the devices. Default: one per user and host.")

    def __init__(self, options: Emulated.Options, specification: Specification, chunk: int) -> None:
        super().__init__()
        self._options, self._shape = options, (chunk, specification.action_dims)
        self.mean = nn.Linear(specification.state_dims, chunk * specification.action_dims)
        self.value = nn.Linear(specification.state_dims, 1)
        self.log_std = nn.Parameter(torch.tensor(math.log(_STD)))
        self.ballast: Tensor
        self.register_buffer("ballast", torch.zeros(int(options.weights_mb * 1e6 / 2), dtype=torch.bfloat16))
        self._claim: Claim | None = None
        self._generator: Devices | None = None
        self._trainer: Stream | None = None
        self._optimiser_steps = 0
        # The one place where an optimiser tells that it has made a step, whoever owns it.
        me = weakref.ref(self)
        handle = register_optimizer_step_post_hook(lambda optimiser, *_: _after_step(me(), optimiser))
        weakref.finalize(self, handle.remove)

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        """See the protocol."""
        asked_s = time.monotonic()
        if self._generator is None:
            self._claim = Claim(self._options.devices, "generator", self._options.folder)
            self._generator = Devices([self._claim.name], self._options.folder)
        with torch.inference_mode():
            mean, values = self._decide(observations)
            noise = torch.zeros_like(mean)
            if noise_keys is not None:
                noise = torch.from_numpy(row_noise(noise_keys, mean[0].numel())).reshape(mean.shape)
            actions = mean + self.log_std.exp() * noise
            logprobs = -0.5 * noise.square() - self.log_std - 0.5 * _LOG_2PI
            act = Act(actions.numpy(), logprobs.numpy(), values.numpy())
        took_ms = self._options.batch_ms + self._options.row_ms * len(observations)
        self._generator.compute(took_ms / 1000, asked_s)  # what was really computed is part of it
        return act

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        """See the protocol."""
        asked_s = time.monotonic()
        mean, values = self._decide(observations)
        deviation = (torch.from_numpy(np.ascontiguousarray(actions)) - mean) * torch.exp(-self.log_std)
        logprobs = -0.5 * deviation.square() - self.log_std - 0.5 * _LOG_2PI
        entropy = (self.log_std + 0.5 * (1 + _LOG_2PI)).expand_as(mean)
        if torch.is_grad_enabled():
            share = self._options.sample_ms / len(set(self._options.trainer_devices))
            self._training.launch(share * len(observations) / 1000, asked_s)
        return Evaluation(logprobs, entropy, values)

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        """There is nothing to imitate."""
        raise InputError("policy emulated: it learns nothing, so it cannot be pre-trained; remove the section pretrain")

    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        """See the protocol. The ballast is no parameter: Adam would take real time for it."""
        return {"policy": [*self.mean.parameters(), self.log_std], "value": list(self.value.parameters())}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """See torch; on a generator it takes its time."""
        result = super().load_state_dict(state_dict, strict, assign)
        if self._generator is not None and not self._options.load_in_background:
            self._generator.compute(self._options.load_ms / 1000)
        return result

    def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
        """See torch; on a trainer they are there when they are computed."""
        if self._trainer is not None:
            self._trainer.wait()
        return super().state_dict(*arguments, **keywords)

    def after_optimiser_step(self) -> None:
        """The step's time, and what it does to the ballast."""
        self._training.wait()
        self._training.launch(self._options.optimiser_step_ms / 1000)
        if self._options.changed_share > 0:
            stride = max(1, round(1 / self._options.changed_share))
            # The lowest bit: always another number, and never an infinite one.
            self.ballast.view(torch.int16)[self._optimiser_steps % stride :: stride].bitwise_xor_(1)
        self._optimiser_steps += 1

    @property
    def training_devices(self) -> int:
        """See the protocol."""
        return len(set(self._options.trainer_devices))

    @property
    def _training(self) -> Stream:
        if self._trainer is None:
            self._trainer = Stream(Devices(self._options.trainer_devices, self._options.folder))
        return self._trainer

    def _decide(self, observations: Observations) -> tuple[Tensor, Tensor]:
        state = torch.from_numpy(np.ascontiguousarray(observations.state))
        return self.mean(state).reshape(-1, *self._shape), self.value(state).squeeze(-1)


def _after_step(policy: Emulated | None, optimiser: torch.optim.Optimizer) -> None:
    if policy is not None and any(
        parameter is policy.log_std for group in optimiser.param_groups for parameter in group["params"]
    ):
        policy.after_optimiser_step()
