"""Dynamic batching: when a generator sends which requests to its device (DESIGN §7). Pure; knows nothing of Redis.

A batch is sent when its rows reach `max_rows` or the next request would pass it, or when the oldest request's age
reaches `max_wait_ms`. Rows are environments, not messages. Requests of different shapes never share a batch.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


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
