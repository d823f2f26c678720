"""Flow-SDE and Flow-Noise against loops written straight from the equations, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from vla_stream.policies import flow_matching as flow

STEPS = [1, 2, 4, 10]
NOISE_LEVEL = 0.5


def slow_sde(x: float, velocity: float, t: float, delta: float, noise_level: float) -> tuple[float, float]:
    """Mean and standard deviation of one number."""
    below = 1 - t if t < 1 else 1 - (t - delta)
    sigma = noise_level * math.sqrt(t / below)
    action, noise = x - velocity * t, x + velocity * (1 - t)
    mean = action * (1 - (t - delta)) + noise * (t - delta - sigma**2 * delta / (2 * t))
    return mean, sigma * math.sqrt(delta)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("steps", STEPS)
def test_the_network_is_asked_at_one_and_then_ever_nearer_to_zero(steps: int) -> None:
    assert flow.denoising_times(steps).tolist() == pytest.approx([1 - k / steps for k in range(steps)])


@pytest.mark.parametrize("steps", STEPS)
def test_a_step_of_flow_sde_is_that_of_a_slow_loop_at_all_times(steps: int) -> None:
    x, velocity, t = random(steps, 3), random(steps, 3, seed=1), flow.denoising_times(steps)[:, None]
    mean, std = flow.sde_step(x, velocity, t, 1 / steps, NOISE_LEVEL)
    for k in range(steps):
        for i in range(3):
            expected = slow_sde(float(x[k, i]), float(velocity[k, i]), float(t[k]), 1 / steps, NOISE_LEVEL)
            assert float(mean[k, i]) == pytest.approx(expected[0], abs=1e-12)
            assert float(std[k]) == pytest.approx(expected[1], abs=1e-12)


def test_the_first_standard_deviation_is_the_noise_level_and_single_precision_knows_which_step_is_first() -> None:
    for steps in range(1, 100):
        t = flow.denoising_times(steps).float()
        _, std = flow.sde_step(torch.zeros(steps), torch.zeros(steps), t, 1 / steps, NOISE_LEVEL)
        assert float(std[0]) == pytest.approx(NOISE_LEVEL, rel=1e-4)
        assert torch.isfinite(std).all()


@pytest.mark.parametrize("steps", STEPS)
def test_without_noise_flow_sde_is_the_ode(steps: int) -> None:
    x, velocity, t = random(steps, 3), random(steps, 3, seed=1), flow.denoising_times(steps)[:, None]
    mean, std = flow.sde_step(x, velocity, t, 1 / steps, 1e-9)
    torch.testing.assert_close(mean, flow.ode_step(x, velocity, 1 / steps))
    assert float(std.max()) < 1e-8


def test_flow_sde_keeps_the_distribution_that_the_ode_makes() -> None:
    # Actions of N(2, 0.5²): then x at t is N(2(1 − t), t² + (0.5(1 − t))²), and the velocity is known.
    steps, x, draws = 200, random(10_000), torch.Generator().manual_seed(1)
    for t in flow.denoising_times(steps):
        variance = t**2 + (0.5 * (1 - t)) ** 2
        slope = (t - 0.25 * (1 - t)) / variance
        velocity = -2 + slope * (x - 2 * (1 - t))
        mean, std = flow.sde_step(x, velocity, t, 1 / steps, NOISE_LEVEL)
        x = mean + std * torch.randn(10_000, generator=draws, dtype=torch.float64)
    assert float(x.mean()) == pytest.approx(2, abs=0.02)
    assert float(x.std()) == pytest.approx(0.5, abs=0.02)


def test_log_probs_and_entropy_are_a_gaussians() -> None:
    x, mean, std = random(4, 3), random(4, 3, seed=1), random(4, 3, seed=2).exp()
    normal = torch.distributions.Normal(mean, std)
    torch.testing.assert_close(flow.gaussian_logprobs(x, mean, std), normal.log_prob(x))
    torch.testing.assert_close(flow.gaussian_entropy(std), normal.entropy())


def test_an_index_from_normal_numbers_is_uniform_and_never_out_of_range() -> None:
    index = flow.uniform_index(random(40_000), 4)
    assert torch.bincount(index).tolist() == pytest.approx([10_000] * 4, rel=0.05)
    assert flow.uniform_index(torch.tensor([-40.0, 40.0]), 4).tolist() == [0, 3]
