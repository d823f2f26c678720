"""RoboCasa kitchens (robosuite, a Panda arm on a mobile base): three cameras, proprioception, the episode's sentence.

NOT RUN HERE: written to what RoboCasa's own gymnasium wrapper and environment factory do, and tested with a double in
the simulator's place only. RoboCasa is not on the package index under its name and downloads its kitchens; follow its
installation guide in an environment of its own, add vla-stream (`pip install --no-deps -e .` and what its error then
names), name that interpreter in `simulators.python`, and begin with `vla-stream check --conformance`.

    images  robot0_agentview_left, robot0_agentview_right, robot0_eye_in_hand, u8[1, size, size, 3], upright
    state   f32[1, 16]: hand relative to the base (x, y, z in m; quaternion x, y, z, w), fingers (2, m), base (x, y, z
            in m; quaternion x, y, z, w)
    action  f32[1, 12] in [-1, 1], in the order of robosuite's controller of the robot PandaOmron

One row per process; kitchen, objects and sentence are drawn anew in every reset, from its seed. An image is rendered
when it is read, which must be before the next step or reset. MUJOCO_GL=egl renders on a GPU; the default is osmesa.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from importlib.util import find_spec
from io import StringIO
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from vla_stream.config import Section
from vla_stream.environments.chunks import check_actions
from vla_stream.environments.late_images import LateImages
from vla_stream.environments.one_row import failing_as, one_row
from vla_stream.environments.protocol import Observations, Specification, StepResult
from vla_stream.errors import EnvironmentFailed, InputError

CAMERAS = ("robot0_agentview_left", "robot0_agentview_right", "robot0_eye_in_hand")
ROBOT = "PandaOmron"
STATE = (
    *("robot0_base_to_eef_pos", "robot0_base_to_eef_quat", "robot0_gripper_qpos"),
    *("robot0_base_pos", "robot0_base_quat"),
)


class RoboCasa:
    """One RoboCasa environment as an EnvironmentBatch of one row."""

    class Options(Section):
        """Options of `environment.options` when `environment.name` is robocasa."""

        task: str = Field(default="PnPCounterToCab", description="Name under which RoboCasa registers the task.")
        layout_ids: list[int] | None = Field(default=None, description="Kitchens to draw from. Default: all.")
        style_ids: list[int] | None = Field(default=None, description="Looks to draw from. Default: all.")
        camera_size: int = Field(default=128, ge=8, le=1024, description="Width and height of all images in pixels.")

    rows_per_process: ClassVar[int | None] = 1
    whole_batch: ClassVar[bool] = False

    @classmethod
    def check_installed(cls, options: Options) -> None:
        """Raises InputError: no RoboCasa here."""
        for package in ("robosuite", "robocasa"):
            if find_spec(package) is None:
                raise InputError(
                    f"robocasa: {package} is not installed in the environment of {sys.executable}; install RoboCasa "
                    "and its kitchens as its guide says, and set simulators.python to that environment's interpreter"
                )

    def __init__(self, rows: int, max_steps: int, options: Options) -> None:
        """Make the simulator (seconds) without a reset. Raises InputError or EnvironmentFailed."""
        if rows != 1:
            raise InputError(f"robocasa: {rows} rows in one process, expected 1; start one process per row")
        self.check_installed(options)
        self.rows, self.max_steps = rows, max_steps
        self._options = options
        self._env: Any = _make(options)
        self._images = LateImages("robocasa", CAMERAS, None)
        self._steps = 0
        self._running = False
        size = (options.camera_size, options.camera_size)
        try:
            seen = self._reset(0)
            actions = int(self._env.action_dim)
        except Exception:
            self.close()
            raise
        self.specification = Specification(dict.fromkeys(CAMERAS, size), seen.state.shape[1], actions)
        self._observations = seen

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """Reset the row if mask bool[1] says so, from seeds u64[1] alone."""
        if mask[0]:
            self._observations = self._reset(int(seeds[0]))
            self._steps, self._running = 0, True
        return self._observations

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Step the row if active bool[1] says so, with actions f32[1, A], which are clipped to [-1, 1].

        Reward is 1 in the step that succeeds, which ends the episode, else 0. Raises EnvironmentFailed on a bad action
        or a row that ended."""
        check_actions("robocasa", actions, active, 1, self.specification.action_dims)
        if not active[0]:
            return one_row(self._observations, 0.0, terminated=False, truncated=False, success=False)
        if not self._running:
            raise EnvironmentFailed("robocasa: step of a row that is not running; reset it first")
        self._images.expire()
        with failing_as(f"{self._options.task}: step failed"):
            raw, _, _, _ = self._env.step(actions[0].clip(-1, 1).astype(np.float64))
            success = bool(self._env._check_success())
        self._observations = self._observe(raw, self._observations.instruction[0])
        self._steps += 1
        truncated = self._steps >= self.max_steps and not success
        self._running = not (success or truncated)
        return one_row(self._observations, float(success), terminated=success, truncated=truncated, success=success)

    def close(self) -> None:
        """Release the simulator. Idempotent."""
        self._images.expire()
        env, self._env = self._env, None
        if env is not None:
            with suppress(Exception):  # a simulator that fails while it goes away has nothing left to tell
                env.close()

    def _reset(self, seed: int) -> Observations:
        self._images.expire()
        with failing_as(f"{self._options.task}: reset failed"), redirect_stdout(StringIO()):
            self._env.rng = np.random.default_rng(seed)
            np.random.seed(int(self._env.rng.integers(2**32)))  # of robosuite's own noise
            raw = self._env.reset()
            sentence = str(self._env.get_ep_meta().get("lang", ""))
        return self._observe(raw, sentence)

    def _observe(self, raw: Mapping[str, np.ndarray], sentence: str) -> Observations:
        state = np.concatenate([np.asarray(raw[name]).ravel() for name in STATE]).astype(np.float32)
        self._images = LateImages("robocasa", CAMERAS, self._draw)
        return Observations(self._images, state[None], [sentence])

    def _draw(self) -> Mapping[str, np.ndarray]:
        size = self._options.camera_size
        with failing_as(f"{self._options.task}: cannot render"):
            drawn = {name: self._env.sim.render(width=size, height=size, camera_name=name) for name in CAMERAS}
        # Drawn with row 0 at the bottom.
        return {name: np.array(image[None, ::-1], dtype=np.uint8, order="C") for name, image in drawn.items()}


def _make(options: RoboCasa.Options) -> Any:
    """The simulator's own environment, which never ends by itself and draws only when asked."""
    os.environ.setdefault("MUJOCO_GL", "osmesa")
    with failing_as(f"{options.task}: cannot be made"), redirect_stdout(StringIO()):
        import robocasa  # noqa: F401  registers the tasks
        import robosuite
        from robosuite.controllers import load_composite_controller_config

        return robosuite.make(
            env_name=options.task,
            robots=ROBOT,
            controller_configs=load_composite_controller_config(controller=None, robot=ROBOT),
            has_renderer=False,
            has_offscreen_renderer=True,
            use_camera_obs=False,
            ignore_done=True,
            layout_ids=options.layout_ids,
            style_ids=options.style_ids,
        )
