"""The unit of training data. Shape suffixes: T chunk steps, k rows of one slot, H actions per chunk, A action dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vla_stream.environments.protocol import Observations


@dataclass(frozen=True, slots=True)
class Segment:
    """What one slot of k rows contributes to an update: T chunk steps.

    ticket        number of the permit it was made under; orders segments
    observations  T+1 of k rows; [t] is what chunk step t acted on, [T] closes the segment. After a row ended in
                  chunk step t (and in segments with resets), [t+1] holds the observation after its reset.
    final         observations before the reset of rows that were truncated, N rows (None if there are none)
    final_index   i64[N, 2]: chunk step and row of each row of `final`
    actions       f32[T, k, H, A]; logprobs f32[T, k, H, A], those of the behaviour policy
    executed      bool[T, k, H]: the action was executed (False after the row ended inside the chunk)
    valid         bool[T, k]: the row took part in this chunk step (False once it is held, in episode segments)
    rewards       f32[T, k]: sum over the executed actions of the chunk
    terminated, truncated, success   bool[T, k]: what happened in this chunk step
    versions      i64[T]: version of the weights that acted
    extras        name -> array[T, k, ...], from `Act.extras`
    """

    ticket: int
    observations: Sequence[Observations]
    final: Observations | None
    final_index: np.ndarray
    actions: np.ndarray
    logprobs: np.ndarray
    executed: np.ndarray
    valid: np.ndarray
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray
    versions: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """T."""
        return int(self.actions.shape[0])

    @property
    def rows(self) -> int:
        """k."""
        return int(self.actions.shape[1])
