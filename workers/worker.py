"""What every worker process shares: name, hash in Redis, desired state, signals, samples, waiting for Redis.

Liveness is progress: the main loop calls `beat()`, no thread does it for a loop that is stuck.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from vla_stream.broker.complaints import CUT_OFF, OOM, explain, not_stored, refused, was_cut
from vla_stream.broker.connection import (
    OUT_OF_MEMORY,
    UNREACHABLE,
    Backoff,
    Client,
    ResponseError,
    ServerClock,
    address,
    check_server,
    connect,
)
from vla_stream.broker.lanes import shm_folder
from vla_stream.broker.queue import Entry
from vla_stream.config import Config, LaneName
from vla_stream.errors import Expired, Hopeless, InputError, NoSuchRun, RunFailed, VlaStreamError
from vla_stream.flow import Desired, Flow, FlowState
from vla_stream.metrics import Meter, Usage
from vla_stream.streams import notices, presence
from vla_stream.streams.keys import Keys
from workers.lifeline import die_with_parent, orphaned

BEAT_S = 1.0
TTL_S = 60.0  # longer than any single step of a healthy main loop, so that a long update is not taken for a death
LONG_TTL_S = 900.0  # while a model is loaded, environments start, or a warm start is made
BLOCK_S = 1.0  # longest BLOCK of any worker's connection

MEMORY_WORD_S = 30.0  # between two events of one worker about a full server
MEMORY_STATE_S = 3.0  # longer than Backoff's longest wait
WAITING_FOR_MEMORY = "waiting: Redis is full"
CUT_OFF_AFTER = 2  # failures in a row of one request, before the server is suspected to refuse that request alone

Answer = TypeVar("Answer")


class Worker:
    """One live worker of a run."""

    def __init__(self, role: str, worker_id: str, token: str, run: str, url: str, parent: int | None = None) -> None:
        self.role, self.id, self.token, self.url, self.parent = role, worker_id, token, url, parent
        self.keys = Keys(run)
        self.client = self.connect()
        self.flow = Flow(self.client, self.keys)
        self.meter, self._usage = Meter(), Usage()
        self.traced = False  # all its life, as the config says; else while `flow` says so
        self._clock, self._looked_ms = ServerClock(self.client), 0.0
        self.desired: Desired = "running"
        self.generation = ""  # of the server's life, as seen last
        self.lane: LaneName = "auto"  # the run's, as seen last
        self.sees_shm: bool | None = None  # whether the run's folder under /dev/shm is here; None: not looked yet
        self.changed_lane = False  # this worker made `auto` mean Redis
        self.version = 0
        self.state = "starting"
        self.device = ""
        self.progress = 0
        self.fellows: dict[str, dict[str, str | int]] = {}  # processes that this one shows too: what differs, by id
        self._signals = 0
        self._next_beat_s = self._next_memory_word_s = self._full_until_s = 0.0
        self._ttl_s = TTL_S
        self._started_ms = int(time.time() * 1000)

    def connect(self) -> Client:
        """One more connection, for a thread of its own."""
        return connect(self.url, name=self.id, block_s=BLOCK_S)

    @property
    def leaving(self) -> bool:
        """This worker was told to finish what it has begun, and end."""
        return self._signals > 0

    @property
    def draining(self) -> bool:
        """This worker, or the whole run, begins nothing new and ends when what is begun is finished."""
        return self.leaving or self.desired in ("draining", "stopped")

    @property
    def stopping(self) -> bool:
        """End now."""
        return self._signals > 1 or self.desired == "stopped"

    def claim(self) -> None:
        """Take the name. Raises InputError when a live worker has it (F53)."""
        if not self._write_hash():
            raise InputError(
                f"worker {self.id}: the name is taken by a live worker of run {self.keys.run}; use another"
            )

    def beat(self) -> None:
        """Called from the main loop, as often as it likes: once a second it shows progress and reads the desired state.

        Raises Expired when another process took this worker's name over."""
        now_s = time.monotonic()
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_S
        if self.parent is not None and orphaned(self.parent):
            raise Expired("the process that started this worker is gone")
        if not self._write_hash():
            raise Expired("another process took this worker's name over")
        state = self.flow.state()
        if state is not None:
            self.desired, self.generation = state.desired, state.generation
            self._mind_the_lane(state)
        self.emit("second", self.meter.sample() | self._usage.sample())
        self._send_spans(state.trace_until_ms if state is not None else 0)

    def _send_spans(self, until_ms: int) -> None:
        """Those since the last beat: of a beat that took a minute, also what a trace asked for meanwhile."""
        spans, dropped = self.meter.spans()
        if not (self.traced or until_ms):
            return
        before_ms, self._looked_ms = self._looked_ms, self._clock.now_ms()
        if spans and (self.traced or before_ms < until_ms):
            clock_us = 1000.0 * self._looked_ms - 1e6 * time.monotonic()
            with notices.expendable():
                notices.trace(self.client, self.keys, self.id, self.role, clock_us, spans, dropped)

    def _mind_the_lane(self, state: FlowState) -> None:
        """A reader that does not see the run's /dev/shm has observations sent through Redis (F28)."""
        folder = shm_folder(self.keys.run, state.shm_token)
        self.lane, self.sees_shm = state.lane, folder.is_dir()
        if self.role not in presence.READERS or self.sees_shm or state.lane != "auto" or state.remote_reader:
            return
        if self.flow.add_remote_reader(self.id):
            self.changed_lane = True
            self.say(
                "lane",
                f"observations travel through Redis from now on: {self.id} on {socket.gethostname()} does not see "
                f"{folder}; once it is gone: vla-stream lane auto --run {self.keys.run}",
            )

    def look_again(self) -> None:
        """The next `beat` reads the desired state, however short ago the last one was."""
        self._next_beat_s = 0.0

    @contextlib.contextmanager
    def long_step(self, state: str) -> Iterator[None]:
        """The body may take minutes without a beat: until it is over, silence is no sign of death."""
        before, self.state, self._ttl_s = self.state, state, LONG_TTL_S
        self.patiently(self._write_hash)
        try:
            yield
        finally:
            self.state, self._ttl_s, self._next_beat_s = before, TTL_S, 0.0

    def emit(self, kind: str, sample: dict[str, float]) -> None:
        """One entry of the `metrics` stream."""
        with notices.expendable():
            notices.sample(self.client, self.keys, self.id, self.role, kind, sample)

    def say(self, kind: str, sentence: str) -> None:
        """An event for people, also in this worker's log."""
        print(f"{time.strftime('%H:%M:%S')} {self.id} {kind}: {sentence}", file=sys.stderr, flush=True)
        with contextlib.suppress(*UNREACHABLE), notices.expendable():
            try:
                notices.say(self.client, self.keys, self.id, kind, sentence)
            except OUT_OF_MEMORY:
                notices.say_although_full(self.flow.scripts, self.keys, self.id, kind, sentence)

    def bury(self, stream: str, letters: Sequence[tuple[Entry, str]]) -> None:
        """Entries nobody can use, each with the reason, go to `dead-letters`; that must not kill their reader (F16)."""
        if letters:
            self.meter.count("dead_letters", len(letters))
            with notices.expendable():
                notices.dead_letters(self.client, self.keys, self.id, stream, letters)

    def release(self) -> None:
        """Give the name back."""
        with contextlib.suppress(*UNREACHABLE):
            presence.release(self.flow.scripts, self.keys, self.id, self.token)

    def on_signal(self, *_: object) -> None:
        """SIGTERM or SIGINT: the first drains, the second stops."""
        self._signals += 1

    def patiently(self, call: Callable[[], Answer], recover: Callable[[], None] | None = None) -> Answer | None:
        """`call()`, waiting while Redis is unreachable or full (F23); None when told to stop meanwhile.

        recover: called first after each wait, since a lost reply may have left entries in our pending list (F03).
        """
        backoff = Backoff()
        while True:
            try:
                if recover is not None and backoff.failures:
                    recover()
                return call()
            except (*UNREACHABLE, ResponseError) as exc:
                if refused(exc) or not (isinstance(exc, UNREACHABLE) or not_stored(exc)):
                    raise
                self._name_the_wait(exc, backoff.failures)
                if self.parent is not None and orphaned(self.parent):
                    raise Expired("the process that started this worker is gone") from exc
                if self._signals > 0:
                    time.sleep(Backoff.FIRST_S)  # whoever calls this in a loop until all have left must not spin
                    return None
                time.sleep(backoff.next_s())

    def _name_the_wait(self, exc: Exception, failures: int) -> None:
        """Nobody should have to guess what a worker waits for: its state shows it, and one event tells it."""
        if isinstance(exc, OUT_OF_MEMORY):
            self._wait_for_memory()
        elif failures == 0:
            print(f"{self.id}: Redis: {exc}; waiting for it", file=sys.stderr, flush=True)
        elif failures == CUT_OFF_AFTER and was_cut(exc):
            # The server is there: then it is this request that it does not let through (F25).
            with contextlib.suppress(*UNREACHABLE):
                self.client.ping()
                self.say("redis", f"Redis at {address(self.client)}: {CUT_OFF}")

    def _wait_for_memory(self) -> None:
        now_s = time.monotonic()
        self._full_until_s = now_s + MEMORY_STATE_S
        if now_s >= self._next_memory_word_s:
            self._next_memory_word_s = now_s + MEMORY_WORD_S
            self.say("memory", f"Redis at {address(self.client)}: {OOM}; {self.id} waits")
        # What waits may be the main loop itself: it lives, and its hash must not expire.
        if now_s >= self._next_beat_s:
            self._next_beat_s = now_s + BEAT_S
            with contextlib.suppress(*UNREACHABLE), notices.expendable():
                self._write_hash()

    def _write_hash(self) -> bool:
        fields: dict[str, str | int] = {
            "role": self.role,
            **presence.process_fields(),
            "device": self.device,
            "version": self.version,
            "state": self._shown_state(),
            "progress": self.progress,
            "started_ms": self._started_ms,
            "shm": {True: "yes", False: "no", None: ""}[self.sees_shm],
        }
        for name, others in self.fellows.items():
            presence.claim(self.flow.scripts, self.keys, name, self.token, self._ttl_s, fields | others)
        return presence.claim(self.flow.scripts, self.keys, self.id, self.token, self._ttl_s, fields)

    def _shown_state(self) -> str:
        if time.monotonic() < self._full_until_s:
            return WAITING_FOR_MEMORY
        return "draining" if self.draining else self.state


