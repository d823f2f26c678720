"""A generator's dealings with Redis: requests read, decoded, batched, collated; replies published, then acked."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vla_stream import plugins, seeds
from vla_stream.batching import Batcher, Strategy, padded_size
from vla_stream.broker.connection import OUT_OF_MEMORY, Client, ServerClock
from vla_stream.broker.lanes import PayloadReader
from vla_stream.broker.queue import GARBAGE_AT_ONCE, Entry, WorkQueue
from vla_stream.broker.scripts import ANSWER, Scripts
from vla_stream.config import MAX_NUMBER, Config
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage, PayloadElsewhere, PayloadUnreachable
from vla_stream.metrics import AGE_BOUNDS_MS, FILL_BOUNDS
from vla_stream.streams.actions import ActionReply
from vla_stream.streams.keys import GENERATORS
from vla_stream.streams.obs_requests import ObsRequest
from workers.tray import Tray
from workers.worker import Worker

SWEEP_S = 60.0
TAKEN_OVER_AT_ONCE = 16
ELSEWHERE_WORD_S = 30.0
MAX_DELIVERIES = 3
OVERDUE_MS = 5.0  # beyond the strategy's wait: a request that is older when it is sent waited for a device, or for us
TRIAL_S = 3600  # longer than a generator takes to load its model again


@dataclass(frozen=True, slots=True)
class Work:
    """One request that a generator owns."""

    entry: Entry
    request: ObsRequest
    observations: Observations


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests for one inference, collated and padded. rows: without padding; waited_s: all requests together, until
    `taken_s` of the monotonic clock."""

    works: list[Work]
    observations: Observations
    noise_keys: np.ndarray
    rows: int
    born_ms: float
    waited_s: float = 0.0
    taken_s: float = 0.0

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
        self.reader = PayloadReader(client, worker.keys.blob, worker.flow.shm_folder())
        self.clock = ServerClock(client)
        generators = config.generators
        self.strategy: Strategy = plugins.load_class(plugins.BATCHING, generators.batching)(
            generators.max_batch_size, generators.max_wait_ms
        )
        self.batcher: Batcher[Work] = Batcher(generators.max_batch_size, self.strategy.wait_ms)
        self.refusals: Answers = []
        self._tray = Tray(generators.max_batch_size)
        self.owned: dict[str, float] = {}  # entry id -> when it was read; until its reply is published
        self._elsewhere: dict[str, float] = {}  # entry id -> when it was first handed back
        self._next_take_over_s = self._next_sweep_s = self._next_word_s = 0.0

    def recover(self) -> None:
        """At start and after each reconnect: the group, and what an earlier life or a lost reply left to us (F03)."""
        self._add_all(self.queue.recover())

    def release(self, answers: Answers) -> None:
        """Their replies are published and they are acknowledged."""
        for entry, _ in answers:
            self.owned.pop(entry.id, None)

    def look(self, block_ms: int | None) -> None:
        """Read what is there, up to what the strategy takes; wait for the first request only when none waits."""
        now_s = time.monotonic()
        if now_s >= self._next_take_over_s:
            self._next_take_over_s = now_s + self.config.flow.lease_s / 2
            self._add_all(self.queue.take_over(TAKEN_OVER_AT_ONCE))
        if now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_S
            self.queue.sweep_consumers(idle_ms=int(10 * SWEEP_S * 1000))
        # Rows are environments: read as many requests as still fit, and leave the others to other generators (F30).
        wanted, held = -(-self.batcher.missing_rows() // self.config.simulators.envs_per_slot), len(self.batcher)
        if held:
            entries = self.queue.read(int(min(wanted, self._share(held) - held)))
        else:
            entries = self.queue.read_balanced(wanted, block_ms, lambda: self._share(1) - 1)
        if self._add_all(entries) == len(entries) > 0:
            self._add_all(self.queue.read(GARBAGE_AT_ONCE))

    def _share(self, held: int) -> float:
        """Requests that the next batch may hold, of which so many are here."""
        return self.strategy.takes(self.queue.backlog, held, self.config.simulators.envs_per_slot)

    def take(self) -> Batch | None:
        """The batch that is due, collated and padded to one of the fixed sizes."""
        if not len(self.batcher):
            return None
        works = self.batcher.take(self.clock.now_ms())
        if not works:
            return None
        with self.worker.meter.busy("collate"):
            batch = collate(works, self.config, self._tray)
            waited_s = sum(self.clock.now_ms() - work.entry.born_ms for work in works) / 1000
            batch = replace(batch, waited_s=waited_s, taken_s=time.monotonic())
        self._tray = self._tray.another()
        meter = self.worker.meter
        meter.count("batches")
        meter.count("requests", len(works))
        meter.count("rows", batch.rows)
        meter.highest("rows_highest", batch.rows)
        fill, now_ms = batch.rows / self.config.generators.max_batch_size, self.clock.now_ms()
        meter.mean("fill", fill)
        meter.bucket("fill", fill, FILL_BOUNDS)
        meter.mean("age_ms", now_ms - batch.born_ms)
        meter.bucket("age_ms", now_ms - batch.born_ms, AGE_BOUNDS_MS)
        latest_ms = now_ms - self.strategy.wait_ms - OVERDUE_MS
        meter.count("overdue", sum(work.entry.born_ms < latest_ms for work in works))
        return batch

    def _add_all(self, entries: Sequence[Entry]) -> int:
        """Owned is what waits in a batch or for its refusal: should Redis fail in here, `recover` brings it again.

        Returns how many of them nobody waits for: those that do not even say who asked."""
        damaged: list[tuple[Entry, str]] = []
        with self.worker.meter.busy("read"):
            for entry in entries:
                if entry.id not in self.owned:
                    try:
                        self._add(entry, ObsRequest.from_fields(entry.fields))
                    except BadMessage as exc:
                        damaged.append((entry, str(exc)))
        self.worker.bury(self.queue.stream, damaged)
        self.queue.done([entry.id for entry, _ in damaged])
        return len(damaged)

    def _add(self, entry: Entry, request: ObsRequest) -> None:
        try:
            if is_suspect(entry) and self.client.exists(self.worker.keys.trial(entry.id)):
                raise BadMessage("served alone, it left its generator without a reply; it is not served again")
            observations = self._tray.read(self.reader, request)
            self.batcher.add(
                Work(entry, request, observations), request.n, _shape(entry, request, observations), entry.born_ms
            )
        except PayloadElsewhere as exc:
            if self._hand_back(entry, str(exc)):
                return
            self._refuse(entry, request, str(exc))
        except PayloadUnreachable as exc:
            self._refuse(entry, request, str(exc))
        except (BadMessage, ValueError) as exc:
            self.worker.bury(self.queue.stream, [(entry, str(exc))])
            self._refuse(entry, request, str(exc))
        self.owned[entry.id] = time.monotonic()

    def _hand_back(self, entry: Entry, reason: str) -> bool:
        """Leave to other generators what lies in a /dev/shm that is not here; False when none took it for a lease."""
        now_s, lease_s = time.monotonic(), self.config.flow.lease_s
        # All look for such entries twice per lease, this one too.
        if now_s - self._elsewhere.setdefault(entry.id, now_s) > lease_s:
            del self._elsewhere[entry.id]
            return False
        self._elsewhere = {name: first_s for name, first_s in self._elsewhere.items() if now_s - first_s < 3 * lease_s}
        self.queue.hand_back(entry.id)
        self.worker.meter.count("handed_back")
        if now_s >= self._next_word_s:
            self._next_word_s = now_s + ELSEWHERE_WORD_S
            self.worker.say("elsewhere", f"requests are left to other generators: {reason}")
        return True

    def _refuse(self, entry: Entry, request: ObsRequest, reason: str) -> None:
        """The slot that waits must hear of it: it aborts its segment and goes on."""
        self.refusals.append((entry, ActionReply(request.id, self.worker.version, "", None, reason)))


def collate(works: list[Work], config: Config, tray: Tray) -> Batch:
    """One batch of these requests, padded to one of the fixed sizes. tray: where they may lie together already."""
    rows = sum(work.request.n for work in works)
    size = padded_size(rows, config.generators.padded_sizes, config.generators.max_batch_size)
    observations = tray.joined([work.observations for work in works], size)
    # Each checkpoint that is evaluated has the same noise, though its tickets have other numbers.
    turns = config.trainer.segments_per_update if config.held_out is not None else MAX_NUMBER
    ids = [((work.request.id.ticket - 1) % turns + 1, work.request.id.step, work.request.n) for work in works]
    keys = np.concatenate([seeds.noise_keys(config.seed, *part) for part in ids])
    keys = keys[np.minimum(np.arange(size), rows - 1)]
    return Batch(works, observations, keys, rows, min(work.entry.born_ms for work in works))


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
        with self.worker.meter.busy("answer"):
            try:
                self._send_at_once(answers)
            except OUT_OF_MEMORY:
                self._send_although_full(answers)
        self.worker.progress += len(answers)

    def _send_at_once(self, answers: Answers) -> None:
        # One transaction: when memory is full the reply is refused, and then the request must not be gone either (F23).
        with self.client.pipeline(transaction=True) as pipe:
            for _, reply in answers:
                stream = self.worker.keys.actions(reply.id.simulator)
                pipe.xadd(stream, reply.to_fields(), nomkstream=True)  # type: ignore[arg-type]
            self.queue.queue_done(pipe, [entry.id for entry, _ in answers])
            if trials := self._trials(answers):
                pipe.delete(*trials)
            pipe.execute()

    def _send_although_full(self, answers: Answers) -> None:
        for entry, reply in answers:
            keys = [self.worker.keys.actions(reply.id.simulator), self.queue.stream]
            fields = [item for pair in reply.to_fields().items() for item in pair]
            self.queue.scripts.call(ANSWER, keys, [self.queue.group, entry.id, *fields])
        if trials := self._trials(answers):
            self.client.delete(*trials)

    def begin_trial(self, entry: Entry) -> None:
        """A mark until this suspect has its answer: should it end this process, its next reader finds it (F16)."""
        with contextlib.suppress(OUT_OF_MEMORY):  # a server that is full must be served all the more
            self.worker.client.set(self.worker.keys.trial(entry.id), self.worker.id, ex=TRIAL_S)

    def _trials(self, answers: Answers) -> list[str]:
        return [self.worker.keys.trial(entry.id) for entry, _ in answers if is_suspect(entry)]


def is_suspect(entry: Entry) -> bool:
    """Delivered too often: it may be what ended its readers, so it is served alone."""
    return entry.deliveries > MAX_DELIVERIES


def _shape(entry: Entry, request: ObsRequest, observations: Observations) -> Hashable:
    """Requests that may share a batch: same shapes, same mode. A suspect is served alone."""
    images = tuple((name, image.shape[1:]) for name, image in sorted(observations.images.items()))
    alone = entry.id if is_suspect(entry) else ""
    return request.mode, images, observations.state.shape[1], alone
