"""Gymnasium environments with spaces that those of the package lack; used as `fake_gymnasium:Name-v0`."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

HEIGHT, WIDTH = 24, 32

Info = dict[str, Any]


class Robot(gymnasium.Env[dict[str, Any], np.ndarray]):
    """A dict observation with everything in it. It reuses its buffers, and tells its task at each reset.

    Every pixel of the wrist camera is the number of steps since the reset, of the rendered image that plus 100.
    The reward is 1. `done_at`: it terminates after so many steps; `success_at`: is_success from that step on.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(
        self, render_mode: str | None = None, done_at: int = 0, success_at: int = 0, fail: str = "", rgba: bool = False
    ) -> None:
        self.render_mode, self.rgba = render_mode, rgba
        self.done_at, self.success_at, self.fail = done_at, success_at, fail
        self.observation_space = spaces.Dict(
            {
                "joints": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
                "task": spaces.Text(40),
                "gripper": spaces.Discrete(3),
                "camera": spaces.Dict(
                    {
                        "wrist": spaces.Box(0, 255, (3, HEIGHT, WIDTH), np.uint8),
                        "depth": spaces.Box(0, 255, (HEIGHT, WIDTH), np.uint8),
                    }
                ),
                "words": spaces.Sequence(spaces.Discrete(5)),
            }
        )
        self.action_space = spaces.Box(np.array([-2.0, 0.0, -np.inf]), np.array([2.0, 10.0, np.inf]), (3,), np.float64)
        self.wrist, self.joints = np.zeros((3, HEIGHT, WIDTH), np.uint8), np.zeros((2, 2))
        self.steps = self.renders = 0
        self.task, self.closed = "", False
        self.actions: list[np.ndarray] = []

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Info, Info]:
        super().reset(seed=seed)
        self.steps = 0
        self.joints[:] = self.np_random.standard_normal((2, 2))
        self.task = f"lift cube {self.np_random.integers(1000)}"
        return self._observe(), {"language": f"please {self.task}"}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.steps += 1
        self.joints += 1
        if self.fail == "raise":
            raise ValueError("the arm broke\nin two")
        info = {"is_success": np.float64(self.steps >= self.success_at)} if self.success_at else {}
        return self._observe(), 1.0, self.steps == self.done_at, self.fail == "truncate", info

    def render(self) -> Any:
        self.renders += 1
        return np.full((HEIGHT, WIDTH, 4 if self.rgba else 3), 100 + self.steps, np.uint8)

    def close(self) -> None:
        self.closed = True

    def _observe(self) -> dict[str, Any]:
        self.wrist[:] = self.steps
        camera = {"wrist": self.wrist, "depth": np.full((HEIGHT, WIDTH), 7, np.uint8)}
        return {"joints": self.joints, "task": self.task, "gripper": 1, "camera": camera, "words": (1, 2)}


class Choices(gymnasium.Env[np.ndarray, Any]):
    """Pixels alone, and discrete actions of the kind that `actions` names; the first pixel is its seed's."""

    def __init__(self, actions: str = "discrete") -> None:
        self.observation_space = spaces.Box(0, 255, (16, 20, 1), np.uint8)
        self.action_space = {
            "discrete": spaces.Discrete(4, start=-1),
            "multi": spaces.MultiDiscrete([2, 3], start=[5, 0]),
            "binary": spaces.MultiBinary(3),
            "box": spaces.Box(0, 10, (2,), np.int64),
            "tuple": spaces.Tuple([spaces.Discrete(2)]),
        }[actions]
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        return np.full((16, 20, 1), self.np_random.integers(256), np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        return np.zeros((16, 20, 1), np.uint8), 0.0, False, False, {}


class Twin(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Another simulator with the shapes of `fakes:Line`."""

    def __init__(self, numbers: int = 3) -> None:
        self.observation_space = spaces.Dict(
            {"eye": spaces.Box(0, 255, (16, 16, 3), np.uint8), "numbers": spaces.Box(-1, 1, (numbers,), np.float32)}
        )
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Info, Info]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {}


gymnasium.register("Twin-v0", entry_point=Twin)
gymnasium.register("Robot-v0", entry_point=Robot, max_episode_steps=1000)
gymnasium.register("Choices-v0", entry_point=Choices)
