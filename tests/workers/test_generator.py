"""The generator, step by step, with simulators and trainer that are played by the test."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_policies import Linear
from fakes import POISON, Line
from live_run import Run

from vla_stream.broker.connection import OUT_OF_MEMORY, UNREACHABLE, connect
from vla_stream.broker.lanes import ShmLane, segment_name
from vla_stream.broker.scripts import Scripts
from vla_stream.broker.server import EmbeddedServer
from vla_stream.config import Config
from vla_stream.environments.protocol import Observations
from vla_stream.errors import RunFailed
from vla_stream.policies.protocol import Act
from vla_stream.streams.actions import ActionReply
from vla_stream.streams.obs_requests import ObsRequest, RequestId
from vla_stream.streams.observations import pack_observations
from vla_stream.streams.weights import WeightsManifest
from workers.generator import TRIALS, Generator, Stages
from workers.models import make_policy
from workers.replies import Replies
from workers.requests import Answers, Batch
from workers.weights import WeightsWriter, to_bytes

H, A = 2, 2
CPU = torch.device("cpu")
SPECIFICATION = Line(1, 1, Line.Options()).specification
DEADLINE_S = 30.0  # a process that imports torch on a busy machine takes its time


def look(rows: int = 2, seed: int = 0) -> Observations:
    return Line(rows, 12, Line.Options()).reset(np.ones(rows, dtype=bool), np.arange(rows, dtype=np.uint64) + seed)


class Watched(Linear):
    """Tells how many rows it saw in each call."""

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Any:
        self.calls = [*getattr(self, "calls", []), len(observations)]
        return super().act(observations, noise_keys)


class Bench:
    """Generators of one run, and both their neighbours' sides of the streams."""

    def __init__(self, run: Run, config: Config) -> None:
        self.run, self.config = run, config
        self.sent: dict[str, str] = {}
        for simulator in ("simulator-0", "simulator-1"):
            Replies(run.client, run.keys.actions(simulator)).open()

    def generator(self, number: int = 0) -> Generator:
        worker = self.run.worker("generator", number)
        policy = make_policy(self.config, SPECIFICATION, CPU)
        policy.__class__ = Watched
        made = Generator(worker, self.config, policy, worker.connect)
        made.collector.recover()
        return made

    def publish(self, version: int, *, damaged: bool = False) -> tuple[WeightsManifest, Linear]:
        """Weights of another seed per version, as a trainer's commit leaves them."""
        policy = make_policy(self.config.model_copy(update={"seed": version}), SPECIFICATION, CPU)
        assert isinstance(policy, Linear)
        writer = WeightsWriter(self.run.client, Scripts(self.run.client), self.run.keys, 1)
        upload = writer.describe(version, version - 1, 1, to_bytes(policy.state_dict()))
        writer.upload(upload)
        manifest = upload.manifest
        fields: dict[Any, Any] = manifest.to_fields()
        self.run.client.xadd(self.run.keys.weights, {**fields, b"version": b"99"} if damaged else fields)
        return manifest, policy

    def request(
        self,
        ticket: int,
        observations: Observations | None = None,
        *,
        simulator: str = "simulator-0",
        min_version: int = 0,
        ref: str = "",
        mode: str = "sample",
    ) -> str:
        """Send one request; returns its id."""
        observations = look() if observations is None else observations
        identity = RequestId(simulator, "9f2c11ab", 0, 0, ticket, 1, 0)
        payload = None if ref else pack_observations(observations)
        fields = ObsRequest(identity, len(observations), min_version, mode, payload, ref).to_fields()
        entry: Any = self.run.client.xadd(self.run.keys.obs_requests, fields)  # type: ignore[arg-type]
        self.sent[str(identity)] = entry.decode()
        return str(identity)

    def replies(self, simulator: str = "simulator-0") -> list[ActionReply]:
        entries: Any = self.run.client.xrange(self.run.keys.actions(simulator))
        return [ActionReply.from_fields(fields) for _, fields in entries]

    def serve(self, generator: Generator, replies: int = 1, simulator: str = "simulator-0") -> list[ActionReply]:
        """Steps until so many replies are there."""
        self.until(
            lambda: generator.step(None) or len(self.replies(simulator)) >= replies, lambda: self.replies(simulator)
        )
        while len(self.replies(simulator)) < replies:
            self.until(lambda: generator.step(None), lambda: self.replies(simulator))
        return self.replies(simulator)

    def until(self, condition: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, (told(), self.run.events())
            time.sleep(0.001)

    def waiting(self) -> int:
        return int(self.run.client.xlen(self.run.keys.obs_requests))

    def pending(self) -> int:
        summary: Any = self.run.client.xpending(self.run.keys.obs_requests, "generators")
        return int(summary["pending"])

    def letters(self) -> list[str]:
        entries: Any = self.run.client.xrange(self.run.keys.dead_letters)
        return [fields[b"reason"].decode() for _, fields in entries]


@pytest.fixture
def make(run: Run) -> Callable[..., Bench]:
    return lambda **changes: Bench(run, run.start(**changes))


Make = Callable[..., Bench]


def test_one_batch_serves_requests_of_two_simulators_and_each_gets_its_own_reply(make: Make) -> None:
    bench = make(generators__max_wait_ms=10_000)
    generator = bench.generator()
    first = bench.request(1)
    generator.step(None)
    assert bench.replies() == [] and len(generator.collector.batcher) == 1, "half a batch waits"
    second = bench.request(2, simulator="simulator-1")
    assert generator.step(None)
    assert generator.policy.calls == [4]  # type: ignore[attr-defined]
    assert [str(reply.id) for reply in bench.replies()] == [first]
    assert [str(reply.id) for reply in bench.replies("simulator-1")] == [second]
    assert bench.waiting() == bench.pending() == 0


def test_half_a_batch_is_sent_when_its_oldest_request_is_old_enough(make: Make) -> None:
    bench = make(generators__max_wait_ms=30)
    generator = bench.generator()
    started_s = time.monotonic()
    bench.request(1)
    bench.serve(generator)
    assert time.monotonic() - started_s >= 0.02


def test_requests_that_are_sent_later_than_their_wait_and_five_ms_are_counted_and_the_fullest_batch_is_told(
    make: Make,
) -> None:
    bench = make(generators__max_wait_ms=50)
    generator = bench.generator()
    for ticket in (1, 2):
        bench.request(ticket)
    bench.serve(generator, 2)
    sample = generator.worker.meter.sample()
    assert (sample["requests"], sample["rows_highest"]) == (2, 4)
    assert sample["overdue"] == 0 or sample["age_ms"] > 55, "a full batch does not wait"
    bench.request(3)
    time.sleep(0.06)
    bench.serve(generator, 3)
    sample = generator.worker.meter.sample()
    assert (sample["requests"], sample["overdue"], sample["rows_highest"]) == (1, 1, 2)


def test_f31_while_a_batch_fills_our_clock_ends_the_wait_and_not_a_block(make: Make) -> None:
    bench = make(generators__max_wait_ms=50)
    generator = bench.generator()
    bench.request(1)
    started_s = time.monotonic()
    bench.until(lambda: generator.step(8_000))
    assert time.monotonic() - started_s < 5


def test_auto_batching_divides_what_waits_among_the_generators(make: Make) -> None:
    bench = make(generators__batching="auto", generators__max_batch_size=64)
    first, second = bench.generator(0), bench.generator(1)
    assert not second.step(None), "it has asked once"
    for ticket in range(6):
        bench.request(ticket)
    assert first.step(None) and second.step(None)
    assert [len(generator.collector.batcher) for generator in (first, second)] == [0, 0]
    served = [generator.worker.progress for generator in (first, second)]
    assert served == [3, 2], "half of six; of the three that are left, half again"
    bench.serve(second, 6)


def test_a_strategy_of_the_users_own_decides_how_much_a_batch_takes(make: Make) -> None:
    bench = make(generators__batching="fakes:OneByOne", generators__max_batch_size=64)
    generator = bench.generator()
    for ticket in range(3):
        bench.request(ticket)
    bench.serve(generator, 3)
    assert generator.policy.calls == [64, 64, 64]  # type: ignore[attr-defined]
    assert generator.collector.strategy.batches == [64, 64, 64]  # type: ignore[attr-defined]


def test_before_its_first_request_a_generator_infers_at_every_size_that_it_pads_to(make: Make) -> None:
    bench = make(generators__max_batch_size=16, generators__padded_sizes=[2, 8], generators__batching="auto")
    generator = bench.generator()
    generator.warm_up(SPECIFICATION)
    assert generator.policy.calls == [size for size in (2, 8, 16) for _ in range(TRIALS)]  # type: ignore[attr-defined]


def test_a_device_that_cannot_hold_the_largest_batch_says_so_before_the_first_request(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(generators__max_batch_size=16)
    generator = bench.generator()

    def out_of_memory(observations: Observations, noise_keys: np.ndarray | None) -> Act:
        raise RuntimeError("no room on the device")

    monkeypatch.setattr(generator.policy, "act", out_of_memory)
    with pytest.raises(RunFailed, match=r"no inference for \d+ rows .*no room on the device; see generators.max_batch"):
        generator.warm_up(SPECIFICATION)


def test_answers_that_redis_does_not_take_do_not_hold_the_device_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(generators__max_wait_ms=0)
    generator = bench.generator()
    stages, send, tries = Stages(generator), generator.answerer.send, list[str]()

    def unreachable(answers: Answers) -> None:
        tries.append(threading.current_thread().name)
        if len(tries) <= 2:
            raise UNREACHABLE[0]("injected")
        send(answers)

    monkeypatch.setattr(generator.answerer, "send", unreachable)
    try:
        request = bench.request(1)
        batches = list[Batch]()
        bench.until(lambda: batches or [batches.append(batch) for batch in [stages.next_batch(0.01)] if batch])
        stages.pass_on(stages.infer(batches[0]))
        assert tries[0] == threading.current_thread().name
        bench.until(lambda: request in [str(reply.id) for reply in bench.replies()])
        assert tries[1:] == ["answer", "answer"] and stages.error is None
        bench.until(lambda: stages.empty)
    finally:
        stages.stop.set()


def test_a_generator_whose_device_is_busy_leaves_requests_to_others_until_it_is_nearly_free(make: Make) -> None:
    bench = make(generators__max_wait_ms=0)
    busy, other = bench.generator(0), bench.generator(1)
    stages = Stages(busy)
    try:
        bench.request(1)
        bench.until(lambda: stages.next_batch(0.01))
        stages._took_s[4] = 60.0  # rows with padding
        bench.request(2)
        # Until it holds the batch for the free device it may read on: then the device is busy for a minute.
        bench.until(lambda: stages.next_batch(0.01))
        third = bench.request(3)
        bench.until(lambda: other.step(None))
        assert third in [str(reply.id) for reply in bench.replies()]
        assert len(busy.collector.owned) == 2
        # The device is free earlier than expected: at once there is work for it.
        bench.request(4)
        stages._free_at_s = 0.0
        stages._moved.set()
        bench.until(lambda: stages.next_batch(0.01))
        assert len(busy.collector.owned) == 3
    finally:
        stages.stop.set()


def test_padding_changes_no_result(make: Make) -> None:
    bench = make(generators__max_batch_size=16, generators__padded_sizes=[6])
    generator = bench.generator()
    bench.request(1, look(3), mode="mode")
    (reply,) = bench.serve(generator)
    assert generator.policy.calls == [6]  # type: ignore[attr-defined]
    expected = make_policy(bench.config, SPECIFICATION, CPU).act(look(3), None)
    assert reply.act is not None and reply.act.actions.shape == (3, H, A)
    assert np.allclose(reply.act.actions, expected.actions, atol=1e-6)
    assert np.allclose(reply.act.logprobs, expected.logprobs, atol=1e-6)
    assert np.allclose(reply.act.values, expected.values, atol=1e-6)


def test_f15_the_same_request_gets_the_same_actions_whoever_serves_it_in_whatever_batch(make: Make) -> None:
    bench = make()
    first, second = bench.generator(0), bench.generator(1)
    bench.request(1)
    bench.serve(first)
    bench.request(2, look(seed=9))
    bench.request(1)
    bench.serve(second, replies=3)
    assert second.policy.calls == [4]  # type: ignore[attr-defined]
    alone, other, together = (reply.act for reply in bench.replies())
    assert alone is not None and other is not None and together is not None
    assert np.array_equal(alone.actions, together.actions)
    assert np.array_equal(alone.logprobs, together.logprobs)
    assert not np.array_equal(alone.actions, other.actions)


def test_rows_with_the_same_observation_get_different_noise(make: Make) -> None:
    bench = make()
    bench.request(1, look(1).take([0, 0]))
    (reply,) = bench.serve(bench.generator())
    assert reply.act is not None
    assert not np.array_equal(reply.act.actions[0], reply.act.actions[1])


def test_the_mode_is_sampled_without_noise_in_a_batch_of_its_own(make: Make) -> None:
    bench = make(generators__max_batch_size=8)
    generator = bench.generator()
    bench.request(1, look(1).take([0, 0]), mode="mode")
    bench.request(2)
    replies = bench.serve(generator, replies=2)
    assert generator.policy.calls == [8, 8]  # type: ignore[attr-defined]
    act = next(reply.act for reply in replies if reply.id.ticket == 1)
    assert act is not None and np.array_equal(act.actions[0], act.actions[1])


def test_f44_weights_are_swapped_between_batches_and_every_reply_tells_which_acted(make: Make) -> None:
    bench = make(seed=77)
    generator = bench.generator()
    bench.request(1, mode="mode")
    bench.serve(generator)
    for version in (1, 2):
        bench.publish(version)
    manifest, policy = bench.publish(3)
    bench.request(2, mode="mode")
    before, after = bench.serve(generator, replies=2)
    assert (before.version, before.weights) == (0, "")
    assert (after.version, after.weights) == (3, manifest.digest)
    assert generator.worker.version == 3
    assert after.act is not None
    assert np.allclose(after.act.actions, policy.act(look(), None).actions, atol=1e-6)


def test_older_weights_never_replace_newer_ones(make: Make) -> None:
    bench = make()
    generator = bench.generator()
    for version in (5, 4):
        bench.publish(version)
        bench.request(version)
        bench.serve(generator, replies=6 - version)
    assert [reply.version for reply in bench.replies()] == [5, 5]


def test_f44_a_request_that_demands_newer_weights_waits_for_them(make: Make) -> None:
    bench = make()
    generator = bench.generator()
    bench.publish(1)
    bench.request(1, min_version=2)
    answered = threading.Thread(target=lambda: bench.serve(generator))
    answered.start()
    bench.until(lambda: generator.version == 0 and bench.pending() == 1)
    assert bench.replies() == []
    bench.publish(2)
    reader = threading.Thread(target=lambda: bench.until(lambda: (generator.weights.poll(), generator.version == 2)[1]))
    reader.start()
    answered.join(DEADLINE_S)
    reader.join(DEADLINE_S)
    assert [reply.version for reply in bench.replies()] == [2]


def test_f44_weights_that_never_come_end_the_generator_with_both_versions_named(make: Make) -> None:
    bench = make(generators__batch_deadline_s=0.05)
    generator = bench.generator()
    bench.publish(1)
    bench.request(1, min_version=2)
    with pytest.raises(RunFailed, match=r"weights 2 are demanded, 0 is loaded, and no newer ones came for 0.05 s"):
        bench.serve(generator)
    assert bench.pending() == 1, "the request goes to another generator"


def test_f27_damaged_weights_are_buried_and_the_newest_whole_ones_are_used(make: Make) -> None:
    bench = make()
    generator = bench.generator()
    bench.publish(1)
    bench.publish(2, damaged=True)
    bench.request(1)
    assert [reply.version for reply in bench.serve(generator)] == [1]
    assert len(bench.letters()) == 1


def test_f44_a_broken_connection_while_weights_arrive_loses_no_version(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    generator = bench.generator()
    bench.publish(1)
    monkeypatch.setattr(generator.weights.client, "get", _broken)
    with pytest.raises(UNREACHABLE[0]):
        generator.weights.poll()
    monkeypatch.undo()
    started_s = time.monotonic()
    generator.weights.poll(block_ms=900)
    assert time.monotonic() - started_s < 0.8, "it does not wait for another version first"
    newest = generator.weights.newest()
    assert newest is not None and newest.version == 1


def test_weights_whose_chunks_are_gone_are_passed_over(make: Make, run: Run) -> None:
    bench = make()
    generator = bench.generator()
    manifest, _ = bench.publish(1)
    run.client.delete(run.keys.weight_chunk(1, manifest.epoch, 0))
    generator.weights.poll()
    assert generator.weights.newest() is None
    bench.publish(2)
    generator.weights.poll()
    newest = generator.weights.newest()
    assert newest is not None and newest.version == 2


def test_f16_f27_an_undecodable_entry_is_a_dead_letter_and_stops_nobody(make: Make, run: Run) -> None:
    bench = make()
    run.client.xadd(run.keys.obs_requests, {"what": "is this"})
    bench.request(1)
    assert len(bench.serve(bench.generator())) == 1
    assert len(bench.letters()) == 1 and bench.waiting() == bench.pending() == 0


def test_f17_a_request_that_was_trimmed_while_it_was_pending_is_buried_and_acked(make: Make, run: Run) -> None:
    bench = make()
    generator = bench.generator()
    bench.request(1)
    run.client.xreadgroup("generators", "generator-0", {run.keys.obs_requests: ">"})
    run.client.xtrim(run.keys.obs_requests, maxlen=0, approximate=False)
    generator.collector.recover()
    assert bench.pending() == 0 and not generator.collector.owned
    (reason,) = bench.letters()
    assert "trimmed" in reason


def test_f19_a_request_that_a_failover_brings_back_is_answered_again_alike(make: Make, run: Run) -> None:
    bench = make()
    generator = bench.generator()
    bench.request(1)
    generator.collector.look(None)
    behind: Any = run.client.dump(run.keys.obs_requests)  # where a replica stands that lags
    bench.serve(generator)
    assert bench.waiting() == bench.pending() == 0
    run.client.restore(run.keys.obs_requests, 0, behind, replace=True)
    assert bench.waiting() == bench.pending() == 1
    # As the collecting thread does after the reconnect.
    generator.collector.recover()
    first, again = bench.serve(generator, replies=2)
    assert first.id == again.id and first.act is not None and again.act is not None
    assert np.array_equal(first.act.actions, again.act.actions)
    assert bench.waiting() == bench.pending() == 0


def test_f16_a_request_that_the_policy_fails_at_is_a_dead_letter_its_slot_is_told_and_the_others_are_served(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    bench = make(generators__max_wait_ms=10_000)
    generator = bench.generator()
    bad = look()
    bad.state[1, 0] = POISON
    poison = bench.request(1, bad)
    good = bench.request(2)
    replies = {str(reply.id): reply for reply in bench.serve(generator, replies=2)}
    assert generator.policy.calls == [4, 4, 4]  # type: ignore[attr-defined]
    assert replies[poison].act is None
    assert replies[poison].error == "inference failed: ValueError: a state that no policy digests"
    assert replies[good].act is not None
    assert bench.letters() == [replies[poison].error] and bench.waiting() == bench.pending() == 0
    assert "Traceback" in capfd.readouterr().err


def test_f16_when_one_after_the_other_fails_it_is_the_device_and_the_generator_ends(make: Make) -> None:
    bench = make()
    generator = bench.generator()
    bad = look()
    bad.state[:] = POISON
    for ticket in range(1, 4):
        bench.request(ticket, bad)
        bench.serve(generator, replies=ticket)
    last = bench.request(4, bad)
    with pytest.raises(RunFailed, match="fails again and again, last: a state that no policy digests"):
        bench.serve(generator, replies=4)
    assert last not in [str(reply.id) for reply in bench.replies()] and bench.pending() == 1


def delivered(bench: Bench, times: int) -> str:
    """The oldest request, as if generator-0 had read it so often and ended each time; returns its entry."""
    stream = bench.run.keys.obs_requests
    entries: Any = bench.run.client.xreadgroup("generators", "generator-7", {stream: ">"}, count=1)
    (identity, _) = entries[0][1][0]
    bench.run.client.xclaim(stream, "generators", "generator-0", 0, [identity], retrycount=times)
    return str(identity.decode())


def test_f16_an_entry_that_was_delivered_too_often_is_served_alone_and_marked_until_it_has_its_reply(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(generators__max_wait_ms=10, generators__max_batch_size=4)
    generator = bench.generator()
    for ticket in (1, 2):
        bench.request(ticket)
    entry = delivered(bench, times=3)
    act, marks = generator.policy.act, []

    def spy(observations: Observations, keys: np.ndarray | None) -> Act:
        marks.append(run.client.get(run.keys.trial(entry)))
        return act(observations, keys)

    monkeypatch.setattr(generator.policy, "act", spy)
    generator.collector.recover()
    replies = bench.serve(generator, replies=2)
    # Both together would have been one full batch.
    assert marks == [b"generator-0", None]
    assert all(reply.act is not None for reply in replies) and bench.letters() == []
    assert not run.client.exists(run.keys.trial(entry))


def test_f16_an_entry_that_left_the_generator_that_served_it_alone_without_a_reply_is_a_dead_letter(
    make: Make, run: Run
) -> None:
    bench = make()
    generator = bench.generator()
    poison = bench.request(1)
    entry = delivered(bench, times=4)
    run.client.set(run.keys.trial(entry), "generator-7")
    bench.request(2)
    generator.collector.recover()
    replies = {str(reply.id): reply for reply in bench.serve(generator, replies=2)}
    assert "served alone, it left its generator without a reply" in replies[poison].error
    assert bench.letters() == [replies[poison].error]
    assert not run.client.exists(run.keys.trial(entry)) and bench.waiting() == bench.pending() == 0


def test_a_request_with_too_many_rows_gets_an_error_reply(make: Make) -> None:
    bench = make()
    bench.request(1, look(5))
    (reply,) = bench.serve(bench.generator())
    assert reply.act is None and "raise generators.max_batch_size" in reply.error
    assert bench.waiting() == 0


def test_f28_a_request_whose_payload_is_unreachable_gets_an_error_reply(make: Make) -> None:
    bench = make()
    generator = bench.generator()
    bench.request(1, ref="shm:1.1-5c0ffee0:0:100:0123456789abcdef")
    (reply,) = bench.serve(generator)
    assert reply.act is None and "cannot be opened here" in reply.error
    assert bench.waiting() == bench.pending() == 0 and not generator.collector.owned


def remote_generator(bench: Bench, folder: Path, number: int = 7) -> Generator:
    """One that does not see the run's folder under /dev/shm."""
    made = bench.generator(number)
    made.collector.reader.folder = folder / "another host"
    return made


def test_f28_a_request_in_a_dev_shm_that_is_not_here_is_served_by_another_generator_and_counts_no_delivery(
    make: Make, run: Run, tmp_path: Path, start: Start
) -> None:
    bench = make(flow__lease_s=1.0)
    remote, other = remote_generator(bench, tmp_path), bench.generator()
    lane = ShmLane(run.shm)
    for ticket in (1, 2):
        segment = segment_name(ticket, 1)
        bench.request(ticket, ref=lane.write(segment, 0, pack_observations(look())))
    bench.until(lambda: remote.step(None) or bench.pending() == 2)
    assert bench.replies() == [] and not remote.collector.owned
    pending: Any = run.client.xpending_range(run.keys.obs_requests, "generators", "-", "+", 10)
    assert [item["times_delivered"] for item in pending] == [0, 0]
    # Both look for such entries; whoever finds them first, they end where they can be read.
    bench.until(lambda: remote.step(None) or other.step(None) or len(bench.replies()) == 2)
    assert all(reply.act is not None for reply in bench.replies())
    assert bench.waiting() == bench.pending() == 0 and bench.letters() == []
    (text,) = [text for kind, text in run.events() if kind == "elsewhere"]
    assert text.startswith("requests are left to other generators: ") and "cannot be opened here" in text


def test_f28_a_request_that_no_generator_can_read_gets_an_error_reply_after_a_lease(
    make: Make, run: Run, tmp_path: Path, start: Start
) -> None:
    bench = make(flow__lease_s=0.4)
    generators = [remote_generator(bench, tmp_path, number) for number in (7, 8)]
    bench.request(1, ref=ShmLane(run.shm).write(segment_name(1, 1), 0, pack_observations(look())))
    started_s = time.monotonic()
    bench.until(lambda: any(generator.step(None) for generator in generators) or len(bench.replies()) == 1)
    (reply,) = bench.replies()
    assert reply.act is None and "cannot be opened here" in reply.error
    assert time.monotonic() - started_s > 0.4
    assert bench.waiting() == bench.pending() == 0
    assert not any(generator.collector.owned for generator in generators)


def test_f03_a_broken_connection_while_a_payload_is_read_strands_no_request(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    generator = bench.generator()
    bench.request(1, ref="redis:1.1-5c0ffee0:0:100:0123456789abcdef")
    bench.request(2)
    monkeypatch.setattr(generator.collector.client, "hget", _broken)
    with pytest.raises(UNREACHABLE[0]):
        generator.step(None)
    monkeypatch.undo()
    # As the collecting thread does after a reconnect.
    generator.collector.recover()
    replies = {reply.id.ticket: reply for reply in bench.serve(generator, replies=2)}
    assert "is gone" in replies[1].error and replies[2].act is not None
    assert not generator.collector.owned


def _broken(*_: object) -> None:
    raise UNREACHABLE[0]("injected")


def test_f14_a_request_is_redelivered_when_the_generator_dies_before_ack(make: Make) -> None:
    bench = make(flow__lease_s=0.2)
    dying, other = bench.generator(0), bench.generator(1)
    bench.request(1)
    dying.collector.look(None)
    bench.until(lambda: len(dying.collector.batcher))
    batch = None
    while batch is None:
        batch = dying.collector.take()
    late = dying.infer(batch)
    started_s = time.monotonic()
    bench.serve(other)
    assert time.monotonic() - started_s < 5
    assert bench.waiting() == bench.pending() == 0
    # Not dead but slow: its reply comes too, under the same id and with the same actions.
    dying.answer(late)
    first, second = bench.replies()
    assert first.id == second.id and first.act is not None and second.act is not None
    assert np.array_equal(first.act.actions, second.act.actions)


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts generator processes, which do not outlive the test."""
    started = []

    def one(run: Run, worker: str = "generator-7") -> subprocess.Popen[bytes]:
        run.flow.announce(SPECIFICATION)
        environment = {**os.environ, "VLA_STREAM_TOKEN": "t", "VLA_STREAM_REDIS": run.url}
        command = [sys.executable, "-m", "workers.generator", run.name, worker]
        started.append(subprocess.Popen(command, env=environment))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def test_f14_requests_that_wait_while_the_only_generator_is_killed_are_all_served_by_one_attached_later(
    make: Make, run: Run, tmp_path: Path, start: Start
) -> None:
    hang = tmp_path / "hang"
    hang.touch()
    policy = {"name": "fake_policies:Linear", "chunk": H, "options": {"hang_once": str(hang)}}
    bench = make(policy=policy, flow__lease_s=0.5)
    sent = {bench.request(ticket) for ticket in range(1, 101)}
    only = start(run)
    bench.until(lambda: not hang.exists())  # it sits in its first batch, and has read the next
    assert bench.waiting() == 100 and _pending(bench) > 0
    only.kill()
    start(run, "generator-8")
    bench.until(lambda: len(bench.replies()) >= 100 and not bench.waiting())
    replies = bench.replies()
    assert {str(reply.id) for reply in replies} == sent and len(replies) == 100
    assert all(reply.act is not None for reply in replies) and _pending(bench) == 0


def test_f14_a_generator_whose_device_hangs_ends_and_its_request_goes_to_another(
    make: Make, run: Run, tmp_path: Path, start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    hang = tmp_path / "hang"
    hang.touch()
    options = {"hang_once": str(hang)}
    bench = make(
        policy={"name": "fake_policies:Linear", "chunk": H, "options": options},
        generators__batch_deadline_s=0.5,
        flow__lease_s=0.6,
    )
    bench.request(1)
    hanging = start(run)
    bench.until(lambda: not hang.exists())
    assert hanging.wait(DEADLINE_S) == 1
    assert "a batch is older than generators.batch_deadline_s, 0.5 s: the device hangs" in capfd.readouterr().err
    assert bench.replies() == [] and bench.pending() == 1
    assert len(bench.serve(bench.generator())) == 1 and bench.pending() == 0


def test_f06_a_generator_whose_connections_are_cut_goes_on_serving(make: Make, run: Run, start: Start) -> None:
    bench = make()
    serving = start(run)
    for ticket in range(1, 5):
        bench.request(ticket)
        bench.until(lambda: len(bench.replies()) == ticket)  # noqa: B023
        cut = [client["id"] for client in run.client.client_list() if client["name"] == "generator-7"]
        assert cut
        for number in cut:
            run.client.client_kill_filter(_id=number)
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(DEADLINE_S) == 0


def test_a_generator_leaves_on_sigterm_after_it_has_answered_what_it_owns(make: Make, run: Run, start: Start) -> None:
    bench = make(generators__max_wait_ms=1500)
    leaving = start(run)
    bench.request(1)
    bench.until(lambda: run.client.exists(run.keys.worker("generator-7")) and bench.waiting() and _pending(bench))
    leaving.send_signal(signal.SIGTERM)
    assert leaving.wait(DEADLINE_S) == 0
    assert len(bench.replies()) == 1 and bench.waiting() == 0
    assert not run.client.exists(run.keys.worker("generator-7"))


def test_a_generator_that_leaves_while_redis_is_down_waits_without_using_a_cpu(tmp_path: Path, start: Start) -> None:
    with (
        EmbeddedServer.start(tmp_path) as server,
        contextlib.closing(connect(server.url, name="test")) as client,
        contextlib.closing(Run(server.url, "down", tmp_path, client)) as run,
    ):
        # Half a batch, which is due soon: it owns a request that it can not answer.
        bench = Bench(run, run.start(generators__max_wait_ms=2500, flow__drain_deadline_s=4.0))
        leaving = start(run)
        bench.until(lambda: client.hget(run.keys.worker("generator-7"), "state") == b"running")
        bench.request(1)
        bench.until(lambda: _pending(bench))
        before = _reads(client)
        bench.until(lambda: _reads(client) > before + 2)  # it reads on, so it holds what it has read
        server.stop()
        leaving.send_signal(signal.SIGTERM)
        asked_s, used_s = time.monotonic(), cpu_s(leaving.pid)
        while time.monotonic() < asked_s + 3.0:
            assert leaving.poll() is None
            time.sleep(0.05)
        assert cpu_s(leaving.pid) - used_s < 0.75, "of 3 s"
        assert leaving.wait(DEADLINE_S) == 0


def _pending(bench: Bench) -> int:
    """0 also while there is no group yet."""
    groups: Any = bench.run.client.xinfo_groups(bench.run.keys.obs_requests)
    return sum(group["pending"] for group in groups)


def _reads(client: Any) -> int:
    return int(client.info("commandstats")["cmdstat_xreadgroup"]["calls"])


def test_a_generators_own_entries_are_not_served_twice_when_their_lease_passes(make: Make) -> None:
    bench = make(flow__lease_s=0.02, generators__max_wait_ms=300)
    generator = bench.generator()
    bench.request(1)
    assert len(bench.serve(generator)) == 1
    assert generator.policy.calls == [4]  # type: ignore[attr-defined]


def test_f53_a_reply_to_a_vanished_simulator_does_not_bring_its_stream_back(make: Make, run: Run) -> None:
    bench = make()
    generator = bench.generator()
    bench.request(1)
    run.client.delete(run.keys.actions("simulator-0"))
    bench.until(lambda: generator.step(None))
    assert not run.client.exists(run.keys.actions("simulator-0"))
    assert bench.waiting() == bench.pending() == 0


def test_f23_when_redis_is_full_replies_get_through_and_their_requests_are_gone(tmp_path: Path) -> None:
    with (
        EmbeddedServer.start(tmp_path) as server,
        contextlib.closing(connect(server.url, name="test")) as client,
        contextlib.closing(Run(server.url, "full", tmp_path, client)) as run,
    ):
        bench = Bench(run, run.start())
        generator = bench.generator()
        bench.request(1)
        client.config_set("maxmemory", "1")
        with pytest.raises(OUT_OF_MEMORY):
            client.xadd(run.keys.obs_requests, {"another": "request"})
        assert len(bench.serve(generator)) == 1 and bench.waiting() == bench.pending() == 0
        # A suspect too, although its mark is refused.
        client.config_set("maxmemory", "0")
        bench.request(3)
        delivered(bench, times=4)
        generator.collector.recover()
        client.config_set("maxmemory", "1")
        assert len(bench.serve(generator, replies=2)) == 2 and bench.waiting() == bench.pending() == 0
        # One to a simulator that is gone does not bring its stream back here either.
        client.config_set("maxmemory", "0")
        bench.request(2)
        client.delete(run.keys.actions("simulator-0"))
        client.config_set("maxmemory", "1")
        bench.until(lambda: generator.step(None))
        assert bench.waiting() == bench.pending() == 0 and not client.exists(run.keys.actions("simulator-0"))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda act: Act(act.actions * np.float32("nan"), act.logprobs, act.values), "actions or logprobs hold NaN"),
        (lambda act: Act(act.actions[:1], act.logprobs[:1], act.values[:1]), "actions are .* expected f32"),
        (lambda act: Act(act.actions.astype(np.float64), act.logprobs, act.values), "actions are .* expected f32"),
        (lambda act: Act(act.actions[:, :1], act.logprobs[:, :1], act.values), "actions are of 1 steps, expected"),
        (lambda act: Act(act.actions.tolist(), act.logprobs, act.values), "actions are .* expected f32"),
        (lambda act: None, "NoneType"),
    ],
    ids=["NaN", "rows", "dtype", "steps", "list", "nothing"],
)
def test_f41_a_policy_that_returns_nonsense_has_failed_and_nobody_waits_for_it(
    make: Make, fault: Callable[[Act], Act | None], told: str
) -> None:
    bench = make()
    bench.publish(1)
    generator = bench.generator()
    good = generator.policy.act
    generator.policy.act = lambda observations, keys: fault(good(observations, keys))  # type: ignore[assignment, method-assign, return-value]
    bench.request(1)
    (reply,) = bench.serve(generator)
    assert reply.act is None and re.search(told, reply.error)
    assert bench.waiting() == 0
