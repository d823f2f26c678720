"""Comparisons within a group, against the values of NUMERICS and slow loops written from the equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_stream.learning.groups import (
    Length,
    all_equal,
    episode_returns,
    grpo_advantages,
    length_weights,
    rloo_advantages,
    until_first_end,
)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_grpo_of_numerics() -> None:
    got = grpo_advantages(tensor(1, 0, 0, 0, 0, 0, 0, 0), std=True)
    assert torch.allclose(got, tensor(2.4749, *[-0.3536] * 7), atol=5e-5, rtol=0)
    assert torch.allclose(grpo_advantages(tensor(1, 0, 0, 0), std=False), tensor(0.75, -0.25, -0.25, -0.25))


def test_rloo_of_numerics() -> None:
    assert torch.allclose(rloo_advantages(tensor(1, 0, 0, 0)), tensor(1, -1 / 3, -1 / 3, -1 / 3))


def test_group_advantages_equal_the_equations_on_200_random_inputs() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        returns = generator.standard_normal(int(generator.integers(2, 9))) * 10.0 ** generator.integers(-2, 3)
        rows = len(returns)
        mean = sum(returns) / rows
        std = math.sqrt(sum((value - mean) ** 2 for value in returns) / (rows - 1))
        centred = [value - mean for value in returns]
        others = [value - (sum(returns) - value) / (rows - 1) for value in returns]
        got = torch.from_numpy(returns)
        np.testing.assert_allclose(grpo_advantages(got, std=False).numpy(), centred, rtol=0, atol=1e-9)
        expected = [value / (std + 1e-6) for value in centred]
        np.testing.assert_allclose(grpo_advantages(got, std=True).numpy(), expected, rtol=0, atol=1e-9)
        np.testing.assert_allclose(rloo_advantages(got).numpy(), others, rtol=0, atol=1e-9)


def test_equal_returns_are_nothing_to_compare_and_give_0() -> None:
    assert all_equal(tensor(0.3, 0.3, 0.3)) and not all_equal(tensor(0.3, 0.3, 0.4))
    assert not all_equal(tensor(math.nan, math.nan)), "a return that is no number must be seen"
    for advantages in (grpo_advantages(tensor(1, 1, 1, 1), std=True), rloo_advantages(tensor(1, 1, 1, 1))):
        assert torch.equal(advantages, tensor(0, 0, 0, 0))


def test_steps_after_the_first_end_do_not_count() -> None:
    valid = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 1, 0]], dtype=torch.bool)
    ends = torch.tensor([[0, 0, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    expected = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    assert torch.equal(until_first_end(valid, ends), expected)
    # The reward of the chunk step that ends a row counts.
    rewards = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, math.nan], [100.0, 200.0, math.inf], [7.0, 7.0, 7.0]])
    assert torch.equal(episode_returns(rewards, expected), torch.tensor([11.0, 222.0, 3.0]))


def test_what_counts_equals_a_slow_loop_on_200_random_inputs() -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        shape = tuple(int(size) for size in generator.integers(1, 7, size=2))
        valid, ends = generator.random(shape) < 0.8, generator.random(shape) < 0.3
        rewards, expected, counted = generator.standard_normal(shape), np.zeros(shape[1]), np.zeros(shape, dtype=bool)
        for row in range(shape[1]):
            for t in range(shape[0]):
                if valid[t, row]:
                    counted[t, row], expected[row] = True, expected[row] + rewards[t, row]
                    if ends[t, row]:
                        break
        got = until_first_end(torch.from_numpy(valid), torch.from_numpy(ends))
        np.testing.assert_array_equal(got.numpy(), counted)
        np.testing.assert_allclose(episode_returns(torch.from_numpy(rewards), got).numpy(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("length", ["own", "max"])
def test_length_weights_give_the_mean_over_rows_on_200_random_inputs(length: Length) -> None:
    generator = np.random.default_rng(2)
    for _ in range(200):
        lengths = generator.integers(1, generator.integers(2, 12), size=int(generator.integers(2, 7)))
        losses = [generator.standard_normal(size) for size in lengths]
        expected = 0.0
        for of_row in losses:
            expected += sum(of_row) / (len(of_row) if length == "own" else max(lengths)) / len(losses)
        weights, shares = length_weights(torch.from_numpy(lengths).double(), length)
        total = sum(float(weight) * of_row.sum() for weight, of_row in zip(weights, losses, strict=True))
        divisor = sum(float(share) * len(of_row) for share, of_row in zip(shares, losses, strict=True))
        assert divisor == pytest.approx(len(losses), abs=1e-9)
        assert total / divisor == pytest.approx(expected, abs=1e-9)
