"""The one place where workers count. A worker's Meter is sampled to the `metrics` stream once a second."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

Sample = dict[str, float]


class Meter:
    """Counters (summed per sample), means (averaged per sample), highest and last values, and busy shares."""

    def __init__(self) -> None:
        # Threads of one worker count concurrently.
        self._lock = threading.Lock()
        self._since_s = time.monotonic()
        self._sums: dict[str, float] = {}
        self._means: dict[str, tuple[float, int]] = {}
        self._highest: dict[str, float] = {}
        self._gauges: dict[str, float] = {}
        self._busy_s: dict[str, float] = {}

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

    @contextlib.contextmanager
    def busy(self, stage: str) -> Iterator[None]:
        """Time spent in a stage; the sample holds its share of the wall time as `busy.<stage>`."""
        start = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - start
            with self._lock:
                self._busy_s[stage] = self._busy_s.get(stage, 0.0) + spent

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
