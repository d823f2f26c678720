"""Reading a stream without a group: every entry in order, or just the newest. For actions, weights and viewers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vla_stream.broker.connection import Client
from vla_stream.broker.queue import Entry, to_entries, to_entry


class Tail:
    """One reader's place in a stream. `start`: the id to read after; `$` skips what is there already."""

    def __init__(self, client: Client, stream: str, start: str = "0") -> None:
        self.client, self.stream = client, stream
        if start == "$":
            newest = newest_entries(client, stream, 1)
            start = newest[0].id if newest else "0"
        self._last = start

    def read(self, count: int, block_ms: int | None = None) -> list[Entry]:
        """Up to `count` entries after the last one read. block_ms None or 0: do not wait."""
        return self.took(self.client.xread({self.stream: self._last}, count=count, block=block_ms or None))

    def queue_read(self, pipe: Any, count: int, block_ms: int | None, consumed: Sequence[Entry]) -> None:
        """The command of `read`, appended to those of the caller; its reply is for `took`.

        consumed: entries to remove, since there is no group that keeps them for others. After the read: a reply to
        that would come at once, and whoever waits for entries would be told of it."""
        pipe.xread({self.stream: self._last}, count=count, block=block_ms or None)
        if consumed:
            pipe.xdel(self.stream, *[entry.id for entry in consumed])

    def took(self, reply: Any) -> list[Entry]:
        """The entries of such a reply; the next read goes on after them."""
        entries = to_entries(reply)
        if entries:
            self._last = entries[-1].id
        return entries


def newest_entries(client: Client, stream: str, count: int) -> list[Entry]:
    """The newest `count` entries, oldest first."""
    reply: Any = client.xrevrange(stream, count=count)
    return [to_entry(item) for item in reversed(reply)]


def entries_since(client: Client, stream: str, since_ms: float) -> list[Entry]:
    """What was added since then by the server's clock, oldest first."""
    reply: Any = client.xrange(stream, min=max(0, int(since_ms)))
    return [to_entry(item) for item in reply]


def oldest_age_s(client: Client, stream: str, now_ms: float) -> float:
    """Seconds since the oldest entry was added; 0 of an empty stream."""
    reply: Any = client.xrange(stream, count=1)
    return max(0.0, now_ms - to_entry(reply[0]).born_ms) / 1000 if reply else 0.0
