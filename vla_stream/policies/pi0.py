"""π0 (arXiv 2410.24164): a vision-language model and an action expert that denoises action chunks by flow matching.

    images ─ SigLIP ─┐
    words ───────────┴ PaliGemma ─ keys and values, once per observation ┐
    state, x at time t ─ action expert ──────────────────────────────────┴ velocity ─ x at t − δ, K times

The network is transformers' PI0ForConditionalGeneration (see pi0_network.py). With `checkpoint` it and the statistics
come from a folder (see pretrained.py), without one it is a random network of 160 k parameters, the same each time, for
tests. The noise whose density is the log-prob is that of flow_matching.py: with `noise: sde` one step, drawn per row,
is random; with `noise: learned` every step is, and a head of its own tells how much.

A log-prob is that of the executed actions and real dims in the network's units, where actions are normalised: in the
environment's units it would differ by a constant. The value is read from the action expert's output (mean over executed
actions and denoising steps), whose gradient ends there.

What is not trained does not travel (see partly_trained.py).

# B rows, N prefix tokens, K denoising steps, R random ones of these, C actions of the network, H executed, D padded
# action dims, A real ones, W width of the action expert
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.policies import flow_matching as flow
from vla_stream.policies import pi0_network, pretrained
from vla_stream.policies.network_policy import NetworkOptions, NetworkPolicy, as_array
from vla_stream.policies.protocol import Act, Evaluation, row_noise
from vla_stream.policies.vlm_inputs import Prompts, chosen_cameras, fit_images
from vla_stream.sections import PlainPath

_LABEL_TIMES = (1.5, 1.0)  # of the Beta distribution that imitation draws its times from, and …
_LABEL_SCALE, _LABEL_OFFSET = 0.999, 0.001  # … how they are mapped: both are π0's


class Pi0(NetworkPolicy):
    """The policy: the network, preprocessing, a value head, and log-probs."""

    class Options(NetworkOptions):
        """Options of `policy.options` when `policy.name` is pi0."""

        checkpoint: PlainPath | None = Field(
            default=None, description="Folder of a π0 in transformers' layout. Default: a tiny random one."
        )
        statistics: PlainPath | None = Field(
            default=None,
            validate_default=True,
            description="File with the statistics of the robot's data. Default: the checkpoint's own.",
        )
        train: pi0_network.Trained = Field(
            default="expert",
            description="expert: not the vision-language model; lora: adapters in both, and the heads.",
        )
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

        @field_validator("checkpoint")
        @classmethod
        def _whole(cls, folder: Path | None) -> Path | None:
            if folder is not None:
                pretrained.check_folder(folder, pi0_network.ARCHITECTURE)
            return folder

        @field_validator("statistics")
        @classmethod
        def _readable(cls, file: Path | None, info: ValidationInfo) -> Path | None:
            folder = info.data.get("checkpoint")
            found = file or (folder / pretrained.PROCESSOR if folder else None)
            if found is not None:
                pretrained.read_statistics(found)
            return found

        @field_validator("learned_std")
        @classmethod
        def _ascending(cls, bounds: tuple[float, float]) -> tuple[float, float]:
            if not 0 < bounds[0] < bounds[1]:
                raise ValueError("two numbers above 0, the lower one first")
            return bounds

    def __init__(self, options: Pi0.Options, specification: Specification, chunk: int) -> None:
        """Raises InputError for an environment or a chunk that the network or the statistics do not fit."""
        super().__init__(options)
        self._options, self._specification, self._chunk = options, specification, chunk
        self._cameras = chosen_cameras(options.cameras, specification)
        self._config = pi0_network.read_config(options.checkpoint, chunk)
        _check_fit(self._config, specification, chunk)
        self._set_statistics(specification)
        # Minutes: what can be wrong has been looked at before.
        self.network = pi0_network.build(self._config, options.checkpoint)
        vision = self._config.vlm_config.vision_config
        self._image_size: int = vision.image_size
        image_tokens = len(self._cameras) * (vision.image_size // vision.patch_size) ** 2
        text = self._config.vlm_config.text_config
        first = [self._config.vlm_config.image_token_id] * image_tokens + [text.bos_token_id]
        self._prompts = Prompts(pi0_network.tokenizer(options.checkpoint), first, options.words, text.pad_token_id)
        pi0_network.choose_trained(self.network, options.train, options.lora_rank)
        width = self._config.dit_config.hidden_size
        self.add_value_head(width)
        self._delta = 1 / options.denoising_steps
        self._all_random = options.noise == "learned"
        if self._all_random:
            self.noise_head = nn.Linear(width, self._config.max_action_dim)
            self.log_std_range: Tensor
            self.register_buffer("log_std_range", torch.tensor(options.learned_std).log(), persistent=False)
        self.close_network(self.network, (self.network.model.vlm, self.network.model.dit))

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
        beyond = labels[:, -1:].expand(-1, self._config.chunk_size - self._chunk, -1)
        labels = self._padded(torch.cat([labels, beyond], dim=1), self._config.max_action_dim)
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
        if self._options.statistics is None:
            self.state_mean.copy_(torch.from_numpy(mean))
            self.state_std.copy_(torch.from_numpy(pretrained.constants_kept(std)))

    # ---- the network

    def _prefix(self, observations: Observations) -> _Prefix:
        """What does not change while a chunk is denoised."""
        ids, mask = map(self.host, self._prompts(observations.instruction))
        images = [self.tensor(observations.images[camera]) for camera in self._cameras]
        pixels = torch.stack([fit_images(image, self._image_size) for image in images], dim=1)
        present = torch.ones(pixels.shape[:2], dtype=torch.bool, device=pixels.device)
        model = self.network.model
        with self.autocast():
            embeddings = model.embed_prefix(ids, pixels, present)
            # Zeros: attention within the prefix goes both ways.
            types = torch.zeros(ids.shape, dtype=embeddings.dtype, device=ids.device)
            cache = model.vlm(
                inputs_embeds=embeddings,
                attention_mask=mask,
                position_ids=mask.cumsum(-1) - 1,
                token_type_ids=types,
                use_cache=True,
            ).cache
        state = (self.tensor(observations.state) - self.state_mean) / self.state_std
        return _Prefix(cache, mask, self._padded(state, self._config.max_state_dim))

    def _expert(self, prefix: _Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The action expert's output [B, C, W] and the velocity [B, C, D] at x [B, C, D] and times t [B]."""
        network, cache = self.network, prefix.cache
        length = cache.get_seq_length()
        with self.autocast():
            embeddings = network.embed_action_time(prefix.state, x, t.to(x.dtype))
            outcome = network.model(action_embeds=embeddings, attention_mask=prefix.mask, cache=cache)
            output = outcome.last_hidden_state[:, -self._config.chunk_size :]
            velocity = network.action_out_proj(output)
        # Each step sees the prefix and itself, not the steps before.
        cache.crop(length - cache.get_seq_length())
        return output.to(x.dtype), velocity.to(x.dtype)

    def _transition(self, x: Tensor, velocity: Tensor, output: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of x [B, C, D] after a random step at times t [B]."""
        if self._all_random:
            low, high = self.log_std_range.to(x.dtype)
            std = torch.exp(low + (high - low) * torch.sigmoid(self.noise_head(output)))
            return flow.ode_step(x, velocity, self._delta), std * self._options.temperature
        mean, std = flow.sde_step(x, velocity, t[:, None, None], self._delta, self._options.noise_level)
        return mean, std * self._options.temperature

    def _values(self, outputs: list[Tensor]) -> Tensor:
        """Values [B] from the action expert's outputs [B, C, W] of all denoising steps."""
        executed = torch.stack([output[:, : self._chunk].mean(1) for output in outputs])
        return self.values_of(executed.mean(0))

    def _draw(self, noise_keys: np.ndarray | None, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """First noise [B, C, D], that of the random steps [B, R, C, D], and which steps these are [B, R]."""
        steps, shape = self._options.denoising_steps, (self._config.chunk_size, self._config.max_action_dim)
        random = steps if self._all_random else 1
        keys = np.zeros(rows, dtype=np.uint64) if noise_keys is None else noise_keys
        size = shape[0] * shape[1]
        normal = self.tensor(row_noise(keys, 1 + (1 + random) * size))
        noise = normal[:, 1:].reshape(rows, 1 + random, *shape)
        if self._all_random:
            random_steps = torch.arange(steps, device=normal.device).expand(rows, steps)
        else:
            random_steps = flow.uniform_index(normal[:, :1], steps)
        first = noise[:, 0] if noise_keys is not None else noise[:, 0] * self._options.evaluation_temperature
        return first, noise[:, 1:], random_steps

    def _times(self) -> Tensor:
        """f[K]: when the network is asked."""
        return flow.denoising_times(self._options.denoising_steps).to(self.action_std)

    # ---- in and out

    def _set_statistics(self, specification: Specification) -> None:
        low, high = specification.action_low, specification.action_high
        state, action = np.zeros(specification.state_dims), np.full(specification.action_dims, 1.0)
        found = pretrained.Statistics(state, state + 1, action * (high + low) / 2, action * (high - low) / 2)
        if self._options.statistics is not None:
            found = pretrained.read_statistics(self._options.statistics)
            found.check(specification, str(self._options.statistics))
        self.state_mean: Tensor
        self.state_std: Tensor
        self.action_mean: Tensor
        self.action_std: Tensor
        for name in ("state_mean", "state_std", "action_mean", "action_std"):
            self.register_buffer(name, torch.from_numpy(getattr(found, name).astype(np.float32)))

    def _executed(self, x: Tensor) -> Tensor:
        """[B, H, A] of [B, C, D]."""
        return x[:, : self._chunk, : self._specification.action_dims]

    def _padded(self, x: Tensor, dims: int) -> Tensor:
        return F.pad(x, (0, dims - x.shape[-1]))


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Keys and values of the prefix, its mask [B, N], and the normalised, padded state."""

    cache: Any
    mask: Tensor
    state: Tensor


def _check_fit(config: Any, specification: Specification, chunk: int) -> None:
    for what, got, unit, most in (
        ("the environment's state", specification.state_dims, "dims", config.max_state_dim),
        ("the environment's action", specification.action_dims, "dims", config.max_action_dim),
        ("policy.chunk", chunk, "actions", config.chunk_size),
    ):
        if got > most:
            raise InputError(
                f"policy pi0: {what} has {got} {unit}, expected at most {most}, as its checkpoint has; use another"
            )
