"""GAE against the values of NUMERICS and against a slow loop written from the equation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_stream.learning.advantages import DECAY, RunningMoments, gae, normalise, successor_values


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)[:, None]


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (1.0, (-1.45119, -4.45575, 2.53965, 0.5249, -0.49)),
        (0.7, (-0.67698, -5.24817, 2.48461, 0.67043, -0.49)),
    ],
)
def test_case_c_rlax_multistep(lam: float, expected: tuple[float, ...]) -> None:
    values = column(1, 4, -3, -2, -1)
    successors = successor_values(values, column(-1)[0], column()[:, 0], torch.zeros(0, 2, dtype=torch.int64))
    never, always = flags(0, 0, 0, 0, 0), flags(1, 1, 1, 1, 1)
    got = gae(column(0, 0, 1, 0, -0.5), values, successors, never, never, always, gamma=0.99, lam=lam)
    assert torch.allclose(got, column(*expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [((0, 0, 0), (0, 1, 0), (2.921, 2.2, 1.02)), ((0, 1, 0), (0, 0, 0), (1.382, 0.4, 1.02))],
    ids=["truncated: bootstraps from before the reset", "terminated: does not bootstrap"],
)
def test_case_d_truncation_is_not_termination(
    terminated: tuple[int, ...], truncated: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    values = column(0.5, 0.6, 0.7)
    # V(s') = [.6, 2.0, .8]: only the truncated chunk step's differs from the next value, .7 (after the reset).
    successors = successor_values(values, column(0.8)[0], column(2.0)[:, 0], torch.tensor([[1, 0]]))
    assert torch.equal(successors, column(0.6, 2.0, 0.8))
    got = gae(column(1, 1, 1), values, successors, flags(*terminated), flags(*truncated), flags(1, 1, 1), 0.9, 0.95)
    assert torch.allclose(got, column(*expected), atol=1e-9, rtol=0)


def slow_gae(
    rewards: np.ndarray,
    values: np.ndarray,
    successors: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    valid: np.ndarray,
    gamma: float,
    lam: float,
) -> np.ndarray:
    """A_t = Σ_{s ≥ t} (γλ)^{s−t} δ_s, the sum ending with the row's episode or its last valid chunk step."""
    advantages = np.zeros_like(values)
    for row in range(values.shape[1]):
        for t in range(values.shape[0]):
            weight = 1.0
            for s in range(t, values.shape[0]):
                if not valid[s, row]:
                    break
                following = 0.0 if terminated[s, row] else successors[s, row]
                advantages[t, row] += weight * (rewards[s, row] + gamma * following - values[s, row])
                weight *= gamma * lam
                if terminated[s, row] or truncated[s, row]:
                    break
    return advantages


def test_gae_equals_the_double_loop_on_200_random_inputs() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        shape = (int(generator.integers(1, 12)), int(generator.integers(1, 6)))
        rewards, values, successors = (generator.standard_normal(shape) for _ in range(3))
        terminated, truncated = (generator.random(shape) < 0.2 for _ in range(2))
        valid = generator.random(shape) < 0.85
        gamma, lam = generator.random(2)
        arrays = (rewards, values, successors, terminated, truncated, valid)
        got = gae(*(torch.from_numpy(array) for array in arrays), gamma, lam).numpy()
        np.testing.assert_allclose(got, slow_gae(*arrays, gamma, lam), rtol=0, atol=1e-9)


def test_garbage_in_held_rows_and_behind_terminations_is_never_read() -> None:
    nan = float("nan")
    got = gae(
        column(1, 1, nan),
        column(0.5, 0.25, nan),
        column(0.25, nan, nan),
        flags(0, 1, 0),
        flags(0, 0, 0),
        flags(1, 1, 0),
        gamma=0.5,
        lam=1.0,
    )
    assert torch.equal(got, column(1.0, 0.75, 0.0))


def test_successor_values_leaves_its_input_alone() -> None:
    values = torch.zeros(2, 2)
    got = successor_values(values, torch.full((2,), 5.0), torch.tensor([7.0, 8.0]), torch.tensor([[0, 1], [1, 0]]))
    assert torch.equal(got, torch.tensor([[0.0, 7.0], [8.0, 5.0]]))
    assert torch.equal(values, torch.zeros(2, 2))


def test_normalised_advantages_have_mean_0_and_standard_deviation_1() -> None:
    got = normalise(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    expected = (np.array([1.0, 2.0, 3.0, 6.0]) - 3.0) / np.sqrt(3.5)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-7)
    assert normalise(torch.tensor([1.0, 2.0])).dtype == torch.float32


def test_equal_advantages_normalise_to_zero() -> None:
    assert torch.equal(normalise(torch.full((7,), 0.1)), torch.zeros(7))


def test_running_moments_are_those_of_all_earlier_advantages_weighted_by_age() -> None:
    generator = np.random.default_rng(3)
    updates = [generator.normal(size, 1 + size, size) for size in (4, 9, 1, 6)]
    moments = RunningMoments()
    for advantages in updates:
        moments = moments.after(torch.from_numpy(advantages))
    weights = np.concatenate([np.full(len(a), DECAY ** (len(updates) - 1 - i)) for i, a in enumerate(updates)])
    everything = np.concatenate(updates)
    mean = np.average(everything, weights=weights)
    variance = np.average((everything - mean) ** 2, weights=weights)
    assert moments.weight == pytest.approx(weights.sum())
    assert (moments.mean, moments.variance) == pytest.approx((mean, variance))
    expected = (np.array([2.0, 5.0]) - mean) / np.sqrt(variance)
    np.testing.assert_allclose(moments.scale(torch.tensor([2.0, 5.0])).numpy(), expected, rtol=1e-5)


def test_before_the_first_update_advantages_stay_as_they_are() -> None:
    assert torch.allclose(RunningMoments().scale(torch.tensor([-2.0, 0.5])), torch.tensor([-2.0, 0.5]))


def test_a_success_after_updates_of_equal_advantages_is_ten_deviations_and_no_more() -> None:
    moments = RunningMoments().after(torch.full((50,), -0.5))
    assert torch.equal(moments.scale(torch.tensor([1.0, -0.5, -9.0])), torch.tensor([10.0, 0.0, -10.0]))
