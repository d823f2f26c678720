"""A generator: loads the VLA, batches requests of any simulator, infers action chunks, replies.

Three stages overlap in `serve`, each a thread with its own connection: collect (read, decode, batch, collate), infer
(the main thread), answer (publish replies, acknowledge, renew leases). A fourth brings weights. `step()` runs the same
stages one after the other, for `--inline`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from queue import Empty, Full, Queue

import numpy as np
import torch

from vla_stream import seeds
from vla_stream.batching import Batcher, padded_size
from vla_stream.broker.connection import Client, ServerClock
from vla_stream.broker.lanes import PayloadReader, shm_folder
from vla_stream.broker.queue import Entry, WorkQueue
from vla_stream.broker.scripts import Scripts
from vla_stream.config import Config
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage, PayloadUnreachable, RunFailed
from vla_stream.policies.protocol import Act, Policy
from vla_stream.streams.actions import ActionReply
from vla_stream.streams.keys import GENERATORS
from vla_stream.streams.obs_requests import ObsRequest
from vla_stream.streams.observations import unpack_observations
from workers.models import WeightsReader, await_specification, make_policy, torch_device
from workers.worker import BLOCK_S, Worker, run_process

POLL_S = 0.0005  # between two looks while a batch fills: BLOCK's own deadline would be late by up to 10 ms
SWEEP_S = 60.0


@dataclass(frozen=True, slots=True)
class Work:
    """One request that a generator owns."""

    entry: Entry
    request: ObsRequest
    observations: Observations


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests for one inference, collated and padded. size: rows with padding."""

    works: list[Work]
    observations: Observations
    noise_keys: np.ndarray
    rows: int
    born_ms: float
    taken_s: float = field(default_factory=time.monotonic)

    @property
    def min_version(self) -> int:
        return max(work.request.min_version for work in self.works)

    @property
    def mode(self) -> str:
        return self.works[0].request.mode


# Replies, each with the entry to acknowledge after it is published.
Answers = list[tuple[Entry, ActionReply]]


class Collector:
    """Stage one: read, decode, batch, collate."""

    def __init__(self, worker: Worker, config: Config, client: Client) -> None:
        self.worker, self.config, self.client = worker, config, client
        self.queue = WorkQueue(
            client, Scripts(client), worker.keys.obs_requests, GENERATORS, worker.id, config.flow.lease_s
        )
        self.reader = PayloadReader(client, worker.keys.blob, shm_folder(worker.keys.run, worker.url))
        self.clock = ServerClock(client)
        self.batcher: Batcher[Work] = Batcher(config.generators.max_batch_size, config.generators.max_wait_ms)
        self.refusals: Answers = []
        self.owned: dict[str, float] = {}  # entry id -> when it was read; until its reply is published
        self._next_take_over_s = self._next_sweep_s = 0.0

    def recover(self) -> None:
        """At start and after each reconnect: the group, and what an earlier life or a lost reply left to us (F03)."""
        for entry in self.queue.recover():
            self._add(entry)

    def release(self, answers: Answers) -> None:
        """Their replies are published and they are acknowledged."""
        for entry, _ in answers:
            self.owned.pop(entry.id, None)

    def look(self, block_ms: int | None) -> None:
        """Read what is there, up to what the batch still takes; wait for the first request only when none waits."""
        now_s = time.monotonic()
        if now_s >= self._next_take_over_s:
            self._next_take_over_s = now_s + self.config.flow.lease_s / 2
            for entry in self.queue.take_over(self.batcher.missing_rows()):
                self._add(entry)
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_S
            self.queue.sweep_consumers(idle_ms=int(10 * SWEEP_S * 1000))
        wanted = self.batcher.missing_rows()
        block = None if len(self.batcher) else block_ms
        entries = self.queue.read(wanted) if block is None else self.queue.read_balanced(wanted, block)
        for entry in entries:
            self._add(entry)

    def take(self) -> Batch | None:
        """The batch that is due, collated and padded to one of the fixed sizes."""
        if not len(self.batcher):
            return None
        works = self.batcher.take(self.clock.now_ms())
        if not works:
            return None
        rows = sum(work.request.n for work in works)
        size = padded_size(rows, self.config.generators.padded_sizes, self.config.generators.max_batch_size)
        observations = Observations.concatenate([work.observations for work in works])
        keys = np.concatenate([self._noise_keys(work) for work in works])
        if size > rows:
            # Padding repeats the last row: any valid input will do, and its outputs are cut off again.
            index = np.minimum(np.arange(size), rows - 1)
            observations, keys = observations.take(index), keys[index]
        born_ms = min(work.entry.born_ms for work in works)
        meter = self.worker.meter
        meter.count("batches")
        meter.count("requests", len(works))
        meter.count("rows", rows)
        meter.mean("fill", rows / self.config.generators.max_batch_size)
        meter.mean("age_ms", self.clock.now_ms() - born_ms)
        return Batch(works, observations, keys, rows, born_ms)

    def _noise_keys(self, work: Work) -> np.ndarray:
        identity = work.request.id
        return seeds.noise_keys(self.config.seed, identity.ticket, identity.step, work.request.n)

    def _add(self, entry: Entry) -> None:
        if entry.id in self.owned:
            return
        self.owned[entry.id] = time.monotonic()
        try:
            request = ObsRequest.from_fields(dict(entry.fields))
            data = request.payload if request.payload is not None else self.reader.read(request.ref)
            observations = unpack_observations(data, request.n)
            self.batcher.add(
                Work(entry, request, observations), request.n, _shape(request, observations), entry.born_ms
            )
        except PayloadUnreachable as exc:
            self._refuse(entry, request, str(exc))
        except (BadMessage, ValueError) as exc:
            self.worker.bury(self.queue.stream, entry, str(exc))
            self.queue.done([entry.id])
            del self.owned[entry.id]

    def _refuse(self, entry: Entry, request: ObsRequest, reason: str) -> None:
        """The slot that waits must hear of it: it aborts its segment and goes on."""
        self.refusals.append((entry, ActionReply(request.id, self.worker.version, "", None, reason)))


