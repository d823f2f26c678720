"""A policy that breaks the protocol, found as `broken_policies:Forgetful`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from fake_policies import Linear

from vla_stream.environments.protocol import Observations
from vla_stream.policies.protocol import Evaluation


class Forgetful(Linear):
    """Its evaluate knows another log-prob than its act."""

    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        evaluation = super().evaluate(observations, actions, extras)
        return replace(evaluation, logprobs=evaluation.logprobs - 1)
