"""A toy policy (linear, Gaussian), hand-made segments, and a learner of them, for tests of updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from vla_stream import config
from vla_stream.environments.protocol import Observations
from vla_stream.learning.cloning import Demonstrations
from vla_stream.learning.samples import Samples, make_samples
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import Learner, UpdateResult
from vla_stream.policies.protocol import Act, Evaluation, Policy, row_noise

# Two threads for tensors of this size are no faster on an idle machine, and ten times slower on a busy one.
torch.set_num_threads(1)

S, H, A = 3, 2, 2
T, K = 5, 4
NO_ROWS = np.zeros((0, 2), dtype=np.int64)


class NoOptions(BaseModel):
    pass


class Toy(nn.Module):
    """One shared linear trunk, a linear action head with one log-std, a linear value head, and a frozen parameter."""

    Options: ClassVar[type[BaseModel]] = NoOptions

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trunk = nn.Linear(S, 8)
        self.action = nn.Linear(8, H * A)
        self.value = nn.Linear(8, 1)
        self.log_std = nn.Parameter(torch.tensor([-0.5]))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.rows_evaluated = 0

    def _heads(self, observations: Observations) -> tuple[torch.distributions.Normal, Tensor]:
        state = torch.from_numpy(observations.state).to(self.frozen.dtype)
        hidden = torch.tanh(self.trunk(state * self.frozen))
        mean = self.action(hidden).reshape(-1, H, A)
        return torch.distributions.Normal(mean, self.log_std.exp()), self.value(hidden)[:, 0]

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        assert noise_keys is not None
        with torch.no_grad():
            normal, values = self._heads(observations)
            noise = torch.from_numpy(row_noise(noise_keys, H * A)).reshape(-1, H, A)
            actions = normal.mean + normal.stddev * noise
            return Act(actions.numpy(), normal.log_prob(actions).numpy(), values.numpy())

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        self.rows_evaluated += len(observations)
        normal, values = self._heads(observations)
        return Evaluation(normal.log_prob(torch.from_numpy(actions)), normal.entropy(), values)

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        errors = torch.nn.functional.smooth_l1_loss(
            self._heads(observations)[0].mean, torch.from_numpy(actions).to(self.frozen.dtype), reduction="none"
        )
        weights = torch.from_numpy(valid).to(errors.dtype)[..., None].expand_as(errors)
        return (errors * weights).sum() / weights.sum().clamp(min=1)

    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        policy = [*self.trunk.parameters(), *self.action.parameters(), self.log_std]
        return {"policy": policy, "value": list(self.value.parameters())}


class Failing(Toy):
    """From the given training pass on, the values or their gradients are not finite."""

    def __init__(self, good_passes: int, fault: str) -> None:
        super().__init__()
        self.good_passes, self.fault = good_passes, fault

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        evaluation = super().evaluate(observations, actions, extras)
        self.good_passes -= torch.is_grad_enabled()
        if self.good_passes >= 0:
            return evaluation
        # √ at 0: the value is 0, its gradient inf · 0.
        fault = torch.sqrt(0.0 * self.value.weight.sum() ** 2) if self.fault == "gradient" else float("nan")
        return dataclasses.replace(evaluation, values=evaluation.values + fault)


def look(generator: np.random.Generator, rows: int) -> Observations:
    return Observations({}, generator.standard_normal((rows, S)).astype(np.float32), ["reach"] * rows)


def make_segment(policy: Policy, ticket: int, version: int = 0) -> Segment:
    """K rows act by `policy`. Row 1 terminates inside chunk 1, rows 2 and 0 are truncated in chunks 2 and 4: reset."""
    generator = np.random.default_rng(ticket)
    observations = [look(generator, K) for _ in range(T + 1)]
    acts = [policy.act(observations[t], np.arange(K, dtype=np.uint64) + 100 * ticket + 10 * t) for t in range(T)]
    terminated, truncated = np.zeros((T, K), dtype=bool), np.zeros((T, K), dtype=bool)
    executed = np.ones((T, K, H), dtype=bool)
    terminated[1, 1], executed[1, 1, 1], truncated[2, 2], truncated[4, 0] = True, False, True, True
    actions = np.stack([act.actions for act in acts])
    return Segment(
        ticket=ticket,
        observations=observations,
        final=look(generator, 2),
        final_index=np.array([[2, 2], [4, 0]]),
        actions=actions,
        logprobs=np.stack([act.logprobs for act in acts]),
        executed=executed,
        valid=np.ones((T, K), dtype=bool),
        rewards=-np.square(actions).mean((2, 3)),
        terminated=terminated,
        truncated=truncated,
        success=terminated,
        versions=np.full(T, version),
    )


def make_episodes(
    policy: Policy,
    ticket: int,
    lengths: Sequence[int] = (2, T, 4, T),
    successes: Sequence[int] = (0, 2),
    version: int = 0,
) -> Segment:
    """Whole episodes of one row each: `successes` terminate with reward 1 in the first action of their last chunk, the
    others are truncated. What follows an end is held, and holds garbage."""
    generator = np.random.default_rng(ticket)
    rows, steps = len(lengths), max(lengths)
    observations = [look(generator, rows) for _ in range(steps + 1)]
    keys = np.arange(rows, dtype=np.uint64) + np.uint64(1000 * ticket)
    acts = [policy.act(seen, keys + np.uint64(10 * t)) for t, seen in enumerate(observations[:steps])]
    valid = np.arange(steps)[:, None] < np.array(lengths)
    terminated, truncated = np.zeros((steps, rows), dtype=bool), np.zeros((steps, rows), dtype=bool)
    executed = np.repeat(valid[..., None], H, axis=2)
    rewards = np.where(valid, 0.0, np.nan).astype(np.float32)
    for row, length in enumerate(lengths):
        if row in successes:
            terminated[length - 1, row], rewards[length - 1, row] = True, 1.0
            executed[length - 1, row, 1:] = False
        else:
            truncated[length - 1, row] = True
    final_index = np.argwhere(truncated)
    return Segment(
        ticket=ticket,
        observations=observations,
        final=look(generator, len(final_index)) if len(final_index) else None,
        final_index=final_index,
        actions=np.stack([act.actions for act in acts]),
        logprobs=np.stack([act.logprobs for act in acts]),
        executed=executed,
        valid=valid,
        rewards=rewards,
        terminated=terminated,
        truncated=truncated,
        success=terminated,
        versions=np.full(steps, version),
    )


def make_demonstrations(seed: int = 11, moments: int = 40) -> Demonstrations:
    """An expert that always does the same, of which the last action of some moments does not exist."""
    generator = np.random.default_rng(seed)
    actions = np.full((moments, H, A), 0.7, dtype=np.float32)
    valid = np.ones((moments, H), dtype=bool)
    valid[::5, 1] = False
    return Demonstrations(look(generator, moments), actions, valid, episodes=5, successes=5)


def make_learner(
    policy: Toy | None = None,
    algorithm: dict[str, object] | None = None,
    reference: Toy | None = None,
    **trainer: object,
) -> Learner:
    defaults = {"segments_per_update": 3, "minibatch_samples": 16, "critic_warmup_updates": 0, "learning_rate": 1e-2}
    return Learner(
        policy or Toy(),
        config.Algorithm.model_validate({"entropy_coefficient": 0.01} | (algorithm or {})),
        config.Trainer.model_validate(defaults | {"value_learning_rate": 1e-2} | trainer),
        seed=7,
        reference=reference,
        demonstrations=make_demonstrations(),
    )


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.policy.state_dict().items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def update(learner: Learner, segments: Sequence[Segment], version: int = 0) -> UpdateResult:
    learner.version = version
    for segment in segments:
        learner.add(segment)
    return learner.finish(version)


def sampled(
    learner: Learner, segment: Segment, policy: Policy | None = None, reference: Policy | None = None
) -> Samples:
    most_rows = learner.trainer.minibatch_samples
    return make_samples(policy or learner.policy, segment, learner.algorithm, most_rows, reference)


def train(learner: Learner, updates: int = 1) -> UpdateResult:
    """Updates on fresh on-policy segments."""
    for _ in range(updates):
        number = learner.updates_done
        segments = [make_segment(learner.policy, ticket=3 * number + i, version=number) for i in range(3)]
        result = update(learner, segments, version=number)
    return result
