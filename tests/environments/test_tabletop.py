"""The tabletop: real physics and real rays, a few steps each."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import pytest

from vla_stream.environments.protocol import EnvironmentBatch, Expert, Grounding, Observations
from vla_stream.environments.tabletop import CAMERA, COLOURS, IMAGE_SIZE, Delay, Tabletop
from vla_stream.errors import EnvironmentFailed, InputError
from vla_stream.plugins import parse_options

HORIZON = 40


def make(rows: int, max_steps: int = HORIZON, **options: object) -> Tabletop:
    return Tabletop(rows, max_steps, Tabletop.Options.model_validate(options))


def everyone(batch: Tabletop) -> np.ndarray:
    return np.ones(batch.rows, dtype=bool)


def reset(batch: Tabletop, *seeds: int) -> Observations:
    return batch.reset(everyone(batch), np.array(seeds, dtype=np.uint64))


def still(batch: Tabletop) -> np.ndarray:
    return np.zeros((batch.rows, 3), dtype=np.float32)


def named_colour(sentence: str) -> str:
    return next(colour for colour in COLOURS if colour in sentence)


def test_it_offers_all_three_protocols() -> None:
    batch = make(1)
    assert isinstance(batch, EnvironmentBatch)
    assert isinstance(batch, Expert)
    assert isinstance(batch, Grounding)


def test_options_are_readable_without_mujoco() -> None:
    code = """
