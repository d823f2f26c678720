"""One update of the policy: segments are added one by one, then it is finished.

Buffered: adding a segment is a pass without gradients, finishing is epochs × minibatches of decoupled PPO.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vla_stream import config, seeds
from vla_stream.errors import InputError
from vla_stream.learning import objective
from vla_stream.learning.advantages import normalise
from vla_stream.learning.samples import Samples, make_samples, parts, why_not_trainable
from vla_stream.learning.segments import Segment
from vla_stream.policies.protocol import Policy

# Adam's ε of CleanRL's PPO instead of torch's 1e-8: tiny gradients are not blown up to full steps.
ADAM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one update did. `skipped` says why it changed nothing (None: it trained); metrics are then empty."""

    update: int
    samples: int
    skipped: str | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LearnerState:
    """All that a checkpoint needs: updates done, the policy's state dict, and the optimiser as flat named tensors."""

    updates_done: int
    policy: dict[str, Tensor]
    optimiser: dict[str, Tensor]


@dataclass(slots=True)
class _Begun:
    """The next update as far as its segments are here."""

    segments: list[tuple[int, Samples]] = field(default_factory=list)  # each with its ticket, as they came
    problem: str | None = None  # why it will change nothing


_Snapshot = tuple[list[tuple[torch.nn.Parameter, Tensor]], dict[Tensor, dict[str, Tensor]]]


class _NotFinite(Exception):
    """Ends an update half-way; the caller restores the weights."""


