"""A generator: loads the VLA, batches requests of any simulator, infers action chunks, replies.

Three stages overlap in `serve`, each a thread with its own connection: collect (read, decode, batch, collate), infer
(the main thread), answer (publish replies, acknowledge, renew leases). A fourth brings weights. `step()` runs the same
stages one after the other, for `--inline`.
"""

from __future__ import annotations

import bdb
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty, Full, Queue
from statistics import median

import numpy as np
import torch

from vla_stream.batching import padded_size
from vla_stream.broker.connection import UNREACHABLE, Client, ResponseError
from vla_stream.config import Config
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import BadMessage, InputError, RunFailed
from vla_stream.evaluation import instructed, replacer
from vla_stream.policies.protocol import Act, Policy
from vla_stream.streams.actions import ActionReply, check_act
from workers.lane_choice import admit, wait_for_segments
from workers.models import await_specification, make_policy, torch_device
from workers.requests import Answerer, Answers, Batch, Collector, collate, is_suspect
from workers.tray import Tray
from workers.weights import Places, WeightsReader
from workers.worker import BLOCK_S, Worker, run_process

POLL_S = 0.0005  # between two looks while a batch fills: BLOCK's own deadline would be late by up to 10 ms
LEAVING_S = 0.05
TRIALS = 3  # of each size of batch before the first request: the median counts, as other workers start meanwhile
PREFETCH_S = 0.005  # before the device is free its next batch is read, decoded, collated; until then others may have it

FAILURES_IN_A_ROW = 3  # requests that fail alone, one after the other


