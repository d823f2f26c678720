"""What policies that denoise action chunks by flow matching share (π0, π0.5, SmolVLA): sampling with a density,
log-probs, values, imitation, statistics. A network is two functions: what does not change while a chunk is denoised,
and the velocity at a point of the way.

The noise whose density is the log-prob is that of flow_matching.py: with `noise: sde` one step, drawn per row, is
random; with `noise: learned` every step is, and a head of its own tells how much.

A log-prob is that of the executed actions and real dims in the network's units, where actions are normalised: in the
environment's units it would differ by a constant. The value is read from the action expert's output (mean over executed
actions and denoising steps), whose gradient ends there.

# B rows, K denoising steps, R random ones of these, C actions of the network, H executed, D padded action dims, A real
# ones, W width of the action expert
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.policies import flow_matching as flow
from vla_stream.policies import pretrained
from vla_stream.policies.network_policy import NetworkOptions, NetworkPolicy, as_array
from vla_stream.policies.protocol import Act, Evaluation, row_noise
from vla_stream.policies.vlm_inputs import chosen_cameras

_LABEL_TIMES = (1.5, 1.0)  # of the Beta distribution that imitation draws its times from, and …
_LABEL_SCALE, _LABEL_OFFSET = 0.999, 0.001  # … how they are mapped: π0's, and those of all that came after it


class FlowOptions(NetworkOptions):
    """Options that do not depend on which network it is."""

    noise: Literal["sde", "learned"] = Field(
        default="sde",
        description="Flow-SDE: one denoising step of a row is random. Its entropy is the same for all weights: an "
        "entropy bonus does nothing. Flow-Noise: all, by a head.",
    )
    denoising_steps: int = Field(default=4, ge=1, le=100, description="K: times that the action expert is asked.")
    noise_level: float = Field(default=0.5, gt=0, description="a of Flow-SDE.")
    learned_std: tuple[float, float] = Field(
        default=(0.08, 0.16), description="Lowest and highest standard deviation that Flow-Noise may learn."
    )
    temperature: float = Field(default=1.0, gt=0, description="Factor of the random steps' standard deviation.")
    evaluation_temperature: float = Field(
        default=1.0, ge=0, description="Factor of the first noise, always the same one, where nothing is sampled."
    )

    @field_validator("learned_std")
    @classmethod
    def _ascending(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        if not 0 < bounds[0] < bounds[1]:
            raise ValueError("two numbers above 0, the lower one first")
        return bounds


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a network: C actions of D dims, S dims of state, W numbers of the action expert for each action."""

    actions: int
    action_dims: int
    state_dims: int
    width: int


