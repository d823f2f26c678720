"""The loss of some samples under a policy, as the sums that optimiser steps divide, and the metrics of an update.

Legend of shape suffixes: N samples, that is valid chunk steps of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from vla_stream import config
from vla_stream.learning import losses
from vla_stream.learning.losses import Sum
from vla_stream.learning.samples import Samples
from vla_stream.policies.protocol import Policy


class Terms(NamedTuple):
    """The terms of the loss, with their coefficients: policy and entropy are divided by the number of elements, the
    value term by that of samples."""

    policy: Sum
    value: Sum
    entropy: Sum

    def mean(self) -> Tensor:
        """The loss of an optimiser step that these samples are all of."""
        return (
            self.policy.total / self.policy.elements
            + self.value.total / self.value.elements
            - self.entropy.total / self.entropy.elements
        )

    def sums(self, granularity: losses.Granularity) -> dict[str, Tensor]:
        """The same before the division, by the name that the divisor has among the sums of `evaluate`."""
        elements, samples = self.policy.total - self.entropy.total, self.value.total
        # A valid chunk is one element.
        return {"samples": elements + samples} if granularity == "chunk" else {"elements": elements, "samples": samples}


def evaluate(
    policy: Policy, algorithm: config.Algorithm, samples: Samples, advantages_N: Tensor, device: torch.device
) -> tuple[Terms, dict[str, Tensor]]:
    """The loss by the policy's current weights, with gradients, and the sums that metrics are made of (see `Tally`).

    All stay on the device: a GPU works on while the next part is prepared, and whoever reads a number waits for it."""
    granularity = algorithm.granularity
    evaluation = policy.evaluate(samples.observations.gather(), samples.actions, samples.extras)
    executed = samples.executed.to(device)
    mask = losses.element_mask(executed, samples.actions.shape[-1], granularity)
    logprobs = losses.to_elements(evaluation.logprobs, executed, granularity)
    proximal = losses.to_elements(samples.proximal.to(device), executed, granularity)
    behaviour = losses.to_elements(samples.behaviour.to(device), executed, granularity)
    advantages = losses.per_element(advantages_N.to(device), mask)
    weights = losses.behaviour_weights(proximal, behaviour, algorithm.behaviour_weight_cap)
    clipped = losses.clipped_losses(logprobs, proximal, advantages, mask, algorithm.clip)
    policy_loss = losses.weighted_sum(clipped, mask, weights, torch.ones_like(weights))
    value_loss = losses.value_loss(
        evaluation.values,
        samples.values.to(device),
        samples.returns.to(device),
        algorithm.value_clip,
        algorithm.huber_delta,
    )
    entropy = losses.masked_sum(losses.to_elements(evaluation.entropy, executed, granularity), mask)
    terms = Terms(
        policy_loss,
        Sum(algorithm.value_coefficient * value_loss.total, value_loss.elements),
        Sum(algorithm.entropy_coefficient * entropy.total, entropy.elements),
    )
    with torch.no_grad():
        moved = torch.where(mask, logprobs - proximal, 0.0)
        drifted = torch.where(mask, logprobs - behaviour, 0.0)
        error = (moved.exp() - 1).abs()
        sums = {
            "policy_loss": policy_loss.total,
            "value_loss": value_loss.total,
            "entropy": entropy.total,
            "elements": policy_loss.elements,
            "samples": value_loss.elements,
            # k3, from samples of the behaviour policy: KL(old ‖ new) ≈ E[r − 1 − log r].
            "kl_behaviour": (drifted.exp() - 1 - drifted).sum(),
            "kl_proximal": (moved.exp() - 1 - moved).sum(),
            "clipped": (error > algorithm.clip).sum(),
            "ratio_error": error.sum(),
            "behaviour_ratio_error": (drifted.exp() - 1).abs().sum(),
            "ratio_max": moved.max().exp(),
        }
        return terms, {name: number.double() for name, number in sums.items()}


class GradientSums:
    """Gradients gathered part by part as sums, and divided once, by counts that are known when all parts are in.

    There is one sum per divisor, and each divisor needs a way back of its own through what its losses share."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Parameter, str], Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, totals: Mapping[str, Tensor], counts: Mapping[str, Tensor], parameters: Sequence[Parameter]) -> None:
        """The gradients of one part's losses, each under the name of its divisor; nothing else gets a gradient."""
        last = list(totals)[-1]
        for divisor, loss in totals.items():
            self._counts[divisor] = self._counts.get(divisor, 0) + counts[divisor]
            found = torch.autograd.grad(loss, parameters, retain_graph=divisor != last, allow_unused=True)
            for parameter, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    # Not in place: two parameters may share one tensor here.
                    before = self._sums.get((parameter, divisor))
                    self._sums[parameter, divisor] = gradient if before is None else before + gradient

    def means(self) -> dict[Parameter, Tensor]:
        """The gradient of each parameter that has one."""
        gradients: dict[Parameter, Tensor] = {}
        for (parameter, divisor), total in self._sums.items():
            mean = (total / self._counts[divisor]).to(total.dtype)
            gradients[parameter] = gradients[parameter] + mean if parameter in gradients else mean
        return gradients


