"""The synthetic environment of the comparisons, through the adapter that a run would use."""

from __future__ import annotations

import time

import numpy as np
import pytest

from vla_stream.environments.gymnasium import Gymnasium


@pytest.fixture
def batch() -> Gymnasium:
    return Gymnasium(2, 200, Gymnasium.Options(id="pixels:Pixels-v0", kwargs={"step_ms": 5.0}))


def test_it_shows_an_image_of_96_pixels_and_takes_its_time_row_after_row(batch: Gymnasium) -> None:
    everywhere = np.ones(2, dtype=bool)
    assert dict(batch.specification.cameras) == {"front": (96, 96)} and batch.specification.action_dims == 4
    first = batch.reset(everywhere, np.array([1, 2], dtype=np.uint64)).take([0, 1])
    start_s = time.monotonic()
    results = [batch.step(np.eye(4, dtype=np.float32)[:2], everywhere) for _ in range(10)]
    assert time.monotonic() - start_s >= 2 * 10 * 0.005
    last = results[-1].observations.take([0, 1])
    assert first.images["front"].shape == (2, 96, 96, 3)
    assert (first.images["front"] != last.images["front"]).mean() > 0.5


def test_one_of_its_actions_is_rewarded_and_an_episode_has_128_steps(batch: Gymnasium) -> None:
    row = np.array([True, False])
    batch._envs[0].unwrapped._step_s = 0.0
    batch.reset(row, np.array([3, 0], dtype=np.uint64))
    rewards = []
    for step in range(128):
        actions = np.zeros((2, 4), dtype=np.float32)
        actions[0, step % 4] = 1.0
        result = batch.step(actions, row)
        rewards.append(float(result.reward[0]))
        assert result.terminated[0] == (step == 127)
    assert sum(rewards) == 32 and set(rewards) == {0.0, 1.0}
