"""An environment in a child process, for ProcessHost.

    python -m workers.environment_process <socket> <pipe> <memory file or -1> <task>

It answers packets of broker/codec.py, and ends when the socket closes. It sets the kernel's alarm clock before each
step and reset: one that hangs writes all threads' tracebacks into the log and ends, even when a C library hangs. A byte
into the pipe says which of them begins, for a parent that watches whether this process moves at all.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from vla_stream import plugins
from vla_stream.broker.codec import Piece, pieces, unpack
from vla_stream.config import Environment
from vla_stream.environments.chunks import read_images, reset_checked, run_chunk
from vla_stream.environments.protocol import EnvironmentBatch, Observations, StepResult
from vla_stream.errors import InputError
from vla_stream.streams.observations import observation_pieces
from vla_stream.streams.specification import specification_to_json
from workers.lifeline import die_with_parent
from workers.packets import Packets

# What a chunk's answer holds beside the observations, which are those of the rows and then those of `final_rows`.
RESULTS = ("final_rows", "executed", "rewards", "terminated", "truncated", "success")
STEPS, RESETS = b"s", b"r"  # what begins; it takes as long as simulators.step_deadline_s, start_deadline_s allow


class _Watched:
    """The environment in a child process, each step and reset under the alarm."""

    def __init__(self, batch: EnvironmentBatch, deadlines_s: dict[bytes, float], beginnings: int) -> None:
        self.specification = batch.specification
        self._batch, self._deadlines_s, self._beginnings = batch, deadlines_s, beginnings

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        with self._alarm(RESETS):
            return self._batch.reset(mask, seeds)

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        with self._alarm(STEPS):
            return self._batch.step(actions, active)

    def rendered(self, observations: Observations, *, after_reset: bool = False) -> Observations:
        """Images may be rendered only now, and renderers are what hangs most (F40)."""
        with self._alarm(RESETS if after_reset else STEPS):
            return read_images(observations, self.specification)

    @contextlib.contextmanager
    def _alarm(self, what: bytes) -> Iterator[None]:
        """SIGALRM ends this process when the body takes longer."""
        with contextlib.suppress(OSError):  # full, when the parent does not look: it knows enough then
            os.write(self._beginnings, what)
        signal.setitimer(signal.ITIMER_REAL, self._deadlines_s[what])
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(batch: _Watched, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> list[Piece]:
    if meta.get("operation") == "reset":
        observations = reset_checked(batch, arrays["mask"], arrays["seeds"])
        return observation_pieces(batch.rendered(observations, after_reset=True))
    chunk = run_chunk(batch, arrays["actions"], arrays["active"], arrays["reset_rows"], arrays["reset_seeds"])
    seen = batch.rendered(chunk.observations)
    if chunk.final is not None:
        seen = Observations.concatenate([seen, batch.rendered(chunk.final)])
    return observation_pieces(seen, **{name: getattr(chunk, name) for name in RESULTS})


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
            traceback.print_exc()
            reply = pieces({}, {"error": _cause(exc)})
        packets.send(reply, room=(memory_file, *meta["room"]))
    batch.close()


def _cause(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"[:1500]


if __name__ == "__main__":
    main()
