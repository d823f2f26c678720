"""Success of episodes, by the weights they started with."""

from __future__ import annotations

import pytest
from live_run import Run

from vla_stream.streams.trajectories import Episode
from workers.outcomes import WINDOW, EpisodeOutcomes, settled_lag

LAG = 3


def episodes(version: int, *successes: bool, steps: int = 4) -> list[Episode]:
    return [Episode(version, success, 2.0 * success, steps) for success in successes]


def test_there_is_nothing_to_say_before_the_first_episodes_have_settled() -> None:
    outcomes = EpisodeOutcomes(LAG)
    assert outcomes.summary(1) == {}
    outcomes.add(episodes(1, True))
    assert outcomes.summary(LAG) == {}
    assert outcomes.summary(1 + LAG)["success"] == 1.0


def test_f51_episodes_count_by_their_start_so_that_quick_successes_do_not_flatter() -> None:
    outcomes = EpisodeOutcomes(LAG)
    outcomes.add(episodes(1, True, True, steps=2))
    # The failures of the same start end later.
    outcomes.add(episodes(1, False, False, steps=10))
    assert outcomes.summary(1 + LAG) == {"success": 0.5, "return": 1.0, "episode_steps": 6.0, "episodes": 4}


def test_versions_that_are_too_young_or_too_old_are_left_out() -> None:
    outcomes = EpisodeOutcomes(LAG)
    for version in range(1, 20):
        outcomes.add(episodes(version, version >= 12))
    newest = 14
    summary = outcomes.summary(newest + LAG)
    assert summary["episodes"] == WINDOW and summary["success"] == 3 / WINDOW


def test_old_versions_are_forgotten() -> None:
    outcomes = EpisodeOutcomes(LAG)
    for version in range(1, 500):
        outcomes.add(episodes(version, True))
        outcomes.summary(version)
    assert len(outcomes._by_version) <= 2 * WINDOW + LAG


@pytest.mark.parametrize(
    ("max_steps", "segment", "eta", "expected"),
    [(12, {"steps": 6}, 0, 2), (12, {"steps": 6}, 1, 4), (14, {"steps": 6}, 1, 6), (12, "episode", 4, 5)],
    ids=["synchronous", "two segments", "a chunk more", "whole episodes"],
)
def test_episodes_have_settled_when_all_segments_that_they_reach_into_are_trained(
    run: Run, max_steps: int, segment: object, eta: int, expected: int
) -> None:
    changes = {"environment__max_steps": max_steps, "simulators__segment": segment, "flow__max_staleness": eta}
    assert settled_lag(run.config(**changes)) == expected
