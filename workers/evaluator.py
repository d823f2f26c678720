"""The evaluator, in the trainer's place of an evaluation's run: it learns nothing.

It publishes a checkpoint's weights as the only ones, takes the segments of one round of tickets (evaluation.Plan), each
a few held-out seeds from their first step to their last, and has their outcomes. Until the next checkpoint is begun,
the round's segments stay outstanding, so that nothing else is played: the commit that lets them go publishes the next.
The same requests are always inferred together, so outcomes do not depend on who serves them, or how many do.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from vla_stream.config import Config
from vla_stream.environments.protocol import Specification
from vla_stream.errors import Expired, PlayedInVain, RunFailed
from vla_stream.evaluation import Outcomes, Plan
from vla_stream.flow import Consumed
from vla_stream.learning import checkpoint
from vla_stream.streams.observations import unpack_observations
from vla_stream.streams.trajectories import Trajectory
from workers.intake import Intake
from workers.weights import WeightsWriter
from workers.worker import Worker

EPOCH = 1
LOST = "the server lost what was played"
LOOK_S = 1.0  # between two looks at whether seeds were given up


class Evaluator:
    """Evaluates one checkpoint after the other: `begin`, then `step` until `done`.

    outcomes: of all seeds of the config's evaluation, in their order. actions: f32[T, H, A] of each, for films.
    """

    def __init__(self, worker: Worker, config: Config, specification: Specification) -> None:
        self.worker, self.config, self.flow = worker, config, worker.flow
        self.intake = Intake(worker, config, specification)
        self.plan = Plan.of(config)
        self.outcomes = Outcomes.blank(config.evaluation.episodes)
        self.actions: dict[int, np.ndarray] = {}
        self._weights = WeightsWriter(worker.client, worker.flow.scripts, worker.keys, base_every=1)
        self._taken: dict[str, Consumed] = {}  # by its stream entry: this round's
        self._missing = set[int]()
        self._update, self._next_look_s = -1, 0.0
        self._generation = ""
        self._cut_off = False  # in the last step, by the server: its answer may be pending
        self.intake.epoch = EPOCH

    @property
    def done(self) -> bool:
        """All seeds were played."""
        return not self._missing

    @property
    def played(self) -> int:
        return self.config.evaluation.episodes - len(self._missing)

    def begin(self, place: Path) -> None:
        """Have the policy of this checkpoint played; to be repeated where the server was away meanwhile.

        Raises InputError: it cannot be read."""
        data = checkpoint.policy_bytes(place)
        self.outcomes = Outcomes.blank(self.config.evaluation.episodes)
        self.actions.clear()
        self._missing = set(range(self.config.evaluation.episodes))
        update = self._update + 1
        upload = self._weights.describe(update + 1, update, EPOCH, data, full=True)
        self._weights.upload(upload)
        fields = upload.manifest.to_fields()
        try:
            if update == 0:
                self.flow.resume(EPOCH - 1, update, update + 1, 0, 0, fields)
            else:
                consumed = list(self._taken.values())
                if self.flow.commit(EPOCH, self._update, update + 1, consumed, fields, skipped=True) == "missing":
                    raise PlayedInVain(LOST)
        except Expired as exc:  # it was taken over, and only the answer was lost
            raise PlayedInVain(LOST) from exc
        state = self.flow.state()
        self.intake.recover(())
        self._weights.keep(upload)
        # Nothing is asked of the server from here on.
        self._generation = "" if state is None else state.generation
        self._update = update
        self._taken.clear()
        self.worker.version = update + 1

    def step(self, block_ms: int | None) -> bool:
        """Take what was played; True when there was any.

        Raises PlayedInVain, or RunFailed where an environment fails at the same seeds again and again."""
        if self.worker.generation not in ("", self._generation):
            raise PlayedInVain(LOST)
        if self._cut_off:
            self.intake.recover(self._taken)
        self._cut_off, before = True, self.played
        self.intake.collect(len(self.plan.parts), block_ms, self._taken)
        for member, held in list(self.intake.held.items()):
            self._take(held.trajectory)
            self._taken[held.entry.id] = held.consumed
            del self.intake.held[member]
            self.intake.remove_payloads(held.trajectory)
        self.worker.progress += self.played - before
        if time.monotonic() > self._next_look_s:
            self._next_look_s = time.monotonic() + LOOK_S
            self.flow.miss(EPOCH, [consumed.member for consumed in self._taken.values()])
            given_up = self.flow.books().given_up
            if given_up:
                raise RunFailed(f"episodes of {given_up} tickets failed three times, so that there is no whole result")
        self._cut_off = False
        return self.played > before

    def _take(self, trajectory: Trajectory) -> None:
        segment = trajectory.segment
        _, numbers = self.plan.part(segment.ticket)
        first = trajectory.payloads[0]
        seen = unpack_observations(self.intake.reader.read(first) if isinstance(first, str) else first, segment.rows)
        # Episodes are in the order in which they ended: by chunk step, then by row.
        rows = np.argwhere(segment.terminated | segment.truncated)[:, 1]
        for row, episode in zip(rows.tolist(), trajectory.episodes, strict=True):
            if row < len(numbers):
                number = numbers[row]
                self.outcomes.success[number] = episode.success
                self.outcomes.success_at_end[number] = episode.at_end
                self.outcomes.returns[number] = episode.reward
                self.outcomes.steps[number] = episode.steps
                self.outcomes.instructions[number] = seen.instruction[row]
                self.actions[number] = segment.actions[segment.valid[:, row], row]
                self._missing.discard(number)
