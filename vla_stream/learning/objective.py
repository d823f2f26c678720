"""The loss of some samples under a policy, as the sums that optimiser steps divide, and the metrics of an update.

Legend of shape suffixes: N samples, that is valid chunk steps of one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from vla_stream import config
from vla_stream.learning import losses
from vla_stream.learning.algorithms import RECIPES, Elements, looks_first
from vla_stream.learning.losses import Sum
from vla_stream.learning.ranks import ALONE, Alone, Passes
from vla_stream.learning.samples import Samples

Terms = Mapping[str, Sum]
"""The loss by what it is divided by: `shares` for what is per element, `samples` for the value."""

PER_ELEMENT = ("imitation_loss", "entropy", "kl_behaviour", "kl_proximal", "kl_reference")


def mean(terms: Terms) -> Tensor:
    """The loss of an optimiser step that these samples are all of."""
    return sum((term.total / term.elements for term in terms.values()), start=torch.zeros(()))


def of_all_ranks(terms: Terms, ranks: Alone) -> tuple[Terms, Tensor]:
    """This rank's terms with the divisors of all ranks' samples, so that the ranks' means add up; and to what."""
    local = [torch.stack([term.total.detach().double(), term.elements.double()]) for term in terms.values()]
    totals, counts = ranks.total(torch.stack(local)).unbind(1)
    divided = zip(terms.items(), counts, strict=True)
    return {divisor: Sum(term.total, count.to(term.elements.dtype)) for (divisor, term), count in divided}, (
        totals / counts
    ).sum()


def nothing(terms: Terms, sums: Mapping[str, Tensor]) -> tuple[Terms, dict[str, Tensor]]:
    """What was evaluated counts for nothing: it was a row in place of none, in step with other ranks."""
    empty = {divisor: Sum(0 * term.total, 0 * term.elements) for divisor, term in terms.items()}
    return empty, {name: 0 * number for name, number in sums.items()}


def evaluate(
    policy: Passes,
    algorithm: config.Algorithm,
    samples: Samples,
    advantages_N: Tensor,
    device: torch.device,
    version: int,
) -> tuple[Terms, dict[str, Tensor]]:
    """The loss by the policy's current weights, with gradients, and the sums that metrics are made of (see `Tally`).

    `version` is that of the weights which the update started with. All stay on the device: a GPU works on while the
    next part is prepared, and whoever reads a number waits for it."""
    if RECIPES[algorithm.name].policy_losses is None:
        terms, sums = _imitation(policy, samples, device)
    else:
        terms, sums = _policy_gradient(policy, algorithm, samples, advantages_N, device, version)
    with torch.no_grad():
        sums |= {divisor: term.elements for divisor, term in terms.items()}
        return terms, {name: number.detach().double() for name, number in sums.items()}


def _imitation(policy: Passes, samples: Samples, device: torch.device) -> tuple[Terms, dict[str, Tensor]]:
    """The policy's own behaviour-cloning loss of the executed actions."""
    loss = policy.imitation_loss(samples.observations.gather(), samples.actions, samples.executed.numpy())
    executed = samples.executed.sum().to(device)
    total = loss * executed
    return {"shares": Sum(total, executed)}, {"imitation_loss": total, "elements": executed}


