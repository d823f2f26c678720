"""The work queue: at least once, with leases. A consumer may die, hang, come back or lose a reply at any point."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from own_server import tls_server

from vla_stream.batching import Backlog
from vla_stream.broker.connection import OUT_OF_MEMORY, Client, ResponseError, connect
from vla_stream.broker.queue import Entry, WorkQueue
from vla_stream.broker.scripts import SWEEP_CONSUMER, Scripts
from vla_stream.broker.server import EmbeddedServer
from vla_stream.flow import Flow
from vla_stream.streams.keys import Keys

LEASE_S = 30.0
BLOCK_MS = 4000
MakeQueue = Callable[..., WorkQueue]


@pytest.fixture
def stream(run_name: str) -> str:
    return f"vla:{{{run_name}}}:obs-requests"


@pytest.fixture
def queue_of(redis_url: str, stream: str) -> Iterator[MakeQueue]:
    """Queues of the consumers named, each on its own connection, with the group in place."""
    with contextlib.ExitStack() as stack:

        def make(consumer: str, *, group: str = "generators") -> WorkQueue:
            client = stack.enter_context(contextlib.closing(connect(redis_url, name=consumer, block_s=5.0)))
            queue = WorkQueue(client, Scripts(client), stream, group, consumer, LEASE_S)
            queue.ensure_group()
            return queue

        yield make


def add(client: Client, stream: str, count: int = 1, start: int = 0) -> list[str]:
    with client.pipeline(transaction=True) as pipe:
        for number in range(start, start + count):
            pipe.xadd(stream, {"number": number})
        return [entry.decode() for entry in pipe.execute()]


def ids(entries: list[Entry]) -> list[str]:
    return [entry.id for entry in entries]


def let_leases_pass(queue: WorkQueue, entries: list[Entry]) -> None:
    """As if the owner had been silent for longer than the lease."""
    idle = int(2 * LEASE_S * 1000)
    queue.client.xclaim(queue.stream, queue.group, queue.consumer, 0, ids(entries), idle=idle, justid=True)


def owners(queue: WorkQueue) -> dict[str, str]:
    pending = queue.client.xpending_range(queue.stream, queue.group, min="-", max="+", count=1000)
    return {item["message_id"].decode(): item["consumer"].decode() for item in pending}


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for: {what}"
        time.sleep(0.002)


class Reading(threading.Thread):
    """A read in a thread of its own, and what it returned or raised."""

    def __init__(self, read: Callable[[], list[Entry]]) -> None:
        super().__init__(daemon=True)
        self._read = read
        self.result: list[Entry] | BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._read()
        except BaseException as exc:
            self.result = exc

    def entries(self) -> list[Entry]:
        self.join(10.0)
        assert isinstance(self.result, list), self.result
        return self.result


def blocked(client: Client, names: set[str]) -> bool:
    return names <= {item["name"] for item in client.client_list() if "b" in item["flags"]}


# ---- delivery


def test_entries_come_in_order_once_and_with_their_fields(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of("generator-0")
    added = add(client, stream, 3)
    first, second = queue.read(2), queue.read(2)
    assert ids(first) + ids(second) == added
    assert [entry.fields for entry in first + second] == [{b"number": b"%d" % i} for i in range(3)]
    assert queue.read(2) == []


def test_entries_added_before_the_group_existed_are_delivered(client: Client, stream: str, queue_of: MakeQueue) -> None:
    added = add(client, stream, 2)
    assert ids(queue_of("generator-0").read(10)) == added


def test_two_consumers_share_the_work_and_two_groups_do_not(client: Client, stream: str, queue_of: MakeQueue) -> None:
    one, other, foreign = queue_of("generator-0"), queue_of("generator-1"), queue_of("viewer", group="viewers")
    added = add(client, stream, 4)
    assert ids(one.read(2)) + ids(other.read(9)) == added
    assert ids(foreign.read(9)) == added


def test_an_entry_knows_when_the_server_took_it(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of("generator-0")
    seconds, microseconds = client.time()
    add(client, stream)
    assert 0 <= queue.read(1)[0].born_ms - (seconds * 1000 + microseconds // 1000) < 5000


def test_a_blocking_read_returns_as_soon_as_there_is_work(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of(f"blocked-{stream}")
    reading = Reading(lambda: queue.read(5, BLOCK_MS))
    wait_until(lambda: blocked(client, {queue.consumer}), "the reader blocks")
    added = add(client, stream)
    assert ids(reading.entries()) == added


def test_f31_a_block_that_lasts_longer_than_asked_for_is_no_error(tmp_path: Path) -> None:
    with (
        EmbeddedServer.start(tmp_path) as server,
        contextlib.closing(connect(server.url, name="other")) as other,
        contextlib.closing(connect(server.url, name="reader", block_s=0.3)) as client,
    ):
        queue = WorkQueue(client, Scripts(client), "vla:{x}:obs-requests", "generators", "generator-0", LEASE_S)
        queue.ensure_group()
        began = time.monotonic()
        reading = Reading(lambda: queue.read(1, 300))
        wait_until(lambda: blocked(other, {"reader"}), "the reader blocks")
        os.kill(server.pid, signal.SIGSTOP)
        resume = threading.Timer(1.0, os.kill, (server.pid, signal.SIGCONT))
        resume.start()
        assert reading.entries() == [] and time.monotonic() - began > 0.9
        resume.join()
        added = add(other, queue.stream)
        assert ids(queue.read(1, 300)) == added


@pytest.mark.parametrize("block_ms", [None, 0])
def test_a_read_without_time_to_wait_does_not_wait(block_ms: int | None, queue_of: MakeQueue) -> None:
    assert queue_of("generator-0").read(1, block_ms) == []


def test_a_reader_with_no_room_gets_nothing(client: Client, stream: str, queue_of: MakeQueue) -> None:
    dead, queue = queue_of("generator-0"), queue_of("generator-1")
    add(client, stream, 2)
    let_leases_pass(dead, dead.read(1))
    assert queue.read(0) == queue.read_balanced(0, BLOCK_MS) == queue.take_over(0) == []


def test_f20_done_entries_are_neither_pending_nor_kept(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of("generator-0")
    add(client, stream, 3)
    queue.done(ids(queue.read(3)))
    assert client.xlen(stream) == 0
    assert owners(queue) == {}


def test_done_with_nothing_and_done_twice_are_harmless(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of("generator-0")
    add(client, stream)
    entries = queue.read(1)
    queue.done([])
    queue.done(ids(entries))
    queue.done(ids(entries))
    assert client.xlen(stream) == 0


def test_done_can_be_part_of_the_transaction_that_publishes_the_result(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    queue = queue_of("generator-0")
    add(client, stream)
    entries = queue.read(1)
    with queue.client.pipeline(transaction=True) as pipe:
        pipe.set(f"{stream}:reply", "x", px=60_000)
        queue.queue_done(pipe, ids(entries))
        assert client.xlen(stream) == 1
        pipe.execute()
    assert (client.xlen(stream), client.get(f"{stream}:reply")) == (0, b"x")


# ---- death, leases, take over


def test_a_request_is_redelivered_when_its_generator_dies_before_the_ack(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    dead, other = queue_of("generator-0"), queue_of("generator-1")
    added = add(client, stream)
    let_leases_pass(dead, dead.read(1))
    taken = other.take_over(10)
    assert ids(taken) == added and taken[0].fields == {b"number": b"0"}
    assert owners(other) == {added[0]: "generator-1"}


def test_f14_nothing_is_taken_from_an_owner_whose_lease_runs(client: Client, stream: str, queue_of: MakeQueue) -> None:
    owner, other = queue_of("generator-0"), queue_of("generator-1")
    add(client, stream)
    owner.read(1)
    assert other.take_over(10) == []


def test_f14_a_renewed_lease_protects_again_and_counts_as_no_delivery(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    owner, other = queue_of("generator-0"), queue_of("generator-1")
    add(client, stream, 2)
    entries = owner.read(2)
    let_leases_pass(owner, entries)
    assert owner.renew(ids(entries)) == 2
    assert other.take_over(10) == []
    pending = client.xpending_range(stream, "generators", min="-", max="+", count=9)
    assert [item["times_delivered"] for item in pending] == [1, 1]


def test_f14_an_old_owner_that_wakes_up_cannot_steal_its_entries_back(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    stopped, other = queue_of("generator-0"), queue_of("generator-1")
    add(client, stream, 3)
    entries = stopped.read(3)
    let_leases_pass(stopped, entries[:2])
    other.take_over(10)
    assert stopped.renew(ids(entries)) == 1
    assert list(owners(other).values()) == ["generator-1", "generator-1", "generator-0"]


def test_renewing_nothing_renews_nothing(queue_of: MakeQueue) -> None:
    assert queue_of("generator-0").renew([]) == 0


def test_f15_a_late_ack_of_the_old_owner_ends_the_entry_and_the_new_owners_ack_is_harmless(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    late, other = queue_of("generator-0"), queue_of("generator-1")
    add(client, stream)
    entries = late.read(1)
    let_leases_pass(late, entries)
    taken = other.take_over(1)
    late.done(ids(entries))
    other.done(ids(taken))
    assert client.xlen(stream) == 0 and owners(other) == {}


def test_f16_every_delivery_is_counted_on_the_server(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queues = [queue_of(f"generator-{i}") for i in range(4)]
    add(client, stream)
    entries = queues[0].read(1)
    seen = [entries[0].deliveries]
    for owner, successor in itertools.pairwise(queues):
        let_leases_pass(owner, entries)
        entries = successor.take_over(1)
        seen.append(entries[0].deliveries)
    assert seen == [1, 2, 3, 4]


def test_f16_delivery_counts_are_those_of_each_entry_also_among_many_of_others(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    dead, busy, other = queue_of("generator-0"), queue_of("generator-1"), queue_of("generator-2")
    add(client, stream, 200)
    first = dead.read(1)
    busy.read(198)
    last = dead.read(1)
    let_leases_pass(dead, last)
    assert [e.deliveries for e in busy.take_over(300)] == [2]
    let_leases_pass(busy, last)
    let_leases_pass(dead, first)
    assert [(e.id, e.deliveries) for e in other.take_over(300)] == [(first[0].id, 2), (last[0].id, 3)]


def test_f18_take_over_goes_on_from_its_cursor_until_all_are_found_once(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    dead, other = queue_of("generator-0"), queue_of("generator-1")
    added = add(client, stream, 35)
    let_leases_pass(dead, dead.read(35))
    found = [ids(other.take_over(10)) for _ in range(4)]
    assert [len(part) for part in found] == [10, 10, 10, 5]
    assert [entry for part in found for entry in part] == added


def test_f18_the_cursor_passes_entries_of_live_owners(client: Client, stream: str, queue_of: MakeQueue) -> None:
    alive, dead, other = queue_of("generator-0"), queue_of("generator-1"), queue_of("generator-2")
    add(client, stream, 300)
    alive.read(299)
    let_leases_pass(dead, dead.read(1))
    # XAUTOCLAIM looks at ten times its COUNT per call, so one call from the start would never get there.
    assert sum(len(other.take_over(1)) for _ in range(31)) == 1


def test_f18_after_its_end_the_cursor_starts_again(client: Client, stream: str, queue_of: MakeQueue) -> None:
    dead, other = queue_of("generator-0"), queue_of("generator-1")
    for number in range(3):
        added = add(client, stream, 1, start=number)
        let_leases_pass(dead, dead.read(1))
        taken = other.take_over(10)
        assert ids(taken) == added
        other.done(ids(taken))


def test_f18_deleted_entries_of_a_dead_owner_are_no_work(client: Client, stream: str, queue_of: MakeQueue) -> None:
    dead, other = queue_of("generator-0"), queue_of("generator-1")
    added = add(client, stream, 3)
    let_leases_pass(dead, dead.read(3))
    client.xdel(stream, added[1])
    assert ids(other.take_over(10)) == [added[0], added[2]]
    assert list(owners(other)) == [added[0], added[2]]


# ---- reconnects


def test_f03_entries_of_a_lost_reply_come_back_after_a_reconnect(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    queue = queue_of("generator-0")
    added = add(client, stream, 3)
    queue.read(2)  # This reply never arrives.
    again = queue_of("generator-0")
    recovered = again.recover()
    assert ids(recovered) == added[:2]
    assert [entry.fields[b"number"] for entry in recovered] == [b"0", b"1"]
    assert ids(again.read(9)) == added[2:]


def test_f03_recover_leaves_entries_of_others_alone(client: Client, stream: str, queue_of: MakeQueue) -> None:
    one, other = queue_of("generator-0"), queue_of("generator-1")
    add(client, stream, 2)
    one.read(2)
    assert other.recover() == []


def test_f03_recover_needs_neither_stream_nor_group(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of("generator-0")
    client.delete(stream)
    assert queue.recover() == []
    assert ids(queue.read(1)) == [] and client.exists(stream) == 1


def test_f17_a_trimmed_entry_comes_back_empty_and_can_be_acked(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    queue = queue_of("generator-0")
    added = add(client, stream, 2)
    queue.read(2)
    client.xtrim(stream, minid=added[1], approximate=False)
    recovered = queue.recover()
    assert [(entry.id, bool(entry.fields)) for entry in recovered] == [(added[0], False), (added[1], True)]
    queue.done(ids(recovered))
    assert owners(queue) == {}


def test_f10_a_read_after_a_flush_creates_the_group_and_loses_nothing_added_since(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    queue = queue_of("generator-0")
    client.delete(stream)
    added = add(client, stream, 2)
    assert queue.read(5) == []  # NOGROUP: now there is one again
    assert ids(queue.read(5)) == added


def test_f10_every_other_call_after_a_flush_is_harmless_too(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of("generator-0")
    add(client, stream)
    entries = queue.read(1)

    def without_group() -> None:
        assert queue.renew(ids(entries)) == 0
        assert queue.sweep_consumers(0) == 0
        queue.done(ids(entries))

    client.delete(stream)
    without_group()
    # An emptied stream gives the same id again within the same millisecond.
    wait_until(lambda: client.time()[0] * 1000 + client.time()[1] // 1000 > entries[0].born_ms + 1, "another id")
    added = add(client, stream)
    without_group()
    assert queue.take_over(5) == []
    assert ids(queue.read(5)) == added


def test_f10_two_workers_that_create_the_group_at_once_do_not_disturb_each_other(queue_of: MakeQueue) -> None:
    one, other = queue_of("generator-0"), queue_of("generator-1")
    one.ensure_group()
    other.ensure_group()


@pytest.mark.parametrize("how", ["stream deleted", "group destroyed"])
def test_f11_a_reader_that_blocks_during_a_flush_goes_on(
    how: str, client: Client, stream: str, queue_of: MakeQueue
) -> None:
    queue = queue_of(f"blocked-{stream}")
    reading = Reading(lambda: queue.read(5, BLOCK_MS))
    wait_until(lambda: blocked(client, {queue.consumer}), "the reader blocks")
    client.delete(stream) if how == "stream deleted" else client.xgroup_destroy(stream, "generators")
    assert reading.entries() == []
    added = add(client, stream)
    assert ids(queue.read(5, BLOCK_MS)) == added


def test_other_errors_of_the_server_reach_the_caller(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of("generator-0")
    client.delete(stream)
    client.set(stream, "not a stream", px=60_000)
    for call in (
        lambda: queue.read(1),
        lambda: queue.take_over(1),
        lambda: queue.renew(["1-1"]),
        lambda: queue.sweep_consumers(0),
        queue.ensure_group,
    ):
        with pytest.raises(ResponseError, match="wrong kind of value"):
            call()


def test_scripts_survive_a_server_that_forgot_them(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queue = queue_of("generator-0")
    add(client, stream)
    entries = queue.read(1)
    assert queue.renew(ids(entries)) == 1
    client.script_flush()
    assert queue.renew(ids(entries)) == 1


# ---- sharing among readers


def test_f30_a_burst_is_shared_evenly_by_blocked_readers(client: Client, stream: str, queue_of: MakeQueue) -> None:
    queues = [queue_of(f"balanced-{i}-{stream}") for i in range(4)]
    readings = [Reading(lambda queue=queue: queue.read_balanced(16, BLOCK_MS)) for queue in queues]
    wait_until(lambda: blocked(client, {queue.consumer for queue in queues}), "all readers block")
    added = add(client, stream, 64)
    shares = [ids(reading.entries()) for reading in readings]
    assert [len(share) for share in shares] == [16, 16, 16, 16]
    assert sorted(entry for share in shares for entry in share) == sorted(added)


def test_a_balanced_read_of_an_idle_stream_returns_nothing_and_one_of_one_entry_takes_one(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    queue = queue_of("generator-0")
    assert queue.read_balanced(4, 1) == []
    add(client, stream, 2)
    assert len(queue.read_balanced(1, BLOCK_MS)) == 1


def test_the_backlog_is_what_nobody_holds_and_those_who_could(client: Client, stream: str, queue_of: MakeQueue) -> None:
    first, second = queue_of("generator-0"), queue_of("generator-1")
    assert first.backlog() == Backlog(0, 1, 1)
    added = add(client, stream, 5)
    held = second.read(2)
    assert first.backlog() == Backlog(3, 2, 1)
    assert second.backlog() == Backlog(3, 1, 1), "one that has not asked yet is not known"
    first.read(1)
    second.done(ids(held))
    assert first.backlog() == Backlog(2, 2, 2)
    client.xdel(stream, added[2])  # held, and removed by somebody: not one of those that wait
    assert first.backlog().requests == 1
    first.lease_ms = 20
    time.sleep(0.05)
    assert first.backlog().generators == 1, "one that was silent for a lease does not count"


def test_a_balanced_read_leaves_to_others_what_is_more_than_its_share(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    queue = queue_of("generator-0")
    add(client, stream, 6)
    assert len(queue.read_balanced(4, None, lambda: 2)) == 3
    assert len(queue.read_balanced(4, None, lambda: 0)) == 1


# ---- consumers


def consumers(client: Client, stream: str) -> set[str]:
    return {item["name"].decode() for item in client.xinfo_consumers(stream, "generators")}


def test_f13_consumers_that_are_idle_and_hold_nothing_are_swept(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    gone = [queue_of(f"gone-{i}") for i in range(3)]
    add(client, stream, 3)
    for queue in gone:
        queue.done(ids(queue.read(1)))
    sweeper = queue_of("generator-0")
    sweeper.read(1)
    assert sweeper.sweep_consumers(60_000) == 0
    removed = []
    wait_until(lambda: removed.append(sweeper.sweep_consumers(1)) or sum(removed) == 3, "all three are swept")
    # Redis 7.0 makes a consumer only of a reader that got something, and the sweeper has not.
    assert consumers(client, stream) <= {"generator-0"}


def test_f12_a_consumer_that_holds_entries_is_never_deleted(client: Client, stream: str, queue_of: MakeQueue) -> None:
    holder, sweeper = queue_of("holder"), queue_of("generator-0")
    added = add(client, stream)
    holder.read(1)
    wait_until(lambda: client.xinfo_consumers(stream, "generators")[0]["idle"] > 5, "the holder is idle")
    assert sweeper.sweep_consumers(1) == 0
    # Nor when it got work between the look and the deletion, which the script looks at again.
    assert sweeper.scripts.call(SWEEP_CONSUMER, [stream], ["generators", "holder", 1]) == 0
    assert owners(holder) == {added[0]: "holder"}


# ---- handing back


def deliveries(queue: WorkQueue) -> dict[str, tuple[str, int]]:
    """Entry -> its owner, and how often it was delivered, as XPENDING says."""
    pending = queue.client.xpending_range(queue.stream, queue.group, min="-", max="+", count=1000)
    return {item["message_id"].decode(): (item["consumer"].decode(), item["times_delivered"]) for item in pending}


def test_f28_an_entry_that_is_handed_back_can_be_taken_over_at_once_and_was_not_delivered(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    remote, other = queue_of("generator-0"), queue_of("generator-1")
    kept, left = add(client, stream, 2)
    remote.read(2)
    assert deliveries(remote) == {kept: ("generator-0", 1), left: ("generator-0", 1)}
    assert remote.hand_back(left)
    assert deliveries(remote)[left] == ("generator-0", 0)
    # It is not lost when its consumer goes: the sweep leaves a consumer that holds something.
    assert other.sweep_consumers(-1) == 0
    (taken,) = other.take_over(10)
    assert (taken.id, taken.deliveries) == (left, 1)
    assert deliveries(remote) == {kept: ("generator-0", 1), left: ("generator-1", 1)}


def test_f28_however_often_an_entry_is_handed_back_it_is_no_suspect(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    one, other = queue_of("generator-0"), queue_of("generator-1")
    (entry,) = add(client, stream, 1)
    one.read(1)
    for queue in (one, other, one, other, one, other):
        assert queue.hand_back(entry) == (queue is one or queue.consumer == "generator-1")
        (taken,) = (other if queue is one else one).take_over(10)
        assert (taken.id, taken.deliveries) == (entry, 1)


def test_an_entry_that_another_consumer_took_over_is_not_handed_back(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    late, owner = queue_of("generator-0"), queue_of("generator-1")
    (entry,) = add(client, stream, 1)
    let_leases_pass(late, late.read(1))
    owner.take_over(1)
    before = deliveries(owner)
    assert not late.hand_back(entry)
    assert deliveries(owner) == before and owner.take_over(1) == []
    client.delete(stream)
    assert not owner.hand_back(entry)


def test_a_consumer_has_company_as_long_as_another_one_asks_for_entries(
    client: Client, stream: str, queue_of: MakeQueue
) -> None:
    queue, other = queue_of("generator-0"), queue_of("generator-1")
    assert not queue.has_company()
    add(client, stream, 2)
    queue.read(1)
    assert not queue.has_company()
    other.read(1)
    assert queue.has_company()
    queue.lease_ms = 50
    wait_until(lambda: not queue.has_company(), "the other one is silent")
    other.read(1)
    assert queue.has_company()
    client.delete(stream)
    assert not queue.has_company()


def test_f23_a_full_redis_7_acknowledges_deletes_and_shows_the_books(tmp_path: Path) -> None:
    # It refuses to queue any command of a transaction then, which newer servers do not.
    with (
        tls_server(tmp_path) as (port, _),
        contextlib.closing(connect(f"redis://127.0.0.1:{port}/0", name="test")) as client,
    ):
        stream = "vla:{full}:trajectories"
        queue = WorkQueue(client, Scripts(client), stream, "trainers", "trainer-0", 5.0)
        added = add(client, stream, 2)
        queue.ensure_group()
        assert ids(queue.read(2)) == added
        client.zadd("vla:{full}:published", {"1.1": 1})
        client.config_set("maxmemory", 1)
        with pytest.raises(OUT_OF_MEMORY):
            add(client, stream, 1)
        queue.done(added)
        assert client.xlen(stream) == 0 and client.xpending(stream, "trainers")["pending"] == 0
        flow = Flow(client, Keys("full"))
        assert flow.books().in_flight == 1 and flow.live_members() == {"1.1"}