class Answerer:
    """Stage three: publish replies, then acknowledge. A crash in between redelivers; simulators drop the repeat."""

    def __init__(self, worker: Worker, config: Config, client: Client) -> None:
        self.worker, self.client = worker, client
        self.queue = WorkQueue(
            client, Scripts(client), worker.keys.obs_requests, GENERATORS, worker.id, config.flow.lease_s
        )

    def send(self, answers: Answers) -> None:
        """One round trip. Replies to a simulator that is gone are not added (NOMKSTREAM), their requests are done."""
        if not answers:
            return
        with self.client.pipeline(transaction=False) as pipe:
            for _, reply in answers:
                stream = self.worker.keys.actions(reply.id.simulator)
                pipe.xadd(stream, reply.to_fields(), nomkstream=True)  # type: ignore[arg-type]
            self.queue.queue_done(pipe, [entry.id for entry, _ in answers])
            pipe.execute()
        self.worker.progress += len(answers)


class Generator:
    """All stages of one generator."""

    def __init__(self, worker: Worker, config: Config, policy: Policy, connect: Callable[[], Client]) -> None:
        self.worker, self.config, self.policy = worker, config, policy
        self.collector = Collector(worker, config, connect())
        self.answerer = Answerer(worker, config, connect())
        self.weights = WeightsReader(connect(), worker.keys)
        self.version, self.digest = 0, ""

    def step(self, block_ms: int | None) -> bool:
        """All stages once, in this thread; True when a batch was served."""
        self.weights.poll()
        self.collector.look(block_ms)
        self.answer(self.collector.refusals)
        batch = self.collector.take()
        if batch is None:
            return False
        self.answer(self.infer(batch))
        return True

    def answer(self, answers: Answers) -> None:
        """Publish, acknowledge, and let go; empties the list."""
        self.answerer.send(answers)
        self.collector.release(answers)
        answers.clear()

    def infer(self, batch: Batch) -> Answers:
        """Actions for one batch, by weights no older than it demands."""
        self.swap(batch.min_version)
        started_s = time.monotonic()
        keys = None if batch.mode == "mode" else batch.noise_keys
        with self.worker.meter.busy("infer"):
            act = self.policy.act(batch.observations, keys)
        self.worker.meter.mean("infer_ms", (time.monotonic() - started_s) * 1000)
        replies: Answers = []
        start = 0
        for work in batch.works:
            stop = start + work.request.n
            replies.append(
                (work.entry, ActionReply(work.request.id, self.version, self.digest, _cut(act, start, stop)))
            )
            start = stop
        return replies

    def swap(self, min_version: int) -> None:
        """Load the newest weights that arrived; wait for them only when `min_version` demands it.

        Raises RunFailed when they do not arrive: the requests go to another generator, this one restarts (F44)."""
        deadline_s = time.monotonic() + self.config.generators.batch_deadline_s
        with self.worker.meter.busy("weights"):
            weights = self.weights.newest()
            while max(self.version, weights.version if weights else 0) < min_version:
                if time.monotonic() > deadline_s:
                    raise RunFailed(
                        f"{self.worker.id}: weights {min_version} are demanded, {self.version} is loaded, and no newer "
                        f"ones came for {self.config.generators.batch_deadline_s:g} s; see the trainer's log"
                    )
                self.weights.wait(0.05)
                weights = self.weights.newest()
            if weights is None or weights.version <= self.version:
                return
            started_s = time.monotonic()
            self.policy.load_state_dict(weights.state)
            self.version, self.digest = weights.version, weights.digest
            self.worker.version = self.version
            self.worker.meter.mean("swap_ms", (time.monotonic() - started_s) * 1000)
            self.worker.meter.gauge("version", self.version)