class Tally:
    """The sums of all parts of one update, and the means that people see. They stay on the device until then."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._first: Mapping[str, Tensor] = {}
        self._gradient_norms: list[float] = []

    @property
    def optimiser_steps(self) -> int:
        return len(self._gradient_norms)

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """What `evaluate` found for one part."""
        before = self._sums or {name: torch.zeros_like(value) for name, value in sums.items()}
        self._sums = {name: before[name] + value for name, value in sums.items()}
        self._sums["ratio_max"] = torch.maximum(before["ratio_max"], sums["ratio_max"])
        if not self._gradient_norms:
            self._first = self._sums  # before the first optimiser step

    def stepped(self, gradient_norm: float) -> None:
        """An optimiser step was made, with a gradient of this norm before it was scaled down."""
        self._gradient_norms.append(gradient_norm)

    def metrics(self) -> dict[str, float]:
        sums, first = _read(self._sums), _read(self._first)
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
            "gradient_norm": sum(self._gradient_norms) / len(self._gradient_norms),
            "optimiser_steps": float(len(self._gradient_norms)),
        }


def _read(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """All in one transfer: each .item() would wait for the device."""
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))


def describe(parts: Sequence[Samples], algorithm: config.Algorithm, version: int) -> dict[str, float]:
    """Metrics that the optimiser steps do not change. Those without a meaning for these samples are left out.

    `version` is that of the weights which gave π_prox and V."""
    flat = []
    for samples in parts:
        mask = losses.element_mask(samples.executed, samples.behaviour.shape[-1], algorithm.granularity)
        per_element = (
            losses.to_elements(samples.proximal, samples.executed, algorithm.granularity),
            losses.to_elements(samples.behaviour, samples.executed, algorithm.granularity),
            losses.per_element(samples.versions == version, mask),
        )
        flat.append([tensor[mask] for tensor in per_element])
    proximal, behaviour, own = (torch.cat(tensors) for tensors in zip(*flat, strict=True))
    weights = losses.behaviour_weights(proximal, behaviour, algorithm.behaviour_weight_cap).double()
    metrics = {
        "effective_sample_size": float(weights.sum().square() / weights.square().sum() / len(weights)),
        "capped_fraction": float(((proximal - behaviour).exp() > algorithm.behaviour_weight_cap).double().mean()),
    }
    returns = torch.cat([samples.returns for samples in parts])
    values = torch.cat([samples.values for samples in parts])
    spread = returns.double().var(correction=0)
    if spread > 0:
        metrics["explained_variance"] = float(1 - (returns - values).double().var(correction=0) / spread)
    if own.any():
        metrics["act_evaluate_difference"] = float((proximal - behaviour)[own].abs().double().mean())
    return metrics