class _Log(io.TextIOWrapper):
    """stderr, which is a file in the run's folder: a full disk loses words, and must not end the worker (F47)."""

    def __init__(self) -> None:
        super().__init__(io.FileIO(2, "w", closefd=False), errors="backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def run_process(role: str, body: Callable[[Worker, Config], None]) -> None:
    """The frame of a worker process: `python -m workers.<role> RUN ID`, the rest in VLA_STREAM_* variables.

    Exit codes: 0 finished or drained, 2 bad input, 3 hopeless, 1 anything else (the supervisor restarts it)."""
    run, worker_id = sys.argv[1:3]
    sys.stderr = _Log()
    parent = int(os.environ.get("VLA_STREAM_PARENT", "0")) or None
    if parent is not None:
        die_with_parent(parent)
    code = 1
    try:
        worker = Worker(role, worker_id, os.environ["VLA_STREAM_TOKEN"], run, os.environ["VLA_STREAM_REDIS"], parent)
        worker.device = os.environ.get("VLA_STREAM_DEVICE", "")
        signal.signal(signal.SIGTERM, worker.on_signal)
        signal.signal(signal.SIGINT, worker.on_signal)
        check_server(worker.client)
        worker.claim()
        try:
            config = worker.flow.config()
            if "VLA_STREAM_RUNS" in os.environ:
                config = config.model_copy(update={"runs_dir": Path(os.environ["VLA_STREAM_RUNS"])})
            worker.traced, threading.current_thread().name = config.trace, "main"
            worker.say("started", f"{role} {worker_id} started, pid {os.getpid()}")
            body(worker, config)
            worker.say("ended", f"{role} {worker_id} ended as asked")
            code = 0
        finally:
            worker.release()
    except (InputError, Hopeless) as exc:
        print(f"{worker_id}: {exc}", file=sys.stderr, flush=True)
        # No such run: perhaps only until its launcher has made it anew on a server that lost it.
        code = 3 if isinstance(exc, Hopeless) else 1 if isinstance(exc, NoSuchRun) else 2
    except (Expired, RunFailed) as exc:
        print(f"{worker_id}: {exc}", file=sys.stderr, flush=True)
    except SystemExit as exc:
        # Somebody's policy or environment ended the process: that is no end which anybody asked for.
        print(f"{worker_id}: foreign code called sys.exit({exc.code})", file=sys.stderr, flush=True)
    except VlaStreamError as exc:
        traceback.print_exc()
        print(f"{worker_id}: {exc}", file=sys.stderr, flush=True)
    except Exception as exc:
        if refused(exc):
            print(f"{worker_id}: {explain(exc, os.environ['VLA_STREAM_REDIS'])}", file=sys.stderr, flush=True)
            code = 2
        else:
            traceback.print_exc()
    sys.stderr.flush()
    # Threads that block in C (a hung device, a socket) must not keep a finished process alive.
    os._exit(code)
