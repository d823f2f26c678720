"""Packets over a socket pair, between a host and its environment processes: 4 bytes of length, then the packet.

Nobody has to wait for a packet that is not whole: its sender may have been stopped in the midst of it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence

import numpy as np

from vla_stream.broker.codec import MAX_HEADER_BYTES, MAX_PACKET_BYTES, Piece
from vla_stream.errors import BadMessage

LENGTH_BYTES = 4
PIECES_AT_ONCE = 64  # of one system call
# Of the kernel, which may grant less: who reads need not wake up several times for one packet.
BUFFER_BYTES = 512 * 1024


class Packets:
    """One end of the pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.received_bytes = 0  # so far, also of a packet that is not whole yet
        self._in_length, self._whole = True, _bytes(LENGTH_BYTES)
        self._missing = self._whole
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    def fileno(self) -> int:
        """For `poll`."""
        return self._socket.fileno()

    def send(self, packet: Sequence[Piece], timeout_s: float | None = None) -> None:
        """All of its pieces. Raises OSError: closed, or nothing taken for so long, and then the pair is of no more
        use."""
        left: list[Piece] = [
            sum(map(len, packet)).to_bytes(LENGTH_BYTES, "little"),
            *(memoryview(piece) for piece in packet),
        ]
        self._socket.settimeout(timeout_s)
        try:
            while left:
                sent = self._socket.sendmsg(left[:PIECES_AT_ONCE])
                while left and sent >= len(left[0]):
                    sent -= len(left.pop(0))
                if sent:
                    left[0] = left[0][sent:]
        finally:
            self._socket.settimeout(None)

    def receive(self, *, wait: bool) -> memoryview | None:
        """The next whole packet; None when it is not here and `wait` is False. Raises EOFError, OSError, BadMessage."""
        while True:
            while self._missing:
                try:
                    received = self._socket.recv_into(self._missing, 0, 0 if wait else socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return None
                if not received:
                    raise EOFError
                self._missing = self._missing[received:]
                self.received_bytes += received
            whole, was_length = self._whole, self._in_length
            self._whole = self._missing = _bytes(int.from_bytes(whole, "little") if was_length else LENGTH_BYTES)
            self._in_length = not was_length
            if not was_length:
                return whole

    def close(self) -> None:
        self._socket.close()


def _bytes(length: int) -> memoryview:
    if length > MAX_PACKET_BYTES + MAX_HEADER_BYTES:
        raise BadMessage(f"packet of {length} bytes, expected at most {MAX_PACKET_BYTES}")
    return np.empty(length, dtype=np.uint8).data  # unlike a bytearray, not filled first
