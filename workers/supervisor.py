"""Starts, watches, restarts and stops worker processes of one run on this host.

`step()` does one round and returns what people should be told; it never blocks for long. Only the supervisor that owns
a pid kills it. Processes are started from the thread that calls `launch` and `step`: workers die with it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vla_stream.broker import lanes
from vla_stream.broker.complaints import not_stored
from vla_stream.broker.connection import REDIS_ERRORS, UNREACHABLE, ResponseError, address, connect
from vla_stream.broker.server import MALLOC_ENVIRONMENT
from vla_stream.errors import InputError
from vla_stream.flow import Flow, FlowState
from vla_stream.streams import notices, presence
from vla_stream.streams.keys import Keys
from workers.processes import RestartBudget, has_exited, kill_group, log_tail, send_signal, signal_name

ROLES = ("trainer", "generator", "simulator")
CLAIM_TTL_S = 60.0
REDIS_MARGIN_S = 3.0
WATCH_S = 2.0  # between two looks at the workers' hashes
# Both on top of the hash's own TTL. A worker that loops writes its hash again soon after a flush; one that still loads
# a model or makes its environments, and a trainer in a long update, has its main loop elsewhere for minutes.
SILENT_AFTER_S = 15.0
BUSY_AFTER_S = 600.0
MISSING_AFTER_S = 10.0  # longer than a restart takes
STOP_S = 3.0  # from the second SIGTERM to SIGKILL
NUDGE_S = 0.4  # between two SIGTERMs: signals of one number that arrive together count once
DETAIL_LINES = 15
EXIT_FINISHED, EXIT_BAD_INPUT, EXIT_HOPELESS = 0, 2, 3

WAITING_FOR = {
    "simulator": "trainer waits for data: no simulator is alive; start some with vla-stream simulators --run {run}",
    "generator": "simulators wait for actions: no generator is alive; start one with vla-stream generators --run {run}",
    "trainer": "the run waits for updates: no trainer is alive; start one with vla-stream trainers --run {run}",
}


@dataclass(frozen=True, slots=True)
class Notice:
    """One thing to tell people. kind: a word to filter by; details: log lines that show the cause, if any."""

    kind: str
    worker: str
    text: str
    details: tuple[str, ...] = ()


@dataclass(slots=True)
class Child:
    """One worker name of this supervisor, and its process while there is one."""

    role: str
    id: str
    token: str
    device: str
    log: Path
    ranks: int = 1
    process: subprocess.Popen[bytes] | None = None
    log_start: int = 0
    state: str = "starting"
    silent_since_s: float | None = None
    kill_reason: str = ""
    asked: bool = False  # to leave


@dataclass(slots=True)
class _Timer:
    """True once per `every_s`."""

    every_s: float
    _next_s: float = field(default=0.0)

    def due(self, now_s: float) -> bool:
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self.every_s
        return True


def worker_command(role: str, run: str, worker_id: str, interpreters: Mapping[str, Path] | None = None) -> list[str]:
    """The command line of a worker. The URL is not in it, since it may hold a password.

    interpreters: by role; a simulator's is that of its environments' processes, too. Others run in this one."""
    return [str((interpreters or {}).get(role, sys.executable)), "-m", f"workers.{role}", run, worker_id]


class Supervisor:
    """Workers of the run `run` on this host.

    watch_roles: tell when a role has no live worker anywhere (the launcher does, a pool does not).
    shm: the run's folder under /dev/shm, swept of files that belong to no live segment.
    environment: variables for the workers, on top of this process's own.
    """

    def __init__(
        self,
        url: str,
        run: str,
        runs_dir: Path,
        *,
        lease_s: float = 10.0,
        watch_roles: bool = False,
        shm: Path | None = None,
        environment: Mapping[str, str] | None = None,
        command: Callable[[str, str, str], list[str]] = worker_command,
        silent_after_s: float = SILENT_AFTER_S,
        busy_after_s: float = BUSY_AFTER_S,
        missing_after_s: float = MISSING_AFTER_S,
        stop_s: float = STOP_S,
    ) -> None:
        self.url, self.run, self.runs_dir = url, run, runs_dir.resolve()
        self.keys = Keys(run)
        self.children: dict[str, Child] = {}
        self.failures: dict[str, str] = {}
        self.refused: set[str] = set()  # roles whose failure is bad input: trying again is no remedy
        self.finished: dict[str, int] = {}
        self.draining = False
        self.unreachable_since_s: float | None = None
        self._client = connect(url, name="supervisor", margin_s=REDIS_MARGIN_S)
        self._flow = Flow(self._client, self.keys)
        self._command, self._environment = command, dict(environment or {})
        self._watch_roles, self._shm, self._lease_s = watch_roles, shm, lease_s
        self._silent_after_s, self._busy_after_s, self._stop_s = silent_after_s, busy_after_s, stop_s
        self._missing_after_s = missing_after_s
        self._budgets = {role: RestartBudget() for role in ROLES}
        self._drain_until_s = float("inf")
        self._unsent: deque[Notice] = deque(maxlen=200)
        self._shown: set[str] = set()
        self._missing_since: dict[str, float] = {}
        self._told_missing: set[str] = set()
        self._watch, self._sweep = _Timer(min(WATCH_S, silent_after_s / 2)), _Timer(max(2.0, lease_s))

    # ---- what the command line calls

    def launch(self, role: str, count: int, devices: Sequence[str] = ()) -> list[str]:
        """Start `count` workers under free names, spread over `devices`; returns their ids. Trainers are the ranks of
        one, which starts the others itself: see ranks.py.

        Raises InputError (the run has its trainer), or what UNREACHABLE lists.
        """
        if role == "trainer":
            return [self._launch(role, ",".join(devices[:count]), ranks=count)] if count else []
        return [self._launch(role, devices[i % len(devices)] if devices else "") for i in range(count)]

    def _launch(self, role: str, device: str, ranks: int = 1) -> str:
        worker_id, token = self._claim_free(role)
        log = self.runs_dir / self.run / "logs" / f"{worker_id}.log"
        child = Child(role, worker_id, token, device, log, ranks)
        self.children[worker_id] = child
        self._spawn(child)
        return worker_id

    def scale(self, role: str, count: int) -> None:
        """Have so many workers of a role: start the missing ones, ask the newest to finish what they have begun and
        leave. Raises as `launch`."""
        staying = self.staying(role)
        self.launch(role, max(0, count - len(staying)))
        for child in staying[count:]:
            if child.process is None:
                self._forget(child, EXIT_FINISHED)
            else:
                child.asked = True
                send_signal(child.process, signal.SIGTERM)

    def staying(self, role: str) -> list[Child]:
        """Its workers here, without those that were asked to leave."""
        return [child for child in self.children.values() if child.role == role and not child.asked]

    def step(self) -> list[Notice]:
        """One round: reap, restart, look for silent workers and missing roles, sweep. Returns what happened."""
        now_s = time.monotonic()
        told = self._reap(now_s)
        if self.draining:
            self._ask_to_leave()
        if self.draining and now_s > self._drain_until_s and self.children:
            told.append(Notice("stopped", "supervisor", f"{self._names()}: not finished in time, stopped"))
            self._terminate()
        try:
            if self.unreachable_since_s is not None:
                self._client.ping()  # what follows may have nothing to ask just now
            told += self._restart_pending()
            if self._watch.due(now_s):
                told += self._look_for_silence(now_s)
                told += self._look_for_missing_roles(now_s)
            if self._shm is not None and self._sweep.due(now_s):
                lanes.sweep(self._shm, self._flow.live_members(), 2 * self._lease_s)
            if self.unreachable_since_s is not None:
                self.unreachable_since_s = None
                told.append(Notice("redis", "supervisor", f"Redis at {address(self._client)} answers again"))
            self._unsent.extend(notice for notice in told if notice.kind != "ended")  # its worker said so itself
            while self._unsent:
                notice = self._unsent[0]
                notices.say(self._client, self.keys, notice.worker, notice.kind, notice.text)
                self._unsent.popleft()
        except UNREACHABLE as exc:
            for child in self.children.values():
                child.silent_since_s = None
            if self.unreachable_since_s is None:
                self.unreachable_since_s = now_s
                what = f"Redis at {address(self._client)}: no answer ({exc}); workers wait for it"
                told.append(Notice("redis", "supervisor", what))
        except ResponseError as exc:
            if not not_stored(exc):
                raise  # Else events wait in `_unsent`; the workers say what they wait for.
        return told

    def drain(self, deadline_s: float) -> None:
        """Ask all workers to finish what they have begun. `step()` stops those that take longer than `deadline_s`.

        Generators are asked when no simulator is left here: a segment in flight needs them to its end.
        """
        if not self.draining:
            self.draining = True
            self._drain_until_s = time.monotonic() + deadline_s
            for child in list(self.children.values()):
                if child.process is None:
                    self._forget(child, EXIT_FINISHED)
            self._ask_to_leave()

    def _ask_to_leave(self) -> None:
        simulating = self.count("simulator") > 0
        for child in self.children.values():
            if child.process is not None and not child.asked and not (child.role == "generator" and simulating):
                child.asked = True
                send_signal(child.process, signal.SIGTERM)

    def stop(self) -> None:
        """End all workers now, and give their names back. Returns when none is left."""
        self.draining = True
        self._terminate()

    def close(self) -> None:
        """Stop, and give up the connection."""
        self.stop()
        self._client.close()

    def flow_state(self) -> tuple[FlowState | None, bool]:
        """The run's state, None if there is none, and whether the server answered."""
        try:
            return self._flow.state(), True
        except UNREACHABLE:
            return None, False

    def count(self, role: str) -> int:
        """Workers of a role that run here, or are about to be restarted."""
        return sum(child.role == role for child in self.children.values())

    def __repr__(self) -> str:
        state = "draining" if self.draining else "running"
        return f"<Supervisor {self.run} {state}: {self._names() or 'no worker'}>"

    # ---- starting

    def _claim_free(self, role: str) -> tuple[str, str]:
        if role == "trainer":
            token = secrets.token_hex(8)
            if self._claim("trainer-0", role, token):
                return "trainer-0", token
            there = [item for item in presence.alive(self._client, self.keys) if item.role == role]
            where = f" on {there[0].host} with pid {there[0].pid}" if there else ""
            raise InputError(
                f"trainers: run {self.run} has its trainer already, trainer-0{where}, expected none; stop it first"
            )
        number = 0
        while True:
            worker_id, token = f"{role}-{number}", secrets.token_hex(8)
            if worker_id not in self.children and self._claim(worker_id, role, token):
                return worker_id, token
            number += 1

    def _claim(self, worker_id: str, role: str, token: str) -> bool:
        about = {"role": role, "host": socket.gethostname(), "state": "starting"}
        return presence.claim(self._flow.scripts, self.keys, worker_id, token, CLAIM_TTL_S, about)

    def _spawn(self, child: Child) -> None:
        child.log.parent.mkdir(parents=True, exist_ok=True)
        child.state, child.silent_since_s, child.kill_reason = "starting", None, ""
        environment = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **MALLOC_ENVIRONMENT,
            **os.environ,
            **self._environment,
            "VLA_STREAM_REDIS": self.url,
            "VLA_STREAM_TOKEN": child.token,
            "VLA_STREAM_DEVICE": child.device,
            "VLA_STREAM_RUNS": str(self.runs_dir),
            "VLA_STREAM_PARENT": str(os.getpid()),
            "VLA_STREAM_RANKS": str(child.ranks),
        }
        with child.log.open("ab") as log:
            child.log_start = log.tell()
            child.process = subprocess.Popen(
                self._command(child.role, self.run, child.id),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Ctrl-C in the terminal reaches the launcher alone, which drains; the group is for killing it whole.
                start_new_session=True,
            )

    def _restart_pending(self) -> list[Notice]:
        told = []
        for child in [child for child in self.children.values() if child.process is None]:
            if not self._claim(child.id, child.role, child.token):
                old = child.id
                del self.children[old]
                try:
                    child.id, child.token = self._claim_free(child.role)
                except InputError as exc:
                    self.failures.setdefault(child.role, str(exc))
                    told.append(Notice("failed", old, str(exc)))
                    continue
                child.log = child.log.with_name(f"{child.id}.log")
                self.children[child.id] = child
            self._spawn(child)
            told.append(Notice("restarted", child.id, f"{child.id} is started again"))
        return told

    # ---- watching

    def _reap(self, now_s: float) -> list[Notice]:
        told = []
        for child in list(self.children.values()):
            if child.process is None or not has_exited(child.process):
                continue
            # The leader is a zombie still, so the group's number is surely ours: nothing it started may stay.
            kill_group(child.process)
            told.append(self._judge(child, child.process.wait(), now_s))
        return told

    def _judge(self, child: Child, code: int, now_s: float) -> Notice:
        """What the end of a worker means, and what is to be done."""
        child.process = None
        if code == EXIT_FINISHED or (child.asked and code == -signal.SIGTERM):  # asked before it could hear it
            self._forget(child, code)
            return Notice("ended", child.id, f"{child.id} has finished")
        lines = log_tail(child.log, child.log_start)
        last = lines[-1].removeprefix(f"{child.id}: ") if lines else "its log is empty"
        cause = child.kill_reason or (f"killed by {signal_name(-code)}" if code < 0 else last)
        if code == EXIT_HOPELESS:
            cause = last
            self._forget(child, code)
            self.failures.setdefault(child.role, cause)
            return Notice("failed", child.id, f"{child.id} gives up: {cause}")
        if code == EXIT_BAD_INPUT:
            cause = last
            self._forget(child, code)
            if child.role not in self.failures:
                self.failures[child.role] = cause
                self.refused.add(child.role)
            return Notice("failed", child.id, f"{child.id} cannot run: {cause}")
        details = () if cause in self._shown else tuple(lines[-DETAIL_LINES:])
        self._shown.add(cause)
        if self.draining or child.asked:
            self._forget(child, code)
            doing = "draining" if self.draining else "it was to leave"
            return Notice("lost", child.id, f"{child.id} ended while {doing}: {cause}", details)
        if not self._budgets[child.role].take(now_s):
            self._forget(child, code)
            self.failures.setdefault(child.role, f"{child.id} crashed again and again, last: {cause}")
            return Notice("failed", child.id, f"{child.id} crashed too often, the last time: {cause}", details)
        return Notice("crashed", child.id, f"{child.id} crashed: {cause}", details)

    def _forget(self, child: Child, code: int) -> None:
        del self.children[child.id]
        self.finished[child.id] = code
        # Its name is free for others at once; if Redis does not answer, the name expires.
        if self.unreachable_since_s is not None:
            return
        try:
            presence.release(self._flow.scripts, self.keys, child.id, child.token)
        except UNREACHABLE:
            self.unreachable_since_s = time.monotonic()  # the others' names are not worth as many waits
        except REDIS_ERRORS:
            pass

    def _look_for_silence(self, now_s: float) -> list[Notice]:
        """Alive but silent (F06): the process is there, and its hash, which its main loop renews, is not."""
        told = []
        for child in self.children.values():
            if child.process is None or child.kill_reason:
                continue
            state = self._client.hget(self.keys.worker(child.id), "state")
            looping = child.state.startswith(("running", "waiting"))
            if isinstance(state, bytes):
                child.state, child.silent_since_s = state.decode(errors="replace"), None
            elif child.silent_since_s is None:
                child.silent_since_s = now_s
            elif now_s - child.silent_since_s >= (self._silent_after_s if looping else self._busy_after_s):
                child.kill_reason = "it was alive but silent, its main loop made no progress"
                told.append(Notice("silent", child.id, f"{child.id} is alive but silent and is killed"))
                kill_group(child.process)
        return told

    def _look_for_missing_roles(self, now_s: float) -> list[Notice]:
        if not self._watch_roles or self.draining:
            return []
        state = self._flow.state()
        if state is None or state.desired != "running":
            self._missing_since.clear()
            return []
        there = {item.role for item in presence.alive(self._client, self.keys)}
        told = []
        for role in ROLES:
            if role in there:
                self._missing_since.pop(role, None)
                self._told_missing.discard(role)
            elif now_s - self._missing_since.setdefault(role, now_s) >= self._missing_after_s:
                if role not in self._told_missing:
                    told.append(Notice("missing", "supervisor", WAITING_FOR[role].format(run=self.run)))
                self._told_missing.add(role)
        return told

    # ---- ending

    def _terminate(self) -> None:
        """SIGTERM until it counts twice, then SIGKILL of the whole group."""
        started_s = time.monotonic()
        nudge = _Timer(NUDGE_S)
        while self.children:
            now_s = time.monotonic()
            nudging, killing = nudge.due(now_s), now_s - started_s > self._stop_s
            for child in list(self.children.values()):
                if child.process is None:
                    self._forget(child, EXIT_FINISHED)
                elif has_exited(child.process):
                    kill_group(child.process)
                    self._forget(child, child.process.wait())
                elif killing:
                    kill_group(child.process)
                elif nudging:
                    send_signal(child.process, signal.SIGTERM)
            if self.children:
                time.sleep(0.02)

    def _names(self) -> str:
        return ", ".join(self.children)