class Generator:
    """All stages of one generator."""

    def __init__(self, worker: Worker, config: Config, policy: Policy, connect: Callable[[], Client]) -> None:
        self.worker, self.config, self.policy = worker, config, policy
        self.collector = Collector(worker, config, connect())
        self.answerer = Answerer(worker, config, connect())
        self.places = Places(policy)
        self.weights = WeightsReader(connect(), worker.keys, worker.bury, self.places)
        self.version, self.digest = 0, ""
        self._failed_in_a_row = 0
        self._replace = None if config.held_out is None else replacer(config.held_out.replace)

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
        suspect = batch.works[0].entry  # and then the only one
        if is_suspect(suspect):
            self.worker.patiently(lambda: self.answerer.begin_trial(suspect))
        started_s = time.monotonic()
        keys = None if batch.mode == "mode" else batch.noise_keys
        try:
            with self.worker.meter.busy("infer"):
                seen = instructed(batch.observations, self._replace)
                act = self._checked(self.policy.act(seen, keys), len(seen))
        except bdb.BdbQuit:
            raise  # a person at a breakpoint has seen enough
        except Exception as exc:
            # The policy is someone else's code, and what it failed at may be one request among good ones (F16).
            return self._infer_one_by_one(batch, exc)
        self._failed_in_a_row = 0
        took_ms = (time.monotonic() - started_s) * 1000
        self._note_cost(len(batch.observations), took_ms)
        meter, requests = self.worker.meter, len(batch.works)
        meter.mean("infer_ms", took_ms)
        meter.count("served", requests)
        meter.count("served_ms", 1000 * (batch.waited_s + requests * (time.monotonic() - batch.taken_s)))
        replies: Answers = []
        start = 0
        for work in batch.works:
            stop = start + work.request.n
            replies.append(
                (work.entry, ActionReply(work.request.id, self.version, self.digest, _cut(act, start, stop)))
            )
            start = stop
        return replies

    def warm_up(self, specification: Specification) -> None:
        """Infer at every size of batch that the device will see, on black images: kernels are compiled and memory is
        taken before the first request waits for it, and the strategy learns what a batch costs.

        Raises RunFailed: a device that is too small for the largest batch says so now."""
        generators, slot = self.config.generators, self.config.simulators.envs_per_slot
        smallest = padded_size(slot, generators.padded_sizes, generators.max_batch_size)
        for rows in sorted({smallest, *generators.padded_sizes, generators.max_batch_size}):
            observations = Observations.blank(specification, rows)
            took_s = []
            try:
                for _ in range(TRIALS):
                    started_s = time.monotonic()
                    self.policy.act(observations, np.zeros(rows, dtype=np.uint64))
                    took_s.append(time.monotonic() - started_s)
            except Exception as exc:
                raise RunFailed(
                    f"no inference for {rows} rows before the first request: {type(exc).__name__}: {exc}; "
                    "see generators.max_batch_size and padded_sizes"
                ) from exc
            self._note_cost(rows, 1000 * median(took_s))

    def _note_cost(self, rows: int, took_ms: float) -> None:
        """For the strategy; and the sums of a least-squares fit of a + b·rows, for `plan` (cli/costs.py)."""
        self.collector.strategy.served(rows, took_ms)
        meter = self.worker.meter
        meter.count("inferences")
        meter.count("inferred_rows", rows)
        meter.count("inferred_rows2", rows**2)
        meter.count("inferred_ms", took_ms)
        meter.count("inferred_rows_ms", rows * took_ms)

    def _checked(self, act: Act, rows: int) -> Act:
        """What the policy returned, as the simulators will read it: one that says NaN has failed, and must not leave
        them waiting for a reply that they cannot use (F41)."""
        checked = check_act(act.actions, act.logprobs, act.values, act.extras, rows)
        if checked.actions.shape[1] != self.config.policy.chunk:
            raise BadMessage(f"actions are of {checked.actions.shape[1]} steps, expected {self.config.policy.chunk}")
        return checked

    def _infer_one_by_one(self, batch: Batch, cause: Exception) -> Answers:
        """Each request of a failed batch alone; one that fails alone is a dead letter, and its slot is told.

        Raises RunFailed when one after the other fails: then it is the device or the policy, not the request."""
        if len(batch.works) > 1:
            return [answer for work in batch.works for answer in self.infer(collate([work], self.config, Tray(0)))]
        self._failed_in_a_row += 1
        if self._failed_in_a_row > FAILURES_IN_A_ROW:
            raise RunFailed(f"inference fails again and again, last: {cause}") from cause
        traceback.print_exception(cause)
        (work,), reason = batch.works, f"inference failed: {type(cause).__name__}: {cause}"
        self.worker.patiently(lambda: self.worker.bury(self.collector.queue.stream, [(work.entry, reason)]))
        return [(work.entry, ActionReply(work.request.id, self.version, self.digest, None, reason[:1000]))]

    def swap(self, min_version: int) -> None:
        """Load the newest weights that arrived; wait for them only when `min_version` demands it.

        Raises RunFailed when they do not arrive: the requests go to another generator, this one restarts (F44)."""
        deadline_s = time.monotonic() + self.config.generators.batch_deadline_s
        with self.worker.meter.busy("weights"):
            weights = self.weights.newest()
            while max(self.version, weights.version if weights else 0) < min_version:
                if time.monotonic() > deadline_s:
                    raise RunFailed(
                        f"weights {min_version} are demanded, {self.version} is loaded, and no newer "
                        f"ones came for {self.config.generators.batch_deadline_s:g} s; see the trainer's log"
                    )
                self.weights.wait(0.05)
                weights = self.weights.newest()
            if weights is None or weights.version <= self.version:
                return
            started_s = time.monotonic()
            try:
                self.weights.retired = self.places.take(weights.state)
            except (RuntimeError, KeyError) as exc:
                if not self.places.differ(weights.state):
                    raise  # such as a device without room
                # Whole, as their digest shows: no other ones of this run will do better.
                reason = " ".join(str(exc).split())[:300]
                raise InputError(
                    f"weights {weights.version} belong to another policy ({reason}); use that one's config"
                ) from exc
            self.version, self.digest = weights.version, weights.digest
            self.worker.version = self.version
            swap_ms = (time.monotonic() - started_s) * 1000
            self.worker.meter.mean("swap_ms", swap_ms)
            self.worker.meter.count("swaps")
            self.worker.meter.count("swaps_ms", swap_ms)
            self.worker.meter.gauge("version", self.version)


