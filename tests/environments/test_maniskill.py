"""ManiSkill: the pure parts always; the simulator itself with `tools/test --all`, after `tools/setup maniskill`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from vla_stream.config import validate
from vla_stream.environments import maniskill
from vla_stream.environments.maniskill import TASKS, ManiSkill, pick_cube_action, project
from vla_stream.environments.protocol import EnvironmentBatch, Expert, Grounding, Observations, StepResult
from vla_stream.errors import EnvironmentFailed, InputError
from vla_stream.plugins import parse_options
from workers import environment_apart

ALL, NONE = np.ones(1, dtype=bool), np.zeros(1, dtype=bool)
CLOSE_VIEW = {"eye": [0.45, 0.0, 0.5], "target": [0.0, 0.0, 0.1], "fov_degrees": 45.0}
HORIZON = 40


def with_simulator(test: Callable[..., None]) -> Callable[..., None]:
    """Only where the simulator is set up; its packages warn about one another's versions, which is not our error."""
    for mark in (pytest.mark.maniskill, pytest.mark.timeout(180), pytest.mark.filterwarnings("default")):
        test = mark(test)
    return test


def make(max_steps: int = HORIZON, **options: object) -> ManiSkill:
    return ManiSkill(1, max_steps, ManiSkill.Options.model_validate(options))


def reset(env: ManiSkill, seed: int) -> Observations:
    return env.reset(ALL, np.array([seed], dtype=np.uint64))


def play_expert(env: ManiSkill, seed: int, noise: float = 0.0) -> list[StepResult]:
    reset(env, seed)
    random = np.random.default_rng(seed)
    results: list[StepResult] = []
    while not results or not (results[-1].terminated[0] or results[-1].truncated[0]):
        wobble = noise * random.standard_normal((1, 4), dtype=np.float32)
        results.append(env.step(env.expert_actions() + wobble, ALL))
    return results


@pytest.fixture(scope="module")
def seeing() -> Iterator[ManiSkill]:
    env = make(view=CLOSE_VIEW)
    yield env
    env.close()


@pytest.fixture(scope="module")
def knowing() -> Iterator[ManiSkill]:
    env = make(image=False, reward="differenced")
    yield env
    env.close()


def test_module_and_options_work_without_the_simulators_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('mani_skill', 'sapien', 'torch', 'gymnasium'): sys.modules[name] = None\n"
        "from vla_stream.environments.maniskill import ManiSkill\n"
        "print(ManiSkill.Options(task='PushCube-v1').control_mode)\n"
        "try: ManiSkill(1, 8, ManiSkill.Options())\n"
        "except Exception as exc: print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "pd_ee_delta_pos"
    assert second.startswith("EnvironmentFailed") and "tools/setup maniskill" in second


def test_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"camera_siz.*camera_size"):
        parse_options(ManiSkill, {"camera_siz": 32}, "environment.options")


def test_more_rows_than_a_process_can_hold_are_refused() -> None:
    with pytest.raises(InputError, match=r"2 rows.*one process per row"):
        ManiSkill(2, HORIZON, ManiSkill.Options())


def test_a_task_without_a_sentence_of_its_own_asks_for_one() -> None:
    with pytest.raises(InputError, match=r"TurnFaucet-v1 and environment\.options\.instruction is not set"):
        make(task="TurnFaucet-v1")


def test_expert_hovers_descends_grasps_and_carries() -> None:
    cube, goal = np.array([0.0, 0.0, 0.02]), np.array([0.05, 0.0, 0.25])
    beside, over, at = np.array([[0.0, -0.04, 0.02], [0.0, 0.0, 0.08], [0.0, 0.0, 0.025]])
    np.testing.assert_allclose(pick_cube_action(cube, beside, goal, held=False), [0, 0.4, 0.7, 1], atol=1e-6)
    np.testing.assert_allclose(pick_cube_action(cube, over, goal, held=False), [0, 0, -0.6, 1], atol=1e-6)
    np.testing.assert_allclose(pick_cube_action(cube, at, goal, held=False), [0, 0, -0.05, -1], atol=1e-6)
    np.testing.assert_allclose(pick_cube_action(cube, at, goal, held=True), [0.5, 0, 1, -1], atol=1e-6)


