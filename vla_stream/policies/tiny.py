"""A small VLA in plain torch: images + instruction + state -> Gaussian action chunk and value, fast on one core.

    image ─ conv ─ FiLM(words) ─ conv ─ FiLM(words) ─ maps ─ spatial softmax ─ keypoint tokens ┐
    words ─ hashed embeddings ─ word tokens ───────────────────────────────────────────────────┤
    state ─ normalised ─ state token ──────────────────────────────────────────────────────────┤
    two learned queries ─ tokens ──────────────────────────────────────────────────────────────┴ transformer ─ heads

The words modulate the vision (FiLM, arXiv 1709.07871) before it is reduced to a few image points (spatial softmax,
arXiv 1504.00702), so finding the thing that the sentence names is easy to learn; a patch transformer of this size
does not learn it.

# B rows, C cameras, N tokens, W words, K keypoints, H actions per chunk, A action dims, S state dims
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
import xxhash
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stream.config import Section
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.policies.protocol import Act, Evaluation, row_noise
from vla_stream.policies.transfer import to_device

_PATCH = 4
_SMALLEST_IMAGE = 16
_STATE_RANGE = 5.0  # standard deviations; keeps a state far from the demonstrations from saturating everything
_LOG_2PI = math.log(2 * math.pi)


class Tiny(nn.Module):
    """The network, about 130 k parameters with one camera. Takes any sentence, and any cameras of at least 16 × 16, or
    none."""

    class Options(Section):
        """Options of `policy.options` when `policy.name` is tiny."""

        initial_std: float = Field(default=0.37, gt=0, description="First standard deviation of every action dim.")
        min_std: float = Field(default=0.05, gt=0, description="Floor of the learned standard deviations.")
        words: int = Field(default=16, ge=1, description="Words of an instruction that are read; the rest is ignored.")

    _WIDTH = 64
    _HEADS = 4
    _LAYERS = 2
    _CHANNELS = 24
    _MIXED_CHANNELS = 32
    _KEYPOINTS = 8
    _BUCKETS = 512

    def __init__(self, options: Tiny.Options, specification: Specification, chunk: int) -> None:
        super().__init__()
        for camera, (height, width) in specification.cameras.items():
            if min(height, width) < _SMALLEST_IMAGE:
                raise InputError(
                    f"policy tiny: camera {camera} has {height}×{width} pixels, expected at least "
                    f"{_SMALLEST_IMAGE}×{_SMALLEST_IMAGE}; raise the environment's image size"
                )
        self._specification = specification
        self._cameras = list(specification.cameras)
        self._chunk = chunk
        self._words = options.words
        self._log_min_std = math.log(options.min_std)
        width, outputs = self._WIDTH, chunk * specification.action_dims
        self.word_embedding = nn.Embedding(self._BUCKETS, width // 2)
        self.word_token = nn.Linear(width // 2, width)
        self.word_place = nn.Parameter(0.02 * torch.randn(options.words, width))
        self.patch = nn.Conv2d(3, self._CHANNELS, _PATCH, stride=_PATCH)
        self.patch_film = nn.Linear(width // 2, 2 * self._CHANNELS)
        self.mix = nn.Conv2d(self._CHANNELS, self._MIXED_CHANNELS, 3, padding=1)
        self.mix_film = nn.Linear(width // 2, 2 * self._MIXED_CHANNELS)
        self.maps = nn.Conv2d(self._MIXED_CHANNELS, self._KEYPOINTS, 1)
        self.keypoint_token = nn.Linear(3, width)
        self.keypoint_place = nn.Parameter(0.02 * torch.randn(len(self._cameras), self._KEYPOINTS, width))
        self.state_token = nn.Linear(specification.state_dims, width)
        self.action_query = nn.Parameter(0.02 * torch.randn(1, width))
        self.value_query = nn.Parameter(0.02 * torch.randn(1, width))
        self.blocks = nn.ModuleList(_Block(width, self._HEADS) for _ in range(self._LAYERS))
        self.norm = nn.LayerNorm(width)
        self.action_head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, outputs))
        self.value_head = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, 1))
        self.log_std = nn.Parameter(torch.full((specification.action_dims,), math.log(options.initial_std)))
        self.state_mean: Tensor
        self.state_std: Tensor
        self.register_buffer("state_mean", torch.zeros(specification.state_dims))
        self.register_buffer("state_std", torch.ones(specification.state_dims))

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        """See the protocol. The sample is not clipped: its log-prob is that of the Gaussian, environments clip."""
        with torch.inference_mode():
            mean, values = self._decide(observations)
            log_std = self._log_std().expand_as(mean)
            noise = torch.zeros_like(mean)
            if noise_keys is not None:
                noise = self._tensor(row_noise(noise_keys, mean[0].numel())).reshape(mean.shape)
            actions = mean + log_std.exp() * noise
            logprobs = -0.5 * noise.square() - log_std - 0.5 * _LOG_2PI
            return Act(actions.cpu().numpy(), logprobs.cpu().numpy(), values.cpu().numpy())

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        """See the protocol. There are no extras."""
        mean, values = self._decide(observations)
        log_std = self._log_std().expand_as(mean)
        deviation = (self._tensor(actions) - mean) * torch.exp(-log_std)
        logprobs = -0.5 * deviation.square() - log_std - 0.5 * _LOG_2PI
        return Evaluation(logprobs, log_std + 0.5 * (1 + _LOG_2PI), values)

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        """See the protocol: smooth-L1 of the mean; the standard deviation stays as it is."""
        mean, _ = self._decide(observations)
        weight = self._tensor(valid).unsqueeze(-1).to(mean.dtype).expand_as(mean)
        errors = F.smooth_l1_loss(mean, self._tensor(actions), reduction="none")
        return (errors * weight).sum() / weight.sum().clamp(min=1)

    def grounding_loss(self, observations: Observations, targets: np.ndarray) -> Tensor:
        """See the protocol: the first camera's first keypoint is the named object."""
        keypoints_BCK3 = self._keypoints(observations, self._word_vectors(observations.instruction)[1])
        return F.smooth_l1_loss(keypoints_BCK3[:, 0, 0, :2], self._tensor(targets), beta=0.05)

    def set_state_statistics(self, mean: np.ndarray, std: np.ndarray) -> None:
        """Normalise the state by mean f32[S] and std f32[S]; a dim that does not vary keeps its scale."""
        self.state_mean.copy_(torch.from_numpy(mean))
        self.state_std.copy_(torch.from_numpy(np.where(std < 1e-4, 1.0, std)))

    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        """See the protocol. `value` is the head alone: training it cannot move the actions."""
        value = list(self.value_head.parameters())
        ids = {id(parameter) for parameter in value}
        return {"policy": [parameter for parameter in self.parameters() if id(parameter) not in ids], "value": value}

    def _decide(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """Mean action chunk [B, H, A] and values [B]."""
        rows = len(observations)
        words_BWD, sentence_BD, present_BW = self._word_vectors(observations.instruction)
        keypoints_BCK3 = self._keypoints(observations, sentence_BD)
        keypoint_tokens = (self.keypoint_token(keypoints_BCK3) + self.keypoint_place).flatten(1, 2)
        state = (self._tensor(observations.state) - self.state_mean) / self.state_std
        state_token = self.state_token(state.clamp(-_STATE_RANGE, _STATE_RANGE)).unsqueeze(1)
        queries = torch.cat([self.action_query, self.value_query]).expand(rows, 2, -1)
        tokens_BND = torch.cat([queries, state_token, keypoint_tokens, words_BWD], dim=1)
        others = present_BW.new_ones(rows, tokens_BND.shape[1] - self._words)
        mask = torch.cat([others, present_BW], dim=1)[:, None, None, :]
        for block in self.blocks[:-1]:
            tokens_BND = block(tokens_BND, mask, tokens_BND.shape[1])
        outputs = self.norm(self.blocks[-1](tokens_BND, mask, 2))
        mean = self.action_head(outputs[:, 0]).reshape(rows, self._chunk, self._specification.action_dims)
        return mean, self.value_head(outputs[:, 1]).squeeze(-1)

    def _word_vectors(self, instruction: Sequence[str]) -> tuple[Tensor, Tensor, Tensor]:
        """Word tokens [B, W, D], the sentence's mean word [B, D/2], and which words there are bool[B, W]."""
        ids = self._tensor(np.array([_word_ids(text, self._words, self._BUCKETS) for text in instruction]))
        present_BW = ids >= 0
        vectors = self.word_embedding(ids.clamp(min=0)) * present_BW.unsqueeze(-1)
        sentence_BD = vectors.sum(1) / present_BW.sum(1, keepdim=True).clamp(min=1)
        return self.word_token(vectors) + self.word_place, sentence_BD, present_BW

    def _keypoints(self, observations: Observations, sentence_BD: Tensor) -> Tensor:
        """x, y in [-1, 1] and the log of how clearly it is seen, of each keypoint in each camera: [B, C, K, 3]."""
        # Without a camera the state is all there is to see.
        cameras = [sentence_BD.new_zeros(len(observations), 0, self._KEYPOINTS, 3)]
        for camera in self._cameras:
            pixels = self._tensor(observations.images[camera]).permute(0, 3, 1, 2).to(self.log_std.dtype)
            pixels = pixels.div_(255).sub_(0.5)
            features = F.relu(_film(self.patch(pixels), self.patch_film(sentence_BD)))
            features = F.relu(_film(self.mix(features), self.mix_film(sentence_BD)))
            cameras.append(_spatial_softmax(self.maps(features)).unsqueeze(1))
        return torch.cat(cameras, dim=1)

    def _log_std(self) -> Tensor:
        return self.log_std.clamp(min=self._log_min_std)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.log_std.device)


