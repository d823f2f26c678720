"""ManiSkill3 tasks on the CPU: rendered images, proprioception, an instruction. One row per process.

The simulator's CPU backend holds one environment; whoever wants more rows starts more processes (spawned, not forked:
Vulkan does not survive a fork). `mani_skill` is imported when an environment is made, so reading a config is cheap.

Even without images the simulator wants a Vulkan device. `tools/setup maniskill` unpacks a software one into `.vulkan/`
of this checkout where there is none, and this module points the Vulkan loader to it.

    image mode   images {camera: u8[1, size, size, 3]} of all the task's cameras
                 state f32: joint positions and velocities, tool centre pose (x, y, z in m; quaternion w, x, y, z), and
                 for PickCube-v1 the goal (x, y, z in m), which no camera sees. Nothing tells where the object is or
                 whether it is held, except the image and the joints. PickCube-v1: 9 + 9 + 7 + 3 = 28 numbers.
    state mode   no image; state f32 is the simulator's full state observation, object poses included (PickCube-v1: 42)

A frame costs ten steps of physics, and a policy looks at one per action chunk. So an image is rendered when it is read,
which must be before the next step or reset.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from vla_stream.config import Section
from vla_stream.environments.late_images import LateImages
from vla_stream.environments.one_row import one_row
from vla_stream.environments.protocol import Observations, Specification, StepResult
from vla_stream.errors import EnvironmentFailed, InputError

SOFTWARE_VULKAN = Path(__file__).resolve().parents[2] / ".vulkan" / "lvp_icd.json"
MAIN_CAMERA = "base_camera"


@dataclass(frozen=True, slots=True)
class Task:
    """What a task needs to become a VLA task.

    instruction: the sentence; target: attribute of the simulator's environment that holds the object to act on first;
    state: entries of the simulator's `extra` observation that do not give away an object's pose.
    """

    instruction: str
    target: str
    state: tuple[str, ...] = ("tcp_pose",)


# Tasks that run with what the package ships. PullCube-v1 also offers `goal_pos`, but its goal is a fixed step away from
# the cube's start and so would tell where the cube is; PickCube-v1's goal is drawn independently and never rendered.
TASKS: Mapping[str, Task] = {
    "PickCube-v1": Task("pick up the red cube and hold it at the goal", "cube", ("tcp_pose", "goal_pos")),
    "PushCube-v1": Task("push the blue cube onto the target", "obj"),
    "PullCube-v1": Task("pull the blue cube onto the target", "obj"),
    "StackCube-v1": Task("put the red cube on the green cube", "cubeA"),
    "StackPyramid-v1": Task("build a pyramid of the three cubes", "cubeA"),
    "PlaceSphere-v1": Task("put the blue ball into the bin", "obj"),
    "LiftPegUpright-v1": Task("set the peg upright", "peg"),
    "PegInsertionSide-v1": Task("insert the peg into the hole of the box", "peg"),
    "PlugCharger-v1": Task("plug the charger into the socket", "charger"),
    "PokeCube-v1": Task("poke the cube with the peg", "peg"),
    "RollBall-v1": Task("roll the ball onto the target", "ball"),
    "PullCubeTool-v1": Task("pull the cube closer with the hook", "l_shape_tool"),
    "PushT-v1": Task("push the T onto its outline", "tee"),
}


class View(Section):
    """Where the main camera stands. The tasks' own views are wide: at 64 pixels a cube of 4 cm is two pixels there."""

    eye: tuple[float, float, float] = Field(description="Position in m: x away from the robot, y to its left, z up.")
    target: tuple[float, float, float] = Field(description="Point in m in the middle of the image.")
    fov_degrees: float = Field(default=45.0, gt=1, lt=170, description="Vertical field of view.")


