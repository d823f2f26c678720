"""Losses against the values of NUMERICS and against slow loops written from the equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_stream.learning.losses import (
    Granularity,
    Sum,
    behaviour_weights,
    element_mask,
    masked_sum,
    per_element,
    policy_loss,
    to_elements,
    value_loss,
)

GRANULARITIES: tuple[Granularity, ...] = ("action", "chunk", "token")


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mean(loss: Sum) -> float:
    return float(loss.total / loss.elements)


CASE_E = (tensor(-1, -1, -0.5, -2), tensor(-1.2, -0.8, -1, -1), tensor(-1.5, -1, -0.5, -3), tensor(1, -1, 2, -2))


@pytest.mark.parametrize(("cap", "expected"), [(math.inf, 2.4367), (2.0, 0.2811)])
def test_case_e_decoupled_ppo(cap: float, expected: float) -> None:
    loss = policy_loss(*CASE_E, mask=torch.ones(4, dtype=torch.bool), clip=0.2, cap=cap)
    assert mean(loss) == pytest.approx(expected, abs=5e-5)
    assert loss.elements == 4


def test_masked_elements_leave_the_sum_and_the_count_whatever_they_hold() -> None:
    mask = torch.tensor([True, False, True, False])
    kept = policy_loss(*(case[mask] for case in CASE_E), mask=mask[mask], clip=0.2, cap=2.0)
    garbage = tensor(0, math.nan, 0, math.inf)
    masked = policy_loss(*(case + garbage for case in CASE_E), mask=mask, clip=0.2, cap=2.0)
    assert torch.equal(masked.total, kept.total) and masked.elements == kept.elements == 2


def test_gradient_is_finite_when_a_masked_ratio_would_overflow() -> None:
    logprobs = tensor(0.0, 5000.0).requires_grad_()
    zeros = torch.zeros(2, dtype=torch.float64)
    mask = torch.tensor([True, False])
    loss = policy_loss(logprobs, zeros, zeros, tensor(1, 1), mask, clip=0.2, cap=2.0)
    (gradient,) = torch.autograd.grad(loss.total, logprobs)
    assert torch.equal(gradient, tensor(-1.0, 0.0))


def test_behaviour_weights_are_capped_detached_and_survive_overflow() -> None:
    proximal = tensor(0.0, math.log(1.5), math.log(3.0), 5000.0).requires_grad_()
    weights = behaviour_weights(proximal, torch.zeros(4, dtype=torch.float64), cap=2.0)
    assert not weights.requires_grad
    np.testing.assert_allclose(weights.numpy(), [1.0, 1.5, 2.0, 2.0], rtol=1e-12)


def test_policy_loss_equals_the_equation_on_200_random_inputs() -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        shape = tuple(generator.integers(1, 5, size=3))
        logprobs, proximal, behaviour, advantages = (generator.standard_normal(shape) for _ in range(4))
        mask, clip, cap = generator.random(shape) < 0.8, 0.05 + 0.5 * generator.random(), 0.5 + 2 * generator.random()
        expected = 0.0
        for index in np.ndindex(*shape):
            if mask[index]:
                ratio = math.exp(logprobs[index] - proximal[index])
                weight = min(math.exp(proximal[index] - behaviour[index]), cap)
                clipped = min(max(ratio, 1 - clip), 1 + clip)
                expected -= weight * min(ratio * advantages[index], clipped * advantages[index])
        arrays = (torch.from_numpy(array) for array in (logprobs, proximal, behaviour, advantages, mask))
        loss = policy_loss(*arrays, clip, cap)
        assert float(loss.total) == pytest.approx(expected, abs=1e-9)
        assert int(loss.elements) == mask.sum()


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
        return policy_loss(logprobs, behaviour[rows], behaviour[rows], advantages[rows], mask[rows], 0.2, 2.0)

    whole, parts = part(slice(0, 10)), [part(slice(0, 3)), part(slice(3, 10))]
    expected = torch.autograd.grad(whole.total / whole.elements, weight)[0]
    elements = sum(int(one.elements) for one in parts)
    got = sum(torch.autograd.grad(one.total / elements, weight)[0] for one in parts)
    assert float(got) == pytest.approx(float(expected), abs=1e-12) and elements == whole.elements
    # The mean of the parts' means is another number: that is why losses return sums.
    parts = [part(slice(0, 3)), part(slice(3, 10))]
    of_means = sum(one.total / one.elements for one in parts) / len(parts)
    assert abs(float(torch.autograd.grad(of_means, weight)[0]) - float(expected)) > 1e-3
