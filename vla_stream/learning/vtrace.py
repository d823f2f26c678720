"""V-trace (arXiv 1802.01561): value targets and advantages from the data of another policy, as a pure function.

Legend of shape suffixes: T chunk steps, B rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """All [T, B], and 0 where a chunk step is not valid.

    errors  v_s − V_s: what the value is off by
    gains   r_s + γ v_{s+1} − V_s: the advantage before its weight
    weights min(ρ̄_pg, π ÷ μ): that weight
    """

    errors: Tensor
    gains: Tensor
    weights: Tensor

    @property
    def advantages(self) -> Tensor:
        """Those of the policy gradient."""
        return self.weights * self.gains


def vtrace(
    log_ratios_TB: Tensor,
    rewards_TB: Tensor,
    values_TB: Tensor,
    successors_TB: Tensor,
    terminated_TB: Tensor,
    truncated_TB: Tensor,
    valid_TB: Tensor,
    gamma: float | Tensor,
    lam: float,
    rho_cap: float,
    gradient_rho_cap: float,
) -> VTrace:
    """v_s = V_s + Σ_{t ≥ s} γ^{t−s} (Π_{i=s}^{t−1} c_i) ρ_t (r_t + γ V(s_next) − V_t), until the row's episode ends.

    ρ_t = min(ρ̄, π ÷ μ), c_t = λ · min(1, π ÷ μ) from log π − log μ of whole chunks, the decisions. The rest is as in
    `gae`: `successors_TB` is V(s_next), not read where terminated; steps that are not valid are not read at all.
    `gamma` may be a tensor that broadcasts to [T, B].
    """
    zero = torch.zeros_like(values_TB)
    ratios_TB = torch.where(valid_TB, log_ratios_TB, zero).exp()
    gammas_TB = torch.as_tensor(gamma, dtype=values_TB.dtype, device=values_TB.device).expand_as(values_TB)
    bootstrap_TB = torch.where(terminated_TB, zero, successors_TB)
    deltas_TB = torch.where(valid_TB, rewards_TB + gammas_TB * bootstrap_TB - values_TB, zero)
    deltas_TB = ratios_TB.clamp(max=rho_cap) * deltas_TB
    traces_TB = lam * ratios_TB.clamp(max=1.0)
    goes_on_TB = valid_TB & ~(terminated_TB | truncated_TB)
    errors_TB, next_errors_TB = torch.zeros_like(values_TB), torch.zeros_like(values_TB)
    following_B = zero[0]
    for t in reversed(range(len(values_TB))):
        next_errors_TB[t] = torch.where(goes_on_TB[t], following_B, 0.0)
        following_B = deltas_TB[t] + gammas_TB[t] * traces_TB[t] * next_errors_TB[t]
        errors_TB[t] = following_B
    gains_TB = rewards_TB + gammas_TB * (bootstrap_TB + next_errors_TB) - values_TB
    weights_TB = torch.where(valid_TB, ratios_TB.clamp(max=gradient_rho_cap), zero)
    return VTrace(errors_TB, torch.where(valid_TB, gains_TB, zero), weights_TB)
