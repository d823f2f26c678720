"""The simulator, step by step, with a generator that is played by the test."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from live_run import Run, in_use

from vla_stream.broker import lanes
from vla_stream.broker.connection import UNREACHABLE
from vla_stream.broker.lanes import PayloadReader
from vla_stream.config import Config
from vla_stream.flow import LastSeen
from vla_stream.policies.protocol import Act
from vla_stream.streams.actions import ActionReply
from vla_stream.streams.obs_requests import ObsRequest
from vla_stream.streams.trajectories import Trajectory
from workers.environment_host import LocalHost, Outcome
from workers.simulator import Simulator, make_hosts
from workers.slot import State

T, H, A, K = 3, 2, 2, 2
DEADLINE_S = 15.0


class FailingHost(LocalHost):
    """Loses its process, with all rows, in the chunk after `fail` was set."""

    fail = False

    def poll(self) -> Outcome | None:
        outcome = super().poll()
        if outcome is not None and outcome.chunk is not None and self.fail:
            self.fail = False
            return dataclasses.replace(outcome, failed=np.ones(self.rows, dtype=bool), causes=("it died",))
        return outcome


class Bench:
    """A simulator, and a generator's side of its streams."""

    def __init__(self, run: Run, config: Config) -> None:
        self.run, self.config = run, config
        self.worker = run.worker("simulator")
        self.hosts = [FailingHost(config, config.simulators.slots * K) for _ in range(config.simulators.env_batches)]
        made = iter(self.hosts)
        self.simulator = Simulator(self.worker, config, make_hosts(config, lambda *_: next(made), self.worker.id))
        self.simulator.open()

    def pump(self) -> None:
        """Steps until nothing moves any more."""
        deadline_s = time.monotonic() + DEADLINE_S
        while self.simulator.step(self.simulator.replies.read(None)):
            assert time.monotonic() < deadline_s, self.slots

    def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, (self.slots, self.run.events())
            self.pump()
            time.sleep(0.002)

    @property
    def slots(self) -> list[Any]:
        return [slot for batch in self.simulator.batches for slot in batch.slots]

    @property
    def states(self) -> list[State]:
        return [slot.state for slot in self.slots]

    def requests(self) -> dict[str, ObsRequest]:
        """Stream entry -> request, of all that wait."""
        entries: Any = self.run.client.xrange(self.run.keys.obs_requests)
        return {entry.decode(): ObsRequest.from_fields(fields) for entry, fields in entries}

    def reply(self, request: ObsRequest, value: float = 0.0, version: int = 1, shape: tuple[int, ...] = (H, A)) -> None:
        actions = np.full((request.n, *shape), value, dtype=np.float32)
        act = Act(actions, actions - 1, np.zeros(request.n, dtype=np.float32))
        self.send(ActionReply(request.id, version, "d", act))

    def send(self, reply: ActionReply) -> None:
        stream = self.run.keys.actions(reply.id.simulator)
        assert self.run.client.xadd(stream, reply.to_fields(), nomkstream=True)  # type: ignore[arg-type]

    def serve(self, keep: Callable[[ObsRequest], bool] = lambda _: True) -> int:
        """Answer what waits, as a generator does; returns how many."""
        served = 0
        for entry, request in self.requests().items():
            if keep(request):
                self.reply(request)
                self.run.client.xdel(self.run.keys.obs_requests, entry)
                served += 1
        self.pump()
        return served

    def trajectories(self) -> list[Trajectory]:
        entries: Any = self.run.client.xrange(self.run.keys.trajectories)
        return [Trajectory.from_fields(fields) for _, fields in entries]

    def dropped(self) -> float:
        return self.simulator.meter.sample().get("replies_dropped", 0.0)

    def refunded(self) -> list[str]:
        return [member.decode() for member in self.run.client.zrange(self.run.keys.refunded, 0, -1)]


Make = Callable[..., Bench]


