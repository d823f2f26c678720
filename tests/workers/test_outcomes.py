"""Success of episodes, by the weights they started with."""

from __future__ import annotations

import pytest
from live_run import Run

from vla_stream.streams.trajectories import Episode
from workers.outcomes import WINDOW, EpisodeOutcomes, TaskOutcomes, settled_lag

LAG = 3


def episodes(version: int, *successes: bool, steps: int = 4) -> list[Episode]:
    return [Episode(version, success, success, 2.0 * success, steps) for success in successes]


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


TASKS = {"near": {"weight": 3}, "far": {"weight": 1}}  # tickets go near, near, far, near


def test_each_task_has_its_own_figures_and_the_whole_is_their_mean_by_weight(run: Run) -> None:
    outcomes = TaskOutcomes(run.config(environment__tasks=TASKS, simulators__env_batches=2))
    outcomes.add(1, episodes(1, True, True, True, True, False))  # many short episodes of the quick task
    outcomes.add(2, [])
    outcomes.add(3, episodes(1, False, steps=40))
    summary = outcomes.summary(1 + 10)
    assert (summary["success.near"], summary["success.far"], summary["episodes.near"]) == (0.8, 0.0, 5)
    assert (summary["segments.near"], summary["segments.far"]) == (2, 1)
    assert summary["success"] == pytest.approx(0.75 * 0.8) and summary["episodes"] == 6
    assert summary["episode_steps"] == pytest.approx(0.75 * 4 + 0.25 * 40)
    assert outcomes.summary(1 + 10)["segments.near"] == 0, "since the last summary"


def test_while_one_task_has_no_settled_episode_the_whole_says_nothing(run: Run) -> None:
    outcomes = TaskOutcomes(run.config(environment__tasks=TASKS, simulators__env_batches=2))
    outcomes.add(1, episodes(1, True))
    summary = outcomes.summary(1 + 10)
    assert "success" not in summary and summary["success.near"] == 1.0 and summary["segments.far"] == 0


def test_a_run_with_one_task_tells_what_it_always_told(run: Run) -> None:
    outcomes, before = TaskOutcomes(run.config()), EpisodeOutcomes(settled_lag(run.config()))
    outcomes.add(1, episodes(1, True, False))
    before.add(episodes(1, True, False))
    assert outcomes.summary(11) == before.summary(11) != {}
