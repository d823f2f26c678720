"""V-trace against the values of NUMERICS and a slow double loop written from the equation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vla_stream.learning.advantages import gae
from vla_stream.learning.vtrace import VTrace, vtrace


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unbroken(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    bootstrap: Tensor,
    gamma: Tensor,
    *,
    lam: float = 1.0,
    rho_cap: float = 1.0,
    gradient_rho_cap: float = 1.0,
) -> VTrace:
    """One stretch without ends, of which all is valid."""
    never = torch.zeros_like(values, dtype=torch.bool)
    successors = torch.cat([values[1:], bootstrap[None]])
    return vtrace(log_ratios, rewards, values, successors, never, never, ~never, gamma, lam, rho_cap, gradient_rho_cap)


def case_a(gradient_rho_cap: float) -> VTrace:
    """Of rlax's tests: two rows of four steps."""
    behaviour = double(
        [[[8.9, 0.7], [5, 1], [0.6, 0.1], [-0.9, -0.1]], [[0.3, -5], [1, -8], [0.3, 1.7], [4.7, 3.3]]]
    ).log_softmax(-1)
    target = double(
        [[[0.4, 0.5], [9.2, 8.8], [0.7, 4.4], [7.9, 1.4]], [[1, 0.9], [1, -1], [-4.3, 8.7], [0.8, 0.3]]]
    ).log_softmax(-1)
    actions = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]])[..., None]
    log_ratios = (target - behaviour).gather(-1, actions)[..., 0].T
    return unbroken(
        log_ratios,
        double([[-1.3, -1.3, 2.3, 42], [1.3, 5.3, -3.3, -5]]).T,
        double([[2.1, 1.1, -3.1, 0], [3.1, 0.1, -1.1, 7.4]]).T,
        double([8.4, -1.2]),
        double([[0, 0.89, 0.85, 0.99], [0.88, 1, 0.83, 0.95]]).T,
        gradient_rho_cap=gradient_rho_cap,
    )


ERRORS_A = double([[-1.61551, -3.49732, 1.86705, 50.316], [1.46624, 3.61164, -8.337e-5, -13.54]]).T
CAPPED_AT_5 = double([[-1.61551, -17.48661, 1.86705, 162.05268], [7.33122, 3.61164, -8.337e-5, -25.84168]]).T


def test_case_a_rlax() -> None:
    for cap, expected in ((1.0, ERRORS_A), (5.0, CAPPED_AT_5)):
        got = case_a(cap)
        assert torch.allclose(got.errors, ERRORS_A, atol=1e-5, rtol=1e-5)
        assert torch.allclose(got.advantages, expected, atol=1e-5, rtol=1e-5)


def test_case_b_seed_rl() -> None:
    steps = torch.arange(25, dtype=torch.float64)
    rewards = steps.reshape(5, 5)
    got = unbroken(
        (5 * (steps / 25 - 0.5)).reshape(5, 5),
        rewards,
        rewards / 5,
        torch.arange(5, dtype=torch.float64) + 1,
        0.9 / (torch.arange(5, dtype=torch.float64) + 1),
        rho_cap=3.7,
        gradient_rho_cap=2.2,
    )
    targets = rewards / 5 + got.errors
    assert torch.allclose(targets[0], double([0.929816, 0.556437, 0.816895, 1.189767, 1.654995]), atol=1e-6, rtol=0)
    expected = double([118.505139, 88.928326, 78.001, 69.30495, 64.79132])
    assert torch.allclose(got.advantages[3], expected, atol=1e-5, rtol=0)