def _policy_gradient(
    policy: Passes,
    algorithm: config.Algorithm,
    samples: Samples,
    advantages_N: Tensor,
    device: torch.device,
    version: int,
) -> tuple[Terms, dict[str, Tensor]]:
    """Policy loss − entropy bonus + KL to the reference, and the value loss where there is a critic."""
    policy_losses = RECIPES[algorithm.name].policy_losses
    assert policy_losses is not None
    evaluation = policy.evaluate(samples.observations.gather(), samples.actions, samples.extras)
    executed = samples.executed.to(device)
    mask = losses.element_mask(executed, samples.actions.shape[-1], algorithm.granularity)

    def elements(values: Tensor, granularity: losses.Granularity = algorithm.granularity) -> Tensor:
        return losses.to_elements(values.to(device), executed, granularity)

    def spread(values_N: Tensor) -> Tensor:
        return losses.per_element(values_N.to(device), mask)

    logprobs, behaviour = elements(evaluation.logprobs), elements(samples.behaviour)
    proximal, entropy = elements(samples.proximal), elements(evaluation.entropy)
    if algorithm.guesses_proximal:
        proximal = losses.interpolated_proximal(logprobs, behaviour, spread(samples.versions), version)
    chunk_log_ratios = spread(elements(samples.proximal - samples.behaviour, "chunk"))
    per_element, importance = policy_losses(
        algorithm, Elements(logprobs, proximal, behaviour, chunk_log_ratios, spread(advantages_N), mask)
    )
    shares = spread(samples.shares)
    policy_loss = losses.weighted_sum(per_element, mask, spread(samples.weights) * importance, shares)
    total = policy_loss.total
    if algorithm.entropy_coefficient > 0:
        total = total - algorithm.entropy_coefficient * losses.weighted_sum(entropy, mask, shares, shares).total
    if algorithm.reference_kl_coefficient > 0:
        kl_reference = losses.k3(logprobs, elements(samples.reference), mask)
        weighted = losses.weighted_sum(kl_reference, mask, shares, shares).total
        total = total + algorithm.reference_kl_coefficient * weighted
    with torch.no_grad():
        moved = torch.where(mask, logprobs - proximal, 0.0)
        drifted = torch.where(mask, logprobs - behaviour, 0.0)
        error = (moved.exp() - 1).abs()
        importance = torch.where(mask, importance, 0.0).double()
        sums = {
            "policy_loss": policy_loss.total,
            "shares": policy_loss.elements,
            "elements": mask.sum(),
            "entropy": losses.masked_sum(entropy, mask).total,
            # k3, from samples of the behaviour policy: KL(old ‖ new) ≈ E[r − 1 − log r].
            "kl_behaviour": (drifted.exp() - 1 - drifted).sum(),
            "kl_proximal": (moved.exp() - 1 - moved).sum(),
            "clipped": (error > algorithm.clip).sum(),
            "ratio_error": error.sum(),
            "behaviour_ratio_error": (drifted.exp() - 1).abs().sum(),
            "ratio_max": moved.max().exp(),
            "importance": importance.sum(),
            "importance_squared": importance.square().sum(),
        }
        if algorithm.reference_kl_coefficient > 0:
            sums["kl_reference"] = kl_reference.sum()
    if not algorithm.has_critic:
        return {"shares": Sum(total, policy_loss.elements)}, sums
    value_loss = losses.value_loss(
        evaluation.values,
        samples.values.to(device),
        samples.returns.to(device),
        algorithm.value_clip,
        algorithm.huber_delta,
    )
    sums |= {"value_loss": value_loss.total, "samples": value_loss.elements}
    value_total = algorithm.value_coefficient * value_loss.total
    if algorithm.granularity == "chunk":
        # A chunk is one element, so there is one divisor, and one way back.
        return {"samples": Sum(total + value_total, value_loss.elements)}, sums
    return {
        "shares": Sum(total, policy_loss.elements),
        "samples": Sum(value_total, value_loss.elements),
    }, sums


class GradientSums:
    """Gradients gathered part by part as sums, and divided once, by counts that are known when all parts are in.

    There is one sum per divisor, and each divisor needs a way back of its own through what its losses share."""

    def __init__(self, ranks: Alone = ALONE) -> None:
        self._ranks = ranks
        self._sums: dict[tuple[Parameter, str], Tensor] = {}
        self._counts: dict[str, Tensor] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def add(self, terms: Terms, parameters: Sequence[Parameter]) -> None:
        """The gradients of one part's losses; nothing but `parameters` gets a gradient."""
        last = list(terms)[-1]
        for divisor, (loss, count) in terms.items():
            self._counts[divisor] = self._counts.get(divisor, 0) + count.detach().double()
            found = self._ranks.gradients(loss, parameters, again=divisor != last)
            for parameter, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    # Not in place: two parameters may share one tensor here.
                    before = self._sums.get((parameter, divisor))
                    self._sums[parameter, divisor] = gradient if before is None else before + gradient

    def means(self) -> dict[Parameter, Tensor]:
        """The gradient of each parameter that has one: this rank's part of it, before `reduce`."""
        gradients: dict[Parameter, Tensor] = {}
        counts = dict(zip(self._counts, self._ranks.total(torch.stack(list(self._counts.values()))), strict=True))
        for (parameter, divisor), total in self._sums.items():
            mean = (total / counts[divisor]).to(total.dtype)
            gradients[parameter] = gradients[parameter] + mean if parameter in gradients else mean
        return gradients


