"""How many environment steps per second a run will make: discrete-event simulation of its rules. Times are in ms.

Batches of environments, slots, permits, batching and the trainer's order of work are those of flow.py, batching.py and
workers/trainer.py; what each stage takes is given. Nothing is measured here: cli/costs.py takes the times from a run's
metrics, tools/bench/model.py from the options of emulated profiles. `plan` and the benchmarks share this file.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from vla_stream.batching import Backlog, Strategy, padded_size

TINY = 1e-6


@dataclass(frozen=True, slots=True)
class Stages:
    """What a run is made of, and what its stages take.

    batches, slots, rows   environment batches of the run; slots of each; environments of each slot
    steps, env_steps       of a segment: chunk steps, and environment steps executed; means
    chunk                  draws the time of a chunk step of a batch
    reset, resets          time of a reset; resets per segment, at its begin
    infer_batch, infer_row an inference takes a + b·rows, of rows padded to one of `sizes`
    max_rows               rows of an inference at most
    segments               B, of an update
    segment                trainer, per segment on one device, when it arrives: in streaming, its training
    fit                    trainer, per segment on one device, once all are there; 0 in streaming
    host                   trainer, per segment, what its process has to do before or while the device computes
    optimiser_step(s)      time of one, and their number per update; as long on any number of devices
    publish                from an update's end to its commit
    swap                   what new weights cost a generator's device
    way                    of a request and its reply, beside waiting for a device and being inferred
    on_device              batches compute on the generators' devices, in turn with these
    """

    batches: int
    slots: int
    rows: int
    steps: float
    env_steps: float
    chunk: Callable[[np.random.Generator], float]
    reset: float
    resets: float
    infer_batch: float
    infer_row: float
    sizes: tuple[int, ...]
    max_rows: int
    segments: int
    segment: float
    fit: float
    host: float
    optimiser_step: float
    optimiser_steps: int
    streaming: bool
    publish: float = 0.0
    swap: float = 0.0
    way: float = 0.0
    on_device: bool = False

    @property
    def requests(self) -> int:
        """Of one inference, at most."""
        return max(1, self.max_rows // self.rows)

    def infer(self, rows: int) -> float:
        """Time of an inference."""
        return self.infer_batch + self.infer_row * padded_size(rows, list(self.sizes), self.max_rows)

    def train(self, trainers: int) -> float:
        """Time of a whole update on so many devices, for a trainer that never waits."""
        a_segment = self.arrival(trainers)
        computed = self.segments * (a_segment + self.fit / trainers) + self.optimiser_steps * self.optimiser_step
        overlapped = min(self.publish, a_segment) if self.streaming else 0.0
        return computed + self.publish - overlapped

    def arrival(self, trainers: int) -> float:
        """Time of a segment that arrives at a trainer of so many devices."""
        return max(self.segment / trainers, self.host)


def lognormal(mean: float, deviation: float) -> Callable[[np.random.Generator], float]:
    """Draws times of this mean and standard deviation; heavier tails than a normal's, and none below zero."""
    if mean <= 0 or deviation <= 0:
        return lambda random: mean
    sigma2 = math.log1p((deviation / mean) ** 2)
    sigma, shift = math.sqrt(sigma2), math.log(mean) - sigma2 / 2
    return lambda random: math.exp(shift + sigma * random.standard_normal())


After = Callable[[float, Callable[[], None]], None]  # (delay, event): the event is called then


class Transport(Protocol):
    """The way of requests, segments and weights, where it may be the limit."""

    def request(self, now: float, batch: int) -> float:
        """Time until a request of this batch is in a generator's hands."""

    def reply(self, now: float, batch: int) -> float:
        """Time until the reply is in the simulator's."""

    def segment(self, now: float, batch: int) -> float:
        """Time until a segment of this batch is in the trainer's."""

    def version(self, now: float, number: int, after: After, ready: Callable[[int], None]) -> None:
        """Weights were committed: call `ready` with a version's number when generators have it."""


@dataclass(frozen=True, slots=True)
class Direct:
    """All that a message takes is its latency."""

    way: float

    def request(self, now: float, batch: int) -> float:
        """See the protocol."""
        return self.way / 2

    def reply(self, now: float, batch: int) -> float:
        """See the protocol."""
        return self.way / 2

    def segment(self, now: float, batch: int) -> float:
        """See the protocol."""
        return 0.0

    def version(self, now: float, number: int, after: After, ready: Callable[[int], None]) -> None:
        """See the protocol."""
        ready(number)


@dataclass(frozen=True, slots=True)
class Predicted:
    """steps_per_s: environment steps; the rest: shares of the time in which the trainer, the generators' devices and
    the batches of environments were at work."""

    steps_per_s: float
    trainer: float
    generator: float
    simulator: float


