"""Environments in child processes, so that one that hangs, raises or dies is replaced instead of ending the run.

A host owns the B rows of one environment batch. `ProcessHost` spreads them over child processes (as many as the
environment's `rows_per_process` asks for); `LocalHost` keeps them in this process, for `--inline` and pdb. Both do one
thing at a time: `start_reset` or `start_chunk`, then `poll` until it is done.

Parent and child talk in packets of broker/codec.py over a socket pair; the child's side is environment_process.py. It
watches its own steps, and says what it begins; the parent's deadline is for a child that is stopped altogether.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vla_stream import plugins
from vla_stream.broker.codec import pieces, unpack
from vla_stream.config import Config, Environment, Simulators
from vla_stream.environments.chunks import ChunkResult, read_images, reset_checked, run_chunk
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import BadMessage, EnvironmentFailed, InputError, RunFailed
from vla_stream.streams.observations import checked_observations
from vla_stream.streams.specification import specification_from_json
from workers.environment_process import CPU_S, MARGIN, RESETS, RESULTS, STEPS
from workers.packets import Packets, Rooms
from workers.processes import RESTARTS_AT_ONCE, RestartBudget

Reply = tuple[dict[str, np.ndarray], dict[str, Any]]  # arrays and meta of a packet

STDERR = 2  # the file descriptor
GRACE_S = 1.0  # the child's own alarm comes first: it knows where it hangs
REAP_S = 1.0
LOOK_S = 0.1  # between two looks at whether one that says nothing hangs


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a host finished: a chunk, or a reset (then `chunk` is None).

    failed bool[B]: rows whose process was lost meanwhile; their values are zeros and `causes` says why.
    cpu_s: what child processes computed since their last chunks; 0 for a reset.
    """

    observations: Observations
    chunk: ChunkResult | None
    failed: np.ndarray
    causes: tuple[str, ...] = ()
    cpu_s: float = 0.0


class Host(Protocol):
    """B rows of one environment batch."""

    specification: Specification
    whole_batch: bool
    rows: int
    busy: bool

    def start_reset(self, mask: np.ndarray, seeds: np.ndarray) -> None:
        """Begin to reset the rows in mask bool[B] from seeds u64[B]."""

    def start_chunk(
        self, actions_BHA: np.ndarray, active: np.ndarray, reset_rows: np.ndarray, reset_seeds: np.ndarray
    ) -> None:
        """Begin a chunk; see environments/chunks.py."""

    def poll(self) -> Outcome | None:
        """The outcome once it is there. Raises RunFailed when processes keep failing."""

    def waitables(self) -> list[int]:
        """File descriptors that become readable when `poll` may have something."""

    def close(self) -> None:
        """End all processes. Idempotent."""


class LocalHost:
    """All rows in this process; an error of the environment goes straight to the caller (and to pdb)."""

    def __init__(self, config: Config, rows: int) -> None:
        self._batch = plugins.make_batch(config.environment, rows)
        self.specification, self.rows, self.busy = self._batch.specification, rows, False
        self.whole_batch = self._batch.whole_batch
        self._outcome: Outcome | None = None

    def start_reset(self, mask: np.ndarray, seeds: np.ndarray) -> None:
        self._finish(reset_checked(self._batch, mask, seeds), None)

    def start_chunk(
        self, actions_BHA: np.ndarray, active: np.ndarray, reset_rows: np.ndarray, reset_seeds: np.ndarray
    ) -> None:
        chunk = run_chunk(self._batch, actions_BHA, active, reset_rows, reset_seeds)
        self._finish(chunk.observations, chunk)

    def poll(self) -> Outcome | None:
        outcome, self._outcome, self.busy = self._outcome, None, False
        return outcome

    def waitables(self) -> list[int]:
        return []

    def close(self) -> None:
        self._batch.close()

    def _finish(self, observations: Observations, chunk: ChunkResult | None) -> None:
        # Rendered once: each slot will look at its part.
        observations = read_images(observations, self.specification)
        chunk = chunk and dataclasses.replace(chunk, observations=observations)
        self._outcome, self.busy = Outcome(observations, chunk, np.zeros(self.rows, dtype=bool)), True