@pytest.fixture
def make(run: Run) -> Iterator[Make]:
    made: list[Bench] = []

    def build(*, weights: int = 1, **changes: Any) -> Bench:
        config = run.start(**changes)
        if weights:
            run.allow(weights)
        made.append(Bench(run, config))
        made[-1].pump()
        return made[-1]

    yield build
    for bench in made:
        bench.simulator.close()


def test_what_a_batch_does_is_kept_without_gaps_and_counts_as_what_its_slots_time_does(make: Make) -> None:
    bench = make()
    bench.simulator.meter.spans()
    bench.simulator.meter.sample()
    began_s = time.monotonic()
    for _ in range(2 * T):
        time.sleep(0.002)
        bench.serve()
    bench.pump()
    spans = [span for span in bench.simulator.meter.spans()[0] if span.track == "batch 0"]
    assert {"step", "wait"} <= {span.stage for span in spans} and spans[0].start_s <= began_s
    for before, after in itertools.pairwise(spans):
        assert 0 <= after.start_s - before.end_s < 0.002, "spans of an instant are left out"
    for span in spans:
        assert sum(span.parts.values()) == pytest.approx(1) and set(span.parts) <= {"stepping", "asked", "held"}
    assert max(span.parts.get("asked", 0) for span in spans if span.stage == "wait") > 0.5


def test_a_full_segment_is_published_and_can_be_loaded(make: Make, run: Run) -> None:
    bench = make()
    assert sorted(str(r.id).split("/", 2)[2] for r in bench.requests().values()) == ["0.0/1.1/0", "0.1/2.1/0"]
    for _ in range(T):
        assert bench.serve() == 2
    first, second = bench.trajectories()
    assert [first.member, second.member] == ["1.1", "2.1"]
    segment = first.load(PayloadReader(run.client, run.keys.blob, run.shm).read)
    assert segment.steps == T and segment.rows == K and len(segment.observations) == T + 1
    assert segment.versions.tolist() == [1] * T
    assert segment.observations[0].images["front"].shape == (K, 16, 16, 3)
    # Nothing was asked to move, so only the clock in the state went on.
    clock = [float(observations.state[0, 2]) for observations in segment.observations]
    assert clock == pytest.approx([0, 2 / 12, 4 / 12, 6 / 12])
    books = run.flow.books()
    assert books.started == 4 and books.in_flight == 4 and books.balance == 0


def test_the_next_segment_begins_at_once_and_rows_go_on(make: Make) -> None:
    bench = make()
    for _ in range(T):
        bench.serve()
    ids = [str(request.id).split("/", 2)[2] for request in bench.requests().values()]
    assert sorted(ids) == ["0.0/3.1/0", "0.1/4.1/0"]
    assert bench.slots[0].last_observations.state[0, 2] == pytest.approx(6 / 12)


def test_without_permits_a_simulator_is_idle(make: Make, run: Run) -> None:
    bench = make(weights=0)
    assert bench.states == [State.IDLE, State.IDLE] and bench.simulator.idle
    assert bench.requests() == {} and bench.worker.state == "waiting: no weights"
    run.allow()
    bench.until(lambda: len(bench.requests()) == 2)


def test_admission_bounds_what_is_in_flight(make: Make) -> None:
    bench = make(trainer__segments_per_update=1, flow__max_staleness=0)
    assert bench.states == [State.ASKED, State.IDLE]
    for _ in range(T):
        bench.serve()
    assert len(bench.trajectories()) == 1 and bench.states == [State.IDLE, State.IDLE]


def test_a_backend_that_steps_only_as_a_whole_takes_permits_for_all_slots_or_none(make: Make, run: Run) -> None:
    line = {"name": "fakes:LineWhole", "max_steps": 12, "options": {}}
    bench = make(environment=line, simulators__slots=3, trainer__segments_per_update=1, flow__max_staleness=1)
    assert bench.states == [State.IDLE] * 3 and bench.worker.state == "waiting: full"
    run.client.hset(run.keys.flow, "max_staleness", 2)
    bench.until(lambda: bench.states == [State.ASKED] * 3)