def test_projection_has_x_to_the_right_y_down_and_the_middle_at_zero() -> None:
    # A camera at the origin that looks along z, with a field of view of 90°: half the image is as far as the depth.
    extrinsic, intrinsic = np.eye(3, 4), np.array([[32.0, 0, 32], [0, 32, 32], [0, 0, 1]])
    np.testing.assert_allclose(project(np.array([0.0, 0, 2]), extrinsic, intrinsic, 64), [0, 0], atol=1e-6)
    np.testing.assert_allclose(project(np.array([1.0, -0.5, 2]), extrinsic, intrinsic, 64), [0.5, -0.25], atol=1e-6)
    np.testing.assert_allclose(project(np.array([9.0, -9, 2]), extrinsic, intrinsic, 64), [1, -1], atol=1e-6)


def test_software_vulkan_is_found_but_never_overrules_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maniskill, "SOFTWARE_VULKAN", tmp_path / "lvp_icd.json")
    monkeypatch.setenv("VK_ICD_FILENAMES", "")
    monkeypatch.delenv("VK_ICD_FILENAMES")
    assert not maniskill.use_software_vulkan()
    maniskill.SOFTWARE_VULKAN.touch()
    assert maniskill.use_software_vulkan()
    assert os.environ["VK_ICD_FILENAMES"] == str(maniskill.SOFTWARE_VULKAN)
    monkeypatch.setenv("VK_ICD_FILENAMES", "/mine.json")
    assert not maniskill.use_software_vulkan()
    assert os.environ["VK_ICD_FILENAMES"] == "/mine.json"


@with_simulator
def test_it_offers_all_three_protocols(seeing: ManiSkill) -> None:
    assert isinstance(seeing, EnvironmentBatch) and isinstance(seeing, Expert) and isinstance(seeing, Grounding)
    assert seeing.specification.cameras == {"base_camera": (64, 64)}
    assert (seeing.specification.state_dims, seeing.specification.action_dims) == (28, 4)


@with_simulator
def test_image_shows_a_scene_with_a_red_cube_where_grounding_says(seeing: ManiSkill) -> None:
    for seed in range(5):
        observations = reset(seeing, seed)
        image = observations.images["base_camera"]
        assert image.shape == (1, 64, 64, 3) and image.dtype == np.uint8 and image.std() > 10
        red, green, blue = image[0].astype(int).transpose(2, 0, 1)
        rows, columns = np.nonzero((red > 100) & (green < 40) & (blue < 40))
        assert len(rows) >= 10, "the cube of 4 cm must be visible"
        seen = np.array([columns.mean(), rows.mean()]) / 32 - 1
        np.testing.assert_allclose(seeing.grounding_targets()[0], seen, atol=0.08)
        assert observations.instruction == [TASKS["PickCube-v1"].instruction]


@with_simulator
def test_state_beside_an_image_tells_nothing_about_the_object(seeing: ManiSkill, knowing: ManiSkill) -> None:
    state = reset(seeing, 3).state
    full = reset(knowing, 3).state
    assert (state.shape, full.shape) == ((1, 28), (1, 42))
    cube = seeing._env.cube.pose.p[0].numpy()
    assert any(np.allclose(full[0, i : i + 3], cube, atol=1e-6) for i in range(40)), "the full state holds the cube"

    # Put the cube elsewhere: the image changes, the state must not.
    before = reset(seeing, 3).images["base_camera"].copy()
    pose = seeing._env.cube.pose
    moved = pose.raw_pose.clone()
    moved[0, 0] += 0.08
    seeing._env.cube.set_pose(type(pose).create(moved))
    after = seeing._observe(seeing._env.get_obs())
    assert (after.images["base_camera"] != before).any()
    np.testing.assert_array_equal(after.state, state)


@with_simulator
def test_reset_depends_on_all_64_bits_of_the_seed_and_on_nothing_else(seeing: ManiSkill) -> None:
    def trajectory(seed: int) -> list[np.ndarray]:
        parts = [reset(seeing, seed).state.copy(), seeing._observations.images["base_camera"].copy()]
        random = np.random.default_rng(0)
        for _ in range(6):
            result = seeing.step(random.uniform(-1, 1, (1, 4)).astype(np.float32), ALL)
            parts += [result.observations.state.copy(), result.observations.images["base_camera"].copy(), result.reward]
        return parts

    first = trajectory(7)
    play_expert(seeing, 1)
    for a, b in zip(first, trajectory(7), strict=True):
        np.testing.assert_array_equal(a, b)
    other_high_bits = trajectory(7 + (1 << 40))
    assert (first[1] != other_high_bits[1]).any()


