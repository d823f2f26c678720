"""What people read: events as sentences, and dead letters small enough to keep."""

from __future__ import annotations

from vla_stream.broker.connection import Client
from vla_stream.broker.queue import Entry
from vla_stream.streams.keys import Keys
from vla_stream.streams.notices import DEAD_LETTER_BYTES, dead_letters, one_line, sample, say


def only_entry(client: Client, key: str) -> dict[bytes, bytes]:
    ((_, fields),) = client.xrange(key)
    return dict(fields)


def test_an_event_is_one_sentence_with_its_worker_and_kind(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    say(client, keys, "generator-0", "started", "generator-0 started on cpu.")
    assert only_entry(client, keys.events) == {
        b"worker": b"generator-0",
        b"kind": b"started",
        b"text": b"generator-0 started on cpu.",
    }


def test_an_event_of_any_length_is_kept_short(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    say(client, keys, "generator-0", "failed", "x" * 10**6)
    assert len(only_entry(client, keys.events)[b"text"]) == 2000


def test_a_sample_holds_the_numbers_of_a_meter_as_short_texts(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    sample(client, keys, "generator-0", "generator", "second", {"rows": 12, "fill": 1 / 3, "seconds": 1.0})
    assert only_entry(client, keys.metrics) == {
        b"worker": b"generator-0",
        b"role": b"generator",
        b"kind": b"second",
        b"rows": b"12",
        b"fill": b"0.33333333",
        b"seconds": b"1",
    }


def test_a_dead_letter_keeps_the_entry_its_reason_and_its_deliveries(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    raw = {b"id": b"x", b"data": b"\x00\xff"}
    dead_letters(client, keys, "generator-0", keys.obs_requests, [(Entry("1-0", raw, deliveries=4), "wrong schema")])
    assert only_entry(client, keys.dead_letters) == {
        b"raw.id": b"x",
        b"raw.data": b"\x00\xff",
        b"stream": keys.obs_requests.encode(),
        b"entry": b"1-0",
        b"reason": b"wrong schema",
        b"deliveries": b"4",
        b"worker": b"generator-0",
    }


def test_f16_a_huge_or_strange_entry_is_kept_in_part_and_never_fails(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    for number, raw in enumerate(
        [
            {b"data": b"x" * 10**6},
            {b"n" * 10**5: b"x" * 10**5},
            {b"%d" % i: b"" for i in range(50_000)},
            {b"\xff\xfe": b"\xff" * 5000, b"": b"x"},
            {},
        ]
    ):
        dead_letters(client, keys, "w", "s", [(Entry("1-0", raw), "r" * 10**5)])
        _, fields = client.xrevrange(keys.dead_letters, count=1)[0]
        assert client.xlen(keys.dead_letters) == number + 1
        assert sum(len(value) for name, value in fields.items() if name.startswith(b"raw.")) <= DEAD_LETTER_BYTES
        assert sum(len(name) + len(value) for name, value in fields.items()) < 8 * DEAD_LETTER_BYTES


def test_f27_what_an_event_says_is_one_line_without_terminal_commands(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    say(client, keys, "simulator-0", "environment", "ValueError: \x1b[2Jbad\nline \ud800\u202e two")
    assert only_entry(client, keys.events)[b"text"] == b"ValueError: [2Jbad line two"
    assert one_line(b"a\n\n\xff b") == "a \ufffd b"
    assert len(one_line(b"x" * 10**6)) == 2000