def slow_vtrace(
    log_ratios: np.ndarray,
    rewards: np.ndarray,
    values: np.ndarray,
    successors: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    valid: np.ndarray,
    gamma: float,
    lam: float,
    rho_cap: float,
    gradient_rho_cap: float,
) -> tuple[np.ndarray, np.ndarray]:
    """v_s − V_s as the double sum, and the advantages from v_{s+1}."""
    errors, advantages = np.zeros_like(values), np.zeros_like(values)
    ratios = np.exp(log_ratios)
    for row in range(values.shape[1]):
        for s in range(values.shape[0]):
            factor = 1.0
            for t in range(s, values.shape[0]):
                if not valid[t, row]:
                    break
                following = 0.0 if terminated[t, row] else successors[t, row]
                delta = rewards[t, row] + gamma * following - values[t, row]
                errors[s, row] += factor * min(rho_cap, ratios[t, row]) * delta
                factor *= gamma * lam * min(1.0, ratios[t, row])
                if terminated[t, row] or truncated[t, row]:
                    break
        for s in range(values.shape[0]):
            if not valid[s, row]:
                continue
            target = 0.0 if terminated[s, row] else successors[s, row]
            if s + 1 < values.shape[0] and not (terminated[s, row] or truncated[s, row]):
                target += errors[s + 1, row]
            weight = min(gradient_rho_cap, ratios[s, row])
            advantages[s, row] = weight * (rewards[s, row] + gamma * target - values[s, row])
    return errors, advantages


def test_vtrace_equals_the_double_loop_on_200_random_inputs() -> None:
    generator = np.random.default_rng(0)
    for _ in range(200):
        shape = (int(generator.integers(1, 10)), int(generator.integers(1, 5)))
        log_ratios, rewards, values, successors = (generator.standard_normal(shape) for _ in range(4))
        terminated, truncated = (generator.random(shape) < 0.2 for _ in range(2))
        valid = generator.random(shape) < 0.85
        gamma, lam, rho_cap, gradient_rho_cap = generator.random(4) * [1, 1, 2, 2]
        arrays = (log_ratios, rewards, values, successors, terminated, truncated, valid)
        got = vtrace(*(torch.from_numpy(array) for array in arrays), gamma, lam, rho_cap, gradient_rho_cap)
        errors, advantages = slow_vtrace(*arrays, gamma, lam, rho_cap, gradient_rho_cap)
        np.testing.assert_allclose(got.errors.numpy(), errors, rtol=0, atol=1e-9)
        np.testing.assert_allclose(got.advantages.numpy(), advantages, rtol=0, atol=1e-9)


def test_on_policy_with_lambda_its_targets_are_those_of_gae() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values, successors = torch.randn(3, 7, 3, generator=generator, dtype=torch.float64)
    terminated, truncated = torch.rand(2, 7, 3, generator=generator) < 0.2
    valid = torch.rand(7, 3, generator=generator) < 0.9
    same = (rewards, values, successors, terminated, truncated, valid, 0.9, 0.8)
    got = vtrace(torch.zeros_like(values), *same, 1.0, 1.0)
    torch.testing.assert_close(got.errors, gae(*same), rtol=0, atol=1e-12)


def test_garbage_in_held_rows_and_behind_terminations_is_never_read() -> None:
    nan = float("nan")
    flags = [torch.tensor(values)[:, None] for values in ([False, True, False], [False] * 3, [True, True, False])]
    columns = [double(values)[:, None] for values in ([0, 0, nan], [1, 1, nan], [0.5, 0.25, nan], [0.25, nan, nan])]
    got = vtrace(*columns, *flags, 0.5, 1.0, 1.0, 1.0)
    assert torch.equal(got.errors[:, 0], double([1.0, 0.75, 0.0]))
    assert torch.equal(got.advantages[:, 0], double([1.0, 0.75, 0.0]))


@pytest.mark.parametrize("cap", [0.5, 3.0])
def test_weights_are_ratios_up_to_their_cap(cap: float) -> None:
    rewards, values = double([[1.0], [1.0]]), double([[0.0], [0.0]])
    got = unbroken(double([[0.0], [2.0]]), rewards, values, double([0.0]), double(0.9), gradient_rho_cap=cap)
    assert got.weights[:, 0].tolist() == [min(1.0, cap), cap]