class ManiSkill:
    """One ManiSkill environment as an EnvironmentBatch of one row. Also an Expert (PickCube-v1) and a Grounding."""

    class Options(Section):
        """Options of `environment.options` when `environment.name` is maniskill."""

        task: str = Field(default="PickCube-v1", description="Id under which ManiSkill registers the task.")
        instruction: str | None = Field(
            default=None, description="The sentence given to the policy. Default: this file's own for known tasks."
        )
        image: bool = Field(default=True, description="Render; false: the simulator's full state and no image.")
        camera_size: int = Field(default=64, ge=8, le=1024, description="Width and height of every image in pixels.")
        view: View | None = Field(default=None, description="Moves the main camera. Default: the task's own view.")
        control_mode: str = Field(
            default="pd_ee_delta_pos", description="ManiSkill controller; its actions must range from -1 to 1."
        )
        reward: Literal["sparse", "dense", "differenced"] = Field(
            default="sparse",
            description="sparse: 1 on success, -1 on failure; dense: ManiSkill's normalised one, which pays for "
            "lingering; differenced: the dense one's growth since the last step, plus 1 on success.",
        )

    rows_per_process: ClassVar[int | None] = 1
    whole_batch: ClassVar[bool] = False

    @classmethod
    def check_installed(cls, options: Options) -> None:
        """Raises InputError: no ManiSkill here; for a task beside TASKS, for which it has to be imported, also: no
        sentence, no such task, or none of its files."""
        if find_spec("mani_skill") is None:
            raise InputError(
                f"maniskill: ManiSkill is not installed in the environment of {sys.executable}; run tools/setup "
                "maniskill"
            )
        if options.task not in TASKS:
            _check_sentence(options)
            _check_files(options.task)

    def __init__(self, rows: int, max_steps: int, options: Options) -> None:
        """Make the environment (seconds) without resetting it. Raises InputError or EnvironmentFailed."""
        if rows != 1:
            raise InputError(f"maniskill: {rows} rows in one process, expected 1; start one process per row")
        _check_sentence(options)
        known = TASKS.get(options.task)
        self.rows = rows
        self.max_steps = max_steps
        self._task = known or Task(str(options.instruction), target="")
        self._instruction = options.instruction or self._task.instruction
        self._options = options
        self._env: Any = _make(options)
        self._steps = 0
        self._running = False
        self._shaping = 0.0
        try:
            actions = self._action_dims()
            size = (options.camera_size, options.camera_size)
            self._cameras = dict.fromkeys(self._env.get_sensor_params() if options.image else (), size)
            self._images = LateImages("maniskill", self._cameras, None)
            self._observations = self._reset(0)
            self.specification = Specification(self._cameras, self._observations.state.shape[1], actions)
        except Exception:
            self.close()
            raise
        self._running = False

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """Reset the row if mask bool[1] says so, from seeds u64[1] alone."""
        if mask[0]:
            self._observations = self._reset(int(seeds[0]))
        return self._observations

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Step the row if active bool[1] says so, with actions f32[1, A]; the simulator clips them to [-1, 1].

        Success ends the episode. Raises EnvironmentFailed on a bad action, a non-finite outcome, or a row that ended.
        """
        if not active[0]:
            return one_row(self._observations, 0.0, terminated=False, truncated=False, success=False)
        if not self._running:
            raise EnvironmentFailed(f"{self._options.task}: step of a row that is not running; reset it first")
        action = np.asarray(actions, dtype=np.float32)
        expected = (1, self.specification.action_dims)
        if action.shape != expected or not np.isfinite(action).all():
            raise EnvironmentFailed(
                f"{self._options.task}: action {np.array2string(action, threshold=16)} of shape {action.shape}, "
                f"expected finite numbers of shape {expected}"
            )
        self._images.expire()
        with _failing_as(f"{self._options.task}: step failed"):
            raw, reward, terminated, _, info = self._env.step(_tensor(action))
        self._observations = self._observe(raw)
        self._steps += 1
        success = bool(info["success"][0]) if "success" in info else False
        ended = bool(terminated[0]) or success
        truncated = self._steps >= self.max_steps and not ended
        self._running = not (ended or truncated)
        paid = self._reward(float(reward[0]), success)
        return one_row(self._observations, paid, terminated=ended, truncated=truncated, success=success)

    def close(self) -> None:
        """Release the simulator. Idempotent."""
        env, self._env = self._env, None
        if env is not None:
            with suppress(Exception):  # a simulator that fails while it goes away has nothing left to tell
                env.close()

    def expert_actions(self) -> np.ndarray:
        """Next action f32[1, 4] of the scripted expert; it looks only at the present state, so it recovers from noise.

        Hover over the cube, descend, close the gripper, carry to the goal. Only PickCube-v1 with pd_ee_delta_pos, whose
        action is a displacement in units of 10 cm and a gripper command (1 open, -1 closed).
        """
        if (self._options.task, self._options.control_mode) != ("PickCube-v1", "pd_ee_delta_pos"):
            raise EnvironmentFailed(
                f"{self._options.task} with {self._options.control_mode}: no expert; "
                "there is one for PickCube-v1 with pd_ee_delta_pos"
            )
        env = self._env
        cube, tool, goal = (_numpy(pose.p)[0] for pose in (env.cube.pose, env.agent.tcp_pose, env.goal_site.pose))
        held = bool(env.agent.is_grasping(env.cube)[0])
        return pick_cube_action(cube, tool, goal, held)[None]

    def grounding_targets(self) -> np.ndarray:
        """Where the main camera sees the object to act on, f32[1, 2], x right and y down, clipped to [-1, 1]."""
        if not self._options.image or not self._task.target:
            raise EnvironmentFailed(
                f"{self._options.task}: no grounding targets; they need image: true and one of {', '.join(TASKS)}"
            )
        camera = self._env.get_sensor_params()[MAIN_CAMERA]
        position = _numpy(getattr(self._env, self._task.target).pose.p)[0]
        size = self._options.camera_size
        return project(position, _numpy(camera["extrinsic_cv"])[0], _numpy(camera["intrinsic_cv"])[0], size)[None]

    def _reset(self, seed: int) -> Observations:
        # The simulator's generators take 32 bits; the seed sequence mixes all 64 of ours into them.
        short = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._images.expire()
        with _failing_as(f"{self._options.task}: reset failed"):
            raw, info = self._env.reset(seed=short)
            if self._options.reward == "differenced":
                resting = _tensor(np.zeros((1, self._action_dims()), np.float32))
                self._shaping = float(self._env.get_reward(obs=raw, action=resting, info=info)[0])
        self._steps = 0
        self._running = True
        return self._observe(raw)

    def _reward(self, raw: float, success: bool) -> float:
        if not np.isfinite(raw):
            raise EnvironmentFailed(f"{self._options.task}: reward {raw}, expected a finite number")
        if self._options.reward != "differenced":
            return raw
        growth, self._shaping = raw - self._shaping, raw
        return growth + float(success)

    def _observe(self, raw: Any) -> Observations:
        if self._options.image:
            parts = [*_leaves(raw["agent"]), *(raw["extra"][key] for key in self._task.state if key in raw["extra"])]
        else:
            parts = list(_leaves(raw))
        state = np.concatenate([_numpy(part).reshape(1, -1) for part in parts], axis=1, dtype=np.float32)
        if not np.isfinite(state).all():
            raise EnvironmentFailed(f"{self._options.task}: the state holds numbers that are not finite")
        self._images = LateImages("maniskill", self._cameras, self._draw)
        return Observations(self._images, state, [self._instruction])

    def _draw(self) -> dict[str, np.ndarray]:
        """What the cameras see now: {camera: u8[1, size, size, 3]}."""
        with _failing_as("maniskill: cannot render"):
            sensors = self._env.get_sensor_images()
        return {name: _numpy(sensors[name]["rgb"]) for name in self._cameras}

    def _action_dims(self) -> int:
        space = self._env.single_action_space
        if getattr(space, "shape", None) is None or not ((space.low == -1).all() and (space.high == 1).all()):
            raise InputError(
                f"environment.options.control_mode {self._options.control_mode}: action space {space}, expected one "
                "box from -1 to 1; choose a normalised controller such as pd_ee_delta_pos or pd_joint_delta_pos"
            )
        return int(space.shape[0])


def pick_cube_action(cube: np.ndarray, tool: np.ndarray, goal: np.ndarray, held: bool) -> np.ndarray:
    """The expert's action f32[4] from positions [3] in m of the cube, the tool centre and the goal."""
    offset = cube - tool
    aside, above = float(np.linalg.norm(offset[:2])), float(-offset[2])
    if held:
        move, gripper = goal - tool, -1.0
    elif aside > 0.02:  # the open gripper clears a turned cube by 1.2 cm on each side: get over it first
        move, gripper = offset + np.array([0.0, 0.0, 0.07]), 1.0
    elif above > 0.01:
        move, gripper = offset, 1.0
    else:
        move, gripper = offset, -1.0
    return np.append(np.clip(move / 0.1, -1.0, 1.0), gripper).astype(np.float32)


