"""OpenVLA (arXiv 2406.09246): a vision-language model that says actions as words, one after the other.

    <s> image "In: What action should the robot take to touch the red cube?\\nOut:" ─ Llama ─ word 1, …, word H·A

Each action dim is one of 256 bins, and each bin one of the last 256 words of the vocabulary (see action_tokens.py). The
network is in openvla_network.py; with `checkpoint` it comes from a folder in the published layout, with the ranges of
the robot's actions, without one it is a random network of 250 k parameters, the same each time, for tests.

A log-prob is that of a softmax over these 256 words alone, at the temperature of training; entropy likewise. With
`algorithm.granularity: action` that of an action is the sum over its words. The value is read from Llama's output where
the first word is said, and its gradient ends there. The state is not read: OpenVLA has no input for it.

# B rows, N tokens before the actions, H actions, A action dims, W width of Llama
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.policies import action_tokens, networks, openvla_network, pretrained
from vla_stream.policies.network_policy import NetworkOptions, NetworkPolicy, as_array, keys_of
from vla_stream.policies.protocol import Act, Evaluation, row_noise
from vla_stream.policies.vlm_inputs import Prompts, chosen_cameras, crop_centre, stretch_images
from vla_stream.sections import PlainPath

_END = "?\nOut:"  # of the prompt
_STATISTICS = "dataset_statistics.json"
_CROP = 0.9  # of an image's area: what its augmentation cut out, at random, in training


class OpenVla(NetworkPolicy):
    """The policy: the network, preprocessing, a value head, and log-probs."""

    class Options(NetworkOptions):
        """Options of `policy.options` when `policy.name` is openvla or openvla_oft."""

        checkpoint: PlainPath | None = Field(
            default=None, description="Folder of an OpenVLA in the published layout. Default: a tiny random one."
        )
        robot: str | None = Field(
            default=None,
            description="Data set whose statistics are those of this robot (`unnorm_key`). Default: the only one.",
        )
        statistics: PlainPath | None = Field(
            default=None,
            validate_default=True,
            description="File with these statistics. Default: the checkpoint's dataset_statistics.json or config.json.",
        )
        cameras: list[str] | None = Field(
            default=None,
            description="Cameras to look at, in the checkpoint's order. Default: the environment's first.",
        )
        words: int = Field(default=64, ge=32, description="Tokens of the prompt that are read.")
        centre_crop: bool = Field(
            default=False, description="Look at the middle nine tenths of an image; for checkpoints trained on crops."
        )
        train: openvla_network.Trained = Field(
            default="lora", description="lora: adapters at all linear layers but the head; all: everything."
        )

        @field_validator("checkpoint")
        @classmethod
        def _whole(cls, folder: Path | None) -> Path | None:
            if folder is not None:
                openvla_network.check_folder(folder)
            return folder

        @field_validator("statistics")
        @classmethod
        def _readable(cls, file: Path | None, info: ValidationInfo) -> Path | None:
            folder = info.data.get("checkpoint")
            if file is None and folder is not None:
                file = folder / (_STATISTICS if (folder / _STATISTICS).is_file() else pretrained.CONFIG)
            if file is not None:
                pretrained.read_action_range(file, info.data.get("robot"))
            return file

    def __init__(self, options: OpenVla.Options, specification: Specification, chunk: int) -> None:
        """Raises InputError for an environment that the statistics do not fit."""
        super().__init__(options)
        self._options, self._specification, self._chunk = options, specification, chunk
        cameras = list(specification.cameras)[:1] if options.cameras is None else options.cameras
        self._cameras = chosen_cameras(cameras, specification)
        self._set_range(specification)
        folder = options.checkpoint
        sizes = openvla_network.tiny_sizes() if folder is None else openvla_network.read_sizes(folder)
        tokens = openvla_network.tokenizer(folder)
        first, last = [sizes.text.bos_token_id], [openvla_network.space_token(tokens)]
        self._prompts = Prompts(tokens, first, options.words, sizes.padding, _prompt, _END, last)
        # Minutes: what can be wrong has been looked at before.
        network = self.network = openvla_network.build(sizes, folder)
        openvla_network.choose_trained(network, options.train, options.lora_rank)
        if self.low_precision:
            for part in (network.dino, network.siglip, network.projector, network.language):
                networks.halve_frozen(part)
        self.add_value_head(sizes.text.hidden_size)
        self.close_network(network, (network.dino, network.siglip, network.language), folder)

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        """See the protocol. Extras:

        tokens  i64[B, H, A]: ids of the words that were said
        """
        with torch.inference_mode():
            words, temperature = self._chunk * self._specification.action_dims, self._options.temperature
            if noise_keys is None and self._options.evaluation_temperature > 0:
                noise_keys, temperature = keys_of(observations), self._options.evaluation_temperature
            normal = None if noise_keys is None else self.tensor(row_noise(noise_keys, words))
            logits, bins, said_first = self._say(self._prefix(observations), normal, temperature)
            logprobs = action_tokens.chosen(self._log_softmax(logits), bins)
            return Act(
                as_array(self._in_range(self._per_dim(bins))),
                as_array(self._per_dim(logprobs)),
                as_array(self.values_of(said_first)),
                {"tokens": self._per_dim(action_tokens.tokens_of(bins, self._vocabulary)).cpu().numpy()},
            )

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        """See the protocol. The words are those of the extras."""
        bins = action_tokens.tokens_of(self.host(extras["tokens"]).flatten(1), self._vocabulary)
        hidden = self._outputs(self._prefix(observations), bins)
        log_probabilities = self._log_softmax(self.network.action_logits(hidden))
        return Evaluation(
            self._per_dim(action_tokens.chosen(log_probabilities, bins)),
            self._per_dim(action_tokens.entropy(log_probabilities)),
            self.values_of(hidden[:, 0]),
        )

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        """See the protocol: the cross-entropy of the words of the demonstrated actions, among these 256."""
        bins = action_tokens.bins_of(self._normalised(self.tensor(actions))).flatten(1)
        logits = self.network.action_logits(self._outputs(self._prefix(observations), bins))
        errors = self._per_dim(F.cross_entropy(logits.flatten(0, 1), bins.flatten(), reduction="none").view_as(bins))
        weight = self.tensor(valid).unsqueeze(-1).expand_as(errors)
        return (errors * weight).sum() / weight.sum().clamp(min=1)

    # ---- the network

    def _say(self, prefix: Prefix, normal: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, H·A, 256] and the bins i64[B, H·A] drawn from them, by normal numbers [B, H·A] or else the
        likeliest ones, and the output [B, W] where the first was said. Each word is given to Llama before the next."""
        embeddings, cache, all_logits, bins = prefix.embeddings, None, [], list[Tensor]()
        said_first = None
        for word in range(self._chunk * self._specification.action_dims):
            with self.autocast():
                outcome = self.network.language(
                    inputs_embeds=embeddings,
                    attention_mask=_causal(prefix.mask, word)[:, :, -embeddings.shape[1] :],
                    position_ids=positions(prefix.mask, word)[:, -embeddings.shape[1] :],
                    cache=cache,
                    use_cache=True,
                )
            cache, hidden = outcome.cache, outcome.last_hidden_state[:, -1]
            said_first = hidden if said_first is None else said_first
            logits = self.network.action_logits(hidden)
            bins.append(choose(logits, None if normal is None else normal[:, word], temperature))
            all_logits.append(logits)
            embeddings = self._embedded(bins[-1].unsqueeze(1))
        assert said_first is not None
        return torch.stack(all_logits, dim=1), torch.stack(bins, dim=1), said_first.to(self.action_low.dtype)

    def _outputs(self, prefix: Prefix, bins: Tensor) -> Tensor:
        """Llama's outputs [B, H·A, W] where each of the words of bins [B, H·A] was said, all in one pass."""
        before = self._embedded(bins[:, :-1])
        with self.autocast():
            outcome = self.network.language(
                inputs_embeds=torch.cat([prefix.embeddings, before], dim=1),
                attention_mask=_causal(prefix.mask, before.shape[1]),
                position_ids=positions(prefix.mask, before.shape[1]),
                use_cache=False,
            )
        outputs: Tensor = outcome.last_hidden_state[:, prefix.mask.shape[1] - 1 :]
        return outputs.to(self.action_low.dtype)

    def _prefix(self, observations: Observations) -> Prefix:
        """What stands before the words: start of text, image patches, prompt."""
        ids, mask = map(self.host, self._prompts(observations.instruction))
        size = self.network.sizes.image_size
        images = [stretch_images(self.tensor(observations.images[camera]), size) for camera in self._cameras]
        if self._options.centre_crop:
            images = [crop_centre(image, _CROP) for image in images]
        with self.autocast():
            patches = self.network.see(images)
            text = self.network.language.embed_tokens(ids)
        seen = torch.ones(patches.shape[:2], dtype=mask.dtype, device=mask.device)
        return Prefix(
            torch.cat([text[:, :1], patches.to(text.dtype), text[:, 1:]], dim=1),
            torch.cat([mask[:, :1], seen, mask[:, 1:]], dim=1).bool(),
        )

    def _embedded(self, bins: Tensor) -> Tensor:
        embeddings: Tensor = self.network.language.embed_tokens(action_tokens.tokens_of(bins, self._vocabulary))
        return embeddings

    def _log_softmax(self, logits: Tensor) -> Tensor:
        return action_tokens.log_softmax(logits, self._options.temperature)

    @property
    def _vocabulary(self) -> int:
        return self.network.sizes.vocabulary

    # ---- in and out

    def write(self, folder: Path) -> None:
        """A whole model in the published layout, and the heads; see NetworkPolicy. Raises InputError: it has none."""
        source, statistics = self._options.checkpoint, self._options.statistics
        if source is None or statistics is None:
            raise InputError("the tiny random network has no published layout; only its own weights are kept")
        network, place = self.network, source
        self.write_with_heads(network, folder, lambda: openvla_network.write(network, place, folder))
        if statistics.parent != source:
            shutil.copyfile(statistics, folder / _STATISTICS)

    def layers_to_shard(self) -> Sequence[nn.Module]:
        """See the protocol."""
        return networks.layers(self.network)

    def _set_range(self, specification: Specification) -> None:
        ones = np.ones(specification.action_dims, dtype=np.float32)
        found = pretrained.ActionRange(ones * specification.action_low, ones * specification.action_high, ones > 0)
        if self._options.statistics is not None:
            found = pretrained.read_action_range(self._options.statistics, self._options.robot)
            found.check(specification, str(self._options.statistics))
        self.action_low: Tensor
        self.action_high: Tensor
        self.action_scaled: Tensor
        for name, array in (("low", found.low), ("high", found.high), ("scaled", found.scaled)):
            self.register_buffer(f"action_{name}", torch.from_numpy(array))

    def _in_range(self, bins: Tensor) -> Tensor:
        """Actions [B, H, A] in the environment's units."""
        normalised = action_tokens.actions_of(bins)
        actions = 0.5 * (normalised + 1) * (self.action_high - self.action_low) + self.action_low
        return torch.where(self.action_scaled, actions, normalised)

    def _normalised(self, actions: Tensor) -> Tensor:
        """The other way round. A dim without a range is in the middle of it."""
        extent = self.action_high - self.action_low
        shares = torch.where(extent > 0, (actions - self.action_low) / extent.clamp(min=1e-8), 0.5)
        return torch.where(self.action_scaled, 2 * shares - 1, actions)

    def _per_dim(self, words: Tensor) -> Tensor:
        """[B, H, A] of [B, H·A]."""
        return words.reshape(-1, self._chunk, self._specification.action_dims)


@dataclass(frozen=True, slots=True)
class Prefix:
    """Embeddings [B, N, W] of what stands before the words, and where there is something: bool[B, N]."""

    embeddings: Tensor
    mask: Tensor


def _prompt(sentence: str) -> str:
    return f"In: What action should the robot take to {sentence.strip().lower()}{_END}"


def choose(logits: Tensor, normal: Tensor | None, temperature: float) -> Tensor:
    if normal is None:
        return logits.argmax(-1)
    return action_tokens.draw(action_tokens.log_softmax(logits, temperature), normal)


def positions(mask: Tensor, more: int) -> Tensor:
    """Positions i64[B, N + more]: padding takes none."""
    return F.pad(mask.long(), (0, more), value=1).cumsum(-1) - 1


def _causal(mask: Tensor, more: int) -> Tensor:
    """Which of N + more tokens sees which, bool[B, 1, N + more, N + more]: those before it that are there."""
    there = F.pad(mask, (0, more), value=True)
    count = there.shape[1]
    before = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril()
    # Padding sees itself: a softmax over nothing would be NaN.
    return (before & there[:, None, :] | torch.eye(count, dtype=torch.bool, device=mask.device)).unsqueeze(1)
