"""An environment in a child process, for ProcessHost and BatchApart.

    python -m workers.environment_process <socket> <pipe> <memory file or -1> <task>

It answers packets of broker/codec.py, and ends when the socket closes. Operations: `reset` and `chunk` for a host,
whose answers hold the images; `reset`, `step` and what PLAIN lists for a BatchApart, which asks for images with
`observe` only when somebody reads them. It sets the kernel's alarm clock for its steps and resets: one that hangs
writes all threads' tracebacks into the log and ends, even when a C library hangs. A byte into the pipe says what
begins, for a parent that watches whether this process moves at all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from vla_stream import plugins
from vla_stream.broker.codec import Piece, pieces, unpack
from vla_stream.config import Environment
from vla_stream.environments.chunks import check_result, read_images, reset_checked, run_chunk
from vla_stream.environments.protocol import EnvironmentBatch, Observations, StepResult
from vla_stream.errors import InputError
from vla_stream.streams.observations import observation_pieces
from vla_stream.streams.specification import specification_to_json
from workers.lifeline import die_with_parent
from workers.packets import Packets

# What a chunk's answer holds beside the observations, which are those of the rows and then those of `final_rows`.
RESULTS = ("final_rows", "executed", "rewards", "terminated", "truncated", "success", "at_end")
CPU_S = "cpu_s"  # and that: f64[1], what this process has computed since its last chunk
FLAGS = ("reward", "terminated", "truncated", "success")  # what a step's answer holds beside the state
PLAIN = ("expert_actions", "grounding_targets")  # optional methods without arguments, with one array as their answer
STEPS, RESETS = b"s", b"r"  # what begins; it takes as long as simulators.step_deadline_s, start_deadline_s allow
MARGIN = 0.05  # of a deadline


class _Watched:
    """The environment in a child process, each step and reset under the alarm."""

    def __init__(self, batch: EnvironmentBatch, deadlines_s: dict[bytes, float], beginnings: int) -> None:
        self.specification = batch.specification
        self._batch, self._deadlines_s, self._beginnings = batch, deadlines_s, beginnings
        self._told, self._told_s = b"", 0.0
        self.seen: Observations | None = None  # by the last step
        self._cpu_s = 0.0

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        self._alarm(RESETS)
        return self._batch.reset(mask, seeds)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        self._alarm(STEPS)
        result = self._batch.step(actions, active)
        self.seen = result.observations
        return result

    def call(self, name: str) -> np.ndarray:
        """One of PLAIN."""
        self._alarm(STEPS)
        array: np.ndarray = getattr(self._batch, name)()
        return array

    def rendered(self, observations: Observations, *, after_reset: bool = False) -> Observations:
        """Images may be rendered only now, and renderers are what hangs most (F40)."""
        self._alarm(RESETS if after_reset else STEPS)
        return read_images(observations, self.specification)

    def _alarm(self, what: bytes) -> None:
        """From now on, SIGALRM ends this process after the deadline for `what`, unless something else begins before.

        Steps that take microseconds are not told one by one: the alarm may come later by MARGIN, never earlier."""
        now_s, deadline_s = time.monotonic(), self._deadlines_s[what]
        if what == self._told and now_s < self._told_s + MARGIN * deadline_s:
            return
        self._told, self._told_s = what, now_s
        with contextlib.suppress(OSError):  # full, when the parent does not look: it knows enough then
            os.write(self._beginnings, what)
        signal.setitimer(signal.ITIMER_REAL, (1 + MARGIN) * deadline_s)

    def cpu_s(self) -> np.ndarray:
        """f64[1]: seconds computed since the last look, as a part of an answer."""
        before, self._cpu_s = self._cpu_s, time.process_time()
        return np.array([self._cpu_s - before])

    def rest(self) -> None:
        """Nothing is to be done: no alarm."""
        self._told = b""
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(batch: _Watched, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> list[Piece]:
    operation = meta.get("operation")
    if operation == "reset":
        seen = batch.rendered(reset_checked(batch, arrays["mask"], arrays["seeds"]), after_reset=True)
        batch.rest()
        return observation_pieces(seen)
    if operation == "step":
        result = batch.step(arrays["actions"], arrays["active"])
        batch.rest()
        check_result(result, batch.specification, len(result.reward))
        blind = replace(result.observations, images={})
        return observation_pieces(blind, **{name: getattr(result, name) for name in FLAGS})
    if operation == "observe":
        assert batch.seen is not None
        seen = batch.rendered(batch.seen)
        batch.rest()
        return observation_pieces(seen)
    if operation in PLAIN:
        array = batch.call(operation)
        batch.rest()
        return pieces({operation: array}, {})
    chunk = run_chunk(batch, arrays["actions"], arrays["active"], arrays["reset_rows"], arrays["reset_seeds"])
    parts = [batch.rendered(part) for part in (chunk.observations, chunk.final) if part is not None]
    batch.rest()
    seen = Observations.concatenate(parts) if len(parts) > 1 else parts[0]
    return observation_pieces(seen, **{name: getattr(chunk, name) for name in RESULTS}, **{CPU_S: batch.cpu_s()})


def main() -> None:
    die_with_parent(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the simulator, which ends us by closing the socket
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)  # tell where, then die of it
    packets = Packets(socket.socket(fileno=int(sys.argv[1])))
    beginnings, memory_file, task = int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    try:
        batch = plugins.make_batch(Environment.model_validate(task["environment"]), int(task["rows"]))
    except InputError as exc:
        packets.send(pieces({}, {"refused": str(exc)}))
        return
    except Exception as exc:
        traceback.print_exc()
        packets.send(pieces({}, {"error": _cause(exc)}))
        return
    packets.send(pieces({}, {"specification": specification_to_json(batch.specification)}))
    deadlines_s = {STEPS: float(task["step_deadline_s"]), RESETS: float(task["start_deadline_s"])}
    watched = _Watched(batch, deadlines_s, beginnings)
    while True:
        try:
            packet = packets.receive(wait=True)
        except (EOFError, OSError):
            break
        assert packet is not None
        arrays, meta = unpack(packet)
        try:
            reply = _answer(watched, arrays, meta)
        except Exception as exc:
            # The environment is someone else's code: whatever it raises is reported, and this process is replaced.
            watched.rest()
            traceback.print_exc()
            reply = pieces({}, {"error": _cause(exc)})
        packets.send(reply, room=(memory_file, *meta["room"]))
    batch.close()


def _cause(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"[:1500]


if __name__ == "__main__":
    main()