def test_f15_a_repeated_reply_is_dropped(make: Make) -> None:
    bench = make()
    first, second = bench.requests().values()
    bench.reply(first)
    bench.reply(first, value=9.0)
    bench.pump()
    assert bench.states == [State.READY, State.ASKED] and bench.dropped() == 1
    assert bench.slots[0].reply.actions[0, 0, 0] == 0.0
    bench.reply(second)
    bench.pump()
    bench.reply(first)
    bench.pump()
    assert bench.dropped() == 1 and bench.slots[0].step == 1


def test_a_reply_to_an_older_incarnation_is_dropped(make: Make) -> None:
    bench = make()
    request = next(iter(bench.requests().values()))
    older = dataclasses.replace(request, id=dataclasses.replace(request.id, incarnation="0" * 8))
    bench.reply(older)
    bench.pump()
    assert bench.states == [State.ASKED, State.ASKED] and bench.dropped() == 1


def test_a_reply_with_an_error_aborts_the_segment_and_refunds_its_ticket(make: Make, run: Run) -> None:
    bench = make(flow__max_staleness=0)
    request = next(iter(bench.requests().values()))
    bench.send(ActionReply(request.id, 1, "", None, "no payload here"))
    bench.simulator.step(bench.simulator.replies.read(None))
    assert run.flow.books().outcomes["aborted"] == 1 and bench.refunded() == ["1.1"]
    assert ("aborted", "segment 1.1: generator answered with an error: no payload here") in run.events()
    bench.until(lambda: bench.slots[0].state is State.ASKED)
    assert bench.slots[0].permit.member == "1.2" and bench.refunded() == []
    assert run.flow.books().balance == 0


@pytest.mark.parametrize("shape", [(H + 1, A), (H, A + 1)])
def test_f45_a_reply_of_another_shape_aborts_instead_of_ending_the_simulator(
    make: Make, run: Run, shape: tuple[int, int]
) -> None:
    bench = make()
    bench.reply(next(iter(bench.requests().values())), shape=shape)
    bench.simulator.step(bench.simulator.replies.read(None))
    assert run.flow.books().outcomes["aborted"] == 1
    assert f"[H, A] = {list(shape)}, expected [2, 2]" in run.events()[-1][1]


def test_f27_a_foreign_entry_among_the_replies_is_buried(make: Make, run: Run) -> None:
    bench = make()
    run.client.xadd(run.keys.actions("simulator-0"), {"hello": "world"})
    assert bench.serve() == 2
    assert run.client.xlen(run.keys.dead_letters) == 1
    assert [slot.step for slot in bench.slots] == [1, 1]


def test_consumed_replies_leave_the_stream(make: Make, run: Run) -> None:
    bench = make()
    bench.serve()
    assert run.client.xlen(run.keys.actions("simulator-0")) == 0
    assert run.client.pttl(run.keys.actions("simulator-0")) > 0


def test_a_lost_request_is_asked_again_under_its_id(make: Make, run: Run) -> None:
    bench = make(flow__reply_deadline_s=0.1, flow__lease_s=0.3)
    (lost, request), (kept, _) = bench.requests().items()
    run.client.xdel(run.keys.obs_requests, lost)
    bench.until(lambda: len(bench.requests()) == 2)
    again = bench.requests()
    assert again.pop(kept) and list(again.values()) == [request]
    assert "asked again" in run.kinds()
    bench.until(lambda: "waiting" in run.kinds())
    assert len(bench.requests()) == 2, "one that is still in the stream is not sent twice"
    assert bench.serve() == 2 and [slot.step for slot in bench.slots] == [1, 1]


def test_f10_a_server_that_lost_the_run_hears_from_a_simulator_what_it_makes_and_of_which_shapes(
    make: Make, run: Run
) -> None:
    bench = make()
    bench.worker.beat()
    bench.pump()
    state = run.flow.state()
    assert state is not None
    last, making = LastSeen(state, run.flow.books()), run.flow.permits()
    assert making
    run.client.delete(*run.client.scan_iter(match=run.keys.everything_pattern))
    assert run.flow.create(bench.config, last)
    assert run.flow.specification() is None and run.flow.permits() == set()
    bench.worker.look_again()
    bench.worker.beat()
    bench.pump()
    assert run.flow.permits() == making and run.flow.books().balance == 0
    assert run.flow.specification() == bench.hosts[0].specification


