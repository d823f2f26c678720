"""A synthetic gymnasium environment for comparisons with other frameworks: a 3×96×96 image and a fixed time per step.

It needs numpy and gymnasium only, so that a framework with a Python environment of its own can load this file. Here:
`environment: {name: gymnasium, options: {id: "pixels:Pixels-v0"}}` with this folder on PYTHONPATH.
"""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np

SHAPE = (3, 96, 96)
ACTIONS = 4
EPISODE_STEPS = 128
_WINDOWS = 4096  # images are windows into a little more noise than they need, so each is another one


class Pixels(gymnasium.Env[np.ndarray, int]):
    """Noise whose seed names the one action that is rewarded. An episode ends, terminated, after 128 steps.

    step_ms: from the call of `step` to its return, whatever it computes meanwhile.
    """

    def __init__(self, step_ms: float = 5.0) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, SHAPE, np.uint8)
        self.action_space = gymnasium.spaces.Discrete(ACTIONS)
        self._step_s = step_ms / 1000
        self._noise = np.random.default_rng(0).integers(0, 256, int(np.prod(SHAPE)) + _WINDOWS, dtype=np.uint8)
        self._steps = self._best = self._window = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps, self._best = 0, int(self.np_random.integers(ACTIONS))
        self._window = int(self.np_random.integers(_WINDOWS))
        return self._image(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        due_s = time.monotonic() + self._step_s
        self._steps += 1
        reward = float(action == self._best)
        image = self._image()
        time.sleep(max(0.0, due_s - time.monotonic()))
        return image, reward, self._steps >= EPISODE_STEPS, False, {}

    def _image(self) -> np.ndarray:
        self._window = (self._window + 61) % _WINDOWS
        image = self._noise[self._window : self._window + int(np.prod(SHAPE))].reshape(SHAPE).copy()
        image[:, :24, :24] = 60 * self._best
        return image


gymnasium.register("Pixels-v0", entry_point=Pixels)