class Stages:
    """The overlapped form: bounded hand-overs between threads, so that a full stage holds the one before it.

    A batch is made for a device that is free, or will be at once: made earlier it would be smaller, and its requests
    would wait for this device while another one's may be free."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator
        self.batches: Queue[Batch] = Queue(maxsize=1)
        self.answers: Queue[Answers] = Queue(maxsize=4)
        self.error: Exception | None = None
        self.stop = threading.Event()
        self._moved = threading.Event()  # the next batch was taken over, or the device is free
        self._free_at_s = 0.0  # when the device is likely to be free; in the past: it is
        self._took_s: dict[int, float] = {}  # the last inference, by rows
        for name, body in (("collect", self._collect), ("answer", self._answer), ("weights", self._bring_weights)):
            threading.Thread(target=self._guard, args=(body,), name=name, daemon=True).start()

    def next_batch(self, patience_s: float) -> Batch | None:
        """Raises what ended a stage."""
        if self.error is not None:
            raise self.error
        try:
            batch = self.batches.get(timeout=patience_s)
        except Empty:
            return None
        self._free_at_s = time.monotonic() + self._took_s.get(len(batch.observations), 0.0)
        self._moved.set()
        return batch

    def infer(self, batch: Batch) -> Answers:
        """The generator's, timed."""
        began_s = time.monotonic()
        answers = self.generator.infer(batch)
        self._took_s[len(batch.observations)] = time.monotonic() - began_s
        self._free_at_s = 0.0
        self._moved.set()
        return answers

    def pass_on(self, answers: Answers) -> None:
        """While nothing waits for the device, its own thread sends the answers: no other has to wake up for them. Once:
        where Redis is out of reach, the other one waits for it, and does not take the device for hanging meanwhile."""
        if self.batches.empty():
            with contextlib.suppress(*UNREACHABLE, ResponseError):
                return self.generator.answer(answers)
        self.hand_over(answers)

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
        if not self._await_room():
            return
        collector = self.generator.collector
        leaving = self.generator.worker.leaving
        if not leaving:
            collector.look(int(BLOCK_S * 1000 / 4))
        if collector.refusals:
            self.hand_over(collector.refusals)
            collector.refusals = []
        batch = collector.take()
        if batch is not None:
            self.batches.put(batch)
            return
        if len(collector.batcher):
            time.sleep(POLL_S)
        elif leaving:
            time.sleep(LEAVING_S)

    def _await_room(self) -> bool:
        """Whether the device wants its next batch. If not, wait a little, or until it does."""
        self._moved.clear()  # before looking: what moves after that ends the wait
        wait_s = BLOCK_S if self.batches.full() else self._free_at_s - PREFETCH_S - time.monotonic()
        if wait_s > 0:
            self._moved.wait(min(wait_s, BLOCK_S / 4))
        return wait_s <= 0

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


def _cut(act: Act, start: int, stop: int) -> Act:
    extras = {name: array[start:stop] for name, array in act.extras.items()}
    return Act(act.actions[start:stop], act.logprobs[start:stop], act.values[start:stop], extras)


def serve(worker: Worker, config: Config) -> None:
    """The main loop of a generator process."""
    torch.set_num_threads(config.generators.threads)
    unreadable = admit(worker)
    specification = await_specification(worker)
    if specification is None:
        return
    device = torch_device(worker.device or config.generators.device)
    worker.device = str(device)
    with worker.long_step("loading"):
        policy = make_policy(config, specification, device)
        generator = Generator(worker, config, policy, worker.connect)
        generator.warm_up(specification)
    wait_for_segments(worker, generator.answerer.queue, unreadable, config.flow.drain_deadline_s)
    stages = Stages(generator)
    worker.state = "running"
    leave_at_s: float | None = None
    threading.Thread(target=_exit_when_hung, args=(stages,), name="watchdog", daemon=True).start()
    while not worker.stopping:
        worker.patiently(worker.beat)
        with worker.meter.busy("waiting"):
            batch = stages.next_batch(patience_s=0.25)
        if batch is not None:
            stages.pass_on(stages.infer(batch))
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
