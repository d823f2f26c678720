"""What our side of `vla-stream bench peers` is made of: the network that both frameworks train, and how environments
are spread over processes.

# B rows, H actions per chunk, A action dims
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from vla_stream.config import Section
from vla_stream.environments.gymnasium import Gymnasium
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.policies.protocol import Act, Evaluation, row_noise

_LAYERS = ((3, 32, 8, 4), (32, 64, 4, 2), (64, 128, 3, 2))  # channels in and out, kernel, stride
_WIDTH = 512
_LOG_2PI = math.log(2 * math.pi)


class InPairs(Gymnasium):
    """Two environments per process, stepped in turn: on two cores one per process costs more in packets and wake-ups
    than is gained, and four in turn are slow. README.md has the figures."""

    rows_per_process: ClassVar[int | None] = 2


class Conv(nn.Module):
    """Sample-factory's `convnet_simple` with ReLU, a layer of 512 and linear heads. The actions are Gaussian: the
    environment takes the largest of its numbers. The first camera decides; state and instruction are not read."""

    class Options(Section):
        """There are none."""

    def __init__(self, options: Conv.Options, specification: Specification, chunk: int) -> None:
        super().__init__()
        (self._camera, (height, width)), *_ = specification.cameras.items()
        self._shape = (chunk, specification.action_dims)
        convolutions = [layer for sizes in _LAYERS for layer in (nn.Conv2d(*sizes), nn.ReLU())]
        self.convolutions = nn.Sequential(*convolutions, nn.Flatten())
        features = self.convolutions(torch.zeros(1, 3, height, width)).shape[1]
        self.hidden = nn.Sequential(nn.Linear(features, _WIDTH), nn.ReLU())
        self.mean = nn.Linear(_WIDTH, math.prod(self._shape))
        self.value = nn.Linear(_WIDTH, 1)
        self.log_std = nn.Parameter(torch.zeros(specification.action_dims))

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        """See the protocol."""
        with torch.inference_mode():
            mean, values = self._decide(observations)
            log_std = self.log_std.expand_as(mean)
            noise = torch.zeros_like(mean)
            if noise_keys is not None:
                noise = torch.from_numpy(row_noise(noise_keys, math.prod(self._shape))).to(mean).reshape(mean.shape)
            actions = mean + log_std.exp() * noise
            logprobs = -0.5 * noise.square() - log_std - 0.5 * _LOG_2PI
            return Act(actions.cpu().numpy(), logprobs.cpu().numpy(), values.cpu().numpy())

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        """See the protocol. There are no extras."""
        mean, values = self._decide(observations)
        log_std = self.log_std.expand_as(mean)
        deviation = (torch.from_numpy(actions).to(mean) - mean) * torch.exp(-log_std)
        logprobs = -0.5 * deviation.square() - log_std - 0.5 * _LOG_2PI
        return Evaluation(logprobs, log_std + 0.5 * (1 + _LOG_2PI), values)

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        """See the protocol: squared error of the mean."""
        mean, _ = self._decide(observations)
        weight = torch.from_numpy(valid).to(mean).unsqueeze(-1).expand_as(mean)
        error = (mean - torch.from_numpy(actions).to(mean)).square()
        return (error * weight).sum() / weight.sum().clamp(min=1)

    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        """See the protocol. `value` is the head alone."""
        value = list(self.value.parameters())
        ids = {id(parameter) for parameter in value}
        return {"policy": [parameter for parameter in self.parameters() if id(parameter) not in ids], "value": value}

    def _decide(self, observations: Observations) -> tuple[Tensor, Tensor]:
        """Mean actions [B, H, A] and values [B]."""
        images = torch.from_numpy(np.ascontiguousarray(observations.images[self._camera])).to(self.log_std.device)
        pixels = images.permute(0, 3, 1, 2).contiguous().to(self.log_std.dtype).sub_(128).div_(128)
        hidden = self.hidden(self.convolutions(pixels))
        return self.mean(hidden).reshape(-1, *self._shape), self.value(hidden).squeeze(-1)
