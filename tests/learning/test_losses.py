"""Losses against the values of NUMERICS and against slow loops written from the equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_stream.learning.losses import (
    AboveCap,
    Granularity,
    Sum,
    behaviour_weights,
    clipped_losses,
    element_mask,
    interpolated_proximal,
    k3,
    log_losses,
    masked_sum,
    per_element,
    to_elements,
    value_loss,
    weighted_sum,
)

GRANULARITIES: tuple[Granularity, ...] = ("action", "chunk", "token")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean(loss: Sum) -> float:
    return float(loss.total / loss.elements)


def decoupled(
    logprobs: Tensor,
    proximal: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    cap: float = math.inf,
    above: AboveCap = "cap",
) -> Sum:
    """Decoupled PPO, as the algorithms put it together."""
    clipped = clipped_losses(logprobs, proximal, advantages, mask, clip)
    weights = behaviour_weights(proximal, behaviour, cap, above)
    return weighted_sum(clipped, mask, weights, torch.ones_like(weights))


CASE_E = (tensor(-1, -1, -0.5, -2), tensor(-1.2, -0.8, -1, -1), tensor(-1.5, -1, -0.5, -3), tensor(1, -1, 2, -2))


@pytest.mark.parametrize(
    ("cap", "above", "expected"), [(math.inf, "cap", 2.4367), (2.0, "cap", 0.2811), (5.0, "mask", -0.5189)]
)
def test_case_e_decoupled_ppo(cap: float, above: AboveCap, expected: float) -> None:
    loss = decoupled(*CASE_E, mask=torch.ones(4, dtype=torch.bool), cap=cap, above=above)
    assert mean(loss) == pytest.approx(expected, abs=5e-5)
    assert loss.elements == 4, "what is masked by its weight stays in the divisor"


def test_dual_clip_of_numerics() -> None:
    everything = torch.ones(3, dtype=torch.bool)
    ratios, advantages, zero = tensor(2, 2, 0.5).log(), tensor(2, -2, 2), tensor(0, 0, 0)
    got = clipped_losses(ratios, zero, advantages, everything, clip=0.2, dual_clip=1.5)
    assert torch.allclose(got, tensor(-2.4, 3.0, -1.0))
    got = clipped_losses(ratios, zero, advantages, everything, clip=0.2)
    assert torch.allclose(got, tensor(-2.4, 4.0, -1.0))


def test_masked_elements_leave_the_sum_and_the_count_whatever_they_hold() -> None:
    mask = torch.tensor([True, False, True, False])
    kept = decoupled(*(case[mask] for case in CASE_E), mask=mask[mask], cap=2.0)
    garbage = tensor(0, math.nan, 0, math.inf)
    masked = decoupled(*(case + garbage for case in CASE_E), mask=mask, cap=2.0)
    assert torch.equal(masked.total, kept.total) and masked.elements == kept.elements == 2


def test_a_masked_element_loses_nothing_whatever_it_holds() -> None:
    values, mask = tensor(1.0, 3.0), torch.tensor([True, False])
    for dual_clip in (None, 1.5):
        assert clipped_losses(values, -values, values, mask, 0.2, dual_clip).tolist() == [-1.2, 0.0]
    assert log_losses(values, values, mask).tolist() == [-1.0, 0.0]
    assert k3(values, -values, mask).tolist() == [pytest.approx(math.exp(-2) + 1), 0.0]


def test_gradient_is_finite_when_a_masked_ratio_would_overflow() -> None:
    logprobs = tensor(0.0, 5000.0).requires_grad_()
    zeros = torch.zeros(2, dtype=torch.float64)
    mask = torch.tensor([True, False])
    loss = decoupled(logprobs, zeros, tensor(0.0, -5000.0), tensor(1, 1), mask)
    loss = Sum(loss.total + k3(logprobs, zeros, mask).sum() + log_losses(logprobs, tensor(1, 1), mask).sum(), mask)
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    assert torch.equal(gradient, tensor(-2.0, 0.0))


def test_behaviour_weights_are_capped_detached_and_survive_overflow() -> None:
    proximal = tensor(0.0, math.log(1.5), math.log(3.0), 5000.0).requires_grad_()
    weights = behaviour_weights(proximal, torch.zeros(4, dtype=torch.float64), cap=2.0)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights.numpy(), [1.0, 1.5, 2.0, 2.0], rtol=1e-12)
    weights = behaviour_weights(proximal, torch.zeros(4, dtype=torch.float64), cap=2.0, above="mask")
    assert not weights.requires_grad
    np.testing.assert_allclose(weights.numpy(), [1.0, 1.5, 0.0, 0.0], rtol=1e-12)


@pytest.mark.parametrize("above", ["cap", "mask"])
@pytest.mark.parametrize("dual_clip", [None, 1.5])
def test_decoupled_ppo_equals_the_equation_on_200_random_inputs(above: AboveCap, dual_clip: float | None) -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        shape = tuple(generator.integers(1, 5, size=3))
        logprobs, proximal, behaviour, advantages, factor, share = (generator.standard_normal(shape) for _ in range(6))
        mask, clip, cap = generator.random(shape) < 0.8, 0.05 + 0.5 * generator.random(), 0.5 + 2 * generator.random()
        total = divisor = 0.0
        for index in np.ndindex(*shape):
            if mask[index]:
                ratio, gain = math.exp(logprobs[index] - proximal[index]), advantages[index]
                weight = math.exp(proximal[index] - behaviour[index])
                if weight > cap:
                    weight = cap if above == "cap" else 0.0
                surrogate = min(ratio * gain, min(max(ratio, 1 - clip), 1 + clip) * gain)
                if dual_clip is not None and gain < 0:
                    surrogate = max(surrogate, dual_clip * gain)
                total -= factor[index] * weight * surrogate
                divisor += share[index]
        new, old, mu, gains, valid, factors, shares = (
            torch.from_numpy(array) for array in (logprobs, proximal, behaviour, advantages, mask, factor, share)
        )
        loss = weighted_sum(
            clipped_losses(new, old, gains, valid, clip, dual_clip),
            valid,
            factors * behaviour_weights(old, mu, cap, above),
            shares,
        )
        assert float(loss.total) == pytest.approx(total, abs=1e-9)
        assert float(loss.elements) == pytest.approx(divisor, abs=1e-9)


def test_truncated_importance_sampling_equals_the_equation_on_200_random_inputs() -> None:
    """Its gradient is −w · A · ∇log π, w = min(π_θ ÷ μ, C): w itself has none."""
    generator = np.random.default_rng(5)
    for _ in range(200):
        size = int(generator.integers(1, 8))
        logprobs, behaviour, advantages = generator.standard_normal((3, size))
        mask, cap = generator.random(size) < 0.8, 0.5 + 2 * generator.random()
        new = torch.from_numpy(logprobs).requires_grad_()
        elements = log_losses(new, torch.from_numpy(advantages), torch.from_numpy(mask))
        weights = behaviour_weights(new, torch.from_numpy(behaviour), cap)
        loss = weighted_sum(elements, torch.from_numpy(mask), weights, torch.ones_like(weights))
        expected, total = np.zeros(size), 0.0
        for i in range(size):
            if mask[i]:
                expected[i] = -min(math.exp(logprobs[i] - behaviour[i]), cap) * advantages[i]
                total += expected[i] * logprobs[i]
        assert float(loss.total.detach()) == pytest.approx(total, abs=1e-9) and loss.elements == mask.sum()
        (gradient,) = torch.autograd.grad(loss.total, new)
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("behaviour_version", "alpha"), [(7, 0.0), (6, 0.5), (5, 2 / 3), (3, 0.8), (8, 0.0), (9, 1.0)])
def test_the_interpolated_proximal_policy_is_the_nearer_to_the_current_one_the_staler_the_data(
    behaviour_version: int, alpha: float
) -> None:
    logprobs, behaviour = tensor(-1.0).requires_grad_(), tensor(-3.0)
    got = interpolated_proximal(logprobs, behaviour, torch.tensor([behaviour_version]), proximal_version=7)
    assert not got.requires_grad
    assert float(got) == pytest.approx(-3.0 + 2.0 * alpha)


def test_the_interpolated_proximal_policy_equals_the_equation_on_200_random_inputs() -> None:
    generator = np.random.default_rng(6)
    for _ in range(200):
        logprobs, behaviour = generator.standard_normal((2, 5))
        versions, v_prox = generator.integers(0, 9, size=5), int(generator.integers(0, 9))
        expected = np.empty(5)
        for i, v_mu in enumerate(versions):
            v_theta = v_prox + 1
            alpha = 0.0 if v_theta == v_mu else min(max((v_prox - v_mu) / (v_theta - v_mu), 0.0), 1.0)
            expected[i] = behaviour[i] + alpha * (logprobs[i] - behaviour[i])
        arrays = (torch.from_numpy(array) for array in (logprobs, behaviour, versions))
        np.testing.assert_allclose(interpolated_proximal(*arrays, v_prox).numpy(), expected, rtol=0, atol=1e-9)


def test_k3_of_numerics() -> None:
    got = k3(tensor(-1.0), tensor(-1.2), torch.tensor([True]))
    assert float(got) == pytest.approx(0.01873, abs=5e-6)


def test_k3_equals_the_equation_on_200_random_inputs_and_pulls_towards_the_reference() -> None:
    generator = np.random.default_rng(7)
    for _ in range(200):
        logprobs, reference = generator.standard_normal((2, 6))
        mask = generator.random(6) < 0.8
        new = torch.from_numpy(logprobs).requires_grad_()
        got = k3(new, torch.from_numpy(reference), torch.from_numpy(mask))
        ratio = np.exp(reference - logprobs)
        expected = np.where(mask, ratio - 1 - (reference - logprobs), 0.0)
        np.testing.assert_allclose(got.detach().numpy(), expected, rtol=0, atol=1e-9)
        (gradient,) = torch.autograd.grad(got.sum(), new)
        np.testing.assert_allclose(gradient.numpy(), np.where(mask, 1 - ratio, 0.0), rtol=0, atol=1e-9)


def test_value_loss_of_numerics() -> None:
    loss = value_loss(tensor(1.0), tensor(0.5), tensor(1.2), clip=0.2, delta=10.0)
    assert mean(loss) == pytest.approx(0.125)
    # H_10(15) = 100: far errors count linearly.
    assert mean(value_loss(tensor(0.0), tensor(0.0), tensor(15.0), clip=0.2, delta=10.0)) == pytest.approx(100.0)


def test_value_loss_equals_the_equation_on_200_random_inputs() -> None:
    def huber(error: float, delta: float) -> float:
        return 0.5 * error**2 if abs(error) <= delta else delta * (abs(error) - 0.5 * delta)

    generator = np.random.default_rng(2)
    for _ in range(200):
        new, old, returns = generator.standard_normal((3, 7)) * 3
        clip, delta = generator.random(2) + 0.1
        expected = 0.0
        for v, v_old, r in zip(new, old, returns, strict=True):
            step = min(max(v - v_old, -clip), clip)
            expected += max(huber(r - v, delta), huber(r - v_old - step, delta))
        loss = value_loss(torch.from_numpy(new), torch.from_numpy(old), torch.from_numpy(returns), clip, delta)
        assert float(loss.total) == pytest.approx(expected, abs=1e-9) and loss.elements == 7


# Two samples of H = 2 actions of A = 3 dims; of the second sample only the first action was executed.
VALUES = torch.arange(12.0).reshape(2, 2, 3)
EXECUTED = torch.tensor([[True, True], [True, False]])


@pytest.mark.parametrize(
    ("granularity", "expected", "valid"),
    [
        ("action", [[3.0, 12.0], [21.0, 0.0]], 3),
        ("chunk", [15.0, 21.0], 2),
        ("token", [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]], [[6.0, 7.0, 8.0], [0.0, 0.0, 0.0]]], 9),
    ],
)
def test_elements_sum_the_executed_actions_only(granularity: Granularity, expected: list[object], valid: int) -> None:
    elements, mask = to_elements(VALUES, EXECUTED, granularity), element_mask(EXECUTED, 3, granularity)
    assert elements.shape == mask.shape and int(mask.sum()) == valid
    assert torch.equal(torch.where(mask, elements, 0.0), torch.tensor(expected))
    summed = masked_sum(elements, mask)
    assert summed.total == 36.0 and summed.elements == valid


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_elements_equal_a_slow_loop_on_200_random_inputs(granularity: Granularity) -> None:
    generator = np.random.default_rng(8)
    for _ in range(200):
        samples, actions, dims = (int(size) for size in generator.integers(1, 5, size=3))
        values = generator.standard_normal((samples, actions, dims))
        executed = generator.random((samples, actions)) < 0.7
        expected, count = 0.0, 0
        for n in range(samples):
            for h in range(actions):
                if executed[n, h]:
                    # Squared per element, so that it matters which log-probs are summed before.
                    if granularity == "action":
                        expected, count = expected + sum(values[n, h]) ** 2, count + 1
                    elif granularity == "token":
                        expected, count = expected + sum(value**2 for value in values[n, h]), count + dims
            if granularity == "chunk" and executed[n].any():
                expected, count = expected + sum(sum(values[n, h]) for h in np.flatnonzero(executed[n])) ** 2, count + 1
        elements = to_elements(torch.from_numpy(values), torch.from_numpy(executed), granularity)
        summed = masked_sum(elements.square(), element_mask(torch.from_numpy(executed), dims, granularity))
        assert float(summed.total) == pytest.approx(expected, abs=1e-9) and summed.elements == count


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_chunk_steps_advantage_reaches_each_of_its_elements(granularity: Granularity) -> None:
    mask = element_mask(EXECUTED, 3, granularity)
    spread = per_element(torch.tensor([5.0, -2.0]), mask)
    assert spread.shape == mask.shape
    assert (spread[0] == 5.0).all() and (spread[1] == -2.0).all()


def test_a_chunk_without_any_executed_action_is_no_element() -> None:
    executed = torch.tensor([[False, False], [False, True]])
    assert element_mask(executed, 3, "chunk").tolist() == [False, True]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_garbage_in_actions_that_were_not_executed_changes_nothing(granularity: Granularity) -> None:
    dirty = VALUES.clone()
    dirty[1, 1] = math.nan
    mask = element_mask(EXECUTED, 3, granularity)
    clean, got = (masked_sum(to_elements(values, EXECUTED, granularity), mask) for values in (VALUES, dirty))
    assert torch.equal(got.total, clean.total)


def test_sums_of_parts_divided_once_give_the_gradient_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(3)
    behaviour, advantages = torch.randn(2, 10, 2, generator=generator, dtype=torch.float64)
    mask = torch.rand(10, 2, generator=generator) < 0.7
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def part(rows: slice) -> Sum:
        logprobs = behaviour[rows] * weight
        return decoupled(logprobs, behaviour[rows], behaviour[rows], advantages[rows], mask[rows])

    whole, parts = part(slice(0, 10)), [part(slice(0, 3)), part(slice(3, 10))]
    expected = torch.autograd.grad(whole.total / whole.elements, weight)[0]
    elements = sum(int(one.elements) for one in parts)
    got = sum(torch.autograd.grad(one.total / elements, weight)[0] for one in parts)
    assert float(got) == pytest.approx(float(expected), abs=1e-12) and elements == whole.elements
    # The mean of the parts' means is another number: that is why losses return sums.
    parts = [part(slice(0, 3)), part(slice(3, 10))]
    of_means = sum(one.total / one.elements for one in parts) / len(parts)
    assert abs(float(torch.autograd.grad(of_means, weight)[0]) - float(expected)) > 1e-3
