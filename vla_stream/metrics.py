"""The one place where workers count. A worker's Meter is sampled to the `metrics` stream once a second."""

from __future__ import annotations

import bisect
import contextlib
import os
import resource
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Sample = dict[str, float]

FILL_BOUNDS = tuple(round(0.1 * i, 1) for i in range(1, 11))  # of a batch: rows ÷ max_batch_size
SPANS_KEPT = 5000  # since the last look, which is a second ago, or a long step
SHORTEST_SPAN_S = 5e-5  # shorter ones would fill a trace and not be seen in it
AGE_BOUNDS_MS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class Span(NamedTuple):
    """What a thread, or an environment batch, did for a while. Times are of this process's monotonic clock.

    parts: what the time counts as, stage by stage, in shares of it; empty: as `stage`, all of it.
    """

    track: str
    stage: str
    start_s: float
    end_s: float
    parts: Mapping[str, float] = {}


class Meter:
    """Counters (summed per sample), means (averaged per sample), highest and last values, busy shares, and spans."""

    def __init__(self) -> None:
        # Threads of one worker count concurrently.
        self._lock = threading.Lock()
        self._since_s = time.monotonic()
        self._sums: dict[str, float] = {}
        self._means: dict[str, tuple[float, int]] = {}
        self._highest: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}
        self._spans: deque[Span] = deque(maxlen=SPANS_KEPT)
        self._noted = 0

    def count(self, name: str, amount: float = 1) -> None:
        """Add to a counter; the sample holds the amount since the last sample."""
        with self._lock:
            self._sums[name] = self._sums.get(name, 0.0) + amount

    def mean(self, name: str, value: float) -> None:
        """Add one observation; the sample holds the mean since the last sample."""
        with self._lock:
            total, number = self._means.get(name, (0.0, 0))
            self._means[name] = (total + value, number + 1)

    def highest(self, name: str, value: float) -> None:
        """Add one observation; the sample holds the highest since the last sample."""
        with self._lock:
            self._highest[name] = max(value, self._highest.get(name, value))

    def gauge(self, name: str, value: float) -> None:
        """Set a value that stays until it is set again."""
        with self._lock:
            self._gauges[name] = value

    def bucket(self, name: str, value: float, bounds: Sequence[float]) -> None:
        """Add one observation to a histogram: the sample counts, as `<name>[<bound>]`, those above the bound before and
        up to this one; `[inf]` those above the last."""
        place = bisect.bisect_left(bounds, value)
        self.count(f"{name}[{bounds[place]:g}]" if place < len(bounds) else f"{name}[inf]")

    def spend(self, stage: str, seconds: float) -> None:
        """Time spent in a stage; the sample holds its share of the wall time as `busy.<stage>`."""
        with self._lock:
            self._busy_s[stage] = self._busy_s.get(stage, 0.0) + seconds

    @contextlib.contextmanager
    def busy(self, stage: str) -> Iterator[None]:
        """The body's time, as by `spend`, and as a span of this thread."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            end_s = time.monotonic()
            self.spend(stage, end_s - start_s)
            self.note(Span(threading.current_thread().name, stage, start_s, end_s))

    def note(self, span: Span) -> None:
        """Keep a span until the next `spans()`."""
        if span.end_s - span.start_s >= SHORTEST_SPAN_S:
            with self._lock:
                self._spans.append(span)
                self._noted += 1

    def spans(self) -> tuple[list[Span], int]:
        """The newest since the last call, and how many older ones there was no room for."""
        with self._lock:
            found, noted = list(self._spans), self._noted
            self._spans.clear()
            self._noted = 0
        return found, noted - len(found)

    def sample(self) -> Sample:
        """Everything since the last sample; `seconds` is the time it covers."""
        with self._lock:
            now = time.monotonic()
            seconds = max(1e-9, now - self._since_s)
            sums, self._sums = self._sums, {}
            means, self._means = self._means, {}
            busy, self._busy_s, self._since_s = self._busy_s, {}, now
            highest, self._highest = self._highest, {}
            sample = {"seconds": seconds, **self._gauges, **sums, **highest}
        sample |= {name: total / number for name, (total, number) in means.items()}
        sample |= {f"busy.{stage}": min(1.0, spent / seconds) for stage, spent in busy.items()}
        return sample


class Usage:
    """What this process takes of its host."""

    def __init__(self) -> None:
        self._cpu_s, self._since_s = time.process_time(), time.monotonic()

    def sample(self) -> Sample:
        """cpu: cores kept busy since the last sample; memory_mb: resident now (where /proc tells it, else the most)."""
        cpu_s, now_s = time.process_time(), time.monotonic()
        cores = (cpu_s - self._cpu_s) / max(1e-9, now_s - self._since_s)
        self._cpu_s, self._since_s = cpu_s, now_s
        return {"cpu": cores, "memory_mb": _resident_bytes() / 1e6}


def _resident_bytes() -> int:
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