class Tally:
    """The sums of all parts of one update, and the means that people see. They stay on the device until then."""

    def __init__(self, ranks: Alone = ALONE) -> None:
        self._ranks = ranks
        self._sums: dict[str, Tensor] = {}
        self._first: Mapping[str, Tensor] = {}
        self._since_step: list[Mapping[str, Tensor]] = []
        self._gradient_norms: list[float] = []
        self._imitation: list[Tensor] = []

    @property
    def optimiser_steps(self) -> int:
        return len(self._gradient_norms)

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """What `evaluate` found for one part."""
        before = self._sums or {name: torch.zeros_like(value) for name, value in sums.items()}
        self._sums = {name: before[name] + value for name, value in sums.items()}
        if "ratio_max" in sums:
            self._sums["ratio_max"] = torch.maximum(before["ratio_max"], sums["ratio_max"])
        if not self._gradient_norms:
            self._first = self._sums  # before the first optimiser step
        self._since_step.append(sums)

    def stepped(self, gradient_norm: float) -> None:
        """An optimiser step was made, with a gradient of this norm before it was scaled down."""
        self._gradient_norms.append(gradient_norm)
        self._since_step.clear()

    def imitated(self, loss: Tensor) -> None:
        """The mean loss of demonstrations in one optimiser step, of all ranks."""
        self._imitation.append(loss.detach())

    def kl_since_step(self) -> float:
        """KL to the proximal policy in the parts since the last optimiser step. Waits for the device."""
        steps = [torch.stack([sums["kl_proximal"], sums["elements"]]) for sums in self._since_step]
        kl, elements = self._ranks.total(torch.stack(steps).sum(0))
        return float(kl / elements)

    def metrics(self) -> dict[str, float]:
        """Those that the algorithm has."""
        sums, first = self._read()
        elements = sums["elements"]
        metrics = {name: sums[name] / elements for name in PER_ELEMENT if name in sums}
        if "policy_loss" in sums:
            metrics |= {
                "policy_loss": sums["policy_loss"] / sums["shares"],
                "clip_fraction": sums["clipped"] / elements,
                "ratio_max": sums["ratio_max"],
                "first_ratio_error": first["ratio_error"] / first["elements"],
                "first_behaviour_ratio_error": first["behaviour_ratio_error"] / first["elements"],
                "effective_sample_size": sums["importance"] ** 2 / max(sums["importance_squared"], 1e-30) / elements,
            }
        if "value_loss" in sums:
            metrics["value_loss"] = sums["value_loss"] / sums["samples"]
        if self._imitation:
            metrics["demonstration_loss"] = float(torch.stack(self._imitation).mean())
        steps = len(self._gradient_norms)
        if steps:
            metrics["gradient_norm"] = sum(self._gradient_norms) / steps
        return metrics | {"optimiser_steps": float(steps)}

    def _read(self) -> tuple[dict[str, float], dict[str, float]]:
        """The sums of all ranks, and the first. All in one transfer: each .item() would wait for the device."""
        both = torch.stack([torch.stack(list(sums.values())) for sums in (self._sums, self._first)])
        read, first = (dict(zip(self._sums, row, strict=True)) for row in self._ranks.total(both).tolist())
        if "ratio_max" in read:
            read["ratio_max"] = float(self._ranks.largest(self._sums["ratio_max"]))
        return read, first


def describe(parts: Sequence[Samples], algorithm: config.Algorithm, version: int) -> dict[str, float]:
    """Metrics that the optimiser steps do not change. Those without a meaning for these samples are left out.

    `version` is that of the weights which gave π_prox and V."""
    metrics: dict[str, float] = {}
    if algorithm.compares_rows:
        metrics["equal_groups"] = sum(len(samples) == 0 for samples in parts) / len(parts)
    if algorithm.has_critic:
        returns = torch.cat([samples.returns for samples in parts])
        values = torch.cat([samples.values for samples in parts])
        spread = returns.double().var(correction=0)
        if spread > 0:
            metrics["explained_variance"] = float(1 - (returns - values).double().var(correction=0) / spread)
    if looks_first(algorithm):
        metrics |= _distances(parts, algorithm, version)
    return metrics


def _distances(parts: Sequence[Samples], algorithm: config.Algorithm, version: int) -> dict[str, float]:
    """How far the weights that the update starts with are from those that acted, per element."""
    flat = []
    for samples in parts:
        mask = losses.element_mask(samples.executed, samples.behaviour.shape[-1], algorithm.granularity)
        log_ratios = losses.to_elements(samples.proximal - samples.behaviour, samples.executed, algorithm.granularity)
        flat.append((log_ratios[mask], losses.per_element(samples.versions == version, mask)[mask]))
    log_ratios, own = (torch.cat(tensors) for tensors in zip(*flat, strict=True))
    metrics: dict[str, float] = {}
    if "behaviour_weight_cap" in algorithm.used:
        metrics["capped_fraction"] = float((log_ratios.exp() > algorithm.behaviour_weight_cap).double().mean())
    if own.any():
        metrics["act_evaluate_difference"] = float(log_ratios[own].abs().double().mean())
    return metrics