class ProcessHost:
    """Rows spread over child processes; one that fails is replaced, and its rows are reported as failed once."""

    def __init__(self, config: Config, rows: int) -> None:
        cls = plugins.load_class(plugins.ENVIRONMENTS, config.environment.name)
        per_process = cls.rows_per_process or rows
        self._config, self.rows, self.busy = config, rows, False
        self.whole_batch: bool = cls.whole_batch
        self._children = [
            Child(config.environment, config.simulators, range(start, min(start + per_process, rows)))
            for start in range(0, rows, per_process)
        ]
        self._budget = RestartBudget(at_once=RESTARTS_AT_ONCE + len(self._children))
        self._failed = np.zeros(rows, dtype=bool)
        self._causes: list[str] = []
        self._replies: dict[int, Reply] = {}
        self._asked: list[int] = []
        self._is_chunk = False
        self._horizon = 0
        try:
            self.specification = self._await_specification()
        except BaseException:
            self.close()
            raise

    def start_reset(self, mask: np.ndarray, seeds: np.ndarray) -> None:
        self._send("reset", {"mask": mask, "seeds": seeds}, mask)

    def start_chunk(
        self, actions_BHA: np.ndarray, active: np.ndarray, reset_rows: np.ndarray, reset_seeds: np.ndarray
    ) -> None:
        self._horizon = actions_BHA.shape[1]
        arrays = {"actions": actions_BHA, "active": active, "reset_rows": reset_rows, "reset_seeds": reset_seeds}
        self._send("chunk", arrays, active)

    def poll(self) -> Outcome | None:
        for index in self._waiting():
            child = self._children[index]
            try:
                reply = child.poll()
            except EnvironmentFailed as exc:
                self._replace(index, str(exc))
                continue
            if reply is not None:
                self._replies[index] = reply
        return None if self._waiting() else self._finish()

    def waitables(self) -> list[int]:
        return [self._children[index].fileno() for index in self._waiting()]

    def close(self) -> None:
        for child in self._children:
            child.kill()

    def _waiting(self) -> list[int]:
        """Children whose reply is still to come; a replaced one owes none."""
        return [i for i in self._asked if i not in self._replies and not self._failed[self._children[i].rows.start]]

    def _send(self, operation: str, arrays: dict[str, np.ndarray], wanted: np.ndarray) -> None:
        assert not self.busy
        self._asked, self._replies, self._causes = [], {}, []
        self._failed[:] = False
        self.busy, self._is_chunk = True, operation == "chunk"
        for index, child in enumerate(self._children):
            part = slice(child.rows.start, child.rows.stop)
            if wanted[part].any():
                self._asked.append(index)
                child.send(operation, {name: array[part] for name, array in arrays.items()})

    def _replace(self, index: int, cause: str) -> None:
        child = self._children[index]
        self._failed[child.rows.start : child.rows.stop] = True
        self._causes.append(
            f"environment process {child.pid} (rows {child.rows.start} to {child.rows.stop - 1}): {cause}"
        )
        child.kill()
        if not self._budget.take(time.monotonic()):
            raise RunFailed(f"environments fail again and again, last: {cause}")
        self._children[index] = Child(self._config.environment, self._config.simulators, child.rows)

    def _finish(self) -> Outcome:
        self.busy = False
        parts: list[tuple[range, dict[str, np.ndarray]]] = []
        seen: list[tuple[range, Observations]] = []
        finals: list[Observations] = []
        cpu_s = 0.0
        for index, (arrays, meta) in self._replies.items():
            rows = self._children[index].rows
            results = {name: arrays.pop(name) for name in RESULTS if self._is_chunk}
            cpu_s += float(arrays.pop(CPU_S).sum()) if self._is_chunk else 0.0
            ended = len(results["final_rows"]) if self._is_chunk else 0
            try:
                # What the child let pass may still be more than a message may hold.
                observations = checked_observations(arrays, meta, len(rows) + ended)
            except BadMessage as exc:
                self._replace(index, str(exc))
                continue
            parts.append((rows, results))
            seen.append((rows, observations.part(slice(len(rows)))))
            if ended:
                finals.append(observations.part(slice(len(rows), None)))
        failed, causes = self._failed.copy(), tuple(self._causes)
        observations = self._stitch(seen)
        if not self._is_chunk:
            return Outcome(observations, None, failed, causes)
        merged: dict[str, np.ndarray] = {"executed": np.zeros((self.rows, self._horizon), dtype=bool)}
        merged["rewards"] = np.zeros(self.rows, dtype=np.float32)
        merged |= {name: np.zeros(self.rows, dtype=bool) for name in ("terminated", "truncated", "success", "at_end")}
        final_rows = [np.empty(0, dtype=np.int64)]
        for rows, results in parts:
            for name, target in merged.items():
                target[rows.start : rows.stop] = results[name]
            final_rows.append(results["final_rows"] + rows.start)
        index_of_finals = np.concatenate(final_rows)
        final = Observations.concatenate(finals) if finals else None
        chunk = ChunkResult(observations, final, index_of_finals, **merged)
        return Outcome(observations, chunk, failed, causes, cpu_s)

    def _stitch(self, parts: Sequence[tuple[range, Observations]]) -> Observations:
        if len(parts) == 1 and len(parts[0][0]) == self.rows:
            return parts[0][1]
        whole = Observations.blank(self.specification, self.rows)
        instruction = list(whole.instruction)
        for rows, part in parts:
            for camera, image in part.images.items():
                whole.images[camera][rows.start : rows.stop] = image
            whole.state[rows.start : rows.stop] = part.state
            instruction[rows.start : rows.stop] = part.instruction
        return dataclasses.replace(whole, instruction=instruction)

    def _await_specification(self) -> Specification:
        first, *_ = [child.await_specification() for child in self._children]
        return first


