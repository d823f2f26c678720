"""Success of episodes, by the weights they started with."""

from __future__ import annotations

from vla_stream.streams.trajectories import Episode
from workers.outcomes import SETTLED_LAG, WINDOW, EpisodeOutcomes


def episodes(version: int, *successes: bool, steps: int = 4) -> list[Episode]:
    return [Episode(version, success, 2.0 * success, steps) for success in successes]


def test_there_is_nothing_to_say_before_the_first_episodes_have_settled() -> None:
    outcomes = EpisodeOutcomes()
    assert outcomes.summary(1) == {}
    outcomes.add(episodes(1, True))
    assert outcomes.summary(SETTLED_LAG) == {}
    assert outcomes.summary(1 + SETTLED_LAG)["success"] == 1.0


def test_f51_episodes_count_by_their_start_so_that_quick_successes_do_not_flatter() -> None:
    outcomes = EpisodeOutcomes()
    outcomes.add(episodes(1, True, True, steps=2))
    # The failures of the same start end later.
    outcomes.add(episodes(1, False, False, steps=10))
    assert outcomes.summary(1 + SETTLED_LAG) == {"success": 0.5, "return": 1.0, "episode_steps": 6.0, "episodes": 4}


def test_versions_that_are_too_young_or_too_old_are_left_out() -> None:
    outcomes = EpisodeOutcomes()
    for version in range(1, 20):
        outcomes.add(episodes(version, version >= 12))
    newest = 14
    summary = outcomes.summary(newest + SETTLED_LAG)
    assert summary["episodes"] == WINDOW and summary["success"] == 3 / WINDOW


def test_old_versions_are_forgotten() -> None:
    outcomes = EpisodeOutcomes()
    for version in range(1, 500):
        outcomes.add(episodes(version, True))
        outcomes.summary(version)
    assert len(outcomes._by_version) <= 2 * WINDOW + SETTLED_LAG
