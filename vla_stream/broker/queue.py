"""A work queue on one stream: at-least-once delivery to a consumer group, with leases.

Written once, used for obs-requests and trajectories alike. Entries are acknowledged and deleted in one transaction,
since an acknowledgement alone frees nothing (F20). There is no MAXLEN here: trimming destroys unread work (F21).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vla_stream.batching import Backlog
from vla_stream.broker.connection import OUT_OF_MEMORY, Client, ResponseError
from vla_stream.broker.scripts import HAND_BACK, RENEW, SWEEP_CONSUMER, Scripts

GARBAGE_AT_ONCE = 64  # read on at once, where all that was read could not be used: a flood must not hold work up


@dataclass(frozen=True, slots=True)
class Entry:
    """One delivered entry. id: `<ms>-<n>` of the server's clock. deliveries: 1 for the first; 0 when not known."""

    id: str
    fields: Mapping[bytes, bytes]
    deliveries: int = 1

    @property
    def born_ms(self) -> int:
        """Server time at which the entry was added."""
        return int(self.id.partition("-")[0])


class WorkQueue:
    """One consumer's view of a stream and its group.

    Nothing here retries: errors of the connection go to the caller, who calls `recover()` once it is back.
    """

    def __init__(
        self, client: Client, scripts: Scripts, stream: str, group: str, consumer: str, lease_s: float
    ) -> None:
        self.client, self.scripts = client, scripts
        self.stream, self.group, self.consumer = stream, group, consumer
        self.lease_ms = int(lease_s * 1000)
        self._take_over_cursor = "0-0"

    def ensure_group(self) -> None:
        """Create the group, and the stream with it, from the first entry on (F10)."""
        try:
            self.client.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except ResponseError as exc:
            if "BUSYGROUP" not in str(exc):
                raise

    def recover(self) -> list[Entry]:
        """At start and after every reconnect: the group, and what a lost reply left in our own pending list (F03)."""
        self.ensure_group()
        reply = self.client.xreadgroup(self.group, self.consumer, {self.stream: "0"})
        return self._with_deliveries(to_entries(reply))

    def read(self, count: int, block_ms: int | None = None) -> list[Entry]:
        """Up to `count` new entries. block_ms None or 0: do not wait. Creates the group when a flush removed it."""
        if count < 1:
            return []  # To Redis, COUNT 0 means all.
        try:
            # To Redis, BLOCK 0 means for ever.
            reply = self.client.xreadgroup(
                self.group, self.consumer, {self.stream: ">"}, count=count, block=block_ms or None
            )
        except ResponseError as exc:
            # A flush while blocked says UNBLOCKED, one before says NOGROUP (F10, F11).
            if not str(exc).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            self.ensure_group()
            return []
        return to_entries(reply)

    def read_balanced(
        self, count: int, block_ms: int | None, more: Callable[[], float] = lambda: math.inf
    ) -> list[Entry]:
        """Block for one entry, then take what is there, at most `more()`: else one blocked reader gets the lion's share
        (F30)."""
        first = self.read(min(1, count), block_ms)
        return first + self.read(int(min(count - 1, more()))) if first and count > 1 else first

    def take_over(self, count: int) -> list[Entry]:
        """Entries whose owner let their lease pass; they are ours now. Continues from its own cursor (F18).

        Our own entries come back as well when they were not renewed in time: the caller drops what it still works on.
        """
        if count < 1:
            return []
        try:
            reply: Any = self.client.xautoclaim(
                self.stream, self.group, self.consumer, self.lease_ms, start_id=self._take_over_cursor, count=count
            )
        except ResponseError as exc:
            if not str(exc).startswith("NOGROUP"):
                raise
            self.ensure_group()
            return []
        self._take_over_cursor = reply[0].decode()
        return self._with_deliveries([to_entry(item) for item in reply[1] if item[0] is not None])

    def renew(self, ids: Sequence[str]) -> int:
        """Renew the lease of those entries that are still ours (F14); returns how many are."""
        if not ids:
            return 0
        try:
            return int(self.scripts.call(RENEW, [self.stream], [self.group, self.consumer, *ids]))
        except ResponseError as exc:
            if not str(exc).startswith("NOGROUP"):
                raise
            return 0  # Flushed: nothing is anybody's. The next read creates the group again.

    def hand_back(self, entry: str) -> bool:
        """Let others take this entry over at once, as if it had not been delivered to us; False when it is not ours."""
        try:
            arguments = [self.group, self.consumer, self.lease_ms, entry]
            return bool(self.scripts.call(HAND_BACK, [self.stream], arguments))
        except ResponseError as exc:
            if not str(exc).startswith("NOGROUP"):
                raise
            return False  # Flushed, as in `renew`.

    def done(self, ids: Sequence[str]) -> None:
        """Acknowledge and delete. Call it after the result is published: a crash in between redelivers."""
        if not ids:
            return
        try:
            with self.client.pipeline(transaction=True) as pipe:
                self.queue_done(pipe, ids)
                pipe.execute()
        except OUT_OF_MEMORY:
            # Redis 7 queues nothing on a full server, although both free memory (F23). Left in between: a pending
            # entry that is gone, which its next reader finds empty (F17).
            self.client.xdel(self.stream, *ids)
            self.client.xack(self.stream, self.group, *ids)

    def queue_done(self, pipe: Any, ids: Sequence[str]) -> None:
        """The commands of `done`, appended to a transaction of the caller."""
        pipe.xack(self.stream, self.group, *ids)
        pipe.xdel(self.stream, *ids)

    def sweep_consumers(self, idle_ms: int) -> int:
        """Delete consumers that were idle for long and hold nothing (F12, F13); returns how many."""
        removed = 0
        for consumer in self._others():
            if consumer["idle"] > idle_ms and consumer["pending"] == 0:
                arguments = [self.group, bytes(consumer["name"]), idle_ms]
                removed += int(self.scripts.call(SWEEP_CONSUMER, [self.stream], arguments))
        return removed

    def has_company(self) -> bool:
        """Whether another consumer asked for entries within the last lease, as each does that is alive."""
        return any(consumer["idle"] < self.lease_ms for consumer in self._others())

    def backlog(self) -> Backlog:
        """What nobody has taken, and the consumers for it: those that asked within the last lease, and this one."""
        consumers, me = self._consumers(), self.consumer.encode()
        waiting = int(self.client.xlen(self.stream)) - sum(consumer["pending"] for consumer in consumers)
        others = [c for c in consumers if c["name"] != me and c["idle"] < self.lease_ms]
        return Backlog(max(0, waiting), 1 + len(others), 1 + sum(consumer["pending"] == 0 for consumer in others))

    def _others(self) -> list[dict[str, Any]]:
        return [consumer for consumer in self._consumers() if consumer["name"] != self.consumer.encode()]

    def _consumers(self) -> list[dict[str, Any]]:
        try:
            consumers: Any = self.client.xinfo_consumers(self.stream, self.group)
        except ResponseError as exc:
            if "no such key" not in str(exc) and not str(exc).startswith("NOGROUP"):
                raise
            return []
        return list(consumers)

    def _with_deliveries(self, entries: list[Entry]) -> list[Entry]:
        if not entries:
            return []
        low, high = entries[0].id, entries[-1].id
        pending: Any = self.client.xpending_range(
            self.stream, self.group, min=low, max=high, count=4 * len(entries) + 16, consumername=self.consumer
        )
        times = {item["message_id"].decode(): int(item["times_delivered"]) for item in pending}
        return [Entry(entry.id, entry.fields, times.get(entry.id, 0)) for entry in entries]


def to_entries(reply: Any) -> list[Entry]:
    """The entries of the one stream in a reply of XREAD or XREADGROUP."""
    if not reply:
        return []
    ((_, items),) = reply
    return [to_entry(item) for item in items]


def to_entry(item: Any) -> Entry:
    """One entry of a reply."""
    # A trimmed entry that is still pending comes with nil fields (F17): shown as empty, refused by unseal().
    identity, fields = item
    return Entry(identity.decode(), fields or {})
