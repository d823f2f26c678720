"""The suite that tells whether an environment keeps the protocol: all of ours do, and each kind of bug is found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulator_interpreters import config_for

from vla_stream.environments import conformance
from vla_stream.environments.conformance import Report
from vla_stream.environments.protocol import Observations, StepResult
from vla_stream.environments.tabletop import CAMERA, Tabletop
from vla_stream.errors import InputError
from vla_stream.plugins import ENVIRONMENTS, load_class, parse_options
from workers import environment_apart


def checked(cls: Any, max_steps: int, **options: Any) -> Report:
    parsed = parse_options(cls, options, "environment.options")
    return conformance.check_environment(
        lambda rows, horizon: cls(rows, horizon, parsed), cls.rows_per_process, max_steps
    )


ROBOT_PARTS = {"state": ["joints", "gripper"], "success": "terminated"}


@pytest.mark.parametrize(
    ("name", "max_steps", "options"),
    [
        ("tabletop", 40, {}),
        ("tabletop", 40, {"shaping": 1.0}),
        ("gymnasium", 20, {"id": "Pendulum-v1", "instruction": "swing it up"}),
        ("gymnasium-apart", 20, {"id": "CartPole-v1", "instruction": "balance it"}),
        ("gymnasium", 20, {"id": "fake_gymnasium:Robot-v0", "instruction_key": "language", **ROBOT_PARTS}),
        ("fakes:Line", 12, {}),
    ],
    ids=["tabletop", "shaped", "pendulum", "cart pole", "a robot with cameras", "the tests' own"],
)
def test_all_our_environments_keep_the_protocol(name: str, max_steps: int, options: dict[str, Any]) -> None:
    report = checked(load_class(ENVIRONMENTS, name), max_steps, **options)
    assert report.problems == {}
    assert report.notes == ([] if name == "tabletop" else [report.notes[0]])


@pytest.mark.maniskill
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")
def test_maniskill_keeps_the_protocol() -> None:
    assert checked(load_class(ENVIRONMENTS, "maniskill"), 48).problems == {}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("libero", "metaworld")]
)
@pytest.mark.timeout(900)  # LIBERO is made ten times: minutes on a busy machine
def test_simulators_with_an_interpreter_of_their_own_keep_the_protocol(name: str) -> None:
    # Of one task: with all ten of a suite nearly every reset loads another one.
    about = environment_apart.ask(config_for(name, **{"tasks": [0]} if name == "libero" else {}), "try")
    assert about.reports[""].problems == {}
    assert about.offers == (("expert_actions",) if name == "metaworld" else ())


def test_the_emulated_environment_keeps_all_but_what_its_pictures_of_noise_cannot() -> None:
    report = checked(load_class(ENVIRONMENTS, "emulated"), 6, image_size=8)
    # They move on with every observation, and are views of one array: copying them would take the emulated time.
    assert report.problems.keys() == {"seeding", "inactive_rows", "no_shared_buffers"}
    assert all("another image front" in problem for problem in report.problems.values())


class WrongReward(Tabletop):
    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        return replace(result, reward=result.reward.astype(np.float64))


class WrongImage(Tabletop):
    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        observations = super().reset(mask, seeds)
        return replace_images(observations, observations.images[CAMERA].astype(np.float32) / 255)


class SeedOfTheFirstReset(Tabletop):
    """The last episode's number of resets decides the scene too."""

    resets = 0

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        self.resets += 1
        return super().reset(mask, seeds + np.uint64(self.resets))


class RowDecides(Tabletop):
    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        return super().reset(mask, seeds + np.arange(self.rows, dtype=np.uint64) * np.uint64(100))


class OneScene(Tabletop):
    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        return super().reset(mask, seeds * np.uint64(0))


class StepsAllRows(Tabletop):
    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        return super().step(actions, active | True)


class ResetsAllRows(Tabletop):
    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        return super().reset(mask | True, seeds)


class AutoReset(Tabletop):
    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        ended = result.terminated | result.truncated
        if not ended.any():
            return result
        return replace(result, observations=super().reset(ended, np.full(self.rows, 99, np.uint64)))


class NeverTruncates(Tabletop):
    def __init__(self, rows: int, max_steps: int, options: Tabletop.Options) -> None:
        super().__init__(rows, max_steps + 1, options)
        self.max_steps = max_steps

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        self.max_steps += 1
        try:
            return super().step(actions, active)
        finally:
            self.max_steps -= 1


class NeverSucceeds(Tabletop):
    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        result = super().step(actions, active)
        return replace(result, success=np.zeros_like(result.success))


class OneStateBuffer(Tabletop):
    buffer: np.ndarray | None = None

    def _observations(self) -> Observations:
        observations = super()._observations()
        if self.buffer is None:
            self.buffer = observations.state
        self.buffer[:] = observations.state
        return Observations(observations.images, self.buffer, observations.instruction)


class ReadsWhatItReturned(Tabletop):
    returned: np.ndarray | None = None

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        if self.returned is not None and (self.returned == 77).any():
            actions = -actions
        result = super().step(actions, active)
        self.returned = result.observations.state
        return result

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        observations = super().reset(mask, seeds)
        self.returned = observations.state
        return observations


class SwallowsNaN(Tabletop):
    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        return super().step(np.nan_to_num(actions), active)


class RaisesSomethingElse(Tabletop):
    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        if actions.shape[1] != 3:
            raise ValueError("three are enough")
        return super().step(actions, active)


class ClosesOnce(Tabletop):
    closed = False

    def close(self) -> None:
        assert not self.closed, "closed before"
        self.closed = True


def replace_images(observations: Observations, image: np.ndarray) -> Observations:
    return Observations({CAMERA: image}, observations.state, observations.instruction)


@pytest.mark.parametrize(
    ("bug", "check", "told"),
    [
        (WrongReward, "shapes", "reward is float64, expected float32"),
        (WrongImage, "shapes", "image front is float32[3, 48, 48, 3], expected uint8"),
        (SeedOfTheFirstReset, "seeding", "the same seeds again: another image front after 0 steps"),
        (RowDecides, "seeding", "the same seeds in other rows: another image front"),
        (OneScene, "seeding", "four seeds give the same first observation"),
        (StepsAllRows, "inactive_rows", "a row that is not active moved"),
        (ResetsAllRows, "inactive_rows", "a row that is not reset changed"),
        (AutoReset, "final_observation", "step 3 of 3 does not show what a longer episode shows there"),
        (NeverTruncates, "final_observation", "a row goes on after its 3 steps"),
        (NeverSucceeds, "success_flag", "`success` was never set"),
        (OneStateBuffer, "no_shared_buffers", "an observation changed after it was returned"),
        (ReadsWhatItReturned, "no_shared_buffers", "writing into what was returned: another"),
        (SwallowsNaN, "bad_action_rejected", "actions with NaN are executed, expected EnvironmentFailed"),
        (RaisesSomethingElse, "bad_action_rejected", "raise ValueError, expected EnvironmentFailed"),
        (ClosesOnce, "closing", "AssertionError: closed before"),
    ],
)
def test_a_bug_of_each_kind_is_found_and_named(bug: type[Tabletop], check: str, told: str) -> None:
    report = checked(bug, 16)
    assert told in report.problems.get(check, "nothing"), report


def test_what_cannot_be_made_is_bad_input_and_no_finding() -> None:
    with pytest.raises(InputError, match="expected an id that gymnasium knows"):
        checked(load_class(ENVIRONMENTS, "gymnasium"), 20, id="NoSuchThing-v0", instruction="x")
