"""A simulator's own `actions` stream: reading it, and waiting for it together with the environments."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from queue import Empty, Queue

from vla_stream.broker.complaints import not_stored, wrong_type
from vla_stream.broker.connection import UNREACHABLE, Client, ResponseError
from vla_stream.broker.queue import Entry
from vla_stream.broker.tail import Tail
from vla_stream.streams import notices
from workers.worker import BLOCK_S

STREAM_TTL_S = 300.0
REPLIES_AT_ONCE = 256


class Replies:
    """The simulator's own `actions` stream, read in order and deleted when consumed."""

    def __init__(self, client: Client, stream: str) -> None:
        self.client, self.stream = client, stream
        self._tail = Tail(client, stream)
        self._consumed: list[Entry] = []

    def open(self) -> None:
        """Create the stream: generators add to it only while it exists (F53)."""
        # A group made and destroyed leaves an empty stream; an entry added and deleted would be read in between.
        with self.client.pipeline(transaction=True) as pipe:
            pipe.xgroup_create(self.stream, "opening", id="0", mkstream=True)
            pipe.xgroup_destroy(self.stream, "opening")
            pipe.pexpire(self.stream, int(STREAM_TTL_S * 1000))
            pipe.execute()

    def open_anew(self) -> None:
        """Where somebody wrote another type to our key: what was asked meanwhile is asked again."""
        with contextlib.suppress(*UNREACHABLE), notices.expendable():
            self.client.delete(self.stream)
            self.open()

    def read(self, block_ms: int | None) -> list[Entry]:
        """New replies. They are deleted at the next call: an error of the connection must not lose what was read."""
        self._tail.delete(self._consumed)
        self._consumed = self._tail.read(REPLIES_AT_ONCE, block_ms)
        return self._consumed

    def renew(self) -> bool:
        """False when the stream is gone (a flush)."""
        return bool(self.client.pexpire(self.stream, int(STREAM_TTL_S * 1000)))

    def close(self) -> None:
        self.client.delete(self.stream)


class ReplyThread:
    """Blocks on the reply stream, so that the main loop can wait for replies and environments alike."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._error: Exception | None = None
        # Bounded: what the main loop is slow to take stays on the server.
        self._queue: Queue[Entry] = Queue(maxsize=REPLIES_AT_ONCE)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._waker, self.waitable = theirs, Connection(ours.detach())
        threading.Thread(target=self._run, name="replies", daemon=True).start()

    def drain(self) -> list[Entry]:
        """Replies that came since the last call; never waits. Raises what ended the thread."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.waitable.fileno(), 4096)
        if self._error is not None:
            raise self._error
        found = []
        while True:
            try:
                found.append(self._queue.get_nowait())
            except Empty:
                return found

    def _run(self) -> None:
        try:
            while True:
                try:
                    replies = self._replies.read(int(BLOCK_S * 1000))
                except (*UNREACHABLE, ResponseError) as exc:
                    if isinstance(exc, ResponseError) and not not_stored(exc):
                        raise
                    if wrong_type(exc):
                        self._replies.open_anew()
                    time.sleep(0.2)
                    continue
                for reply in replies:
                    if self._queue.full():
                        self._waker.send(b"!")
                    self._queue.put(reply)
                if replies:
                    self._waker.send(b"!")
        except Exception as exc:
            self._error = exc
            self._waker.send(b"!")