import sys
from vla_stream.environments.tabletop import Tabletop
Tabletop.Options()
print("mujoco" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"


def test_observations_have_the_specified_shapes_and_name_a_colour() -> None:
    batch = make(3)
    observations = reset(batch, 1, 2, 3)
    image = observations.images[CAMERA]
    assert (image.shape, image.dtype) == ((3, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    assert batch.specification.cameras == {CAMERA: (IMAGE_SIZE, IMAGE_SIZE)}
    assert (observations.state.shape, observations.state.dtype) == ((3, 8), np.float32)
    assert all(len(sentence.replace(",", "").split()) == 6 for sentence in observations.instruction)
    assert {named_colour(sentence) for sentence in reset(make(12), *range(12)).instruction} == set(COLOURS)


def test_a_seed_decides_everything_in_any_row_of_any_batch() -> None:
    first, second = make(1), make(4)
    for seed in range(5):
        reset(second, 7, 8, 9, 10)
        second.step(np.full((4, 3), 0.7, np.float32), everyone(second))
        one = reset(first, seed)
        other = second.reset(np.array([False, False, True, False]), np.array([0, 0, seed, 0], np.uint64)).take([2])
        np.testing.assert_array_equal(one.images[CAMERA], other.images[CAMERA])
        np.testing.assert_array_equal(one.state, other.state)
        assert one.instruction == other.instruction
        # The same actions lead to the same place, bit for bit: nothing of the last episode is left.
        for _ in range(3):
            actions = np.full((4, 3), -0.4, np.float32)
            after = first.step(actions[:1], everyone(first)).observations
            elsewhere = second.step(actions, everyone(second)).observations.take([2])
            np.testing.assert_array_equal(after.state, elsewhere.state)
            np.testing.assert_array_equal(after.images[CAMERA], elsewhere.images[CAMERA])


def test_different_seeds_give_different_scenes() -> None:
    images = reset(make(6), *range(6)).images[CAMERA]
    assert len({image.tobytes() for image in images}) == 6


def test_rows_that_are_not_active_stay_as_they_are_and_hold_zeros() -> None:
    batch = make(2, max_steps=1)
    before = reset(batch, 1, 2)
    result = batch.step(np.full((2, 3), 1.0, np.float32), np.array([True, False]))
    after = result.observations
    np.testing.assert_array_equal(after.state[1], before.state[1])
    np.testing.assert_array_equal(after.images[CAMERA][1], before.images[CAMERA][1])
    assert not np.array_equal(after.state[0], before.state[0])
    assert result.truncated.tolist() == [True, False]
    assert not result.reward[1] and not result.terminated[1] and not result.success[1]


def test_observations_show_their_own_moment_even_when_read_later() -> None:
    batch = make(2)
    early, late = reset(batch, 1, 2), reset(batch, 1, 2)
    expected = early.images[CAMERA].copy()
    taken = late.take([1])
    for _ in range(4):
        batch.step(np.full((2, 3), 1.0, np.float32), everyone(batch))
    reset(batch, 5, 6)
    np.testing.assert_array_equal(late.images[CAMERA], expected)
    np.testing.assert_array_equal(taken.images[CAMERA], expected[1:])


def test_writing_into_observations_changes_nothing() -> None:
    batch = make(1)
    spoilt = reset(batch, 1)
    spoilt.images[CAMERA][:] = 0
    spoilt.state[:] = 99
    fresh, clean = batch.reset(np.array([False]), np.zeros(1, np.uint64)), reset(make(1), 1)
    np.testing.assert_array_equal(fresh.images[CAMERA], clean.images[CAMERA])
    np.testing.assert_array_equal(fresh.state, clean.state)


def test_only_images_that_are_read_cost_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make(3)
    cast = []
    image = batch._renderer.image
    monkeypatch.setattr(batch._renderer, "image", lambda positions: cast.append(1) or image(positions))
    reset(batch, 1, 2, 3)
    observations = batch.step(still(batch), everyone(batch)).observations
    assert len(cast) == 0
    assert observations.take([0, 2]).images[CAMERA].shape[0] == 2
    assert len(cast) == 2
    observations.images[CAMERA]
    assert len(cast) == 3


def test_the_expert_touches_the_named_cube_and_ends_the_episode_with_reward_1() -> None:
    batch = make(16)
    reset(batch, *range(100, 116))
    running, steps = everyone(batch), 0
    while running.any():
        result = batch.step(batch.expert_actions(), running)
        ended = result.terminated | result.truncated
        np.testing.assert_array_equal(result.success, ended)
        np.testing.assert_array_equal(result.reward, ended.astype(np.float32))
        assert not result.truncated.any()
        running &= ~ended
        steps += 1
    assert steps <= 14


def test_touching_another_cube_ends_the_episode_with_nothing() -> None:
    batch = make(8)
    reset(batch, *range(8))
    batch._targets = (batch._targets + 1) % 3  # the expert now flies to a cube that the sentence does not name
    actual = (batch._targets + 2) % 3
    running, touched = everyone(batch), np.zeros(8, dtype=bool)
    while running.any():
        actions = batch.expert_actions()
        meant, batch._targets = batch._targets, actual
        result = batch.step(actions, running)
        batch._targets = meant
        assert not result.success.any() and not result.reward.any()
        touched |= result.terminated
        running &= ~(result.terminated | result.truncated)
    assert touched.all()


def test_a_row_is_truncated_at_the_horizon_and_not_before() -> None:
    batch = make(1, max_steps=3)
    reset(batch, 1)
    flags = [batch.step(still(batch), everyone(batch)) for _ in range(3)]
    assert [bool(flag.truncated[0]) for flag in flags] == [False, False, True]
    assert not any(flag.terminated[0] for flag in flags)


def test_the_pusher_moves_with_its_set_point_and_no_further_than_the_workspace() -> None:
    batch = make(1, max_steps=100)
    start = reset(batch, 3).state[0]
    up = np.array([[0, 0, 1.0]], np.float32)
    batch.step(up, everyone(batch))
    for _ in range(3):
        state = batch.step(still(batch), everyone(batch)).observations.state[0]
    assert state[2] - start[2] == pytest.approx(min(0.03, 0.14 - start[2]), abs=2e-3)
    for _ in range(40):
        state = batch.step(up * 5, everyone(batch)).observations.state[0]
    assert state[2] == pytest.approx(0.14, abs=2e-3)


def test_actions_beyond_the_range_count_as_its_ends() -> None:
    first, second = make(1), make(1)
    reset(first, 4), reset(second, 4)
    far = first.step(np.array([[7, -9, 0]], np.float32), everyone(first)).observations.state
    near = second.step(np.array([[1, -1, 0]], np.float32), everyone(second)).observations.state
    np.testing.assert_array_equal(far, near)


@pytest.mark.parametrize(
    ("actions", "told"),
    [
        (np.zeros((2, 4), np.float32), r"got actions float32\[2, 4\], expected float32\[2, 3\]"),
        (np.zeros((2, 3), np.float64), r"got actions float64\[2, 3\], expected float32\[2, 3\]"),
        (np.array([[0, 0, 0], [0, np.nan, 0]], np.float32), "in row 1, expected finite"),
        (np.array([[np.inf, 0, 0], [0, 0, 0]], np.float32), "in row 0, expected finite"),
    ],
)
def test_bad_actions_are_refused(actions: np.ndarray, told: str) -> None:
    batch = make(2)
    with pytest.raises(EnvironmentFailed, match=told):
        batch.step(actions, everyone(batch))


def test_actions_of_rows_that_are_not_active_may_hold_anything() -> None:
    batch = make(2)
    reset(batch, 1, 2)
    actions = np.array([[0, 0, 0], [np.nan, 0, 0]], np.float32)
    assert not batch.step(actions, np.array([True, False])).terminated.any()


def test_masks_of_another_size_are_refused() -> None:
    batch = make(2)
    with pytest.raises(EnvironmentFailed, match=r"expected \[2\] each"):
        batch.reset(np.ones(3, dtype=bool), np.zeros(3, np.uint64))
    with pytest.raises(EnvironmentFailed, match=r"expected bool\[2\]"):
        batch.step(still(batch), np.ones(2, dtype=np.int64))


def test_shaping_pays_for_coming_nearer_and_adds_up_to_the_distance_travelled() -> None:
    sparse, shaped = make(1), make(1, shaping=0.5)
    reset(sparse, 5), reset(shaped, 5)
    start = shaped._distance_m(0)
    total = 0.0
    for _ in range(4):
        action = shaped.expert_actions()
        assert not sparse.step(action, everyone(sparse)).reward.any()
        total += float(shaped.step(action, everyone(shaped)).reward[0])
    assert total == pytest.approx(0.5 * 10 * (start - shaped._distance_m(0)), abs=1e-5)
    assert total > 0


def test_grounding_targets_point_at_the_named_colour() -> None:
    batch = make(30)
    observations = reset(batch, *range(30))
    targets = batch.grounding_targets()
    assert (targets.shape, targets.dtype) == ((30, 2), np.float32)
    pixels = ((targets + 1) / 2 * IMAGE_SIZE).astype(int)
    seen = [
        tuple(observations.images[CAMERA][row, y, x]) == COLOURS[named_colour(observations.instruction[row])]
        for row, (x, y) in enumerate(pixels)
    ]
    # The pusher may hang in front of a cube.
    assert sum(seen) >= 26


def test_a_step_waits_as_long_as_the_options_say() -> None:
    batch = make(4, step_delay_ms={"mean": 30, "sigma": 0})
    reset(batch, 1, 2, 3, 4)
    started = time.monotonic()
    batch.step(still(batch), everyone(batch))
    assert time.monotonic() - started >= 0.03


def test_waiting_times_are_lognormal_with_the_given_mean() -> None:
    random = np.random.default_rng(0)
    delay = Delay(mean=20.0, sigma=0.5)
    drawn = np.array([delay.draw_ms(random) for _ in range(20_000)])
    assert drawn.mean() == pytest.approx(20.0, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.02)


def test_a_plain_number_is_the_mean_of_the_delay_and_nonsense_is_an_error() -> None:
    assert parse_options(Tabletop, {"step_delay_ms": 50}, "environment.options").step_delay_ms == Delay(mean=50.0)
    for wrong in ({"step_delay_ms": -1}, {"step_delay_ms": "slow"}, {"step_delay_ms": {"men": 2}}, {"shapping": 1}):
        with pytest.raises(InputError, match=r"^environment\.options"):
            parse_options(Tabletop, wrong, "environment.options")


def test_close_may_be_called_twice() -> None:
    batch = make(1)
    batch.close()
    batch.close()