def simulate(
    stages: Stages,
    rules: Sequence[Strategy],
    trainers: int,
    *,
    max_staleness: int,
    updates: int = 40,
    warm_up: int = 8,
    seed: int = 0,
    transport: Transport | None = None,
) -> Predicted:
    """Of `updates`, after the first `warm_up`, whole wall time. rules: the batching rule of each generator."""
    pipeline = _Pipeline(stages, rules, trainers, max_staleness, seed, transport or Direct(stages.way))
    pipeline.run(warm_up)
    began, before = pipeline.now, dict(pipeline.worked)
    pipeline.run(updates)
    took = pipeline.now - began
    busy = {role: pipeline.worked[role] - before[role] for role in before}
    return Predicted(
        steps_per_s=1000 * (updates - warm_up) * stages.segments * stages.env_steps / took,
        trainer=busy["trainer"] / took,
        generator=busy["generator"] / took / len(rules),
        simulator=busy["simulator"] / took / stages.batches,
    )


@dataclass(slots=True, eq=False)
class _Slot:
    """One slot. left: chunk steps to do; due: it must be reset first; ready: its reply is there."""

    batch: _Batch
    min_version: int = 0
    left: int = 0
    due: bool = False
    ready: bool = False


@dataclass(slots=True, eq=False)
class _Batch:
    number: int
    slots: list[_Slot] = field(default_factory=list)
    busy: bool = False


@dataclass(slots=True)
class _Job:
    """Something for a device: a slot's request, or `work` of its batch there, of that length."""

    slot: _Slot
    born: float = 0.0
    took: float = 0.0
    work: Callable[[], None] | None = None


