"""What workers did when, from records of the `trace` stream: as Chrome's trace format, which Perfetto reads too, and as
shares of the time. Pure: nothing here asks a server.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from vla_stream.cli.pulse import INPUT, OUTPUT, ROLES, WORK, Shares
from vla_stream.cli.samples import Record, number
from vla_stream.metrics import SPANS_KEPT
from vla_stream.streams.notices import one_line

TRACE_FILE = "trace.jsonl"  # in runs/<name>/, of a run with `trace: true`
MOST_US = 2.0**53
MOST_CHARACTERS = 100


class Piece(NamedTuple):
    """A span, in microseconds; see metrics.Span."""

    track: str
    stage: str
    start_us: int
    end_us: int
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Process:
    """Who did it."""

    worker: str
    role: str
    host: str
    pid: int


@dataclass(slots=True)
class _History:
    """Of one process. clocks_us: what each of its entries said is to be added for the server's clock."""

    pieces: list[Piece] = field(default_factory=list)
    clocks_us: list[float] = field(default_factory=list)


def is_trace(record: Record) -> bool:
    """Whether a worker may have written it."""
    return _parse(record) is not None


class Timeline:
    """Spans of all processes on the server's clock."""

    def __init__(self) -> None:
        self._of: dict[Process, _History] = defaultdict(_History)
        self.dropped = 0

    def add(self, records: Iterable[Record]) -> None:
        """What no worker wrote is left out."""
        for record in records:
            found = _parse(record)
            if found is not None:
                process, clock_us, pieces = found
                self._of[process].pieces += pieces
                self._of[process].clocks_us.append(clock_us)
                self.dropped += int(number(record, "dropped") or 0)

    @property
    def workers(self) -> set[str]:
        return {process.worker for process in self._of}

    @property
    def bounds_us(self) -> tuple[int, int]:
        """When the first span began and the last one ended; (0, 0) without any."""
        times = [time for _, piece in self._pieces() for time in (piece.start_us, piece.end_us)]
        return (min(times), max(times)) if times else (0, 0)

    def chrome(self, begin_us: int, end_us: int) -> dict[str, Any]:
        """The spans between two times, cut there, as an object of Chrome's trace event format: one process per worker,
        one thread per track; times count from the beginning."""
        events: list[dict[str, Any]] = []
        pids: dict[Process, int] = {}
        tids: dict[tuple[Process, str], int] = {}
        hosts = {process.host for process in self._of}
        for process in sorted(self._of, key=_order):
            pid = pids[process] = len(pids) + 1
            where = f" on {process.host}" if len(hosts) > 1 else ""
            events.append(_about(pid, 0, "process_name", name=f"{process.worker}{where} ({process.pid})"))
            events.append(_about(pid, 0, "process_sort_index", sort_index=pid))
        for process, piece in self._pieces(begin_us, end_us):
            pid = pids[process]
            tid = tids.get((process, piece.track))
            if tid is None:
                tid = tids[process, piece.track] = len(tids) + 1
                events.append(_about(pid, tid, "thread_name", name=piece.track))
            times = {"ts": piece.start_us - begin_us, "dur": piece.end_us - piece.start_us}
            event = {"ph": "X", "cat": process.role, "name": piece.stage, "pid": pid, "tid": tid, **times}
            events.append(event | ({"args": dict(piece.parts)} if piece.parts else {}))
        about = {"began_us": begin_us, "seconds": (end_us - begin_us) / 1e6, "spans_left_out": self.dropped}
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}

    def shares(self, begin_us: int, end_us: int) -> dict[str, Shares]:
        """Of each worker, as `status` shows them: work, waiting for input, held back by what comes after. Of the time
        in which its process said something."""
        spent_us: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        tracks: dict[str, set[str]] = defaultdict(set)
        seen: dict[Process, tuple[int, int]] = {}
        for process, piece in self._pieces(begin_us, end_us):
            first_us, last_us = seen.get(process, (piece.start_us, piece.end_us))
            seen[process] = min(first_us, piece.start_us), max(last_us, piece.end_us)
            if piece.parts:
                tracks[process.worker].add(piece.track)  # environment batches, which share the worker's time
            for stage, share in (piece.parts or {piece.stage: 1.0}).items():
                spent_us[process.worker][stage] += share * (piece.end_us - piece.start_us)
        found: dict[str, Shares] = {}
        for process in sorted(seen, key=_order):
            worker = process.worker
            whole_us = sum(last - first for who, (first, last) in seen.items() if who.worker == worker)
            whole_us *= max(1, len(tracks[worker]))
            stages = [
                min(1.0, sum(spent_us[worker][stage] for stage in kind[process.role]) / max(1, whole_us))
                for kind in (WORK, INPUT, OUTPUT)
            ]
            found[worker] = Shares(*stages)
        return found

    def _pieces(self, begin_us: int | None = None, end_us: int | None = None) -> Iterator[tuple[Process, Piece]]:
        """On the server's clock, process by process in the order of their beginning; those between the two times."""
        for process in sorted(self._of, key=_order):
            # One for all of a process's life: each entry's own differs by some round trips, and neighbours would meet.
            clock_us = int(median(self._of[process].clocks_us))
            for piece in sorted(self._of[process].pieces, key=lambda piece: (piece.start_us, -piece.end_us)):
                start_us, stop_us = piece.start_us + clock_us, piece.end_us + clock_us
                start_us = start_us if begin_us is None else max(begin_us, start_us)
                stop_us = stop_us if end_us is None else min(end_us, stop_us)
                if start_us < stop_us:
                    yield process, piece._replace(start_us=start_us, end_us=stop_us)


def _order(process: Process) -> tuple[int, int, str, int]:
    return ROLES.index(process.role), len(process.worker), process.worker, process.pid


def _about(pid: int, tid: int, what: str, **args: object) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _parse(record: Record) -> tuple[Process, float, list[Piece]] | None:
    worker, role, host = (one_line(str(record.get(name, ""))) for name in ("worker", "role", "host"))
    pid, clock_us, spans = number(record, "pid"), number(record, "clock_us"), record.get("spans")
    if role not in ROLES or pid is None or clock_us is None or abs(clock_us) > MOST_US or not isinstance(spans, str):
        return None
    try:
        return Process(worker, role, host, int(pid)), clock_us, [_piece(*raw) for raw in json.loads(spans)[:SPANS_KEPT]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _piece(track: object, stage: object, start_us: object, end_us: object, parts: object = None) -> Piece:
    """Raises ValueError."""
    times = start_us, end_us
    if not all(isinstance(time, int) and abs(time) < MOST_US for time in times):
        raise ValueError("no times")
    start, end = (int(str(time)) for time in times)
    if not (isinstance(track, str) and isinstance(stage, str) and start <= end):
        raise ValueError("no span")
    shares: dict[str, float] = {}
    for name, share in parts.items() if isinstance(parts, dict) else ():
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise ValueError("no share")
        shares[one_line(str(name))[:MOST_CHARACTERS]] = float(share)
    return Piece(one_line(track)[:MOST_CHARACTERS], one_line(stage)[:MOST_CHARACTERS], start, end, shares)
