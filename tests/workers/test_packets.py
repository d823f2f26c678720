"""Packets between a host and its environment processes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from vla_stream.errors import BadMessage
from workers import packets as packets_module
from workers.packets import ROOM_FROM_BYTES, Packets, Rooms


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


def answer(asking: Packets, answering: Packets, rooms: Rooms, data: bytes) -> memoryview:
    """As a command and its answer, through a thread: what needs no room may not fit the socket's buffer."""
    room = (rooms.file, *rooms.offer())
    thread = threading.Thread(target=lambda: answering.send([data[:5], data[5:]], room=room))
    thread.start()
    packet = asking.receive(wait=True)
    thread.join()
    assert packet is not None and packet == data
    return packet


@pytest.fixture
def asked() -> Iterator[tuple[Packets, Packets, Rooms]]:
    rooms = Rooms()
    ours, theirs = socket.socketpair()
    with contextlib.closing(Packets(ours, rooms)) as asking, contextlib.closing(Packets(theirs)) as answering:
        yield asking, answering, rooms
    rooms.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory files are of Linux")
def test_answers_that_are_still_looked_at_are_not_written_over_and_their_rooms_are_used_again_later(
    asked: tuple[Packets, Packets, Rooms],
) -> None:
    asking, answering, rooms = asked
    received = asking.received_bytes
    first = answer(asking, answering, rooms, b"a" * ROOM_FROM_BYTES)  # shows how large rooms must be
    assert asking.received_bytes - received > ROOM_FROM_BYTES
    received = asking.received_bytes
    kept = [np.frombuffer(answer(asking, answering, rooms, b"%d" % n * ROOM_FROM_BYTES), np.uint8) for n in range(4)]
    assert asking.received_bytes - received == 4 * 4, "lengths only"
    assert [bytes(array[:2]) for array in kept] == [b"00", b"11", b"22", b"33"] and first[:2] == b"aa"
    size = os.fstat(rooms.file).st_size
    views = [kept.pop()[1:], kept.pop()[7:9]]  # an array's part is enough
    kept.clear()
    for n in range(8):
        answer(asking, answering, rooms, b"%d" % n * 2 * ROOM_FROM_BYTES)
    assert [bytes(view[:2]) for view in views] == [b"33", b"22"]
    assert os.fstat(rooms.file).st_size == size


def test_an_answer_that_finds_no_room_comes_through_the_socket(
    asked: tuple[Packets, Packets, Rooms], monkeypatch: pytest.MonkeyPatch
) -> None:
    asking, answering, rooms = asked
    monkeypatch.setattr(packets_module, "MOST_ROOMS", 1)
    answer(asking, answering, rooms, b"a" * ROOM_FROM_BYTES)
    kept = answer(asking, answering, rooms, b"b" * ROOM_FROM_BYTES)
    for data in (b"c" * ROOM_FROM_BYTES, b"small", b"d" * 5 * ROOM_FROM_BYTES):
        answer(asking, answering, rooms, data)
    assert kept[:1] == b"b"


@pytest.mark.parametrize("offered", [False, True])
def test_an_answer_in_a_room_that_was_not_offered_or_is_too_small_is_refused(
    asked: tuple[Packets, Packets, Rooms], offered: bool
) -> None:
    asking, answering, rooms = asked
    if offered:
        answer(asking, answering, rooms, b"a" * ROOM_FROM_BYTES)
        rooms.offer()
    with socket.socket(fileno=os.dup(answering.fileno())) as raw:
        raw.sendall((1 << 31 | 3 * ROOM_FROM_BYTES).to_bytes(4, "little"))
    with pytest.raises(BadMessage, match="in a room of"):
        asking.receive(wait=False)
