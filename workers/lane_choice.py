"""Which way observation bytes go: a simulator's choice per segment, and a reader's admission to the run."""

from __future__ import annotations

import socket
import time
from collections.abc import Set

from vla_stream.broker.lanes import MIN_FREE_BYTES, Lane, RedisLane, ShmLane
from vla_stream.broker.queue import WorkQueue
from vla_stream.config import Config
from vla_stream.errors import InputError
from vla_stream.flow import Permit
from workers.worker import Worker

BLOB_LIFETIME_S = 3600.0
AVOID_S = 5.0  # /dev/shm, after a write to it failed
WORD_S = 30.0  # between two events about a full /dev/shm
POLL_S = 0.1


class LaneChoice:
    """A simulator's ways for its observations, chosen anew for every segment."""

    def __init__(self, worker: Worker, config: Config) -> None:
        self.worker, self.config = worker, config
        self._redis = RedisLane(worker.client, worker.keys.blob, BLOB_LIFETIME_S)
        self._shm = ShmLane(worker.flow.shm_folder())
        self._failure, self._avoid_until_s = "", 0.0
        self._through_redis = False
        self._next_word_s = 0.0

    def choose(self, permit: Permit) -> tuple[Lane | None, int]:
        """The lane of this permit's segment, and the size below which its observations go inline all the same."""
        if permit.lane == "inline":
            return None, 0
        auto = permit.lane == "auto"
        inline_below = self.config.broker.inline_below_bytes if auto else 0
        if permit.lane == "redis" or (auto and permit.remote_reader):
            return self._redis, inline_below
        reason = self._shm_lacks(1, MIN_FREE_BYTES if auto else 0)
        # Also where people insist on /dev/shm: what is begun must go somewhere, and Redis is there.
        if reason is not None and not self._through_redis:
            self._say(f"observations travel through Redis: {reason}")
        self._through_redis = reason is not None
        return (self._shm if reason is None else self._redis), inline_below

    def reason_to_wait(self, segments: int) -> str | None:
        """Why so many segments should not be begun now. People who insist on /dev/shm wait for room in it."""
        if self.worker.lane != "shm" or not self.worker.sees_shm:
            return None
        reason = self._shm_lacks(segments, 0)
        if reason is not None:
            run = self.worker.keys.run
            self._say(f"{self.worker.id} waits: {reason}; make room there, or: vla-stream lane redis --run {run}")
        return reason

    def failed(self, lane: Lane | None, reason: str) -> None:
        """A write failed, and its segment is aborted. The next ones shall not share its fate (F28)."""
        if lane is self._shm:
            self._failure, self._avoid_until_s = reason, time.monotonic() + AVOID_S

    def _shm_lacks(self, segments: int, free_bytes: int) -> str | None:
        packets = segments * (self.config.segment_steps + 1)
        lacking = self._shm.lacks(max(free_bytes, packets * self._shm.largest_bytes))
        return lacking or (self._failure if time.monotonic() < self._avoid_until_s else None)

    def _say(self, sentence: str) -> None:
        if time.monotonic() >= self._next_word_s:
            self._next_word_s = time.monotonic() + WORD_S
            self.worker.say("lane", sentence)


def admit(worker: Worker) -> Set[str]:
    """Before a worker loads anything: the lane is one that it can use, or `beat` makes it one.

    Returns the segments that may travel by the old one, if this worker had it changed. Raises InputError when people
    insist on a /dev/shm that is not here."""
    worker.look_again()
    worker.patiently(worker.beat)
    if worker.lane == "shm" and worker.sees_shm is False:
        run = worker.keys.run
        raise InputError(
            f"lane of run {run}: shm, but {worker.flow.shm_folder()} is not on {socket.gethostname()}, expected a lane "
            f"that this host can reach; change it with: vla-stream lane auto --run {run}"
        )
    return (worker.patiently(worker.flow.permits) or set()) if worker.changed_lane else set()


def wait_for_segments(worker: Worker, queue: WorkQueue, members: Set[str], deadline_s: float) -> None:
    """A generator that cannot read these segments leaves them to the others of its group, as long as there are any."""
    until_s = time.monotonic() + deadline_s
    while members and time.monotonic() < until_s and not worker.draining and worker.patiently(queue.has_company):
        worker.state = f"waiting: {len(members)} segments are finished in another /dev/shm"
        worker.patiently(worker.beat)
        members = members & (worker.patiently(worker.flow.permits) or set())
        time.sleep(POLL_S)
