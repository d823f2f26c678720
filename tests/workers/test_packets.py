"""Packets between a host and its environment processes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from vla_stream.errors import BadMessage
from workers.packets import Packets


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Packets]]:
    raw, end = socket.socketpair()
    with raw, contextlib.closing(Packets(end)) as packets:
        yield raw, packets


def test_packets_of_any_size_and_number_of_pieces_arrive_whole_and_in_order(
    ends: tuple[socket.socket, Packets],
) -> None:
    raw, receiver = ends
    sender = Packets(raw)
    sent = [[b"head", b"", bytes(range(256)) * 20_000], [b"%d" % number for number in range(300)], [b""], [b"last"]]
    thread = threading.Thread(target=lambda: [sender.send(packet) for packet in sent])
    thread.start()
    for packet in sent:
        assert receiver.receive(wait=True) == b"".join(packet)
    thread.join()
    assert receiver.receive(wait=False) is None


def test_a_packet_that_is_not_whole_is_not_waited_for_and_shows_that_it_grows(
    ends: tuple[socket.socket, Packets],
) -> None:
    raw, receiver = ends
    seen = []
    for piece in (b"\x06\0", b"\0\0ab", b"cd"):
        raw.sendall(piece)
        assert receiver.receive(wait=False) is None
        seen.append(receiver.received_bytes)
    assert seen == [2, 6, 8]
    raw.sendall(b"ef")
    assert receiver.receive(wait=False) == b"abcdef"
    raw.close()
    with pytest.raises(EOFError):
        receiver.receive(wait=False)


def test_an_absurd_length_is_refused_before_anything_is_received_for_it(ends: tuple[socket.socket, Packets]) -> None:
    raw, receiver = ends
    raw.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(BadMessage, match="packet of 4294967295 bytes, expected at most"):
        receiver.receive(wait=False)


def test_a_packet_that_nobody_takes_is_given_up(ends: tuple[socket.socket, Packets]) -> None:
    raw, _ = ends
    with pytest.raises(OSError, match="timed out"):
        Packets(raw).send([bytes(8 * 1024 * 1024)], timeout_s=0.05)