def test_f19_replies_that_a_failover_brings_back_are_not_taken_again(make: Make, run: Run) -> None:
    bench = make()
    stream = run.keys.actions("simulator-0")
    for request in bench.requests().values():
        bench.reply(request)
    behind: Any = run.client.dump(stream)  # where a replica stands that lags
    bench.pump()
    bench.pump()
    assert [slot.step for slot in bench.slots] == [1, 1] and run.client.xlen(stream) == 0
    run.client.restore(stream, 0, behind, replace=True)
    bench.pump()
    assert [slot.step for slot in bench.slots] == [1, 1] and bench.states == [State.ASKED, State.ASKED]
    while not bench.trajectories():
        assert bench.serve() >= 2
    assert [trajectory.segment.steps for trajectory in bench.trajectories()] == [T, T]


@pytest.mark.parametrize("sent", [False, True], ids=["before it is sent", "after it is sent"])
def test_f02_an_error_of_redis_between_decision_and_sending_loses_nothing(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    bench = make()
    real = bench.worker.client.pipeline
    left = [1]

    def pipeline(**options: Any) -> Any:
        pipe = real(**options)
        execute = pipe.execute

        def failing(*arguments: Any, **others: Any) -> Any:
            if left[0]:
                left[0] -= 1
                if sent:
                    execute(*arguments, **others)
                raise UNREACHABLE[0]("injected")
            return execute(*arguments, **others)

        pipe.execute = failing
        return pipe

    for entry, request in bench.requests().items():
        bench.reply(request)
        run.client.xdel(run.keys.obs_requests, entry)
    monkeypatch.setattr(bench.worker.client, "pipeline", pipeline)
    replies = bench.simulator.replies.read(None)
    with pytest.raises(UNREACHABLE[0], match="injected"):
        for _ in range(5):
            bench.simulator.step(replies)
    # As the main loop does: the same step again.
    bench.simulator.step(replies)
    bench.pump()
    asked = [str(request.id).rpartition("/")[2] for request in bench.requests().values()]
    assert asked == ["1"] * (4 if sent else 2) and bench.states == [State.ASKED, State.ASKED]
    while not bench.trajectories():
        assert bench.serve() >= 2
    assert [trajectory.segment.steps for trajectory in bench.trajectories()] == [T, T]
    assert run.flow.books().balance == 0


def test_a_broken_connection_while_consumed_replies_are_deleted_loses_none(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    for request in bench.requests().values():
        bench.reply(request)
    seen = bench.simulator.replies.read(None)
    monkeypatch.setattr(bench.worker.client, "pipeline", _broken)
    with pytest.raises(UNREACHABLE[0]):
        bench.simulator.replies.read(None)
    monkeypatch.undo()
    assert len(seen) == 2 and bench.simulator.replies.read(None) == []
    assert run.client.xlen(run.keys.actions("simulator-0")) == 0


def _broken(*_: object, **__: object) -> None:
    raise UNREACHABLE[0]("injected")


def test_batches_do_not_wait_for_each_other(make: Make) -> None:
    bench = make(simulators__env_batches=2, trainer__segments_per_update=4)
    assert len(bench.requests()) == 4
    for _ in range(T):
        assert bench.serve(lambda request: request.id.batch == 0) == 2
    assert [trajectory.id.split("/")[2] for trajectory in bench.trajectories()] == ["0.0", "0.1"]
    assert [slot.step for slot in bench.simulator.batches[1].slots] == [0, 0]


def test_a_batch_waits_for_the_replies_of_all_its_active_slots(make: Make) -> None:
    bench = make()
    assert bench.serve(lambda request: request.id.slot == 0) == 1
    assert bench.states == [State.READY, State.ASKED]
    assert bench.serve() == 1
    assert [slot.step for slot in bench.slots] == [1, 1]


def test_a_permit_that_expired_drops_its_segment(make: Make, run: Run) -> None:
    bench = make(flow__lease_s=0.3)
    old = bench.requests()
    run.client.zadd(run.keys.permits, {"1.1": 1})
    bench.until(lambda: "expired" in run.kinds())
    bench.until(lambda: bench.states == [State.ASKED, State.ASKED])
    assert bench.slots[0].permit.member == "1.2" and bench.slots[1].permit.member == "2.1"
    bench.dropped()
    bench.reply(next(iter(old.values())))
    bench.pump()
    assert bench.dropped() == 1 and bench.states == [State.ASKED, State.ASKED]
    books = run.flow.books()
    assert books.outcomes["expired"] == 1 and books.balance == 0


def test_a_segment_whose_permit_expired_just_before_publishing_is_dropped(make: Make, run: Run) -> None:
    bench = make()
    for _ in range(T - 1):
        bench.serve()
    run.client.zrem(run.keys.permits, "1.1")
    bench.serve()
    assert [trajectory.member for trajectory in bench.trajectories()] == ["2.1"]
    assert "expired" in run.kinds() and "permit 1.1 is no longer held" in str(run.events())


def test_f41_slots_of_a_lost_process_are_aborted_and_an_idle_one_is_reset_before_it_goes_on(
    make: Make, run: Run
) -> None:
    bench = make(flow__max_staleness=0)
    for _ in range(T):
        bench.serve()
    assert bench.states == [State.IDLE, State.IDLE]
    assert not bench.slots[1].needs_reset.any(), "rows go on"
    run.client.zrem(run.keys.published, "1.1")
    bench.until(lambda: bench.states == [State.ASKED, State.IDLE])
    bench.hosts[0].fail = True
    bench.serve()
    assert ("environment", "it died; replaced, its segments are aborted") in run.events()
    assert run.flow.books().outcomes["aborted"] == 1
    assert bench.slots[1].needs_reset.all(), "its rows were in the lost process too"


def test_draining_finishes_what_is_begun_and_begins_nothing(make: Make, run: Run) -> None:
    bench = make()
    bench.serve()
    bench.worker.on_signal()
    assert bench.worker.draining and not bench.simulator.idle
    for _ in range(T - 1):
        assert bench.serve() == 2
    assert bench.simulator.idle and bench.requests() == {}
    assert len(bench.trajectories()) == 2 and run.flow.books().started == 2


def test_closing_gives_permits_back_and_removes_streams_and_files(make: Make, run: Run) -> None:
    bench = make(broker__lane="shm")
    bench.serve()
    assert len(in_use(run.shm)) == 2
    bench.simulator.close()
    bench.simulator.close()
    assert in_use(run.shm) == [] and not run.client.exists(run.keys.actions("simulator-0"))
    books = run.flow.books()
    assert books.outcomes["aborted"] == 2 and books.in_flight == 0 and books.balance == 0


def test_observations_below_the_threshold_travel_inline(make: Make, run: Run) -> None:
    bench = make()
    assert all(request.payload is not None for request in bench.requests().values())
    assert in_use(run.shm) == []


def test_observations_above_the_threshold_travel_in_one_file_per_segment_which_an_abort_removes(
    make: Make, run: Run
) -> None:
    bench = make(broker__inline_below_bytes=100)
    requests = list(bench.requests().values())
    assert [request.ref.split(":")[0] for request in requests] == ["shm", "shm"]
    assert [name.partition("-")[0] for name in in_use(run.shm)] == ["1.1", "2.1"]
    bench.send(ActionReply(requests[0].id, 1, "", None, "no"))
    bench.simulator.step(bench.simulator.replies.read(None))
    assert not list(run.shm.glob("1.1-*")) and len(list(run.shm.glob("2.1-*"))) == 1


def test_the_redis_lane_reaches_a_reader_that_cannot_see_dev_shm(make: Make, run: Run, tmp_path: Path) -> None:
    bench = make(broker__lane="redis")
    elsewhere = PayloadReader(run.client, run.keys.blob, tmp_path / "another host")
    for _ in range(T):
        assert all(request.payload is None and elsewhere.read(request.ref) for request in bench.requests().values())
        bench.serve()
    segment = bench.trajectories()[0].load(elsewhere.read)
    assert segment.steps == T and segment.observations[0].state.shape == (K, 3)
    (key,) = [key for key in run.client.scan_iter(match=run.keys.blob("1.1-*"))]
    assert run.client.hlen(key) == T + 1 and 0 < run.client.pttl(key) <= 3_600_000


def lanes_of(bench: Bench) -> list[str]:
    return [request.ref.split(":")[0] for request in bench.requests().values()]


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_f28_with_lane_auto_a_write_that_fails_costs_its_segments_and_the_next_ones_take_the_redis_lane(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(weights=0, broker__inline_below_bytes=100)
    monkeypatch.setattr(lanes.os, "pwritev", full)
    run.allow()
    bench.until(lambda: len(bench.requests()) == 2)
    assert lanes_of(bench) == ["redis", "redis"]
    (text,) = [text for kind, text in run.events() if kind == "lane"]
    assert text.startswith("observations travel through Redis: ") and "No space left on device" in text
    assert run.flow.books().outcomes["aborted"] == 2 and run.flow.books().balance == 0


def test_f28_with_lane_auto_segments_take_the_redis_lane_while_dev_shm_is_nearly_full_or_not_the_launchers(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(weights=0, broker__inline_below_bytes=100, trainer__segments_per_update=99)
    free = SimpleNamespace(free=lanes.MIN_FREE_BYTES - 1)
    monkeypatch.setattr(lanes.shutil, "disk_usage", lambda _: free)
    run.allow()
    bench.until(lambda: lanes_of(bench) == ["redis", "redis"])
    free.free += 1
    for _ in range(T):
        bench.serve()
    bench.until(lambda: lanes_of(bench) == ["shm", "shm"])
    monkeypatch.undo()
    shutil.rmtree(run.shm)  # as when the launcher ends
    # What is begun goes on in files without a name.
    for _ in range(T):
        bench.serve()
    bench.until(lambda: lanes_of(bench) == ["redis", "redis"])
    books = run.flow.books()
    assert books.outcomes["aborted"] == 0 and books.balance == 0 and run.kinds().count("lane") == 1


def test_f28_with_lane_shm_a_full_dev_shm_is_waited_for_visibly_and_no_segment_is_begun_or_lost(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(weights=0, broker__lane="shm", trainer__segments_per_update=99)
    bench.worker.beat()
    run.allow()
    bench.until(lambda: lanes_of(bench) == ["shm", "shm"])
    free = SimpleNamespace(free=0)
    monkeypatch.setattr(lanes.shutil, "disk_usage", lambda _: free)
    for _ in range(T):
        assert bench.serve() == 2, "what is begun is finished"
    bench.until(lambda: bench.worker.state == "waiting: /dev/shm is full")
    until_s = time.monotonic() + 0.3
    bench.until(lambda: time.monotonic() > until_s)
    assert bench.requests() == {} and run.flow.books().started == 2
    (text,) = [text for kind, text in run.events() if kind == "lane"]
    assert text == (f"simulator-0 waits: /dev/shm is full; make room there, or: vla-stream lane redis --run {run.name}")
    free.free = 10**9
    bench.until(lambda: lanes_of(bench) == ["shm", "shm"])
    assert bench.worker.state == "running" and run.flow.books().outcomes["aborted"] == 0


def test_the_lane_of_a_live_run_changes_for_segments_begun_from_then_on(make: Make, run: Run) -> None:
    bench = make(simulators__slots=1, broker__inline_below_bytes=100, trainer__segments_per_update=99)
    seen = []
    for lane in ("redis", "inline", "auto", "shm"):
        seen.append(lanes_of(bench))
        run.flow.set_lane(lane, by="a person")
        for _ in range(T):
            bench.serve()
        bench.until(bench.requests)
    assert [*seen, lanes_of(bench)] == [["shm"], ["redis"], [""], ["shm"], ["shm"]]
    assert len(bench.trajectories()) == 4 and run.flow.books().outcomes["aborted"] == 0
