"""The adapter for any gymnasium environment: on those of the package, and on fakes with the spaces that these lack."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import fake_gymnasium
import numpy as np
import pytest

from vla_stream.environments.chunks import run_chunk
from vla_stream.environments.gymnasium import Gymnasium, GymnasiumApart
from vla_stream.environments.protocol import EnvironmentBatch, Observations
from vla_stream.errors import EnvironmentFailed, InputError
from vla_stream.plugins import ALLOWED_VARIABLE, ENVIRONMENTS, load_class, parse_options

ROBOT = "fake_gymnasium:Robot-v0"
CHOICES = "fake_gymnasium:Choices-v0"


def make(id: str, rows: int = 2, max_steps: int = 10, **options: Any) -> Gymnasium:
    return Gymnasium(rows, max_steps, parse_options(Gymnasium, {"id": id, **options}, "environment.options"))


def everywhere(batch: Gymnasium, on: bool = True) -> np.ndarray:
    return np.full(batch.rows, on)


def reset(batch: Gymnasium, *seeds: int, mask: np.ndarray | None = None) -> Observations:
    return batch.reset(everywhere(batch) if mask is None else mask, np.array(seeds, dtype=np.uint64))


def constant(batch: Gymnasium, *values: float) -> np.ndarray:
    """The same action in every row."""
    return np.tile(np.array(values, dtype=np.float32), (batch.rows, 1))


def env_of(batch: Gymnasium, row: int) -> Any:
    return batch._envs[row].unwrapped


# --- the protocol


def test_it_offers_the_protocol_under_both_names() -> None:
    assert load_class(ENVIRONMENTS, "gymnasium") is Gymnasium
    assert load_class(ENVIRONMENTS, "gymnasium-apart") is GymnasiumApart and GymnasiumApart.rows_per_process == 1
    assert isinstance(make("Pendulum-v1"), EnvironmentBatch)


def test_options_are_readable_without_gymnasium() -> None:
    code = (
        "import sys\n"
        "sys.modules['gymnasium'] = None\n"
        "from vla_stream.environments.gymnasium import Gymnasium\n"
        "print(Gymnasium.Options(id='CartPole-v1').success)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "info\n"


def test_the_spaces_of_an_id_become_the_specification() -> None:
    pendulum, cart = make("Pendulum-v1").specification, make("CartPole-v1").specification
    assert (pendulum.cameras, pendulum.state_dims, pendulum.action_dims) == ({}, 3, 1)
    assert (cart.cameras, cart.state_dims, cart.action_dims) == ({}, 4, 2)


def test_a_seed_decides_everything_in_any_row_of_any_batch() -> None:
    narrow, wide = make("Pendulum-v1", rows=1), make("Pendulum-v1", rows=3)
    reset(wide, 1, 2, 3)
    wide.step(constant(wide, 0.3), everywhere(wide))
    for batch, row, seeds in ((narrow, 0, [2**63 + 5]), (wide, 2, [8, 9, 2**63 + 5])):
        states = [reset(batch, *seeds).state[row]]
        for _ in range(5):
            states.append(batch.step(constant(batch, 0.7), everywhere(batch)).observations.state[row])
        if batch is narrow:
            expected = states
    np.testing.assert_array_equal(states, expected)
    assert not np.array_equal(reset(narrow, 6).state, reset(narrow, 7).state)


def test_only_rows_in_the_mask_are_reset() -> None:
    batch = make("Pendulum-v1")
    before = reset(batch, 1, 2).state.copy()
    after = reset(batch, 8, 8, mask=np.array([False, True])).state
    np.testing.assert_array_equal(after[0], before[0])
    assert not np.array_equal(after[1], before[1])


def test_rows_that_are_not_active_stay_as_they_are_and_hold_zeros() -> None:
    batch = make("Pendulum-v1")
    before = reset(batch, 1, 2).state
    result = batch.step(constant(batch, 1.0), np.array([True, False]))
    assert result.reward[0] < 0 and result.reward[1] == 0
    np.testing.assert_array_equal(result.observations.state[1], before[1])
    assert not np.array_equal(result.observations.state[0], before[0])
    # The held row goes on from where it stood, as if nothing had happened.
    alone = make("Pendulum-v1", rows=1)
    reset(alone, 2)
    expected = alone.step(constant(alone, 1.0), everywhere(alone)).observations.state[0]
    got = batch.step(constant(batch, 1.0), np.array([False, True])).observations.state[1]
    np.testing.assert_array_equal(got, expected)


def test_observations_show_their_own_moment_even_when_read_later() -> None:
    batch = make(ROBOT, rows=1, state=["joints"])
    first = reset(batch, 1)
    state = first.state.copy()
    second = batch.step(constant(batch, 0, 0, 0), everywhere(batch)).observations
    np.testing.assert_array_equal(first.state, state)
    assert int(first.images["camera.wrist"].max()) == 0 and int(second.images["camera.wrist"].min()) == 1


# --- ends


def test_the_time_limit_truncates_at_max_steps_and_the_observation_is_that_before_any_reset() -> None:
    batch = make("Pendulum-v1", rows=1, max_steps=3)
    reset(batch, 1)
    results = [batch.step(constant(batch, 0.0), everywhere(batch)) for _ in range(3)]
    assert [bool(r.truncated[0]) for r in results] == [False, False, True]
    assert not any(r.terminated[0] for r in results)
    shown = results[-1].observations.state[0].copy()
    after = reset(batch, 5).state[0]
    assert not np.array_equal(shown, after)
    np.testing.assert_array_equal(results[-1].observations.state[0], shown)


def test_our_limit_takes_the_place_of_a_shorter_registered_one() -> None:
    batch = make("MountainCarContinuous-v0", rows=1, max_steps=1005)  # registered with 999
    reset(batch, 1)
    lengths = 1
    while not batch.step(constant(batch, 0.0), everywhere(batch)).truncated[0]:
        lengths += 1
    assert lengths == 1005


def test_a_fallen_pole_is_terminated_and_not_truncated() -> None:
    batch = make("CartPole-v1", rows=1, max_steps=400)
    reset(batch, 1)
    for _ in range(60):
        result = batch.step(constant(batch, 0.0, 1.0), everywhere(batch))
        if result.terminated[0]:
            break
    assert result.terminated[0] and not result.truncated[0] and not result.success[0]


def test_what_ends_in_the_last_step_is_terminated_and_not_truncated() -> None:
    batch = make(ROBOT, rows=1, max_steps=2, kwargs={"done_at": 2}, state=["joints"])
    reset(batch, 1)
    batch.step(constant(batch, 0, 0, 0), everywhere(batch))
    result = batch.step(constant(batch, 0, 0, 0), everywhere(batch))
    assert result.terminated[0] and not result.truncated[0]


def test_the_environments_own_truncation_counts() -> None:
    batch = make(ROBOT, rows=1, kwargs={"fail": "truncate"}, state=["joints"])
    reset(batch, 1)
    assert batch.step(constant(batch, 0, 0, 0), everywhere(batch)).truncated[0]


def test_a_row_that_ended_or_was_never_reset_must_be_reset_before_its_next_step() -> None:
    batch = make("Pendulum-v1", max_steps=1)
    reset(batch, 1, 0, mask=np.array([True, False]))
    with pytest.raises(EnvironmentFailed, match="Pendulum-v1: step of row 1, which is not running; reset it"):
        batch.step(constant(batch, 0.0), everywhere(batch))
    batch.step(constant(batch, 0.0), np.array([True, False]))
    with pytest.raises(EnvironmentFailed, match="step of row 0"):
        batch.step(constant(batch, 0.0), np.array([True, False]))


def test_a_chunk_keeps_what_a_truncated_row_saw_before_its_reset() -> None:
    batch = make(ROBOT, max_steps=3, images={"view": "render"}, state=["joints"])
    reset(batch, 1, 2)
    actions = np.zeros((2, 4, 3), dtype=np.float32)
    chunk = run_chunk(batch, actions, everywhere(batch), np.array([True, False]), np.array([7, 7], dtype=np.uint64))
    assert chunk.executed.sum(axis=1).tolist() == [3, 3] and chunk.final is not None
    assert chunk.final_rows.tolist() == [0, 1]
    assert chunk.final.images["view"][:, 0, 0, 0].tolist() == [103, 103]
    # Row 0 shows its new episode, row 1 still its last moment.
    assert chunk.observations.images["view"][:, 0, 0, 0].tolist() == [100, 103]


# --- success


def test_success_is_what_info_says() -> None:
    batch = make(ROBOT, rows=1, kwargs={"success_at": 2}, state=["joints"])
    reset(batch, 1)
    told = [bool(batch.step(constant(batch, 0, 0, 0), everywhere(batch)).success[0]) for _ in range(3)]
    assert told == [False, True, True]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"success": "terminated"}, [False, False, True]),
        ({"success": "truncated"}, [False, False, False]),
        ({"success_return": 3.0}, [False, False, True]),
        ({"success_return": 3.5}, [False, False, False]),
    ],
)
def test_an_end_or_the_return_of_a_whole_episode_can_be_the_success(
    options: dict[str, Any], expected: list[bool]
) -> None:
    batch = make(ROBOT, rows=1, kwargs={"done_at": 3}, state=["joints"], **options)
    for seed in (1, 2):  # the second episode's return starts at 0 again
        reset(batch, seed)
        told = [bool(batch.step(constant(batch, 0, 0, 0), everywhere(batch)).success[0]) for _ in range(3)]
        assert told == expected


def test_lasting_until_the_limit_can_be_the_success() -> None:
    batch = make("Pendulum-v1", rows=1, max_steps=2, success="truncated")
    reset(batch, 1)
    assert [bool(batch.step(constant(batch, 0.0), everywhere(batch)).success[0]) for _ in range(2)] == [False, True]


# --- observations


def test_parts_of_a_dict_become_images_state_and_sentence() -> None:
    batch = make(ROBOT, state=["joints", "gripper"], instruction_key="task")
    assert dict(batch.specification.cameras) == {"camera.wrist": (24, 32), "camera.depth": (24, 32)}
    seen = reset(batch, 1, 2)
    assert seen.images["camera.wrist"].shape == seen.images["camera.depth"].shape == (2, 24, 32, 3)
    assert seen.images["camera.depth"].dtype == np.uint8 and (seen.images["camera.depth"] == 7).all()
    assert seen.state.dtype == np.float32 and seen.state.shape == (2, 7)
    assert seen.state[:, 4:].tolist() == [[0, 1, 0]] * 2  # Discrete: one-hot
    np.testing.assert_array_equal(seen.state[0, :4], env_of(batch, 0).joints.astype(np.float32).ravel())
    assert list(seen.instruction) == [env_of(batch, row).task for row in range(2)]
    assert seen.instruction[0] != seen.instruction[1] and seen.instruction[0].startswith("lift cube")


def test_the_sentence_may_come_from_info_or_from_the_config() -> None:
    told = reset(make(ROBOT, rows=1, state=["joints"], instruction_key="language"), 1)
    assert told.instruction[0].startswith("please lift cube")
    assert list(reset(make("CartPole-v1", rows=1, instruction="balance it"), 1).instruction) == ["balance it"]
    assert list(reset(make(ROBOT, rows=1, state=["joints"]), 1).instruction) == ["Robot-v0"]


def test_a_prefix_chooses_all_parts_under_it_and_images_may_be_left_out() -> None:
    batch = make(ROBOT, state=["joints"], images={"hand": "camera.wrist"}, image_size=16)
    assert dict(batch.specification.cameras) == {"hand": (16, 16)}
    assert reset(batch, 1, 2).images["hand"].shape == (2, 16, 16, 3)
    assert make(ROBOT, state=["joints"], images={}).specification.cameras == {}
    assert make(ROBOT, state=["camera"], images={}).specification.state_dims == 4 * 24 * 32


def test_pixels_alone_come_with_a_state_of_one_zero() -> None:
    batch = make(CHOICES)
    seen = reset(batch, 1, 2)
    assert dict(batch.specification.cameras) == {"front": (16, 20)} and batch.specification.state_dims == 1
    assert (seen.state == 0).all() and seen.images["front"].shape == (2, 16, 20, 3)
    np.testing.assert_array_equal(seen.images["front"][..., 0], seen.images["front"][..., 2])


def test_only_images_that_are_read_are_rendered_and_only_for_rows_that_are_taken() -> None:
    batch = make(ROBOT, images={"view": "render"}, state=["joints"])
    probing = env_of(batch, 0).renders
    reset(batch, 1, 2)
    for _ in range(3):
        seen = batch.step(constant(batch, 0, 0, 0), everywhere(batch)).observations
    part = seen.take([1])
    assert (env_of(batch, 0).renders - probing, env_of(batch, 1).renders) == (0, 1)
    assert part.images["view"][0, 0, 0, 0] == 103
    assert seen.images["view"][:, 0, 0, 0].tolist() == [103, 103]
    assert (env_of(batch, 0).renders - probing, env_of(batch, 1).renders) == (1, 1)


def test_an_image_read_too_late_is_an_error_and_not_a_wrong_image() -> None:
    batch = make(ROBOT, rows=1, images={"view": "render"}, state=["joints"])
    seen = reset(batch, 1)
    batch.step(constant(batch, 0, 0, 0), everywhere(batch))
    with pytest.raises(EnvironmentFailed, match="read after the next step"):
        seen.images["view"]


def test_a_rendered_image_is_scaled_to_the_size_asked_for() -> None:
    batch = make(ROBOT, rows=1, images={"view": "render"}, image_size=12, state=["joints"])
    assert reset(batch, 1).images["view"].shape == (1, 12, 12, 3)


# --- actions


def test_a_box_gets_its_bounds_for_minus_one_and_one_and_unbounded_numbers_as_they_are() -> None:
    batch = make(ROBOT, rows=1, state=["joints"])
    reset(batch, 1)
    for action in ([-1, -1, 4], [1, 1, -4], [0, 0, 0.5], [-3, 3, 0]):
        batch.step(constant(batch, *action), everywhere(batch))
    taken = [action.tolist() for action in env_of(batch, 0).actions]
    assert taken == [[-2, 0, 4], [2, 10, -4], [0, 5, 0.5], [-2, 10, 0]]


@pytest.mark.parametrize(
    ("kind", "action", "expected"),
    [
        ("discrete", [0.1, 0.2, 0.9, -5.0], 1),  # the third of -1, 0, 1, 2
        ("multi", [0.1, 0.2, 0.9, 0.8, 0.0], [6, 0]),
        ("binary", [0.1, -0.2, 3.0], [1, 0, 1]),
        ("box", [-1.0, 0.1], [0, 6]),
    ],
)
def test_discrete_choices_are_the_largest_number_of_each_part(kind: str, action: list[float], expected: Any) -> None:
    batch = make(CHOICES, rows=1, kwargs={"actions": kind})
    assert batch.specification.action_dims == len(action)
    reset(batch, 1)
    batch.step(constant(batch, *action), everywhere(batch))
    assert np.array(env_of(batch, 0).taken[0]).tolist() == expected


@pytest.mark.parametrize("actions", [np.zeros((2, 2), np.float32), np.full((2, 1), np.nan, np.float32)])
def test_bad_actions_are_refused(actions: np.ndarray) -> None:
    batch = make("Pendulum-v1")
    reset(batch, 1, 2)
    with pytest.raises(EnvironmentFailed, match=r"Pendulum-v1: actions .* expected finite numbers of shape \[2, 1\]"):
        batch.step(actions, everywhere(batch))


def test_actions_of_rows_that_are_not_active_may_hold_anything() -> None:
    batch = make("Pendulum-v1")
    reset(batch, 1, 2)
    result = batch.step(np.array([[0.0], [np.nan]], np.float32), np.array([True, False]))
    assert np.isfinite(result.observations.state).all()


# --- errors for people


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"id": "Pendulm-v1"}, r"environment.options.id is Pendulm-v1: .*Did you mean: `Pendulum`"),
        ({"id": "no_such_package:Task-v0"}, r"no_such_package:Task-v0: No module named 'no_such_package'"),
        ({"id": "Pendulum-v1", "kwargs": {"gravity": 1}}, r"unexpected keyword argument 'gravity'.*and kwargs"),
        ({"id": ROBOT}, r"state: words is a Sequence, which is no fixed number of numbers; list the parts.*joints"),
        (
            {"id": ROBOT, "state": ["joint"]},
            r"no part 'joint' in the observation; it has .*joints \(Box\[2, 2\] float64\)",
        ),
        ({"id": ROBOT, "state": ["joints"], "images": {"top": "task"}}, r"images: top is 'task', expected render"),
        ({"id": CHOICES, "kwargs": {"actions": "tuple"}}, r"actions are Tuple.*expected Box, Discrete, MultiDiscrete"),
        (
            {"id": ROBOT, "state": ["joints"], "images": {"top": "render"}, "kwargs": {"rgba": True}},
            r"top is render, but fake_gymnasium:Robot-v0 renders a ndarray, expected an image",
        ),
    ],
)
def test_what_no_restart_can_mend_is_one_line_of_bad_input(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told) as caught:
        make(**options)
    assert "\n" not in str(caught.value)


def test_a_sentence_that_is_nowhere_says_where_it_was_looked_for() -> None:
    batch = make(ROBOT, rows=1, state=["joints"], instruction_key="goal")
    with pytest.raises(InputError, match=r"instruction_key is 'goal', which is not in the info of reset \(language\)"):
        reset(batch, 1)


def test_a_package_that_rendering_needs_is_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(InputError, match=r"Pendulum-v1: render failed: pygame is not installed"):
        make("Pendulum-v1", images={"view": "render"})


def test_an_error_inside_names_the_environment_and_the_row_in_one_line() -> None:
    batch = make(ROBOT, kwargs={"fail": "raise"}, state=["joints"])
    reset(batch, 1, 2)
    with pytest.raises(EnvironmentFailed, match="Robot-v0: step failed in row 1: ValueError: the arm broke in two"):
        batch.step(constant(batch, 0, 0, 0), np.array([False, True]))


def test_a_module_that_the_worker_may_not_import_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_VARIABLE, "other")
    with pytest.raises(InputError, match=r"asks for the module fake_gymnasium, .* attach with --allow fake_gymnasium"):
        make(ROBOT)


def test_close_may_be_called_twice_and_closes_every_environment() -> None:
    batch = make(ROBOT, state=["joints"])
    envs = [env_of(batch, row) for row in range(2)]
    assert isinstance(envs[0], fake_gymnasium.Robot)
    batch.close()
    batch.close()
    assert all(env.closed for env in envs)
