"""Chunks: nothing happens after an end inside one, and what an environment returns is checked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from fakes import Line

from vla_stream.environments.chunks import check_result, reset_checked, run_chunk
from vla_stream.environments.protocol import Observations, StepResult
from vla_stream.errors import EnvironmentFailed

H = 4
NEVER = np.zeros(3, dtype=bool)
ALL = np.ones(3, dtype=bool)
SEEDS = np.array([11, 12, 13], dtype=np.uint64)


def make_line(max_steps: int = 20, distances: tuple[float, float, float] = (1.0, 1.0, 1.0)) -> Line:
    """Three rows at 0, each with its goal at the given distance: full steps reach a goal at 0.5 in two."""
    line = Line(3, max_steps, Line.Options())
    line.reset(ALL, SEEDS)
    line.position[:], line.goal[:] = 0.0, distances
    line.calls.clear()
    return line


def full_steps() -> np.ndarray:
    return np.ones((3, H, 2), dtype=np.float32)


def test_the_rest_of_a_chunk_after_an_end_is_not_executed() -> None:
    line = make_line(distances=(0.5, 2.0, 0.25))
    result = run_chunk(line, full_steps(), ALL, NEVER, SEEDS)
    assert result.executed.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert line.calls == [("step", [0, 1, 2]), ("step", [0, 1]), ("step", [1]), ("step", [1])]
    assert line.position.tolist() == [0.5, 1.0, 0.25]
    assert result.terminated.tolist() == result.success.tolist() == [True, False, True]
    assert result.rewards == pytest.approx([-0.25, -(1.75 + 1.5 + 1.25 + 1.0), 0.0])
    assert not result.truncated.any() and result.final is None


def test_a_chunk_stops_early_when_all_rows_have_ended() -> None:
    line = make_line(distances=(0.25, 0.25, 0.25))
    run_chunk(line, full_steps(), ALL, NEVER, SEEDS)
    assert line.calls == [("step", [0, 1, 2])]


def test_rows_that_are_not_active_are_not_stepped_and_report_nothing() -> None:
    line = make_line(distances=(0.25, 0.25, 2.0))
    result = run_chunk(line, full_steps(), np.array([False, True, False]), ALL, SEEDS)
    assert line.calls == [("step", [1]), ("reset", [1])]
    assert result.executed.any(axis=1).tolist() == [False, True, False]
    assert result.rewards.tolist() == [0.0, 0.0, 0.0] and result.terminated.tolist() == [False, True, False]


def test_success_at_the_end_is_that_of_the_last_executed_action() -> None:
    class Passing(Line):
        """Goes on when it has reached its goal."""

        def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
            result = super().step(actions, active)
            return dataclasses.replace(result, terminated=NEVER)

    line = Passing(3, 3, Line.Options())
    line.reset(ALL, SEEDS)
    line.position[:], line.goal[:] = 0.0, (0.25, 0.75, 5.0)
    result = run_chunk(line, full_steps(), ALL, NEVER, SEEDS)
    assert result.truncated.all() and result.executed.sum(axis=1).tolist() == [3, 3, 3]
    assert result.success.tolist() == [True, True, False] and result.at_end.tolist() == [False, True, False]


def test_f52_a_truncated_row_shows_its_observation_before_the_reset() -> None:
    line = make_line(max_steps=3, distances=(5.0, 0.5, 5.0))
    result = run_chunk(line, full_steps(), np.array([True, True, False]), ALL, SEEDS)
    assert result.truncated.tolist() == [True, False, False] and result.terminated.tolist() == [False, True, False]
    assert result.final is not None and result.final_rows.tolist() == [0]
    assert result.final.state[0].tolist() == [0.75, 5.0, 1.0]
    # What comes next is after the reset: no step yet.
    assert result.observations.state[:2, 2].tolist() == [0.0, 0.0]
    fresh = Line(3, 3, Line.Options()).reset(ALL, SEEDS)
    assert np.array_equal(result.observations.state[:2], fresh.state[:2])


def test_final_rows_of_different_steps_keep_their_own_observations() -> None:
    line = make_line(max_steps=4, distances=(5.0, 5.0, 5.0))
    line.steps[:] = 0, 2, 1
    result = run_chunk(line, full_steps(), ALL, NEVER, SEEDS)
    assert result.final is not None and result.final_rows.tolist() == [1, 2, 0]
    assert result.final.state[:, 0].tolist() == [0.5, 0.75, 1.0]


def test_a_row_that_reaches_its_goal_in_its_last_step_is_terminated_not_truncated() -> None:
    line = make_line(max_steps=2, distances=(0.5, 5.0, 5.0))
    result = run_chunk(line, full_steps(), ALL, NEVER, SEEDS)
    assert result.terminated.tolist() == [True, False, False]
    assert result.truncated.tolist() == [False, True, True]
    assert result.final_rows.tolist() == [1, 2]


def test_only_rows_that_ended_and_were_asked_for_are_reset() -> None:
    line = make_line(distances=(0.25, 0.25, 5.0))
    run_chunk(line, full_steps(), ALL, np.array([True, False, True]), SEEDS)
    assert line.calls[-1] == ("reset", [0])


BAD_RESULTS = {
    "state with NaN": {"state": np.full((3, 3), np.nan, dtype=np.float32)},
    "state of another dtype": {"state": np.zeros((3, 3))},
    "state of another width": {"state": np.zeros((3, 4), dtype=np.float32)},
    "a row too few": {"state": np.zeros((2, 3), dtype=np.float32)},
    "another camera": {"images": {"wrist": np.zeros((3, 16, 16, 3), dtype=np.uint8)}},
    "an instruction too few": {"instruction": ["go"] * 2},
    "reward of infinity": {"reward": np.array([0, np.inf, 0], dtype=np.float32)},
    "reward as a column": {"reward": np.zeros((3, 1), dtype=np.float32)},
    "flags as numbers": {"terminated": np.zeros(3)},
    "flags of another length": {"success": np.zeros(2, dtype=bool)},
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_result_outside_the_specification_is_an_environment_failure(name: str) -> None:
    line = make_line()
    good = line.step(full_steps()[:, 0], ALL)
    check_result(good, line.specification, 3)
    change = BAD_RESULTS[name]
    seen = {key: change[key] for key in ("images", "state", "instruction") if key in change}
    rest = {key: value for key, value in change.items() if key not in seen}
    bad = dataclasses.replace(good, observations=dataclasses.replace(good.observations, **seen), **rest)
    with pytest.raises(EnvironmentFailed):
        check_result(bad, line.specification, 3)


def test_a_bad_observation_of_a_reset_is_an_environment_failure_too() -> None:
    line = Line(3, 20, Line.Options(fault="nan", fault_seed=12))
    with pytest.raises(EnvironmentFailed, match="NaN"):
        reset_checked(line, ALL, SEEDS)


def test_a_bad_step_ends_the_chunk_with_an_environment_failure() -> None:
    class Broken(Line):
        def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
            good = super().step(actions, active)
            if self.steps.max() < 2:
                return good
            state = np.zeros((3, 1), dtype=np.float32)
            return dataclasses.replace(good, observations=Observations(good.observations.images, state, ["go"] * 3))

    line = Broken(3, 20, Line.Options())
    line.reset(ALL, SEEDS)
    with pytest.raises(EnvironmentFailed, match=r"state is float32\[3, 1\], expected float32\[3, 3\]"):
        run_chunk(line, full_steps(), ALL, NEVER, SEEDS)
