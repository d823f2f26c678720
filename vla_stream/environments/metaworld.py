"""Meta-World tasks (a Sawyer arm over a table): one camera, the hand, a sentence per task. One row per process.

`metaworld` is imported when an environment is made, so reading a config is cheap. `tools/setup metaworld` installs it
into an environment of its own, `.venvs/metaworld`, since it pins MuJoCo; a config names its interpreter in
`simulators.python`.

    image mode   one image u8[1, size, size, 3] under the camera's name; state f32[1, 4]: position of the hand (x, y, z
                 in m), opening of the gripper from 0 to 1. Where object and goal are, only the image tells.
    state mode   no image; state f32[1, 39] is the simulator's own: hand, gripper and objects now and one step ago, goal
    action       f32[1, 4] in [-1, 1]: displacement of the hand (1 is 1 cm per step) and effort that closes the gripper

An image is rendered when it is read, which must be before the next step or reset. MUJOCO_GL=egl renders on a GPU; the
default is osmesa, which needs none.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from vla_stream.config import Section
from vla_stream.environments.chunks import check_actions
from vla_stream.environments.late_images import LateImages
from vla_stream.environments.one_row import failing_as, one_row
from vla_stream.environments.protocol import Observations, Specification, StepResult
from vla_stream.errors import EnvironmentFailed, InputError

HAND_DIMS, STATE_DIMS, ACTION_DIMS = 4, 39, 4
MOST_REWARD = 10.0  # of the simulator's dense reward
REMEDY = "run tools/setup metaworld, and set simulators.python to .venvs/metaworld/bin/python"

Camera = Literal["corner", "corner2", "corner3", "corner4", "topview", "gripperPOV", "behindGripper"]
UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")  # as the simulator's models define them

# Every task of MT50, with what the policy is told.
TASKS: Mapping[str, str] = {
    "assembly-v3": "put the ring over the peg",
    "basketball-v3": "drop the ball into the basket",
    "bin-picking-v3": "move the block from the one bin to the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "reach around the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "take the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "hit the nail with the hammer",
    "hand-insert-v3": "put the hand into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "insert the peg into the hole in the side",
    "peg-unplug-side-v3": "pull the peg out of the hole in the side",
    "pick-out-of-hole-v3": "take the puck out of the hole",
    "pick-place-v3": "pick up the puck and hold it at the goal",
    "pick-place-wall-v3": "lift the puck over the wall and hold it at the goal",
    "plate-slide-back-side-v3": "slide the plate out of the cabinet sideways",
    "plate-slide-back-v3": "slide the plate out of the cabinet",
    "plate-slide-side-v3": "slide the plate into the cabinet sideways",
    "plate-slide-v3": "slide the plate into the cabinet",
    "push-back-v3": "pull the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "move the hand to the goal",
    "reach-wall-v3": "move the hand around the wall to the goal",
    "shelf-place-v3": "put the block onto the shelf",
    "soccer-v3": "push the ball into the net",
    "stick-pull-v3": "pull the box with the stick",
    "stick-push-v3": "push the box with the stick",
    "sweep-into-v3": "sweep the puck into the hole",
    "sweep-v3": "sweep the puck off the table",
    "window-close-v3": "close the window",
    "window-open-v3": "open the window",
}
SETS: Mapping[str, tuple[str, ...]] = {
    "MT10": (
        *("reach-v3", "push-v3", "pick-place-v3", "door-open-v3", "drawer-open-v3", "drawer-close-v3"),
        *("button-press-topdown-v3", "peg-insert-side-v3", "window-open-v3", "window-close-v3"),
    ),
    "MT50": tuple(TASKS),
}


class MetaWorld:
    """One Meta-World environment as an EnvironmentBatch of one row. Also an Expert, in every task."""

    class Options(Section):
        """Options of `environment.options` when `environment.name` is metaworld."""

        tasks: list[str] = Field(
            default=["reach-v3"],
            min_length=1,
            description="Tasks to play, or the sets MT10 and MT50 of them; each reset seed chooses one; more often "
            "named, more often chosen.",
        )
        image: bool = Field(default=True, description="Render; false: the simulator's full state and no image.")
        camera: Camera = Field(default="corner4", description="The camera; those in corners are turned by 180°.")
        camera_size: int = Field(default=64, ge=8, le=480, description="Width and height of the image in pixels.")
        reward: Literal["sparse", "dense", "differenced"] = Field(
            default="sparse",
            description="sparse: 1 on success; dense: Meta-World's, from 0 to 1, which pays for lingering; "
            "differenced: the dense one's growth since the step before, plus 1 on success.",
        )

    rows_per_process: ClassVar[int | None] = 1
    whole_batch: ClassVar[bool] = False

    @classmethod
    def check_installed(cls, options: Options) -> None:
        """Raises InputError: no Meta-World here, or no such task."""
        _expand(options.tasks)
        if find_spec("metaworld") is None:
            raise InputError(f"metaworld: Meta-World is not installed in the environment of {sys.executable}; {REMEDY}")

    def __init__(self, rows: int, max_steps: int, options: Options) -> None:
        """Make the simulator of the first task, without a reset. Raises InputError or EnvironmentFailed."""
        if rows != 1:
            raise InputError(f"metaworld: {rows} rows in one process, expected 1; start one process per row")
        self.check_installed(options)
        self.rows, self.max_steps = rows, max_steps
        self._options = options
        self._tasks = _expand(options.tasks)
        size = (options.camera_size, options.camera_size)
        cameras: dict[str, tuple[int, int]] = {options.camera: size} if options.image else {}
        self.specification = Specification(cameras, HAND_DIMS if options.image else STATE_DIMS, ACTION_DIMS)
        self._steps = 0
        self._running = False
        self._shaping: float | None = None
        self._images = LateImages("metaworld", (), None)
        self._observations = Observations.blank(self.specification, 1)
        self._raw = np.zeros(STATE_DIMS)
        self._simulator = _Simulator(self._tasks[0], options, max_steps)

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """Reset the row if mask bool[1] says so, from seeds u64[1] alone: they choose the task and all its places."""
        if mask[0]:
            random = np.random.default_rng(int(seeds[0]))
            task = self._tasks[int(random.integers(len(self._tasks)))]
            self._images.expire()
            if task != self._simulator.task:
                self._simulator.close()
                self._simulator = _Simulator(task, self._options, self.max_steps)
            self._raw = self._simulator.reset(int(random.integers(2**31)))
            self._observations = self._observe()
            self._steps, self._running, self._shaping = 0, True, None
        return self._observations

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Step the row if active bool[1] says so, with actions f32[1, 4], which are clipped to [-1, 1].

        Success ends the episode. Raises EnvironmentFailed on a bad action, or a row that ended."""
        check_actions("metaworld", actions, active, 1, ACTION_DIMS)
        if not active[0]:
            return one_row(self._observations, 0.0, terminated=False, truncated=False, success=False)
        if not self._running:
            raise EnvironmentFailed("metaworld: step of a row that is not running; reset it first")
        self._images.expire()
        self._raw, dense, success = self._simulator.step(actions[0].clip(-1, 1))
        self._observations = self._observe()
        self._steps += 1
        truncated = self._steps >= self.max_steps and not success
        self._running = not (success or truncated)
        reward = self._reward(dense / MOST_REWARD, success)
        return one_row(self._observations, reward, terminated=success, truncated=truncated, success=success)

    def expert_actions(self) -> np.ndarray:
        """Next action f32[1, 4] of Meta-World's own scripted policy for the task; it looks at the present state."""
        return self._simulator.expert_action(self._raw)[None]

    def close(self) -> None:
        """Release the simulator. Idempotent."""
        self._images.expire()
        self._simulator.close()

    def _reward(self, dense: float, success: bool) -> float:
        if self._options.reward == "sparse":
            return float(success)
        if self._options.reward == "dense":
            return dense
        growth = 0.0 if self._shaping is None else dense - self._shaping
        self._shaping = dense
        return growth + float(success)

    def _observe(self) -> Observations:
        state = self._raw[: self.specification.state_dims].astype(np.float32)
        self._images = LateImages("metaworld", self.specification.cameras, self._simulator.draw)
        return Observations(self._images, state[None], [TASKS[self._simulator.task]])