def project(position: np.ndarray, extrinsic: np.ndarray, intrinsic: np.ndarray, size: int) -> np.ndarray:
    """Image coordinates f32[2] in [-1, 1] of a point [3] in m; extrinsic [3, 4] world to camera (z forward, y down)."""
    x, y, depth = intrinsic @ (extrinsic @ np.append(position, 1.0))
    return np.array([x, y] / depth / size * 2 - 1, dtype=np.float32).clip(-1.0, 1.0)


def use_software_vulkan() -> bool:
    """Point this process's Vulkan loader to the driver in `.vulkan/`, unless told otherwise. True: it is in use."""
    if SOFTWARE_VULKAN.is_file() and "VK_ICD_FILENAMES" not in os.environ:
        os.environ["VK_ICD_FILENAMES"] = str(SOFTWARE_VULKAN)
        # One row per process: the processes share the cores, a renderer's own threads would only get in their way.
        os.environ.setdefault("LP_NUM_THREADS", "1")
    return os.environ.get("VK_ICD_FILENAMES") == str(SOFTWARE_VULKAN)


def _check_sentence(options: ManiSkill.Options) -> None:
    if options.task not in TASKS and options.instruction is None:
        raise InputError(
            f"environment.options.task is {options.task} and environment.options.instruction is not set; set it, "
            f"or choose a task with one: {', '.join(TASKS)}"
        )


