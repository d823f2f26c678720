"""What one look at a run gives: everything that the page shows, as plain data."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_stream.broker.lanes import PayloadReader
from vla_stream.broker.tail import Tail, newest_entries
from vla_stream.cli import samples
from vla_stream.cli.curve import trace
from vla_stream.cli.dashboard.cameras import Cameras
from vla_stream.cli.options import Target
from vla_stream.cli.progress import Progress
from vla_stream.cli.samples import Record, number
from vla_stream.cli.status import look
from vla_stream.cli.top import RATES
from vla_stream.flow import Flow
from vla_stream.metrics import AGE_BOUNDS_MS, FILL_BOUNDS
from vla_stream.streams.keys import Keys
from vla_stream.streams.notices import one_line

if TYPE_CHECKING:
    from vla_stream.broker.connection import Client
    from vla_stream.broker.queue import Entry
    from vla_stream.cli.pulse import Pulse

EVENTS_SHOWN = 60
MOST_WORKERS = 1000
MOST_BARS = 30
MOST_POINTS = 500  # of one curve
SERIES = ("success", "return", "policy_loss", "value_loss", "imitation_loss", "kl_behaviour", "entropy", "staleness")


class Watch:
    """One session of looking at a run, on a connection of its own. Raises InputError where there is no such run."""

    def __init__(self, client: Client, target: Target) -> None:
        self._client, self._run = client, target.run
        keys = self._keys = Keys(target.run)
        found, _ = look(client, target.run)
        self._progress = Progress(found["updates"])
        self._updates: list[Record] = []
        self._newest: dict[str, Record] = {}  # by worker
        self._curves: tuple[int, dict[str, Any]] | None = None  # made of so many records
        file = target.runs_dir / target.run / samples.METRICS_FILE
        self._metrics = Tail(client, keys.metrics, self._read_file(file))
        events = newest_entries(client, keys.events, EVENTS_SHOWN)
        self._events = deque(map(event, events), maxlen=EVENTS_SHOWN)
        self._news = Tail(client, keys.events, events[-1].id if events else "0")
        reader = PayloadReader(client, keys.blob, Flow(client, keys).shm_folder())
        self.cameras = Cameras(Tail(client, keys.obs_requests, "$"), reader)

    def look(self) -> dict[str, Any]:
        """The page's data: what `status`, `top` and the progress line show."""
        found, pulse = look(self._client, self._run)
        workers = found.pop("workers")
        self._progress.target_updates = found["updates"]
        self._progress.workers = dict(Counter(worker["role"] for worker in workers))
        self._follow_metrics()
        self._progress.pulse.advance(pulse.now_s)
        self._events.extend(map(event, self._news.read(samples.READ_AT_ONCE)))
        there = {worker["id"] for worker in workers}
        self.cameras.forget_others(there)
        self._newest = {worker: record for worker, record in self._newest.items() if worker in there}
        return {
            **found,
            "time": time.time(),
            "figures": self._progress.parts(),
            "waiting": "" if self._progress.last else self._progress.waiting(),
            "making": int(self._client.zcard(self._keys.permits)),
            "alive": Counter(worker["role"] for worker in workers),
            "workers": [self._worker(worker) for worker in workers[:MOST_WORKERS]],
            "shares": {role: asdict(shares) for role, shares in pulse.role_shares().items()},
            "rates": {
                "env_steps": pulse.rate("simulator", "env_steps"),
                "requests": pulse.rate("generator", "requests"),
                "rows": pulse.rate("generator", "rows"),
                "segments": pulse.rate("trainer", "segments"),
                "trained": pulse.trained_per_s(),
                "updates": pulse.updates_per_s(),
            },
            "fill": pulse.mean("generator", "fill", "batches"),
            "histograms": histograms(pulse),
            "events": list(reversed(self._events)),
            "curve_points": len(self._updates),
        }

    def _worker(self, worker: dict[str, Any]) -> dict[str, Any]:
        """One line of the table. rate: of what its role counts, per second."""
        record = self._newest.get(worker["id"], {})
        metric, unit = RATES.get(worker["role"], ("", ""))
        done, seconds = number(record, metric), number(record, "seconds")
        texts = {name: one_line(value) for name, value in worker.items() if isinstance(value, str)}
        return {
            **worker,
            **texts,
            "rate": done / seconds if done is not None and seconds else None,
            "unit": unit,
            "cpu": number(record, "cpu"),
            "memory_mb": number(record, "memory_mb"),
        }

    def curves(self) -> dict[str, Any]:
        """`x`: updates and trained environment steps; `series`: a list per metric, null where it is missing. Thinned
        out to 500 points."""
        if self._curves is not None and self._curves[0] == len(self._updates):
            return self._curves[1]
        curve = trace(self._updates)
        stride = -(-len(curve.updates) // MOST_POINTS) or 1
        # Counted from the end: the newest point is always there.
        chosen = range(len(curve.updates) - 1, -1, -stride)[::-1]
        x = {
            "updates": [number(curve.updates[at], "update") for at in chosen],
            "env_steps": [curve.env_steps[at] for at in chosen],
        }
        series = {name: [number(curve.updates[at], name) for at in chosen] for name in SERIES}
        self._curves = (len(self._updates), {"x": x, "series": series})
        return self._curves[1]

    def seen_by_cameras(self) -> dict[str, Any]:
        seen = self.cameras
        return {"slots": sorted(seen.slots, key=_in_order), "pictures": dict(seen.pictures), "problem": seen.problem}

    def _read_file(self, file: Path) -> str:
        """What the launcher has kept of the metrics, where this is its host; returns the stream's id to go on after."""

        def added() -> Iterator[Record]:
            for record in samples.each(file):
                self._add([record])
                yield record

        return samples.last_id(added())

    def _follow_metrics(self) -> None:
        for _ in range(samples.READS_IN_A_ROW):
            entries = self._metrics.read(samples.READ_AT_ONCE)
            self._add([record for record in map(samples.decode, entries) if samples.is_sample(record)])
            if len(entries) < samples.READ_AT_ONCE:
                return

    def _add(self, records: list[Record]) -> None:
        self._progress.add(records)
        self._newest |= {str(record.get("worker")): record for record in records if record.get("kind") == "second"}
        self._updates += [record for record in records if record.get("kind") in ("update", "start")]


def histograms(pulse: Pulse) -> dict[str, list[tuple[str, float]]]:
    """(upper bound, observations) in order, with the empty ones between; the last is `inf` where some are above all."""
    staleness = pulse.histogram("staleness")
    highest = max((int(bound) for bound in staleness if bound.isdecimal() and len(bound) < 10), default=-1)
    bounds = {
        "staleness": [str(versions) for versions in range(min(highest + 1, MOST_BARS))],
        "fill": [f"{bound:g}" for bound in FILL_BOUNDS],
        "age_ms": [f"{bound:g}" for bound in AGE_BOUNDS_MS],
    }
    shown = {}
    for name, known in bounds.items():
        found = pulse.histogram(name)
        above = sum(number for bound, number in found.items() if bound not in known)
        shown[name] = [(bound, found.get(bound, 0)) for bound in known] + ([("inf", above)] if above else [])
    return shown


def event(entry: Entry) -> dict[str, Any]:
    """One event as texts that are safe to show."""
    texts = {name: one_line(entry.fields.get(name.encode(), b"")) for name in ("worker", "kind", "text")}
    return {"id": entry.id, "time": entry.born_ms / 1000, **texts}


def _in_order(slot: str) -> list[tuple[int, str]]:
    """simulator-9 before simulator-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", slot)]
