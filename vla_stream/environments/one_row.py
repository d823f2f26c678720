"""What adapters of simulators with one environment per process share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from vla_stream.environments.protocol import Observations, StepResult
from vla_stream.errors import EnvironmentFailed, InputError


def one_row(
    observations: Observations, reward: float, *, terminated: bool, truncated: bool, success: bool
) -> StepResult:
    """The result of a step of one row."""
    return StepResult(
        observations=observations,
        reward=np.array([reward], np.float32),
        terminated=np.array([terminated]),
        truncated=np.array([truncated]),
        success=np.array([success]),
    )


@contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Whatever a simulator raises becomes an EnvironmentFailed that begins with `what`: the task, and the occasion."""
    try:
        yield
    except (EnvironmentFailed, InputError):
        raise
    except Exception as exc:
        raise EnvironmentFailed(f"{what}: {type(exc).__name__}: {exc}") from exc