@with_simulator
def test_expert_solves_five_seeds_and_success_ends_the_episode(seeing: ManiSkill) -> None:
    for seed in range(5):
        results = play_expert(seeing, seed, noise=0.05)
        last = results[-1]
        assert last.success[0] and last.terminated[0] and not last.truncated[0] and last.reward[0] == 1
        assert not any(result.success[0] or result.terminated[0] or result.reward[0] for result in results[:-1])


@with_simulator
def test_horizon_truncates_without_terminating_and_a_new_reset_starts_over() -> None:
    env = make(max_steps=3, image=False)
    try:
        for seed in (0, 1):
            reset(env, seed)
            still = np.zeros((1, 4), dtype=np.float32)
            flags = [env.step(still, ALL).truncated[0] for _ in range(3)]
            assert flags == [False, False, True]
            with pytest.raises(EnvironmentFailed, match="not running"):
                env.step(still, ALL)
    finally:
        env.close()
        env.close()


@with_simulator
def test_row_that_is_not_active_stays_untouched(seeing: ManiSkill) -> None:
    observations = reset(seeing, 2)
    result = seeing.step(np.ones((1, 4), dtype=np.float32), NONE)
    assert result.observations is observations
    assert not (result.reward[0] or result.terminated[0] or result.truncated[0] or result.success[0])


@with_simulator
@pytest.mark.parametrize(
    "action", [np.zeros((1, 3)), np.zeros(4), np.full((1, 4), np.nan)], ids=["dims", "rank", "nan"]
)
def test_wrong_action_is_refused(knowing: ManiSkill, action: np.ndarray) -> None:
    reset(knowing, 0)
    with pytest.raises(EnvironmentFailed, match="action"):
        knowing.step(action.astype(np.float32), ALL)


@with_simulator
def test_image_that_nobody_looked_at_in_time_is_an_error_and_not_another_moment(seeing: ManiSkill) -> None:
    stale = reset(seeing, 0)
    kept = seeing.step(seeing.expert_actions(), ALL).observations
    image = kept.images["base_camera"]
    seeing.step(seeing.expert_actions(), ALL)
    assert kept.images["base_camera"] is image
    with pytest.raises(EnvironmentFailed, match="read it before"):
        _ = stale.images["base_camera"]


@with_simulator
def test_differenced_reward_sums_to_the_growth_of_the_dense_one_plus_the_success(knowing: ManiSkill) -> None:
    reset(knowing, 4)
    first = knowing._shaping
    total = sum(float(result.reward[0]) for result in play_expert(knowing, 4))
    # ManiSkill's normalised reward is 1 on success.
    assert 0 < first < 1
    assert total == pytest.approx((1 - first) + 1, abs=1e-5)


@with_simulator
def test_missing_assets_are_an_error_and_not_a_question() -> None:
    with pytest.raises(EnvironmentFailed, match=r"AssemblingKits-v1: no assets.*download_asset AssemblingKits-v1"):
        make(task="AssemblingKits-v1", instruction="put the piece into its place")


@with_simulator
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"task": "AssemblingKits-v1", "instruction": "put it in"}, "whose assets assembling_kits are not here; fetch"),
        ({"task": "PickSingleYCB-v1", "instruction": "pick it"}, "whose assets ycb are not here; fetch them with py"),
        ({"task": "PikcCube-v1", "instruction": "pick it"}, "no task of ManiSkill; did you mean PickCube-v1?"),
        ({"task": "PullCubeTool-v2"}, "environment.options.instruction is not set; set it, or choose a task with one"),
    ],
)
def test_a_task_that_cannot_be_made_is_told_before_anything_starts(options: dict[str, str], told: str) -> None:
    config = validate(
        {
            "environment": {"name": "maniskill", "max_steps": 8, "options": options},
            "policy": {"name": "tiny", "chunk": 4},
            "trainer": {"segments_per_update": 8},
        }
    )
    with pytest.raises(InputError) as caught:
        environment_apart.ask(config)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@with_simulator
def test_only_pick_cube_has_an_expert_and_other_tasks_have_their_cameras() -> None:
    env = make(task="StackCube-v1")
    try:
        reset(env, 0)
        assert set(env.specification.cameras) == {"base_camera", "hand_camera"}
        assert np.abs(env.grounding_targets()).max() < 1
        with pytest.raises(EnvironmentFailed, match="no expert"):
            env.expert_actions()
    finally:
        env.close()


@with_simulator
def test_controller_whose_actions_are_joint_angles_is_refused() -> None:
    with pytest.raises(InputError, match="control_mode pd_joint_pos"):
        make(image=False, control_mode="pd_joint_pos")
