"""Packets over a socket pair, between a host and its environment processes: 4 bytes of length, then the packet.

Nobody has to wait for a packet that is not whole: its sender may have been stopped in the midst of it.
"""

from __future__ import annotations

import socket

LENGTH_BYTES = 4
READ_BYTES = 256 * 1024  # no less than a socket buffer usually holds


class Packets:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._buffer = end, bytearray()

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`."""
        return self._socket.fileno()

    @property
    def unfinished_bytes(self) -> int:
        """What has arrived of a packet that is not whole yet."""
        return len(self._buffer)

    def send(self, packet: bytes, timeout_s: float | None = None) -> None:
        """All of it. Raises OSError: closed, or not taken in time, and then the pair is of no more use."""
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(len(packet).to_bytes(LENGTH_BYTES, "little") + packet)
        finally:
            self._socket.settimeout(None)

    def receive(self, *, wait: bool) -> bytes | None:
        """The next whole packet; None when it is not here and `wait` is False. Raises EOFError, OSError."""
        while (packet := self._whole()) is None:
            try:
                piece = self._socket.recv(READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            if not piece:
                raise EOFError
            self._buffer += piece
        return packet

    def close(self) -> None:
        self._socket.close()

    def _whole(self) -> bytes | None:
        end = LENGTH_BYTES + int.from_bytes(self._buffer[:LENGTH_BYTES], "little")
        if len(self._buffer) < max(end, LENGTH_BYTES):
            return None
        packet = bytes(memoryview(self._buffer)[LENGTH_BYTES:end])
        del self._buffer[:end]
        return packet