class Learner:
    """Owns the policy and its optimiser. Call `add` per segment as they come, then `finish`."""

    def __init__(
        self,
        policy: Policy,
        algorithm: config.Algorithm,
        trainer: config.Trainer,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.trainer = trainer
        self.seed = seed
        self.device = torch.device(device)
        self.updates_done = 0
        self._begun = _Begun()
        if isinstance(policy, torch.nn.Module):
            policy.to(self.device).eval()
        groups = policy.parameter_groups()
        self._policy_parameters, self._value_parameters = list(groups["policy"]), list(groups["value"])
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in policy.named_parameters()}
        self._optimiser = torch.optim.Adam(
            [
                {"params": self._policy_parameters, "lr": trainer.learning_rate},
                {"params": self._value_parameters, "lr": trainer.value_learning_rate},
            ],
            eps=ADAM_EPSILON,
        )

    @property
    def warming_up(self) -> bool:
        """Whether the next update trains the value head only."""
        return self.updates_done < self.trainer.critic_warmup_updates

    def add(self, segment: Segment) -> None:
        """Take one segment of the next update: π_prox, V and advantages by the current weights.

        Each segment is evaluated alone, so that the result does not depend on which segments arrived before it.
        """
        begun = self._begun
        samples = make_samples(self.policy, segment, self.algorithm, self.trainer.minibatch_samples)
        begun.segments.append((segment.ticket, samples))
        begun.problem = begun.problem or why_not_trainable(samples, segment.ticket)

    def finish(self, version: int) -> UpdateResult:
        """Make the update of all segments added; what they are, not the order they came in, decides the result.

        `version` is that of the current weights, before this update. A loss or gradient that is not finite leaves
        weights and optimiser as they were.
        """
        number, begun = self.updates_done, self._begun
        ordered = [samples for _, samples in sorted(begun.segments, key=lambda each: each[0])]
        count = sum(len(samples) for samples in ordered)
        problem = begun.problem or (None if count else "no valid chunk step in any segment")
        metrics: dict[str, float] = {}
        if problem is None:
            before = self._snapshot()
            try:
                metrics = self._optimise(Samples.concatenate(ordered)).metrics()
                metrics |= objective.describe(ordered, self.algorithm)
                metrics |= objective.act_evaluate_difference(ordered, self.algorithm, version)
            except _NotFinite as exc:
                problem = str(exc)
                self._restore(before)
        self._optimiser.zero_grad()
        self._begun = _Begun()
        self.updates_done += 1
        return UpdateResult(number, count, problem, metrics)

    def discard(self) -> None:
        """Forget the segments added: the next update begins anew."""
        self._begun = _Begun()

    def state(self) -> LearnerState:
        """The state to checkpoint, copied to the host."""
        return LearnerState(
            self.updates_done,
            {name: tensor.detach().cpu().clone() for name, tensor in self.policy.state_dict().items()},
            {
                f"{self._names[parameter]}/{entry}": value.detach().cpu().clone()
                for parameter, entries in self._optimiser.state.items()
                for entry, value in entries.items()
            },
        )

    def load_state(self, state: LearnerState) -> None:
        """Go on from a checkpoint. Raises InputError, before anything is changed, if it belongs to another policy."""
        current = self.policy.state_dict()
        for name in sorted(current.keys() | state.policy.keys()):
            got = tuple(state.policy[name].shape) if name in state.policy else "nothing"
            expected = tuple(current[name].shape) if name in current else "nothing"
            if got != expected:
                raise InputError(
                    f"checkpoint: {name} holds {got}, expected {expected}; "
                    "use the policy options that the checkpoint was made with"
                )
        parameters = {name: parameter for parameter, name in self._names.items()}
        moments: dict[Tensor, dict[str, Tensor]] = {}
        for key, value in state.optimiser.items():
            name, _, entry = key.rpartition("/")
            if name not in parameters:
                raise InputError(
                    f"checkpoint: optimiser state of {name}, expected only trained parameters; "
                    "use the policy options that the checkpoint was made with"
                )
            # Adam keeps its step count on the host, its moments beside the parameter.
            device = torch.device("cpu") if entry == "step" else self.device
            moments.setdefault(parameters[name], {})[entry] = value.clone().to(device)
        self.policy.load_state_dict(state.policy)
        self._optimiser.state.clear()
        self._optimiser.state.update(moments)
        self.updates_done = state.updates_done
        self._begun = _Begun()

    def _optimise(self, samples: Samples) -> objective.Tally:
        """Epochs × minibatches, one optimiser step each. Raises _NotFinite."""
        advantages = normalise(samples.advantages)
        tally = objective.Tally()
        for epoch in range(self.trainer.epochs):
            generator = np.random.default_rng(seeds.derive("minibatches", self.seed, self.updates_done, epoch))
            for index in parts(generator.permutation(len(samples)), self.trainer.minibatch_samples):
                place = f"epoch {epoch + 1}, optimiser step {tally.optimiser_steps + 1}"
                terms, sums = self._evaluate(samples.take(index), advantages[torch.from_numpy(index)])
                loss = terms.mean()
                if not torch.isfinite(loss):
                    raise _NotFinite(f"the loss is {loss.item()} in {place}")
                self._optimiser.zero_grad()
                # Only these leaves get a gradient, and Adam leaves parameters without one alone, moments included:
                # while the critic warms up the policy's loss reaches nothing.
                loss.backward(inputs=self._stepped)  # type: ignore[no-untyped-call]
                tally.add(sums)
                tally.stepped(self._step(place))
        return tally

    def _evaluate(self, samples: Samples, advantages_N: Tensor) -> tuple[objective.Terms, dict[str, float]]:
        return objective.evaluate(self.policy, self.algorithm, samples, advantages_N, self.device)

    @property
    def _stepped(self) -> list[torch.nn.Parameter]:
        """The parameters that the next update trains."""
        return self._value_parameters if self.warming_up else self._policy_parameters + self._value_parameters

    def _step(self, place: str) -> float:
        """One optimiser step with the gradients as they are; returns their norm. Raises _NotFinite."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._stepped, self.trainer.max_grad_norm))
        if not np.isfinite(norm):
            raise _NotFinite(f"the gradient's norm is {norm} in {place}")
        self._optimiser.step()
        return norm

    def _snapshot(self) -> _Snapshot:
        trained = self._policy_parameters + self._value_parameters
        moments = {
            parameter: {entry: value.clone() for entry, value in entries.items()}
            for parameter, entries in self._optimiser.state.items()
        }
        return [(parameter, parameter.detach().clone()) for parameter in trained], moments

    def _restore(self, before: _Snapshot) -> None:
        weights, moments = before
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)
        self._optimiser.state.clear()
        self._optimiser.state.update(moments)
