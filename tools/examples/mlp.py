"""Your own policy in one file: an eye that the sentence points at a colour, and an MLP that acts on what it finds.

    cd tools/examples                                     # a module:Class is looked for in the folder that you start in
    ../../.venv/bin/vla-stream check reach.yaml mlp.yaml  # makes the class and tries whether it keeps the protocol
    ../../.venv/bin/vla-stream run reach.yaml mlp.yaml    # learns to reach the named disc from nothing

A VLA of yours has another `_decide`, and perhaps another distribution; `act` and `evaluate` must then still agree on
the log-probs. vla_stream/policies/protocol.py has the words for all that is promised here, vla_stream/policies/vlm.py
does the same around a pretrained vision-language model.

# B rows, H actions per chunk, A action dims
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributions import Normal

from vla_stream.config import Section
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.policies.protocol import Act, Evaluation, row_noise

WORDS = 64  # buckets that words are hashed into


class MlpPolicy(nn.Module):
    """Looks at the first camera, reads words without their order, and knows any number of state and action dims."""

    class Options(Section):
        """What `policy.options` of a config may set."""

        width: int = Field(default=64, ge=1, description="Neurons of each hidden layer.")
        initial_std: float = Field(default=0.6, gt=0, description="First standard deviation of every action dim.")

    def __init__(self, options: MlpPolicy.Options, specification: Specification, chunk: int) -> None:
        super().__init__()
        self.camera = next(iter(specification.cameras))
        self.shape = (chunk, specification.action_dims)
        self.colour = nn.Linear(WORDS, 3)
        seen = 2 + specification.state_dims
        self.action_head = _mlp(seen, options.width, chunk * specification.action_dims)
        self.value_head = _mlp(seen, options.width, 1)
        self.log_std = nn.Parameter(torch.full((specification.action_dims,), options.initial_std).log())

    # ---- what generators and the trainer call

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        """A chunk of actions for each row. Noise comes from the rows' keys alone, so that a request that is served
        twice, or in another batch, gets the same answer; without keys: the mode."""
        with torch.no_grad():
            normal, values = self._decide(observations)
            actions = normal.mean
            if noise_keys is not None:
                noise = self._tensor(row_noise(noise_keys, actions[0].numel())).reshape(actions.shape)
                actions = normal.mean + normal.stddev * noise
            # Not clipped: the log-prob is that of this very sample. Environments clip.
            return Act(_array(actions), _array(normal.log_prob(actions)), _array(values))

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        """What the weights of now say about recorded actions f32[B, H, A], with gradients. `extras` is what `act` left
        to recompute the log-probs by (tokens, a denoising chain): here nothing."""
        normal, values = self._decide(observations)
        return Evaluation(normal.log_prob(self._tensor(actions)), normal.entropy(), values)

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        """For a warm start by demonstrations: the mean's squared error where valid bool[B, H]."""
        normal, _ = self._decide(observations)
        weight = self._tensor(valid).unsqueeze(-1).to(normal.mean.dtype).expand_as(normal.mean)
        return ((normal.mean - self._tensor(actions)).square() * weight).sum() / weight.sum().clamp(min=1)

    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        """Each has its learning rate in `trainer`. The value must not move the actions: it has layers of its own."""
        value = list(self.value_head.parameters())
        return {"policy": [*self.colour.parameters(), *self.action_head.parameters(), self.log_std], "value": value}

    # ---- the network

    def _decide(self, observations: Observations) -> tuple[Normal, Tensor]:
        """The distribution of the actions [B, H, A], and the values [B]."""
        place = self._look(observations.images[self.camera], observations.instruction)
        seen = torch.cat([place, self._tensor(observations.state)], dim=1)
        mean = self.action_head(seen).reshape(-1, *self.shape)
        # A trained critic may look at what the policy sees, but not through it.
        return Normal(mean, self.log_std.exp().expand_as(mean)), self.value_head(seen.detach())[:, 0]

    def _look(self, image: np.ndarray, sentences: Sequence[str]) -> Tensor:
        """Where the colour is that the sentence asks for: x and y in [-1, 1], [B, 2]."""
        pixels = self._tensor(image).to(self.log_std.dtype) / 127.5 - 1
        colour = self.colour(self._tensor(np.array([_words(sentence) for sentence in sentences])))
        likeness = torch.einsum("bhwc,bc->bhw", pixels, colour)
        rows, height, width = likeness.shape
        weight = (5 * likeness).flatten(1).softmax(dim=1).reshape(rows, height, width)
        x, y = (torch.linspace(-1, 1, size, device=weight.device) for size in (width, height))
        return torch.stack([(weight.sum(1) * x).sum(1), (weight.sum(2) * y).sum(1)], dim=1)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.log_std.device)


def _mlp(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


def _words(sentence: str) -> np.ndarray:
    """Which words there are, f32[WORDS]. By a hash that is the same in every process, which Python's own is not."""
    counts = np.zeros(WORDS, dtype=np.float32)
    for word in re.findall(r"\w+", sentence.lower()):
        counts[zlib.crc32(word.encode()) % WORDS] = 1
    return counts


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
