"""One update of the policy: a pass without gradients per segment, then epochs × minibatches of decoupled PPO.

Legend of shape suffixes: N samples, that is valid chunk steps of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vla_stream import config, seeds
from vla_stream.errors import InputError
from vla_stream.learning import losses
from vla_stream.learning.advantages import normalise
from vla_stream.learning.samples import Prepared, Samples, make_samples, parts, why_not_trainable
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


_Snapshot = tuple[list[tuple[torch.nn.Parameter, Tensor]], dict[Tensor, dict[str, Tensor]]]


class _NotFinite(Exception):
    """Ends an update half-way; the caller restores the weights."""


class Learner:
    """Owns the policy and its optimiser. Call `prepare` per segment in any order, then `update` with all of them."""

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

    def prepare(self, segment: Segment) -> Prepared:
        """π_prox, V and advantages of one segment by the current weights.

        Each segment is evaluated alone, so that the result does not depend on which segments arrived before it.
        """
        samples = make_samples(self.policy, segment, self.algorithm, self.trainer.minibatch_samples)
        return Prepared(segment.ticket, self.updates_done, samples)

    def update(self, segments: Sequence[Prepared], version: int) -> UpdateResult:
        """Train on the given segments; what they are, not the order they came in, decides the result.

        `version` is that of the current weights, before this update. A loss or gradient that is not finite leaves
        weights and optimiser as they were. Raises ValueError if a segment was prepared before the last update.
        """
        number = self.updates_done
        for segment in segments:
            if segment.update != number:
                raise ValueError(
                    f"segment {segment.ticket} was prepared for update {segment.update}, expected {number}; "
                    "call prepare after the previous update"
                )
        ordered = sorted(segments, key=lambda segment: segment.ticket)
        count = sum(len(segment.samples) for segment in ordered)
        problem = why_not_trainable(ordered)
        metrics: dict[str, float] = {}
        if problem is None:
            samples = Samples.concatenate([segment.samples for segment in ordered])
            before = self._snapshot()
            try:
                metrics = self._optimise(samples) | self._describe(samples, version)
            except _NotFinite as exc:
                problem = str(exc)
                self._restore(before)
        self._optimiser.zero_grad()
        self.updates_done += 1
        return UpdateResult(number, count, problem, metrics)

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

    def _optimise(self, samples: Samples) -> dict[str, float]:
        """Epochs × minibatches, one optimiser step each. Returns means over all of them. Raises _NotFinite."""
        stepped = self._value_parameters if self.warming_up else self._policy_parameters + self._value_parameters
        advantages = normalise(samples.advantages)
        sums: dict[str, float] = {}
        first: dict[str, float] = {}
        gradient_norms: list[float] = []
        for epoch in range(self.trainer.epochs):
            generator = np.random.default_rng(seeds.derive("minibatches", self.seed, self.updates_done, epoch))
            for index in parts(generator.permutation(len(samples)), self.trainer.minibatch_samples):
                place = f"epoch {epoch + 1}, optimiser step {len(gradient_norms) + 1}"
                loss, terms = self._loss(samples.take(index), advantages[torch.from_numpy(index)])
                if not torch.isfinite(loss):
                    raise _NotFinite(f"the loss is {loss.item()} in {place}")
                self._optimiser.zero_grad()
                # Only these leaves get a gradient, and Adam leaves parameters without one alone, moments included:
                # while the critic warms up the policy's loss reaches nothing.
                loss.backward(inputs=stepped)  # type: ignore[no-untyped-call]
                norm = float(torch.nn.utils.clip_grad_norm_(stepped, self.trainer.max_grad_norm))
                if not np.isfinite(norm):
                    raise _NotFinite(f"the gradient's norm is {norm} in {place}")
                self._optimiser.step()
                first = first or terms
                gradient_norms.append(norm)
                ratio_max = max(sums.get("ratio_max", 0.0), terms["ratio_max"])
                sums = {name: sums.get(name, 0.0) + value for name, value in terms.items()} | {"ratio_max": ratio_max}
        elements = sums["elements"]
        return {
            "policy_loss": sums["policy_loss"] / elements,
            "value_loss": sums["value_loss"] / sums["samples"],
            "entropy": sums["entropy"] / elements,
            "kl_behaviour": sums["kl_behaviour"] / elements,
            "kl_proximal": sums["kl_proximal"] / elements,
            "clip_fraction": sums["clipped"] / elements,
            "ratio_max": sums["ratio_max"],
            "first_ratio_error": first["ratio_error"] / first["elements"],
            "first_behaviour_ratio_error": first["behaviour_ratio_error"] / first["elements"],
            "gradient_norm": sum(gradient_norms) / len(gradient_norms),
            "optimiser_steps": float(len(gradient_norms)),
        }

    def _loss(self, samples: Samples, advantages_N: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The loss of one optimiser step, and the sums that the metrics are made of."""
        algorithm, granularity = self.algorithm, self.algorithm.granularity
        evaluation = self.policy.evaluate(samples.observations, samples.actions, samples.extras)
        executed = samples.executed.to(self.device)
        mask = losses.element_mask(executed, samples.actions.shape[-1], granularity)
        logprobs = losses.to_elements(evaluation.logprobs, executed, granularity)
        proximal = losses.to_elements(samples.proximal.to(self.device), executed, granularity)
        behaviour = losses.to_elements(samples.behaviour.to(self.device), executed, granularity)
        advantages = losses.per_element(advantages_N.to(self.device), mask)
        policy = losses.policy_loss(
            logprobs, proximal, behaviour, advantages, mask, algorithm.clip, algorithm.behaviour_weight_cap
        )
        value = losses.value_loss(
            evaluation.values,
            samples.values.to(self.device),
            samples.returns.to(self.device),
            algorithm.value_clip,
            algorithm.huber_delta,
        )
        entropy = losses.masked_sum(losses.to_elements(evaluation.entropy, executed, granularity), mask)
        loss = (
            policy.total / policy.elements
            + algorithm.value_coefficient * value.total / value.elements
            - algorithm.entropy_coefficient * entropy.total / entropy.elements
        )
        with torch.no_grad():
            moved = torch.where(mask, logprobs - proximal, 0.0)
            drifted = torch.where(mask, logprobs - behaviour, 0.0)
            error = (moved.exp() - 1).abs()
            terms = {
                "policy_loss": policy.total,
                "value_loss": value.total,
                "entropy": entropy.total,
                "elements": policy.elements,
                "samples": value.elements,
                # k3, from samples of the behaviour policy: KL(old ‖ new) ≈ E[r − 1 − log r].
                "kl_behaviour": (drifted.exp() - 1 - drifted).sum(),
                "kl_proximal": (moved.exp() - 1 - moved).sum(),
                "clipped": (error > algorithm.clip).sum(),
                "ratio_error": error.sum(),
                "behaviour_ratio_error": (drifted.exp() - 1).abs().sum(),
                "ratio_max": moved.max().exp(),
            }
            # One transfer: each .item() would wait for the device.
            numbers = torch.stack([term.double() for term in terms.values()]).tolist()
        return loss, dict(zip(terms, numbers, strict=True))

    def _describe(self, samples: Samples, version: int) -> dict[str, float]:
        """Metrics that the optimiser steps do not change. Those without a meaning for these samples are left out."""
        granularity = self.algorithm.granularity
        mask = losses.element_mask(samples.executed, samples.actions.shape[-1], granularity)
        proximal = losses.to_elements(samples.proximal, samples.executed, granularity)
        behaviour = losses.to_elements(samples.behaviour, samples.executed, granularity)
        cap = self.algorithm.behaviour_weight_cap
        weights = losses.behaviour_weights(proximal, behaviour, cap)[mask].double()
        metrics = {
            "effective_sample_size": float(weights.sum().square() / weights.square().sum() / len(weights)),
            "capped_fraction": float(((proximal - behaviour)[mask].exp() > cap).double().mean()),
        }
        spread = samples.returns.double().var(correction=0)
        if spread > 0:
            unexplained = (samples.returns - samples.values).double().var(correction=0)
            metrics["explained_variance"] = float(1 - unexplained / spread)
        own = losses.per_element(samples.versions == version, mask) & mask
        if own.any():
            metrics["act_evaluate_difference"] = float((proximal - behaviour)[own].abs().double().mean())
        return metrics

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
