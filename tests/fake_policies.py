"""A small linear-Gaussian policy, found as `fake_policies:Linear`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from fakes import POISON
from pydantic import Field
from torch import Tensor, nn

from vla_stream.config import Section
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.policies.protocol import Act, Evaluation, row_noise


class Linear(nn.Module):
    """A shared linear trunk over state and mean image, a Gaussian action head with one log-std, a value head."""

    class Options(Section):
        hang_once: str = Field(default="", description="A file: while it exists, remove it and hang at a request.")
        poison: Literal["raise", "exit", "segfault"] = Field(default="raise", description="What a POISON state does.")
        loss: Literal["finite", "nan"] = Field(default="finite", description="nan: no update ever succeeds.")

    def __init__(self, options: Linear.Options, specification: Specification, chunk: int) -> None:
        super().__init__()
        self.options, self.shape = options, (chunk, specification.action_dims)
        self.trunk = nn.Linear(specification.state_dims + 1, 8)
        self.action = nn.Linear(8, chunk * specification.action_dims)
        self.value = nn.Linear(8, 1)
        self.log_std = nn.Parameter(torch.tensor([-0.5]))

    def _heads(self, observations: Observations) -> tuple[torch.distributions.Normal, Tensor]:
        image = np.asarray(observations.images["front"]).reshape(len(observations), -1).mean(1) / 255
        seen = np.concatenate([observations.state, image[:, None]], axis=1).astype(np.float32)
        hidden = torch.tanh(self.trunk(torch.from_numpy(seen)))
        mean = self.action(hidden).reshape(-1, *self.shape)
        return torch.distributions.Normal(mean, self.log_std.exp()), self.value(hidden)[:, 0]

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        asked = any(observations.instruction)  # and not the blank observations of a warm-up
        if asked and self.options.hang_once and Path(self.options.hang_once).exists():
            Path(self.options.hang_once).unlink()
            time.sleep(3600)
        if (observations.state == POISON).any():
            match self.options.poison:
                case "raise":
                    raise ValueError("a state that no policy digests")
                case "exit":
                    os._exit(9)
                case "segfault":
                    os.kill(os.getpid(), signal.SIGSEGV)
        with torch.no_grad():
            normal, values = self._heads(observations)
            actions = normal.mean
            if noise_keys is not None:
                noise = torch.from_numpy(row_noise(noise_keys, self.shape[0] * self.shape[1]))
                actions = normal.mean + normal.stddev * noise.reshape(-1, *self.shape)
            return Act(actions.numpy(), normal.log_prob(actions).numpy(), values.numpy())

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        normal, values = self._heads(observations)
        if self.options.loss == "nan" and torch.is_grad_enabled():
            values = values * float("nan")
        return Evaluation(normal.log_prob(torch.from_numpy(actions)), normal.entropy(), values)

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        raise AssertionError("no test imitates with it")

    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        policy = [*self.trunk.parameters(), *self.action.parameters(), self.log_std]
        return {"policy": policy, "value": list(self.value.parameters())}
