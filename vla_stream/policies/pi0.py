"""π0 (arXiv 2410.24164): a vision-language model and an action expert that denoises action chunks by flow matching.

    images ─ SigLIP ─┐
    words ───────────┴ PaliGemma ─ keys and values, once per observation ┐
    state, x at time t ─ action expert ──────────────────────────────────┴ velocity ─ x at t − δ, K times

The network is transformers' PI0ForConditionalGeneration (see pi0_network.py). With `checkpoint` it and the statistics
come from a folder (see pretrained.py), without one it is a random network of 160 k parameters, the same each time, for
tests. How it is sampled and trained: flow_policy.py.

What is not trained does not travel (see partly_trained.py).

# B rows, N prefix tokens, C actions of the network, D padded action dims, W width of the action expert
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.policies import networks, pi0_network, pretrained
from vla_stream.policies.flow_policy import FlowOptions, FlowPolicy, Sizes, padded
from vla_stream.policies.network_policy import as_array
from vla_stream.policies.vlm_inputs import Prompts, fit_images
from vla_stream.sections import PlainPath


class Pi0(FlowPolicy):
    """The policy: the network, preprocessing, a value head, and log-probs."""

    label = "pi0"

    class Options(FlowOptions):
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

    def __init__(self, options: Pi0.Options, specification: Specification, chunk: int) -> None:
        """Raises InputError for an environment or a chunk that the network or the statistics do not fit."""
        config, file = pi0_network.read_config(options.checkpoint, chunk), options.statistics
        sizes = Sizes(config.chunk_size, config.max_action_dim, config.max_state_dim, config.dit_config.hidden_size)
        statistics = None if file is None else (pretrained.read_statistics(file), str(file))
        super().__init__(options, specification, chunk, sizes, statistics)
        # Minutes: what can be wrong has been looked at before.
        self.network, self._config = pi0_network.build(config, options.checkpoint), config
        vision = config.vlm_config.vision_config
        self._image_size: int = vision.image_size
        image_tokens = len(self._cameras) * (vision.image_size // vision.patch_size) ** 2
        text = config.vlm_config.text_config
        first = [config.vlm_config.image_token_id] * image_tokens + [text.bos_token_id]
        self._prompts = Prompts(pi0_network.tokenizer(options.checkpoint), first, options.words, text.pad_token_id)
        pi0_network.choose_trained(self.network, options.train, options.lora_rank)
        parts = (self.network.model.vlm, self.network.model.dit)
        self.close_flow(self.network, parts, options.checkpoint)
        self._folder = options.checkpoint

    def write(self, folder: Path) -> None:
        """A whole model in transformers' layout, and the heads; see NetworkPolicy."""

        def network() -> None:
            if self._folder is None:
                self._prompts.save(folder / pretrained.TOKENIZER)
            else:
                pretrained.copy_others(self._folder, folder)
            self.network.save_pretrained(folder)  # with a config of its own
            state, action = (self.state_mean, self.state_std), (self.action_mean, self.action_std)
            statistics = pretrained.Statistics(*map(as_array, (*state, *action)))
            pretrained.write_statistics(statistics, folder / pretrained.PROCESSOR)

        self.write_with_heads(self.network, folder, network)

    def layers_to_shard(self) -> Sequence[nn.Module]:
        """See the protocol: those of the action expert. What the others compute leaves them by the cache, too."""
        return networks.layers(self.network.model.dit)

    def _prefix(self, observations: Observations) -> _Prefix:
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
        return _Prefix(cache, mask, padded(self._normalised_state(observations), self._config.max_state_dim))

    def _expert(self, prefix: _Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
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


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Keys and values of the prefix, its mask [B, N], and the normalised, padded state."""

    cache: Any
    mask: Tensor
    state: Tensor
