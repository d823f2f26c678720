"""Dynamic batching: when a generator sends which requests to its device. Pure; knows nothing of Redis.

A batch is sent when its rows reach `max_rows` or the next request would pass it, or when the oldest request's age
reaches `max_wait_ms`. Rows are environments, not messages. Requests of different shapes never share a batch.

A `Strategy` says how many requests a generator takes for a batch and how long they may wait; the config names one
(`generators.batching`), or a class of the user's own as `module:Class`.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")
FORGET = 0.98  # per inference: a cost curve follows a device that gets slower within some hundred of them


@dataclass(frozen=True, slots=True)
class Backlog:
    """Requests that nobody has taken yet, and the generators that may: all of them, and those that hold none. The one
    that looks counts as free."""

    requests: int
    generators: int
    free: int


class Strategy(Protocol):
    """How a generator batches; made as `Class(max_rows, max_wait_ms)` from the config's max_batch_size, max_wait_ms."""

    wait_ms: float
    """Age of the oldest request at which its batch is sent, however small."""

    def takes(self, backlog: Callable[[], Backlog], held: int, rows: int) -> float:
        """Requests of `rows` rows each that the next batch may hold, of which `held` are here; inf: what fits. Looking
        at the backlog costs two round trips."""

    def served(self, rows: int, took_ms: float) -> None:
        """An inference was made."""


class Deadline:
    """Waits until the batch is full or its oldest request has waited for `max_wait_ms`."""

    def __init__(self, max_rows: int, max_wait_ms: float) -> None:
        self.wait_ms = max_wait_ms

    def takes(self, backlog: Callable[[], Backlog], held: int, rows: int) -> float:
        """See the protocol."""
        return math.inf

    def served(self, rows: int, took_ms: float) -> None:
        """See the protocol."""


class WorkConserving(Deadline):
    """Sends what is there as soon as the device is free."""

    def __init__(self, max_rows: int, max_wait_ms: float) -> None:
        super().__init__(max_rows, 0.0)


class Auto:
    """Never waits, and takes its share of what waits; nothing to tune.

    Where a batch costs a + b·rows and b dominates, the waiting requests are divided among all generators: a larger
    batch would only make its first rows wait for its last ones. Where a dominates (more than two requests' b·rows),
    among those that are free now. Waiting for more was never worth it: tools/bench/README.md says how that was found.
    """

    wait_ms = 0.0

    def __init__(self, max_rows: int, max_wait_ms: float) -> None:
        self.cost = CostCurve()

    def takes(self, backlog: Callable[[], Backlog], held: int, rows: int) -> float:
        """See the protocol."""
        seen = backlog()
        batch_ms, row_ms = self.cost.fit()
        among = seen.free if batch_ms > 2 * row_ms * rows else seen.generators
        return math.ceil((seen.requests + held) / among)

    def served(self, rows: int, took_ms: float) -> None:
        """See the protocol."""
        self.cost.add(rows, took_ms)


class CostCurve:
    """What an inference takes, as a + b·rows: least squares, in which older ones weigh less and less."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # Σw, Σw·x, Σw·x², Σw·y, Σw·x·y of rows x and times y

    def add(self, rows: int, took_ms: float) -> None:
        """One more inference."""
        new = (1.0, rows, rows * rows, took_ms, rows * took_ms)
        self._sums = [FORGET * old + value for old, value in zip(self._sums, new, strict=True)]

    def fit(self) -> tuple[float, float]:
        """(a, b) in ms, neither negative; a is 0 as long as all were of one size."""
        n, x, xx, y, xy = self._sums
        if n == 0:
            return 0.0, 0.0
        spread = xx - x * x / n
        if spread < 1e-6 * xx:
            return 0.0, y / x
        slope = max(0.0, (xy - x * y / n) / spread)
        return max(0.0, (y - slope * x) / n), slope


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[Item]):
    item: Item
    rows: int
    born_ms: float


class Batcher(Generic[Item]):
    """Collects requests, and says when a batch is due. Times are in ms of one clock, the caller's (the server's)."""

    def __init__(self, max_rows: int, max_wait_ms: float) -> None:
        self.max_rows, self.max_wait_ms = max_rows, max_wait_ms
        self._waiting: OrderedDict[Hashable, deque[_Waiting[Item]]] = OrderedDict()

    def __len__(self) -> int:
        """Requests that wait."""
        return sum(len(group) for group in self._waiting.values())

    @property
    def rows(self) -> int:
        """Rows that wait, over all shapes."""
        return sum(waiting.rows for group in self._waiting.values() for waiting in group)

    def add(self, item: Item, rows: int, shape: Hashable, born_ms: float) -> None:
        """A request of `rows` rows, made at `born_ms`. Raises ValueError when it can never fit a batch."""
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"request has {rows} rows, expected 1 to {self.max_rows}; raise generators.max_batch_size")
        self._waiting.setdefault(shape, deque()).append(_Waiting(item, rows, born_ms))

    def take(self, now_ms: float) -> list[Item]:
        """The batch that is due, oldest shape first, or an empty list."""
        due = [shape for shape, group in self._waiting.items() if self._is_due(group, now_ms)]
        if not due:
            return []
        shape = min(due, key=lambda name: _oldest_ms(self._waiting[name]))
        group = self._waiting[shape]
        batch: list[Item] = []
        free = self.max_rows
        while group and group[0].rows <= free:
            waiting = group.popleft()
            free -= waiting.rows
            batch.append(waiting.item)
        if not group:
            del self._waiting[shape]
        return batch

    def missing_rows(self) -> int:
        """Rows that the fullest batch still takes; 0: it is full, and more would only be kept from other generators."""
        fullest = max((sum(w.rows for w in group) for group in self._waiting.values()), default=0)
        return max(0, self.max_rows - fullest)

    def _is_due(self, group: deque[_Waiting[Item]], now_ms: float) -> bool:
        rows = 0
        for waiting in group:
            rows += waiting.rows
            if rows >= self.max_rows:
                return True
        return now_ms - _oldest_ms(group) >= self.max_wait_ms


def _oldest_ms(group: deque[_Waiting[Item]]) -> float:
    # Not always the first: an entry taken over from a dead generator is older than what came before it.
    return min(waiting.born_ms for waiting in group)


def padded_size(rows: int, sizes: list[int], max_rows: int) -> int:
    """The smallest of the fixed batch sizes that holds `rows`; `max_rows` is always one of them."""
    return min((size for size in sizes if size >= rows), default=max_rows)