def _check_files(task: str) -> None:
    """Whether there is such a task, and what it asks for has been downloaded, or may be now."""
    use_software_vulkan()
    with redirect_stdout(StringIO()):
        import mani_skill.envs  # noqa: F401  registers the tasks
        from mani_skill.utils import assets
        from mani_skill.utils.registration import REGISTERED_ENVS

    if task not in REGISTERED_ENVS:
        near = difflib.get_close_matches(task, REGISTERED_ENVS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(TASKS)}"
        raise InputError(f"environment.options.task is {task}, no task of ManiSkill; {remedy}")
    wanted = REGISTERED_ENVS[task].asset_download_ids or []
    each = [name for group in wanted for name in (_members(assets, group) if group in assets.DATA_GROUPS else [group])]
    missing = sorted(name for name in each if not assets.is_data_source_downloaded(name))
    if missing and os.environ.get("MS_SKIP_ASSET_DOWNLOAD_PROMPT") != "1":
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise InputError(f"environment.options.task is {task}, whose assets {shown} are not here; {_fetch(task)}")


def _members(assets: Any, group: str) -> list[str]:
    found: list[str] = assets.expand_data_group_into_individual_data_source_ids(group)
    return found


def _fetch(task: str) -> str:
    return (
        f"fetch them with python -m mani_skill.utils.download_asset {task}, or choose one of {', '.join(TASKS)}, which "
        "need none"
    )


def _make(options: ManiSkill.Options) -> Any:
    """The simulator's own environment, without gymnasium's wrappers: no time limit but ours, no autoreset."""
    software = use_software_vulkan()
    try:
        import gymnasium
        import mani_skill.envs  # noqa: F401  registers the tasks
        from mani_skill.utils import download_asset, sapien_utils
    except ImportError as exc:
        raise EnvironmentFailed(f"maniskill: {exc}; run tools/setup maniskill") from exc

    sensors: dict[str, Any] = {"width": options.camera_size, "height": options.camera_size}
    if options.view is not None:
        pose = sapien_utils.look_at(options.view.eye, options.view.target)
        sensors[MAIN_CAMERA] = {"pose": pose, "fov": float(np.deg2rad(options.view.fov_degrees))}

    def refuse(question: str) -> bool:
        raise EnvironmentFailed(
            f"environment.options.task {options.task}: no assets ({question.split('.')[0]}); {_fetch(options.task)}"
        )

    # Left alone, the simulator asks on stdin whether to download, which in a worker is a hang.
    ask = download_asset.prompt_yes_no
    if os.environ.get("MS_SKIP_ASSET_DOWNLOAD_PROMPT") != "1":
        download_asset.prompt_yes_no = refuse
    try:
        with _failing_as(f"environment.options.task {options.task}: cannot be made"), redirect_stdout(StringIO()):
            return gymnasium.make(
                options.task,
                obs_mode="state_dict",
                control_mode=options.control_mode,
                reward_mode="sparse" if options.reward == "sparse" else "normalized_dense",
                sensor_configs=sensors,
                sim_backend="physx_cpu",
                render_backend="cpu" if software else "gpu",
                disable_env_checker=True,
            ).unwrapped
    finally:
        download_asset.prompt_yes_no = ask


@contextmanager
def _failing_as(what: str) -> Iterator[None]:
    """Whatever a simulator raises becomes an EnvironmentFailed that names the task."""
    try:
        yield
    except (EnvironmentFailed, InputError):
        raise
    except Exception as exc:
        remedy = "; there is no usable Vulkan device, run tools/setup maniskill" if str(exc).startswith("vk::") else ""
        raise EnvironmentFailed(f"{what}: {type(exc).__name__}: {exc}{remedy}") from exc


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        for branch in tree.values():
            yield from _leaves(branch)
    else:
        yield tree


def _numpy(tensor: Any) -> np.ndarray:
    # A copy: the simulator may reuse its buffers, and observations are kept until a segment is complete.
    array: np.ndarray = tensor.cpu().numpy().copy()
    return array


def _tensor(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array)
