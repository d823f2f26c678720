"""Denoising of flow-matching policies (π0, SmolVLA) with noise that has a density, after πRL (arXiv 2510.25889).

The time t runs from 1 (noise) to 0 (action) in K steps of δ = 1/K. The network predicts the velocity v = noise − action
at x; the action is then expected at x − v·t, the noise at x + v·(1 − t).

    Flow-SDE    a step is a Gaussian around the solution of a stochastic equation that has the ODE's marginals
    Flow-Noise  a step is a Gaussian around the ODE's, and the standard deviation is the network's own

# B rows, K denoising steps, C actions that the network makes, H of them executed, D padded action dims, A real ones
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LOG_2PI = math.log(2 * math.pi)


def denoising_times(steps: int) -> Tensor:
    """f64[K]: 1, 1 − δ, …, δ, where the network is asked."""
    return 1 - torch.arange(steps, dtype=torch.float64) / steps


def ode_step(x: Tensor, velocity: Tensor, delta: float) -> Tensor:
    """x at t − δ without noise, as x at t: the mean of a step of Flow-Noise."""
    return x - velocity * delta


def sde_step(x: Tensor, velocity: Tensor, t: Tensor, delta: float, noise_level: float) -> tuple[Tensor, Tensor]:
    """Mean, as x, and standard deviation, as t, of x at t − δ in Flow-SDE. t in (0, 1] must broadcast to x.

    σ = a·√(t/(1 − t)) with a = `noise_level`; at t = 1, where that is infinite, its denominator is that of t − δ.
    The mean is x̂0·(1 − (t − δ)) + x̂1·(t − δ − σ²δ/2t), and the standard deviation σ·√δ.
    """
    first = t > 1 - delta / 2
    variance = noise_level**2 * t / torch.where(first, 1 - (t - delta), 1 - t)
    action, noise = x - velocity * t, x + velocity * (1 - t)
    mean = action * (1 - (t - delta)) + noise * (t - delta - variance * delta / (2 * t))
    return mean, (variance * delta).sqrt()


def gaussian_logprobs(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density of each element of x under N(mean, std²)."""
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * _LOG_2PI


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of each element of N(·, std²)."""
    return std.log() + 0.5 * (1 + _LOG_2PI)


def uniform_index(normal: Tensor, count: int) -> Tensor:
    """i64[B] uniform in 0 … count − 1 from standard normal numbers f[B], by their distribution function."""
    share: Tensor = torch.special.ndtr(normal.double())
    return (share * count).long().clamp(max=count - 1)