class _Pipeline:
    """Slots, generators and a trainer. A method named `_on_…` is an event."""

    def __init__(
        self,
        stages: Stages,
        rules: Sequence[Strategy],
        trainers: int,
        max_staleness: int,
        seed: int,
        transport: Transport,
    ) -> None:
        self.stages, self.trainers, self.max_staleness = stages, trainers, max_staleness
        self.random, self.transport = np.random.default_rng(seed), transport
        self.now, self.commits = 0.0, 0
        self.worked = {"trainer": 0.0, "generator": 0.0, "simulator": 0.0}
        self._rules = list(rules)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        batches = [_Batch(number) for number in range(stages.batches)]
        for batch in batches:
            batch.slots = [_Slot(batch) for _ in range(stages.slots)]
        # Slot by slot: a batch's second slot comes after all batches' first ones.
        self._idle = deque(batch.slots[index] for index in range(stages.slots) for batch in batches)
        # Batches on devices share each with a generator of their own; others are served by any generator.
        shared: deque[_Job] = deque()
        self._queues = [deque() if stages.on_device else shared for _ in rules]
        self._free = list(range(len(rules)))
        self._loaded = [0] * len(rules)
        self._blocked: list[tuple[int, list[_Job]]] = []
        self._outstanding = self._arrived = self._trained = self._version = 0
        self._training = self._head = False
        self._alarm = 0.0  # the next look at batches that wait

    def run(self, updates: int) -> None:
        """Until so many are committed."""
        if not self._events:
            self._grant()
        while self.commits < updates:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def _after(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._number), event))

    # ---- simulators

    def _grant(self) -> None:
        begun: dict[_Batch, None] = {}
        count, eta = self.stages.segments, self.max_staleness
        while self._idle and self._outstanding < (1 + eta) * count:
            slot = self._idle.popleft()
            slot.min_version = self.commits + self._outstanding // count - eta
            self._outstanding += 1
            slot.left = max(1, self._round(self.stages.steps))
            slot.due = self.random.random() < self.stages.resets
            if not slot.due:
                self._ask(slot)
            begun[slot.batch] = None
        for batch in begun:
            self._advance(batch)

    def _round(self, mean: float) -> int:
        """A whole number of this mean."""
        low = math.floor(mean)
        return low + (self.random.random() < mean - low)

    def _advance(self, batch: _Batch) -> None:
        """Resets first; then a chunk, once all slots that work on a segment have replies."""
        active = [slot for slot in batch.slots if slot.left]
        if batch.busy or not active:
            return
        due = [slot for slot in active if slot.due]
        if due:
            self._compute(batch, self.stages.reset, lambda: self._on_reset(due))
        elif all(slot.ready for slot in active):
            self._compute(batch, self.stages.chunk(self.random), lambda: self._on_chunk(batch, active))

    def _compute(self, batch: _Batch, took: float, then: Callable[[], None]) -> None:
        batch.busy = True
        self.worked["simulator"] += took
        if self.stages.on_device:
            device = batch.number % len(self._queues)
            self._queues[device].append(_Job(batch.slots[0], self.now, took, then))
            self._serve(device)
        else:
            self._after(took, then)

    def _on_reset(self, slots: list[_Slot]) -> None:
        for slot in slots:
            slot.due = False
            self._ask(slot)
        slots[0].batch.busy = False
        self._advance(slots[0].batch)

    def _on_chunk(self, batch: _Batch, slots: list[_Slot]) -> None:
        batch.busy = False
        for slot in slots:
            slot.ready = False
            slot.left -= 1
            if slot.left:
                self._ask(slot)
            else:
                self._idle.append(slot)
                self._after(self.transport.segment(self.now, batch.number), self._on_segment)
        self._grant()
        self._advance(batch)

    def _ask(self, slot: _Slot) -> None:
        self._after(self.transport.request(self.now, slot.batch.number), lambda: self._on_request(slot))

    def _on_request(self, slot: _Slot) -> None:
        device = slot.batch.number % len(self._queues)
        self._queues[device].append(_Job(slot, self.now))
        self._serve(device)

    def _on_reply(self, slot: _Slot) -> None:
        slot.ready = True
        self._advance(slot.batch)

    # ---- generators

    def _serve(self, device: int) -> None:
        """Free devices take what waits; where each has its own queue, this one."""
        queue = self._queues[device]
        for free in [device] if self.stages.on_device else sorted(self._free):
            if not queue:
                return
            if free not in self._free:
                continue
            if queue[0].work is not None:
                job = queue.popleft()
                self._free.remove(free)
                self._after(job.took, lambda free=free, job=job: self._on_worked(free, job))  # type: ignore[misc]
                continue
            jobs = self._batch_of(self._rules[free], queue)
            if not jobs:
                return  # the rules of all are alike
            self._free.remove(free)
            self._infer(free, jobs)

    def _infer(self, device: int, jobs: list[_Job]) -> None:
        if max(job.slot.min_version for job in jobs) > self._version:
            self._blocked.append((device, jobs))
            return
        rows = self.stages.rows * len(jobs)
        took = self.stages.infer(rows)
        self._rules[device].served(rows, took)
        self.worked["generator"] += took
        if self._loaded[device] < self._version:
            self._loaded[device] = self._version
            took += self.stages.swap
        self._after(took, lambda: self._on_replies(device, jobs))

    def _batch_of(self, rule: Strategy, queue: deque[_Job]) -> list[_Job]:
        """What a free device infers now: none while its rule waits for more."""
        waiting = len(queue)
        if self.stages.on_device:
            waiting = sum(1 for _ in itertools.takewhile(lambda job: job.work is None, queue))
        share = min(self.stages.requests, rule.takes(lambda: self._backlog(waiting), 1, self.stages.rows))
        due = queue[0].born + rule.wait_ms
        if waiting < share and self.now < due - TINY:
            if not self.now < self._alarm <= due:
                self._alarm = due
                device = queue[0].slot.batch.number % len(self._queues)
                self._after(due - self.now, lambda: self._serve(device))
            return []
        return [queue.popleft() for _ in range(min(waiting, int(share)))]

    def _backlog(self, waiting: int) -> Backlog:
        if self.stages.on_device:
            return Backlog(waiting - 1, 1, 1)
        return Backlog(waiting - 1, len(self._queues), len(self._free))

    def _on_replies(self, device: int, jobs: list[_Job]) -> None:
        self._free.append(device)
        for job in jobs:
            delay = self.transport.reply(self.now, job.slot.batch.number)
            self._after(delay, lambda slot=job.slot: self._on_reply(slot))  # type: ignore[misc]
        self._serve(device)

    def _on_worked(self, device: int, job: _Job) -> None:
        self._free.append(device)
        assert job.work is not None
        job.work()
        self._serve(device)

    def _on_version(self, version: int) -> None:
        self._version = max(self._version, version)
        blocked, self._blocked = self._blocked, []
        for device, jobs in blocked:
            self._infer(device, jobs)

    # ---- the trainer

    def _on_segment(self) -> None:
        self._arrived += 1
        self._train()

    def _train(self, done: float = 0.0) -> None:
        """The next segment, of which `done` is computed already."""
        stages, before = self.stages, self._trained
        if self._training or not self._arrived + self._head:
            return
        if self._head:
            self._head = False
        else:
            self._arrived -= 1
        self._training, self._trained = True, before + 1
        took = max(0.0, stages.arrival(self.trainers) - done)
        share = stages.segments / stages.optimiser_steps
        if stages.streaming:
            took += int(self._trained // share - before // share) * stages.optimiser_step
        elif self._trained == stages.segments:
            took += stages.segments * stages.fit / self.trainers + stages.optimiser_steps * stages.optimiser_step
        self.worked["trainer"] += took
        self._after(took, self._on_trained)

    def _on_trained(self) -> None:
        if self._trained < self.stages.segments:
            self._training = False
            self._train()
            return
        # In streaming the device computes the next update's first segment while this one is published.
        if self.stages.streaming and self._arrived:
            self._arrived -= 1
            self._head = True
        self._after(self.stages.publish, self._on_published)

    def _on_published(self) -> None:
        self._training, self._trained = False, 0
        self._outstanding -= self.stages.segments
        self.commits += 1
        self.transport.version(self.now, self.commits, self._after, self._on_version)
        self._train(done=self.stages.publish if self._head else 0.0)
        self._grant()