class _Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries = nn.Linear(width, width)
        self.keys_values = nn.Linear(width, 2 * width)
        self.attended = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, tokens: Tensor, mask: Tensor, first: int) -> Tensor:
        """The first tokens [B, first, D] after attending to all tokens [B, N, D]; the last block needs no more."""
        rows, count, width = tokens.shape
        normal = self.before_attention(tokens)
        query = self.queries(normal[:, :first]).view(rows, first, self.heads, -1).transpose(1, 2)
        key, value = self.keys_values(normal).view(rows, count, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        kept = tokens[:, :first] + self.attended(attended.transpose(1, 2).reshape(rows, first, width))
        result: Tensor = kept + self.mlp(self.before_mlp(kept))
        return result


def _film(features: Tensor, modulation: Tensor) -> Tensor:
    """Scale and shift each channel of features [B, C, h, w] by modulation [B, 2C]."""
    scale, shift = modulation[:, :, None, None].chunk(2, dim=1)
    return torch.addcmul(shift, features, 1 + scale)


def _spatial_softmax(maps: Tensor) -> Tensor:
    """Expected x and y in [-1, 1] under the softmax of each map [B, K, h, w], and its log-sum-exp: [B, K, 3]."""
    height, width = maps.shape[-2:]
    x = (torch.arange(width, device=maps.device, dtype=maps.dtype) * 2 + 1) / width - 1
    y = (torch.arange(height, device=maps.device, dtype=maps.dtype) * 2 + 1) / height - 1
    flat = maps.flatten(2)
    places = torch.stack([x.repeat(height), y.repeat_interleave(width)], dim=1)
    clarity = torch.logsumexp(flat, dim=2, keepdim=True) - math.log(height * width)
    return torch.cat([flat.softmax(dim=2) @ places, clarity], dim=2)


@lru_cache(maxsize=4096)
def _word_ids(text: str, count: int, buckets: int) -> tuple[int, ...]:
    """Bucket of each of the first `count` words, -1 where there is none. Equal on every host."""
    words = re.findall(r"\w+", text.lower())[:count]
    ids = [xxhash.xxh64_intdigest(word.encode()) % buckets for word in words]
    return tuple(ids + [-1] * (count - len(ids)))
