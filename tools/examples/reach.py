"""Your own simulator in one file: a finger on a table, seen from above, is to reach the disc that the sentence names.

    cd tools/examples                                     # a module:Class is looked for in the folder that you start in
    ../../.venv/bin/vla-stream check reach.yaml           # makes the class and tries whether it keeps the protocol
    ../../.venv/bin/vla-stream run reach.yaml             # the tiny VLA: imitation, then PPO

To make it yours, copy the folder and replace what stands in `_reset_row`, `_step_row` and `_images`; the rest is what
any simulator needs. vla_stream/environments/protocol.py has the words for all that is promised here.

# B rows: environments that are stepped together
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from vla_stream.config import Section
from vla_stream.environments.chunks import check_actions
from vla_stream.environments.protocol import Observations, Specification, StepResult

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220)}
TABLE, FINGER = (200, 190, 170), (20, 20, 20)
PIXELS = 24
DISC_RADIUS, FINGER_RADIUS = 0.2, 0.08  # the table is a square from -1 to 1
STEP = 0.2  # what an action of 1 moves the finger by


class Reach:
    """B tables with three discs each.

    images["top"]: u8[B, 24, 24, 3]. state: f32[B, 2], the finger's x (right) and y (down), each in [-1, 1].
    actions: f32[B, 2] in [-1, 1], the finger's way in x and y. Reaching the named disc ends the episode with success.
    """

    class Options(Section):
        """What `environment.options` of a config may set. Unknown keys are errors, told with the sentences here."""

        progress_reward: float = Field(default=1.0, ge=0, description="Per unit by which the finger comes nearer.")

    # Your simulator can hold any number of rows in one process? None. Just one, as many do? 1: then each row gets a
    # process of its own, and this class is made with rows = 1.
    rows_per_process: ClassVar[int | None] = None
    # True for simulators on a GPU that can only step all rows at once.
    whole_batch: ClassVar[bool] = False

    def __init__(self, rows: int, max_steps: int, options: Reach.Options) -> None:
        self.specification = Specification(cameras={"top": (PIXELS, PIXELS)}, state_dims=2, action_dims=2)
        self.rows, self.max_steps, self.options = rows, max_steps, options
        self._finger = np.zeros((rows, 2))
        self._discs = np.zeros((rows, len(COLOURS), 2))
        self._named = np.zeros(rows, dtype=int)  # the disc that the sentence names
        self._steps = np.zeros(rows, dtype=int)

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        """Begin an episode in the rows of mask bool[B], each from its seed u64[B] alone: that makes runs repeatable."""
        for row in np.flatnonzero(mask):
            self._reset_row(row, np.random.default_rng(int(seeds[row])))
            self._steps[row] = 0
        return self._observations()

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """One step of the rows of active bool[B]; the others stay as they are, with zeros and False in what is told.

        There is no reset in here: a row that ended is reset by whoever steps it, after it has seen the last image.
        """
        check_actions("reach", actions, active, self.rows, self.specification.action_dims)
        reward = np.zeros(self.rows, dtype=np.float32)
        success = np.zeros(self.rows, dtype=bool)
        truncated = np.zeros(self.rows, dtype=bool)
        for row in np.flatnonzero(active):
            reward[row], success[row] = self._step_row(row, np.clip(actions[row], -1, 1))
            self._steps[row] += 1
            # Terminated: the task is over. Truncated: only the time is, and the value of what would follow counts.
            truncated[row] = self._steps[row] >= self.max_steps and not success[row]
        return StepResult(self._observations(), reward, terminated=success.copy(), truncated=truncated, success=success)

    def expert_actions(self) -> np.ndarray:
        """Optional: what demonstrates the task, f32[B, 2], for a warm start by imitation (`pretrain` in the config)."""
        named = self._discs[np.arange(self.rows), self._named]
        return np.clip((named - self._finger) / STEP, -1, 1).astype(np.float32)

    def close(self) -> None:
        """Nothing to release here; a simulator with windows or a GPU lets go of them."""

    # ---- the world

    def _reset_row(self, row: int, random: np.random.Generator) -> None:
        self._finger[row] = random.uniform(-0.9, 0.9, 2)
        while True:  # until no disc covers another one or the finger
            discs = random.uniform(-0.8, 0.8, (len(COLOURS), 2))
            things = np.vstack([discs, self._finger[row]])
            distances = np.linalg.norm(things[:, None] - things[None], axis=-1) + 9 * np.eye(len(things))
            if distances.min() > 2 * DISC_RADIUS:
                break
        self._discs[row], self._named[row] = discs, random.integers(len(COLOURS))

    def _step_row(self, row: int, action: np.ndarray) -> tuple[float, bool]:
        """Reward and success."""
        before = self._distance(row)
        self._finger[row] = np.clip(self._finger[row] + STEP * action, -1, 1)
        reached = self._distance(row) < DISC_RADIUS
        return self.options.progress_reward * (before - self._distance(row)) + reached, reached

    def _distance(self, row: int) -> float:
        return float(np.linalg.norm(self._discs[row, self._named[row]] - self._finger[row]))

    def _images(self) -> np.ndarray:
        """u8[B, 24, 24, 3], RGB, the first line at the top."""
        places = (np.arange(PIXELS) * 2 + 1) / PIXELS - 1
        images = np.full((self.rows, PIXELS, PIXELS, 3), TABLE, dtype=np.uint8)
        things = [(self._discs[:, index], DISC_RADIUS, colour) for index, colour in enumerate(COLOURS.values())]
        for centre, radius, colour in [*things, (self._finger, FINGER_RADIUS, FINGER)]:
            x, y = places - centre[:, :1], places - centre[:, 1:]
            images[(x**2)[:, None, :] + (y**2)[:, :, None] < radius**2] = colour
        return images

    def _observations(self) -> Observations:
        """Of all rows, in new arrays: nobody may see an observation change afterwards."""
        return Observations(
            images={"top": self._images()},
            state=self._finger.astype(np.float32),
            instruction=[f"reach the {list(COLOURS)[named]} disc" for named in self._named],
        )