class _Simulator:
    """Meta-World's own environment of one task, its renderer, and its scripted policy."""

    def __init__(self, task: str, options: MetaWorld.Options, max_steps: int) -> None:
        os.environ.setdefault("MUJOCO_GL", "osmesa")  # read when mujoco is imported
        # One row per process: the processes share the cores, a renderer's threads would get in their way.
        os.environ.setdefault("LP_NUM_THREADS", "1")
        with failing_as(f"{task}: cannot be made"):
            import mujoco
            from metaworld.env_dict import ENV_CLS_MAP
            from metaworld.policies import ENV_POLICY_MAP

            self.task, self._options = task, options
            self._expert: Any = ENV_POLICY_MAP[task]()
            self._env: Any = ENV_CLS_MAP[task]()
            size = options.camera_size
            self._renderer: Any = mujoco.Renderer(self._env.model, size, size) if options.image else None
        # Its benchmarks draw 50 places beforehand; here each reset draws its own from its seed. The goal may be seen:
        # the scripted policies look at it.
        self._env._set_task_called, self._env._freeze_rand_vec, self._env.seeded_rand_vec = True, False, True
        self._env._partially_observable = False
        self._env.__dict__.pop("sawyer_observation_space", None)  # made for a hidden goal
        self._env.max_path_length = max_steps + 1  # it refuses to go on at its own

    def reset(self, seed: int) -> np.ndarray:
        """The state f64[39]. seed: below 2**31."""
        with failing_as(f"{self.task}: reset failed"):
            self._env.seed(seed)
            raw: np.ndarray = self._env.reset()[0]
        return raw

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
        """The state f64[39], the dense reward, and whether the task is done."""
        with failing_as(f"{self.task}: step failed"):
            raw, reward, _, _, told = self._env.step(action)
        return raw, float(reward), bool(told["success"])

    def draw(self) -> Mapping[str, np.ndarray]:
        camera = self._options.camera
        with failing_as(f"{self.task}: cannot render"):
            self._renderer.update_scene(self._env.data, camera=camera)
            drawn = self._renderer.render()
        turned = drawn[::-1, ::-1] if camera in UPSIDE_DOWN else drawn
        return {camera: np.array(turned[None], order="C")}  # a copy: the renderer uses its array again

    def expert_action(self, raw: np.ndarray) -> np.ndarray:
        with failing_as(f"{self.task}: the scripted policy failed"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they ask for more than 1, and say so
            action: np.ndarray = np.asarray(self._expert.get_action(raw), dtype=np.float32).clip(-1, 1)
        return action

    def close(self) -> None:
        renderer, self._renderer = self._renderer, None
        env, self._env = self._env, None
        for part in (renderer, env):
            with suppress(Exception):  # a simulator that fails while it goes away has nothing left to tell
                part.close()


def _expand(tasks: list[str]) -> list[str]:
    """Sets replaced by what is in them. Raises InputError."""
    names: list[str] = []
    for name in tasks:
        if name not in TASKS and name not in SETS:
            near = difflib.get_close_matches(name, [*SETS, *TASKS], n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join([*SETS, *TASKS])}"
            raise InputError(f"environment.options.tasks holds {name!r}, no task of Meta-World; {remedy}")
        names += SETS.get(name, (name,))
    return names