class FlowPolicy(NetworkPolicy):
    """Base of such a policy. Whoever derives makes its network after this constructor, and at last calls `close_flow`.

    Raises InputError for an environment or a chunk that the network or the statistics do not fit."""

    label: ClassVar[str]  # as policy.name

    def __init__(
        self,
        options: FlowOptions,
        specification: Specification,
        chunk: int,
        sizes: Sizes,
        statistics: tuple[pretrained.Statistics, str] | None,
    ) -> None:
        """statistics: those that the network was trained with, and where they are from; None: nothing is known."""
        super().__init__(options)
        self._flow, self._sizes, self._specification, self._chunk = options, sizes, specification, chunk
        self._cameras = chosen_cameras(options.cameras, specification)
        self._check_fit()
        self._keeps_statistics = statistics is not None
        self._set_statistics(statistics)
        self._delta = 1 / options.denoising_steps
        self._all_random = options.noise == "learned"

    def close_flow(self, network: nn.Module, parts: Iterable[nn.Module], folder: Path | None = None) -> None:
        """The network is there: add the heads, and see `close_network`."""
        self.add_value_head(self._sizes.width)
        if self._all_random:
            self.noise_head = nn.Linear(self._sizes.width, self._sizes.action_dims)
            self.log_std_range: Tensor
            self.register_buffer("log_std_range", torch.tensor(self._flow.learned_std).log(), persistent=False)
        self.close_network(network, parts, folder)

    @abstractmethod
    def _prefix(self, observations: Observations) -> Any:
        """What does not change while a chunk is denoised."""

    @abstractmethod
    def _expert(self, prefix: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The action expert's output [B, C, W] and the velocity, noise − action, [B, C, D] at x [B, C, D] and times
        t [B] from 1 (noise) to 0 (action)."""

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        """See the protocol. Without keys every step is the ODE's, from one and the same first noise. Extras:

        chain         f32[B, K + 1, C, D]: x from the first noise to the action
        random_steps  i64[B, R]: the denoising steps whose noise the log-prob is of
        """
        with torch.inference_mode():
            first, noise, random_steps = self._draw(noise_keys, len(observations))
            prefix = self._prefix(observations)
            x, chain, outputs = first, [first], []
            logprobs = torch.zeros_like(first)
            for step, t in enumerate(self._times()):
                output, velocity = self._expert(prefix, x, t.expand(len(x)))
                mean, std = self._transition(x, velocity, output, t.expand(len(x)))
                random = (random_steps == step).any(1)[:, None, None]
                ode = flow.ode_step(x, velocity, self._delta)
                if noise_keys is None:
                    x = ode
                else:
                    x = torch.where(random, mean + std * noise[:, min(step, noise.shape[1] - 1)], ode)
                logprobs = logprobs + torch.where(random, flow.gaussian_logprobs(x, mean, std), 0.0)
                chain.append(x)
                outputs.append(output)
            actions = self._executed(x) * self.action_std + self.action_mean
            extras = {"chain": torch.stack(chain, dim=1).float(), "random_steps": random_steps}
            return Act(
                as_array(actions),
                as_array(self._executed(logprobs)),
                as_array(self._values(outputs)),
                {name: tensor.cpu().numpy() for name, tensor in extras.items()},
            )

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        """See the protocol. The actions are the end of the chain in the extras."""
        chain, random_steps = self.tensor(extras["chain"]), torch.from_numpy(extras["random_steps"])
        random_steps = random_steps.to(chain.device)
        prefix = self._prefix(observations)
        times = self._times()
        rows = torch.arange(len(chain), device=chain.device)
        logprobs = entropy = torch.zeros_like(self._executed(chain[:, 0]))
        outputs = []
        for step in random_steps.unbind(1):
            x, t = chain[rows, step], times[step]
            output, velocity = self._expert(prefix, x, t)
            mean, std = self._transition(x, velocity, output, t)
            densities = flow.gaussian_logprobs(chain[rows, step + 1], mean, std)
            logprobs = logprobs + self._executed(densities)
            entropy = entropy + self._executed(flow.gaussian_entropy(std).expand_as(x))
            outputs.append(output)
        if not self._all_random:
            with torch.no_grad():
                outputs = [
                    self._expert(prefix, chain[:, step], t.expand(len(chain)))[0] for step, t in enumerate(times)
                ]
        return Evaluation(logprobs, entropy, self._values(outputs))

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        """See the protocol: the mean square of the error of the velocity, at random times. The network's actions beyond
        the demonstrated ones repeat the last of them, without counting."""
        labels = (self.tensor(actions) - self.action_mean) / self.action_std
        beyond = labels[:, -1:].expand(-1, self._sizes.actions - self._chunk, -1)
        labels = padded(torch.cat([labels, beyond], dim=1), self._sizes.action_dims)
        # On the host, so that the draw is the same on every device.
        t = torch.distributions.Beta(*_LABEL_TIMES).sample((len(labels),))
        t = (t * _LABEL_SCALE + _LABEL_OFFSET).to(labels)
        noise = torch.randn(labels.shape).to(labels)
        x = t[:, None, None] * noise + (1 - t[:, None, None]) * labels
        _, velocity = self._expert(self._prefix(observations), x, t)
        errors = self._executed((velocity - (noise - labels)).square())
        weight = self.tensor(valid).unsqueeze(-1).expand_as(errors)
        return (errors * weight).sum() / weight.sum().clamp(min=1)

    def set_state_statistics(self, mean: np.ndarray, std: np.ndarray) -> None:
        """See the protocol; a checkpoint keeps those that it was trained with."""
        if not self._keeps_statistics:
            self.state_mean.copy_(torch.from_numpy(mean))
            self.state_std.copy_(torch.from_numpy(pretrained.constants_kept(std)))

    def _transition(self, x: Tensor, velocity: Tensor, output: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of x [B, C, D] after a random step at times t [B]."""
        if self._all_random:
            low, high = self.log_std_range.to(x.dtype)
            std = torch.exp(low + (high - low) * torch.sigmoid(self.noise_head(output)))
            return flow.ode_step(x, velocity, self._delta), std * self._flow.temperature
        mean, std = flow.sde_step(x, velocity, t[:, None, None], self._delta, self._flow.noise_level)
        return mean, std * self._flow.temperature

    def _values(self, outputs: list[Tensor]) -> Tensor:
        """Values [B] from the action expert's outputs [B, C, W] of all denoising steps."""
        executed = torch.stack([output[:, : self._chunk].mean(1) for output in outputs])
        return self.values_of(executed.mean(0))

    def _draw(self, noise_keys: np.ndarray | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """First noise [B, C, D], that of the random steps [B, R, C, D], and which steps these are [B, R]."""
        steps, shape = self._flow.denoising_steps, (self._sizes.actions, self._sizes.action_dims)
        random = steps if self._all_random else 1
        keys = np.zeros(rows, dtype=np.uint64) if noise_keys is None else noise_keys
        size = shape[0] * shape[1]
        normal = self.tensor(row_noise(keys, 1 + (1 + random) * size))
        noise = normal[:, 1:].reshape(rows, 1 + random, *shape)
        if self._all_random:
            random_steps = torch.arange(steps, device=normal.device).expand(rows, steps)
        else:
            random_steps = flow.uniform_index(normal[:, :1], steps)
        first = noise[:, 0] if noise_keys is not None else noise[:, 0] * self._flow.evaluation_temperature
        return first, noise[:, 1:], random_steps

    def _times(self) -> Tensor:
        """f[K]: when the network is asked."""
        return flow.denoising_times(self._flow.denoising_steps).to(self.action_std)

    # ---- in and out

    def _normalised_state(self, observations: Observations) -> Tensor:
        """f[B, S]"""
        return (self.tensor(observations.state) - self.state_mean) / self.state_std

    def _check_fit(self) -> None:
        sizes, specification = self._sizes, self._specification
        for what, got, unit, most in (
            ("the environment's state", specification.state_dims, "dims", sizes.state_dims),
            ("the environment's action", specification.action_dims, "dims", sizes.action_dims),
            ("policy.chunk", self._chunk, "actions", sizes.actions),
        ):
            if got > most:
                raise InputError(
                    f"policy {self.label}: {what} has {got} {unit}, expected at most {most}, as its checkpoint has; "
                    "use another"
                )

    def _set_statistics(self, known: tuple[pretrained.Statistics, str] | None) -> None:
        specification = self._specification
        if known is None:
            low, high = specification.action_low, specification.action_high
            state, action = np.zeros(specification.state_dims), np.full(specification.action_dims, 1.0)
            found = pretrained.Statistics(state, state + 1, action * (high + low) / 2, action * (high - low) / 2)
        else:
            found, source = known
            found.check(specification, source)
        self.state_mean: Tensor
        self.state_std: Tensor
        self.action_mean: Tensor
        self.action_std: Tensor
        for name in ("state_mean", "state_std", "action_mean", "action_std"):
            self.register_buffer(name, torch.from_numpy(getattr(found, name).astype(np.float32)))

    def _executed(self, x: Tensor) -> Tensor:
        """[B, H, A] of [B, C, D]."""
        return x[:, : self._chunk, : self._specification.action_dims]


def padded(x: Tensor, dims: int) -> Tensor:
    """With zeros, to so many numbers in the last dimension."""
    return F.pad(x, (0, dims - x.shape[-1]))
