"""A simulator's own `actions` stream: reading it, and waiting for it together with the environments."""

from __future__ import annotations

import contextlib
from collections.abc import Set

from vla_stream.broker.client import Sent
from vla_stream.broker.complaints import wrong_type
from vla_stream.broker.connection import UNREACHABLE, Client, ResponseError
from vla_stream.broker.queue import Entry
from vla_stream.broker.tail import Tail
from vla_stream.streams import notices

STREAM_TTL_S = 300.0
REPLIES_AT_ONCE = 256


class Replies:
    """The simulator's own `actions` stream, read in order and deleted when consumed."""

    def __init__(self, client: Client, stream: str) -> None:
        self.client, self.stream = client, stream
        self._tail = Tail(client, stream)
        self._consumed: list[Entry] = []
        self._sent: Sent | None = None

    def open(self) -> None:
        """Create the stream: generators add to it only while it exists (F53). What somebody wrote to our key in another
        type goes; what was asked meanwhile is asked again."""
        try:
            self._create()
        except ResponseError as exc:
            if not wrong_type(exc):
                raise
            self.client.delete(self.stream)
            self._create()

    def _create(self) -> None:
        # A group made and destroyed leaves an empty stream; an entry added and deleted would be read in between.
        with self.client.pipeline(transaction=True) as pipe:
            pipe.xgroup_create(self.stream, "opening", id="0", mkstream=True)
            pipe.xgroup_destroy(self.stream, "opening")
            pipe.pexpire(self.stream, int(STREAM_TTL_S * 1000))
            pipe.execute()

    def read(self, block_ms: int | None) -> list[Entry]:
        """New replies, in one round trip."""
        self.ask(block_ms)
        return self._take()

    def ask(self, block_ms: int | None) -> int:
        """Ask for new replies, unless that was done; returns the file descriptor that tells when `poll` has them.

        What was read before is deleted now, and again if that failed: no error of the connection loses a reply."""
        if self._sent is None:
            pipe = self.client.pipeline(transaction=False)
            self._tail.queue_read(pipe, REPLIES_AT_ONCE, block_ms, self._consumed)
            self._sent = pipe.begin()
        return self._sent.fileno()

    def poll(self, readable: Set[int]) -> list[Entry]:
        """Those that were asked for, if their file descriptor is among these; does not wait."""
        if self._sent is None:
            return []
        if self._sent.fileno() in readable:
            return self._take()
        if self._sent.late:
            sent, self._sent = self._sent, None
            sent.drop()
        return []

    def _take(self) -> list[Entry]:
        assert self._sent is not None
        sent, self._sent = self._sent, None
        try:
            self._consumed = self._tail.took(sent.replies()[0])
        except ResponseError as exc:
            if not wrong_type(exc):
                raise
            with contextlib.suppress(*UNREACHABLE), notices.expendable():
                self.open()
            return []
        return self._consumed

    def renew(self) -> bool:
        """False when the stream is gone (a flush)."""
        return bool(self.client.pexpire(self.stream, int(STREAM_TTL_S * 1000)))

    def close(self) -> None:
        self.client.delete(self.stream)
