"""What a trainer takes from `trajectories`: read, checked, and held until an update consumes it, or refused."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vla_stream.broker.lanes import PayloadReader
from vla_stream.broker.queue import GARBAGE_AT_ONCE, Entry, WorkQueue
from vla_stream.config import Config
from vla_stream.environments.protocol import Specification
from vla_stream.errors import BadMessage, Hopeless, PayloadUnreachable
from vla_stream.flow import Consumed
from vla_stream.learning.segments import Segment
from vla_stream.streams.keys import TRAINERS
from vla_stream.streams.trajectories import Trajectory
from workers.worker import Worker

POISONED_UPDATES = 4  # so many updates' segments in a row, all unusable: their makers will not do better
READ_AT_ONCE = 4  # segments: while more were read, the device would have nothing to compute
TICKETS_REMEMBERED = 10_000  # a simulator frozen for longer than so many segments is not met


@dataclass(frozen=True, slots=True)
class Held:
    """A segment that this trainer has taken and not yet committed."""

    entry: Entry
    trajectory: Trajectory
    segment: Segment

    @property
    def consumed(self) -> Consumed:
        return Consumed(self.entry.id, self.trajectory.member)


class Intake:
    """Takes segments for one trainer, which sets `epoch` when it takes the run over.

    held     by `<ticket>.<attempt>`, in the order in which they came
    lineage  the newest tickets that the trainer's weights were trained on, oldest first
    """

    def __init__(self, worker: Worker, config: Config, specification: Specification) -> None:
        self.worker, self.config, self.specification = worker, config, specification
        self.flow, self.meter = worker.flow, worker.meter
        self.queue = WorkQueue(
            worker.client, self.flow.scripts, worker.keys.trajectories, TRAINERS, worker.id, config.flow.lease_s
        )
        self.reader = PayloadReader(worker.client, worker.keys.blob, self.flow.shm_folder())
        self.epoch = 0
        self.held: dict[str, Held] = {}
        self.lineage: dict[int, None] = {}
        self.last_data_s = time.monotonic()
        self._poisoned_in_a_row = 0

    def recover(self, others: Collection[str]) -> None:
        """What an earlier trainer or a lost reply left pending. others: entries that the trainer has beside `held`."""
        self._take_all(self.queue.recover(), others)

    def collect(self, most: int, block_ms: int | None, others: Collection[str]) -> None:
        """Read a few new segments, at most so many. others: as for `recover`."""
        with self.meter.busy("waiting"):
            entries = self.queue.read(min(most, READ_AT_ONCE), block_ms)
        if self._take_all(entries, others) == len(entries) > 0:
            self._take_all(self.queue.read(GARBAGE_AT_ONCE), others)

    def is_stale(self, held: Held, version: int) -> bool:
        """Whether it is too old to be trained by weights of this version."""
        return version - held.trajectory.version > self.config.flow.stale_limit_versions

    def refuse_stale(self, version: int) -> None:
        """Looked at before each update, since held segments age when this trainer takes over under a new version."""
        for held in [held for held in self.held.values() if self.is_stale(held, version)]:
            staleness, limit = version - held.trajectory.version, self.config.flow.stale_limit_versions
            self._refuse(held.entry, held.trajectory, f"its staleness is {staleness}, at most {limit} is trained")
            del self.held[held.trajectory.member]

    def remember(self, tickets: Sequence[int]) -> None:
        """They belong to the lineage now."""
        self.lineage |= dict.fromkeys(tickets)
        for ticket in list(self.lineage)[:-TICKETS_REMEMBERED]:
            del self.lineage[ticket]

    def remove_payloads(self, trajectory: Trajectory) -> None:
        """Its observations are of no more use."""
        references = trajectory.references()
        if references:
            self.reader.remove(references[0])

    def _take_all(self, entries: Sequence[Entry], others: Collection[str]) -> int:
        """Returns how many of them cannot be used."""
        with self.meter.busy("read"):
            return self._take_each(entries, others)

    def _take_each(self, entries: Sequence[Entry], others: Collection[str]) -> int:
        damaged: list[tuple[Entry, str]] = []
        arrived: list[tuple[Entry, Trajectory]] = []
        ours = {held.entry.id for held in self.held.values()}.union(others)
        for entry in entries:
            if entry.id in ours:
                continue  # pending after a reconnect, or delivered once more by a group that was made anew
            try:
                arrived.append((entry, Trajectory.from_fields(entry.fields)))
            except BadMessage as exc:
                damaged.append((entry, str(exc)))
        published = self.flow.published_as([trajectory.member for _, trajectory in arrived])
        for (entry, trajectory), published_as in zip(arrived, published, strict=True):
            try:
                if published_as != entry.id:
                    raise BadMessage(f"segment {trajectory.member} was not published as this entry")
                self._take(entry, trajectory)
            except BadMessage as exc:
                damaged.append((entry, str(exc)))
        if damaged:
            self._poisoned(damaged)
        return len(damaged)

    def _take(self, entry: Entry, trajectory: Trajectory) -> None:
        """Raises BadMessage."""
        if trajectory.segment.ticket in self.lineage:
            # Published, trained, and registered anew by a simulator that never heard of it from the lost server.
            self.flow.refuse(self.epoch, entry.id, "lost_with_server")
            self.remove_payloads(trajectory)
            self.worker.say("refused", f"segment {trajectory.member}: its ticket was trained before, it is dropped")
            return
        try:
            segment = trajectory.load(self.reader.read)
            self._check_shapes(segment)
        except PayloadUnreachable as exc:
            self._refuse(entry, trajectory, str(exc))
            return
        self.last_data_s, self._poisoned_in_a_row = time.monotonic(), 0
        self.held[trajectory.member] = Held(entry, trajectory, segment)
        self.meter.count("segments")

    def _check_shapes(self, segment: Segment) -> None:
        """A segment of another action shape or other observations must not end the trainer (F45). Raises BadMessage."""
        got = segment.actions.shape[2:]
        expected = (self.config.policy.chunk, self.specification.action_dims)
        if got != expected:
            raise BadMessage(f"segment {segment.ticket}: actions are [H, A] = {list(got)}, expected {list(expected)}")
        first = segment.observations[0]
        cameras = {camera: image.shape[1:3] for camera, image in first.images.items()}
        if cameras != dict(self.specification.cameras) or first.state.shape[1] != self.specification.state_dims:
            raise BadMessage(
                f"segment {segment.ticket}: it shows cameras {cameras} and {first.state.shape[1]} state dims, "
                f"expected {dict(self.specification.cameras)} and {self.specification.state_dims}"
            )

    def _refuse(self, entry: Entry, trajectory: Trajectory, reason: str) -> None:
        self.flow.refuse(self.epoch, entry.id, "refused")
        self.remove_payloads(trajectory)
        self.meter.count("refused")
        self.worker.say("refused", f"segment {trajectory.member}: {reason}; its ticket is given out again")

    def _poisoned(self, damaged: Sequence[tuple[Entry, str]]) -> None:
        self.worker.bury(self.queue.stream, damaged)
        segments = self.flow.refuse_all(self.epoch, [entry.id for entry, _ in damaged], "poisoned")
        for entry, reason in damaged:
            if entry.id not in segments:
                continue  # somebody else's entry, which nobody waits for
            self.meter.count("poisoned")
            self.worker.say("poisoned", f"entry {entry.id}: {reason}; its ticket is given out again")
            self._poisoned_in_a_row += 1
            if self._poisoned_in_a_row >= POISONED_UPDATES * self.config.trainer.segments_per_update:
                raise Hopeless(
                    f"{self._poisoned_in_a_row} segments in a row could not be used, last: {reason}; "
                    "see what the simulators and the policy of the generators return"
                )
