"""Any small vision-language model of transformers with a head for actions: copy this for a VLA of your own.

    images, sentence ─ vision-language model ─ its output for the last token ─┐
    state ─ normalised ───────────────────────────────────────────────────────┴ head ─ action chunk

The model is in vlm_network.py: a folder's, or a tiny random one, the same each time. The head is new and knows nothing:
it wants a warm start. With `head: gaussian` it gives the mean of each action dim, and a deviation is learned for each;
with `head: binned` logits of 256 bins (see action_tokens.py). Log-probs are those of actions in [-1, 1], whatever the
environment's range is.

What is to be exchanged for another model: `eyes` for what it is given, `_decide` for what is made of its output.

# B rows, N tokens, H actions, A action dims, S state dims, W width of the model
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import Field, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.policies import action_tokens, networks, pretrained, vlm_network
from vla_stream.policies.flow_matching import gaussian_entropy, gaussian_logprobs
from vla_stream.policies.network_policy import NetworkOptions, NetworkPolicy, as_array, keys_of
from vla_stream.policies.protocol import Act, Evaluation, row_noise
from vla_stream.policies.vlm_inputs import Prompts, chosen_cameras, fit_images
from vla_stream.sections import PlainPath

_STATE_RANGE = 5.0  # standard deviations; keeps a state far from the demonstrations from saturating everything


class Vlm(NetworkPolicy):
    """The policy: the model, preprocessing, heads, and log-probs."""

    class Options(NetworkOptions):
        """Options of `policy.options` when `policy.name` is vlm."""

        checkpoint: PlainPath | None = Field(
            default=None, description="Folder of a model in transformers' layout. Default: a tiny random one."
        )
        family: vlm_network.Family = Field(default="smolvlm", description="Of the tiny one; a folder tells its own.")
        image_size: int | None = Field(
            default=None, ge=1, description="Side of the images, for models that take any. Default: theirs, or 224."
        )
        train: vlm_network.Trained = Field(
            default="lora", description="lora: adapters at all linear layers; all: everything. The heads always are."
        )
        head: Literal["gaussian", "binned"] = Field(default="gaussian", description="What an action is drawn from.")
        initial_std: float = Field(
            default=0.37, gt=0, description="First standard deviation of the Gaussian, of an action in [-1, 1]."
        )
        min_std: float = Field(default=0.05, gt=0, description="Floor of the learned standard deviations.")

        @field_validator("checkpoint")
        @classmethod
        def _whole(cls, folder: Path | None) -> Path | None:
            if folder is not None:
                pretrained.check_folder(folder, *vlm_network.FAMILIES)
            return folder

    def __init__(self, options: Vlm.Options, specification: Specification, chunk: int) -> None:
        """Raises InputError for cameras that are not there, or an image size that the model cannot take."""
        super().__init__(options)
        self._options, self._specification, self._chunk = options, specification, chunk
        self._binned, self._min_log_std = options.head == "binned", math.log(options.min_std)
        self._cameras = chosen_cameras(options.cameras, specification)
        folder = options.checkpoint
        config = vlm_network.read_config(folder, options.family)
        self._eyes = vlm_network.eyes(config, options.image_size)
        # Minutes: what can be wrong has been looked at before.
        self.network = vlm_network.build(config, folder)
        text = config.text_config
        ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
        first = [
            *self._eyes.image_ids * len(self._cameras),
            *([] if text.bos_token_id is None else [text.bos_token_id]),
        ]
        # The output for the end of the text is what the head is given.
        tokens, padding = vlm_network.tokenizer(folder), text.pad_token_id or 0
        self._prompts = Prompts(tokens, first, options.words, padding, last=ends[:1])
        vlm_network.choose_trained(self.network, options.train, options.lora_rank)
        if self.low_precision:
            networks.halve_frozen(self.network)
        width, elements = text.hidden_size + specification.state_dims, chunk * specification.action_dims
        outputs = elements * (action_tokens.BINS if self._binned else 1)
        self.action_head = nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, outputs))
        if not self._binned:
            self.log_std = nn.Parameter(torch.full((specification.action_dims,), math.log(options.initial_std)))
        self.state_mean: Tensor
        self.state_std: Tensor
        self.register_buffer("state_mean", torch.zeros(specification.state_dims))
        self.register_buffer("state_std", torch.ones(specification.state_dims))
        self.add_value_head(width)
        self.close_network(self.network, [self.network], folder)

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        """See the protocol. Extras: bins u8[B, H, A] with the binned head. A Gaussian sample is not clipped: its
        log-prob is that of the Gaussian, environments clip."""
        with torch.inference_mode():
            decided, values = self._decide(observations)
            temperature = self._options.temperature
            if noise_keys is None and self._options.evaluation_temperature > 0:
                noise_keys, temperature = keys_of(observations), self._options.evaluation_temperature
            normal = None
            if noise_keys is not None:
                elements = self._chunk * self._specification.action_dims
                normal = self.tensor(row_noise(noise_keys, elements)).reshape(decided.shape[:3])
            chosen = self._choose(decided, normal, temperature)
            logprobs, _ = self._density(decided, chosen)
            actions = self._in_range(action_tokens.actions_of(chosen) if self._binned else chosen)
            extras = {"bins": chosen.byte().cpu().numpy()} if self._binned else {}
            return Act(as_array(actions), as_array(logprobs), as_array(values), extras)

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        """See the protocol."""
        decided, values = self._decide(observations)
        chosen = self.host(extras["bins"]).long() if self._binned else self._normalised(self.tensor(actions))
        return Evaluation(*self._density(decided, chosen), values)

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        """See the protocol: smooth-L1 of the mean, or the cross-entropy of the bins."""
        decided, _ = self._decide(observations)
        labels = self._normalised(self.tensor(actions))
        if self._binned:
            bins = action_tokens.bins_of(labels)
            errors = -action_tokens.chosen(action_tokens.log_softmax(decided, 1.0), bins)
        else:
            errors = F.smooth_l1_loss(decided, labels, reduction="none")
        weight = self.tensor(valid).unsqueeze(-1).expand_as(errors)
        return (errors * weight).sum() / weight.sum().clamp(min=1)

    def write(self, folder: Path) -> None:
        """A whole model in transformers' layout, without a language head, and the heads; see NetworkPolicy."""

        def network() -> None:
            if self._options.checkpoint is None:
                self._prompts.save(folder / pretrained.TOKENIZER)
            else:
                pretrained.copy_others(self._options.checkpoint, folder)
            self.network.save_pretrained(folder)  # with a config of its own

        self.write_with_heads(self.network, folder, network)

    def set_state_statistics(self, mean: np.ndarray, std: np.ndarray) -> None:
        """See the protocol."""
        self.state_mean.copy_(torch.from_numpy(mean))
        self.state_std.copy_(torch.from_numpy(pretrained.constants_kept(std)))

    def layers_to_shard(self) -> Sequence[nn.Module]:
        """See the protocol."""
        return networks.layers(self.network)

    def _decide(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """Means [B, H, A] or logits [B, H, A, 256], and values [B]."""
        ids, mask = map(self.host, self._prompts(observations.instruction))
        images = [fit_images(self.tensor(observations.images[camera]), self._eyes.size) for camera in self._cameras]
        with self.autocast():
            inputs = self._eyes.inputs(torch.stack(images, dim=1).contiguous(), ids, mask)
            outcome = self.network(input_ids=ids, attention_mask=mask, use_cache=False, **inputs)
        state = (self.tensor(observations.state) - self.state_mean) / self.state_std
        last = outcome.last_hidden_state[:, -1].to(state.dtype)
        features = torch.cat([last, state.clamp(-_STATE_RANGE, _STATE_RANGE)], dim=-1)
        shape = (-1, self._chunk, self._specification.action_dims, *([action_tokens.BINS] if self._binned else []))
        return self.action_head(features).reshape(shape), self.values_of(features)

    def _choose(self, decided: Tensor, normal: Tensor | None, temperature: float) -> Tensor:
        """Bins i64[B, H, A], or actions in [-1, 1], by normal numbers [B, H, A], or else the mode."""
        if not self._binned:
            return decided if normal is None else decided + self._std(temperature) * normal
        if normal is None:
            return decided.argmax(-1)
        return action_tokens.draw(action_tokens.log_softmax(decided, temperature), normal)

    def _density(self, decided: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropy [B, H, A] of bins i64[B, H, A], or of actions in [-1, 1], at training's temperature."""
        if self._binned:
            log_probabilities = action_tokens.log_softmax(decided, self._options.temperature)
            return action_tokens.chosen(log_probabilities, chosen), action_tokens.entropy(log_probabilities)
        std = self._std(self._options.temperature).expand_as(decided)
        return gaussian_logprobs(chosen, decided, std), gaussian_entropy(std)

    def _std(self, temperature: float) -> Tensor:
        return self.log_std.clamp(min=self._min_log_std).exp() * temperature

    def _in_range(self, normalised: Tensor) -> Tensor:
        """Actions in the environment's units; the other way round is `_normalised`."""
        low, high = self._specification.action_low, self._specification.action_high
        return (normalised + 1) / 2 * (high - low) + low

    def _normalised(self, actions: Tensor) -> Tensor:
        low, high = self._specification.action_low, self._specification.action_high
        return (actions - low) / (high - low) * 2 - 1