class Child:
    """One child process with some rows. Commands may be sent before it is ready; replies come in order."""

    def __init__(
        self, environment: Environment, simulators: Simulators, rows: range, python: str | Path = sys.executable
    ) -> None:
        self.rows = rows
        self.specification: Specification | None = None
        self._deadlines_s = {STEPS: simulators.step_deadline_s, RESETS: simulators.start_deadline_s}
        ours, theirs = socket.socketpair()
        self._beginnings, pipe = os.pipe()
        os.set_blocking(self._beginnings, False)
        os.set_blocking(pipe, False)
        task = {
            "environment": environment.model_dump(mode="json"),
            "rows": len(rows),
            "step_deadline_s": simulators.step_deadline_s,
            "start_deadline_s": simulators.start_deadline_s,
        }
        self._rooms = Rooms()
        passed = [theirs.fileno(), pipe] + [self._rooms.file] * (self._rooms.file >= 0)
        handed = map(str, (theirs.fileno(), pipe, self._rooms.file))
        command = [python, "-m", "workers.environment_process", *handed, json.dumps(task)]
        # Simulators print, and what a command like `eval` prints is read by programs.
        self._process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, stdout=STDERR)
        theirs.close()
        os.close(pipe)
        self._packets = Packets(ours, self._rooms)
        self._expect(RESETS)

    @property
    def ready(self) -> bool:
        return self.specification is not None

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._packets.fileno()

    def send(self, operation: str, arrays: dict[str, np.ndarray]) -> None:
        """A command; environment_process.py lists them."""
        self._expect(RESETS if operation == "reset" or not self.ready else STEPS)
        packet = pieces(arrays, {"operation": operation, "room": self._rooms.offer()})
        # Should it have died, or not read, the next poll says so with the reason.
        with contextlib.suppress(OSError):
            self._packets.send(packet, self._deadlines_s[STEPS])

    def poll(self) -> Reply | None:
        """The reply, or None while it works. Raises EnvironmentFailed: dead, hung, raised."""
        before = self._packets.received_bytes
        try:
            while (packet := self._packets.receive(wait=False)) is not None:
                arrays, meta = unpack(packet)
                if "error" in meta:
                    raise EnvironmentFailed(str(meta["error"]))
                if self.ready:
                    return arrays, meta
                self._greet(meta)
        except (EOFError, OSError) as exc:
            raise EnvironmentFailed(self._exit_reason()) from exc
        except BadMessage as exc:
            raise EnvironmentFailed(f"its answer is damaged: {exc}") from exc
        if self._process.poll() is not None:
            raise EnvironmentFailed(self._exit_reason())  # what it forked may hold the socket open
        self._watch(moved=self._packets.received_bytes != before)
        return None

    def await_specification(self) -> Specification:
        """Once the environment is made. Raises like `poll`."""
        while self.poll() is None and self.specification is None:
            wait([self.fileno()], timeout=LOOK_S)
        assert self.specification is not None
        return self.specification

    def ask(self, operation: str, arrays: dict[str, np.ndarray]) -> Reply:
        """Send, and wait for the reply. Raises like `poll`."""
        self.send(operation, arrays)
        while (reply := self.poll()) is None:
            wait([self.fileno()], timeout=LOOK_S)
        return reply

    def kill(self) -> None:
        self._packets.close()
        self._rooms.close()
        if self._beginnings >= 0:
            os.close(self._beginnings)
            self._beginnings = -1
        if self._process.poll() is None:
            self._process.kill()
        # One that hangs in a driver does not even die of SIGKILL: it must not take its parent along.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(REAP_S)

    def _expect(self, what: bytes) -> None:
        self._allowed_s = self._deadlines_s[what]
        self._due_s = time.monotonic() + self._allowed_s

    def _watch(self, *, moved: bool) -> None:
        with contextlib.suppress(BlockingIOError):
            if begun := os.read(self._beginnings, 4096):
                self._expect(STEPS if begun.endswith(STEPS) else RESETS)
        if moved:
            self._expect(STEPS)
        if time.monotonic() > self._due_s + MARGIN * self._allowed_s + GRACE_S:
            raise EnvironmentFailed(
                f"no sign of life for {self._allowed_s:g} s, it hangs; see simulators.step_deadline_s"
            )

    def _greet(self, meta: dict[str, object]) -> None:
        if "refused" in meta:
            raise InputError(str(meta["refused"]))
        self.specification = specification_from_json(str(meta["specification"]))
        self._expect(RESETS)

    def _exit_reason(self) -> str:
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "process closed its pipe; its log has the cause"
        if code == -signal.SIGALRM:
            return (
                f"a step took longer than simulators.step_deadline_s, {self._deadlines_s[STEPS]:g} s, "
                "or a reset longer than simulators.start_deadline_s: it hangs; the log shows where"
            )
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"process ended with {ended}; its log has the cause"
