"""Reading a stream without a group: in order, each entry once, from where the reader stands."""

from __future__ import annotations

import pytest

from vla_stream.broker.connection import Client
from vla_stream.broker.tail import Tail, newest_entries


@pytest.fixture
def stream(run_name: str) -> str:
    return f"vla:{{{run_name}}}:actions:simulator-0"


def add(client: Client, stream: str, count: int = 1) -> list[str]:
    return [client.xadd(stream, {"number": number}).decode() for number in range(count)]


def test_entries_come_in_order_and_once(client: Client, stream: str) -> None:
    added = add(client, stream, 3)
    tail = Tail(client, stream)
    assert [entry.id for entry in tail.read(2)] + [entry.id for entry in tail.read(2)] == added
    assert tail.read(2) == []
    later = add(client, stream)
    assert [(entry.id, entry.fields) for entry in tail.read(2, block_ms=1000)] == [(later[0], {b"number": b"0"})]


def test_a_reader_may_skip_what_is_there_already(client: Client, stream: str) -> None:
    add(client, stream, 3)
    tail = Tail(client, stream, "$")
    assert tail.read(5) == []
    later = add(client, stream)
    assert [entry.id for entry in tail.read(5)] == later


@pytest.mark.parametrize("block_ms", [None, 0, 1])
def test_an_empty_or_missing_stream_is_no_error_and_does_not_hold_the_reader(
    block_ms: int | None, client: Client, stream: str
) -> None:
    assert Tail(client, stream).read(1, block_ms) == []
    assert Tail(client, stream, "$").read(1, block_ms) == []


def test_f10_a_reader_goes_on_after_a_flush(client: Client, stream: str) -> None:
    tail = Tail(client, stream)
    old = int(add(client, stream)[0].partition("-")[0])
    tail.read(5)
    client.delete(stream)
    # The server's clock has to move on: ids are its times.
    added = client.xadd(stream, {"number": 9}, id=f"{old + 1}-0").decode()
    assert [entry.id for entry in tail.read(5)] == [added]


def test_consumed_entries_are_removed(client: Client, stream: str) -> None:
    add(client, stream, 3)
    tail = Tail(client, stream)
    for consumed in (tail.read(2), []):
        with client.pipeline(transaction=False) as pipe:
            tail.queue_read(pipe, 1, None, consumed)
            assert len(tail.took(pipe.execute()[0])) == (1 if consumed else 0)
    assert client.xlen(stream) == 1


def test_the_newest_entries_come_oldest_first(client: Client, stream: str) -> None:
    added = add(client, stream, 4)
    assert [entry.id for entry in newest_entries(client, stream, 2)] == added[-2:]
    assert newest_entries(client, stream + "-missing", 2) == []