class Stages:
    """The overlapped form: bounded hand-overs between threads, so that a full stage holds the one before it."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.batches: Queue[Batch] = Queue(maxsize=1)
        self.answers: Queue[Answers] = Queue(maxsize=4)
        self.error: Exception | None = None
        self.stop = threading.Event()
        for name, body in (("collect", self._collect), ("answer", self._answer), ("weights", self._bring_weights)):
            threading.Thread(target=self._guard, args=(body,), name=name, daemon=True).start()

    def next_batch(self, patience_s: float) -> Batch | None:
        """Raises what ended a stage."""
        if self.error is not None:
            raise self.error
        try:
            return self.batches.get(timeout=patience_s)
        except Empty:
            return None

    def hand_over(self, answers: Answers) -> None:
        while self.error is None:
            try:
                return self.answers.put(answers, timeout=1.0)
            except Full:
                continue

    @property
    def empty(self) -> bool:
        """Nothing is owned, in no stage."""
        return not self.generator.collector.owned

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as exc:
            self.error = exc

    def _collect(self) -> None:
        worker, collector = self.generator.worker, self.generator.collector
        worker.patiently(collector.recover)
        while not self.stop.is_set():
            worker.patiently(self._collect_once, collector.recover)

    def _collect_once(self) -> None:
        collector = self.generator.collector
        leaving = self.generator.worker.leaving
        if not leaving:
            collector.look(int(BLOCK_S * 1000 / 4))
        if collector.refusals:
            self.hand_over(collector.refusals)
            collector.refusals = []
        # While the device is busy the next batch goes on filling: it is taken only when there is room for it.
        if not self.batches.full():
            batch = collector.take()
            if batch is not None:
                self.batches.put(batch)
                return
        if len(collector.batcher) or leaving:
            time.sleep(POLL_S)

    def _answer(self) -> None:
        worker, lease_s = self.generator.worker, self.generator.config.flow.lease_s
        next_renewal_s = time.monotonic() + lease_s / 3
        while not self.stop.is_set():
            with contextlib.suppress(Empty):
                answers = self.answers.get(timeout=min(0.25, lease_s / 6))
                worker.patiently(lambda: self.generator.answer(answers))  # noqa: B023
            if time.monotonic() >= next_renewal_s:
                next_renewal_s = time.monotonic() + lease_s / 3
                worker.patiently(self._renew)

    def _renew(self) -> None:
        """Leases of young batches only: a hung device must lose its requests to another generator (F14)."""
        oldest_s = time.monotonic() - self.generator.config.generators.batch_deadline_s
        owned = dict(self.generator.collector.owned)
        if any(taken_s < oldest_s for taken_s in owned.values()):
            limit_s = self.generator.config.generators.batch_deadline_s
            self.error = RunFailed(
                f"a batch is older than generators.batch_deadline_s, {limit_s:g} s: the device hangs"
            )
            raise self.error
        self.generator.answerer.queue.renew(list(owned))

    def _bring_weights(self) -> None:
        while not self.stop.is_set():
            self.generator.worker.patiently(lambda: self.generator.weights.poll(int(BLOCK_S * 1000 / 2)))


def _shape(request: ObsRequest, observations: Observations) -> Hashable:
    """Requests that may share a batch: same shapes, same mode."""
    images = tuple((name, image.shape[1:]) for name, image in sorted(observations.images.items()))
    return request.mode, images, observations.state.shape[1]


def _cut(act: Act, start: int, stop: int) -> Act:
    extras = {name: array[start:stop] for name, array in act.extras.items()}
    return Act(act.actions[start:stop], act.logprobs[start:stop], act.values[start:stop], extras)


def warm_up(policy: Policy, config: Config, observations: Observations) -> None:
    """Run each padded batch size once, so that the first requests do not pay for allocation and compilation."""
    for size in {*config.generators.padded_sizes, config.generators.max_batch_size}:
        policy.act(observations.take(np.zeros(size, dtype=np.int64)), np.zeros(size, dtype=np.uint64))


def serve(worker: Worker, config: Config) -> None:
    """The main loop of a generator process."""
    torch.set_num_threads(config.generators.threads)
    specification = await_specification(worker)
    if specification is None:
        return
    device = torch_device(worker.device or config.generators.device)
    worker.device = str(device)
    policy = make_policy(config, specification, device)
    generator = Generator(worker, config, policy, worker.connect)
    generator.weights.device = device
    stages = Stages(generator)
    worker.state = "running"
    leave_at_s: float | None = None
    threading.Thread(target=_exit_when_hung, args=(stages,), name="watchdog", daemon=True).start()
    while not worker.stopping:
        worker.patiently(worker.beat)
        with worker.meter.busy("waiting"):
            batch = stages.next_batch(patience_s=0.25)
        if batch is not None:
            stages.hand_over(generator.infer(batch))
        elif worker.leaving:
            leave_at_s = leave_at_s or time.monotonic() + config.flow.drain_deadline_s
            if stages.empty or time.monotonic() > leave_at_s:
                break
        elif worker.draining and not worker.patiently(worker.flow.permits):
            break  # The run drains: simulators need their replies until the last segment is made.
    stages.stop.set()


def _exit_when_hung(stages: Stages) -> None:
    """The main thread may sit in a hung device for ever; only another thread can end the process then (F14)."""
    while not stages.stop.is_set():
        if stages.error is not None:
            time.sleep(5.0)  # the main thread says it better, if it is able to
            print(f"{stages.generator.worker.id}: {stages.error}", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(0.25)


def main() -> None:
    run_process("generator", serve)


if __name__ == "__main__":
    main()
