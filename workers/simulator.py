"""A simulator: steps environment batches, asks generators for actions, publishes segments of trajectory.

A batch steps when all its active slots have replies; batches never wait for each other. `step()` does what can be done
now and returns; `main()` waits in between. State lives in the slots, so a test drives `step()` with any Host.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

import numpy as np

from vla_stream import seeds, tasks
from vla_stream.broker.connection import UNREACHABLE
from vla_stream.broker.queue import Entry
from vla_stream.config import Config, Environment
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage, EnvironmentFailed, Expired, PayloadUnreachable
from vla_stream.evaluation import Plan
from vla_stream.flow import NO_TURN, Permit
from vla_stream.metrics import Meter, Span
from vla_stream.streams.actions import ActionReply
from vla_stream.streams.obs_requests import ObsRequest
from vla_stream.tasks import Turns
from workers.environment_host import Host, Outcome, ProcessHost
from workers.lane_choice import LaneChoice, admit
from workers.replies import Replies
from workers.slot import Place, Slot, State, new_incarnation, slot_part
from workers.worker import BEAT_S, BLOCK_S, Worker, run_process

ENVIRONMENT_VARIABLE = "VLA_STREAM_ENVIRONMENT"  # a section `environment` as JSON, instead of the run's
LOOK_S = BEAT_S / 4  # longest time between two looks at an environment that says nothing
FIRST_PERMIT_WAIT_S, LONGEST_PERMIT_WAIT_S = 0.005, 0.1

# What a slot's time counts as: its environments work, it waits for actions, or the run's flow holds it back.
SPENT = {State.WANTING: "stepping", State.STEPPING: "stepping", State.ASKED: "asked", State.READY: "asked"}
SPENT |= {State.IDLE: "held", State.FINISHED: "held"}


class _Batch:
    """One environment batch: its host, its slots, and the tickets of its task."""

    def __init__(self, number: int, host: Host, slots: list[Slot], turns: Turns) -> None:
        self.number, self.host, self.slots, self.turns = number, host, slots, turns
        self.resetting: list[Slot] = []
        self.reset_mask = np.zeros(host.rows, dtype=bool)
        self.begun = 0  # resets and chunks
        self.began_s = 0.0  # the last of them
        self._doing = "", 0
        self._since_s = 0.0
        self._spent_s: dict[str, float] = {}

    @property
    def active(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.state is not State.IDLE]

    def account(self, began_s: float, now_s: float, meter: Meter) -> Counter[str]:
        """What it did meanwhile goes into the trace once it does something else; returns slots by what their time
        counts as."""
        stages = Counter(SPENT[slot.state] for slot in self.slots)
        busy = self.host.busy
        doing = ("reset" if self.resetting else "step") if busy else ("wait" if self.active else "held")
        waited_long = not busy and began_s - self._since_s >= BEAT_S
        if (doing, self.begun) != self._doing or waited_long:
            self._close_span(began_s, meter)
            self._doing, self._since_s = (doing, self.begun), began_s
        for stage, number in stages.items():
            self._spent_s[stage] = self._spent_s.get(stage, 0.0) + number * (now_s - began_s)
        return stages

    def _close_span(self, end_s: float, meter: Meter) -> None:
        if self._spent_s:
            in_all_s = sum(self._spent_s.values()) or 1.0
            parts = {stage: spent_s / in_all_s for stage, spent_s in self._spent_s.items()}
            meter.note(Span(f"batch {self.number}", self._doing[0], self._since_s, end_s, parts))
            self._spent_s.clear()


@dataclass(slots=True)
class _Asked:
    """A request that was sent: its stream entry, and when."""

    slot: Slot
    entry: str
    since_s: float


class Simulator:
    """All batches of one process. `hosts`: one per environment batch."""

    def __init__(self, worker: Worker, config: Config, hosts: list[Host]) -> None:
        self.worker, self.config = worker, config
        self.flow, self.keys, self.meter = worker.flow, worker.keys, worker.meter
        self.incarnation = new_incarnation()
        self.lanes = LaneChoice(worker, config)
        self.replies = Replies(worker.client, self.keys.actions(worker.id))
        self._action_shape = (config.policy.chunk, hosts[0].specification.action_dims)
        simulators, held_out = config.simulators, config.held_out
        self._plan = None if held_out is None else Plan.of(config)
        tasks.check_whole_batch(config, hosts[0].whole_batch)
        self.batches = []
        for number, (host, task) in enumerate(zip(hosts, tasks.of_batches(config, worker.id), strict=True)):
            k = simulators.envs_per_slot
            slots = [
                Slot(
                    Place(worker.id, self.incarnation, number, index),
                    slice(index * k, (index + 1) * k),
                    config.segment_steps,
                    whole_episode=simulators.segment == "episode",
                    mode="mode" if held_out is not None and not held_out.sample else "sample",
                )
                for index in range(simulators.slots)
            ]
            turns = tasks.turns_of(config.environment, task)
            if self._plan is not None:
                turns = self._plan.turns_of(config.environment, task)
            self.batches.append(_Batch(number, host, slots, turns))
        # Decided first, sent at the end of a step: an error of Redis in between loses nothing.
        self._outbox: dict[str, tuple[Slot, ObsRequest]] = {}
        self._oldest_s = 0.0  # when the first of them was begun
        self._to_abort: list[str] = []
        self._asked: dict[str, _Asked] = {}
        self._next_permit_s = 0.0
        self._permit_wait_s = FIRST_PERMIT_WAIT_S
        self._next_renewal_s = 0.0
        self._next_look_s = 0.0
        self._generation = ""
        self._accounted_s = time.monotonic()

    @property
    def idle(self) -> bool:
        """Nothing in flight: a drained simulator may end."""
        return not any(batch.active or batch.host.busy for batch in self.batches)

    def open(self) -> None:
        """Announce the shapes and open the reply stream. Raises InputError on other shapes than the run's."""
        for batch in self.batches:
            self.flow.announce(batch.host.specification)
        self.replies.open()

    def close(self) -> None:
        """Give permits back and free everything. Idempotent."""
        for batch in self.batches:
            batch.host.close()
        for batch in self.batches:
            for slot in batch.active:
                self._abort(slot, None)
        with contextlib.suppress(*UNREACHABLE):
            self._send_aborts()
            self.replies.close()

    def step(self, replies: list[Entry], readable: Set[int] | None = None) -> bool:
        """Do all that can be done now; True when anything moved. readable: file descriptors of environments that said
        something (None: unknown); the others are looked at four times a second."""
        self.account()
        # First of all, else what is finished would be published under a permit that the server has lost.
        if self.worker.generation != self._generation:
            self._register_anew()
        moved = self._take_replies(replies)
        now_s = time.monotonic()
        if readable is None or now_s >= self._next_look_s:
            readable, self._next_look_s = None, now_s + LOOK_S
        for batch in self.batches:
            if batch.host.busy and (readable is None or not readable.isdisjoint(batch.host.waitables())):
                moved |= self._poll_host(batch)
        # In the order in which one makes the next possible: a slot whose segment is published may begin another.
        moved |= self._publish()
        moved |= self._request_permits()
        for batch in self.batches:
            moved |= self._start_host(batch)
        self._send_requests()
        self._send_aborts()
        self._renew_and_ask_again()
        return moved

    def account(self) -> None:
        """Where the time of the slots went since the last step."""
        began_s, now_s = self._accounted_s, time.monotonic()
        self._accounted_s = now_s
        stages: Counter[str] = Counter()
        for batch in self.batches:
            stages += batch.account(began_s, now_s, self.meter)
        for stage, number in stages.items():
            self.meter.spend(stage, (now_s - began_s) * number / stages.total())

    def patience_s(self) -> float:
        """How long the main loop may wait for replies and environments before the next `step`."""
        idle = any(slot.state is State.IDLE for batch in self.batches for slot in batch.slots)
        until_permit_s = self._next_permit_s - time.monotonic() if idle and not self.worker.draining else BEAT_S
        return min(LOOK_S, max(0.0, until_permit_s))

    # ---- replies

    def _take_replies(self, replies: list[Entry]) -> bool:
        moved = False
        damaged: list[tuple[Entry, str]] = []
        for entry in replies:
            try:
                reply = ActionReply.from_fields(entry.fields)
            except BadMessage as exc:
                damaged.append((entry, str(exc)))
                continue
            asked = self._asked.pop(str(reply.id), None)
            if asked is None:
                self.meter.count("replies_dropped")  # a repeat, or for an older incarnation or attempt
                continue
            slot = asked.slot
            reply_ms = (time.monotonic() - asked.since_s) * 1000
            self.meter.mean("reply_ms", reply_ms)
            self.meter.count("replies")
            self.meter.count("replies_ms", reply_ms)
            if reply.act is not None:
                self.meter.mean("value", float(reply.act.values.sum()) / slot.k)
            try:
                if reply.act is None:
                    raise EnvironmentFailed(f"generator answered with an error: {reply.error}")
                if reply.act.actions.shape[1:] != self._action_shape:
                    got, expected = list(reply.act.actions.shape[1:]), list(self._action_shape)
                    raise EnvironmentFailed(f"reply's actions are [H, A] = {got}, expected {expected}")
                slot.answer(reply.act, reply.version)
            except EnvironmentFailed as exc:
                self._abort(slot, str(exc))
            moved = True
        self.worker.bury(self.replies.stream, damaged)
        return moved

    # ---- environments

    def _start_host(self, batch: _Batch) -> bool:
        """Resets first, then requests of slots that need none, then a chunk once all active slots have replies."""
        if not any(slot.state in (State.WANTING, State.READY) for slot in batch.slots):
            return False
        wanting = [slot for slot in batch.slots if slot.state is State.WANTING]
        due = [slot for slot in wanting if slot.resets_due().any()]
        self._ask([(slot, slot.last_observations) for slot in wanting if slot not in due])
        if batch.host.busy:
            return len(due) < len(wanting)
        if due:
            self._start_resets(batch, due)
            return True
        ready = [slot for slot in batch.slots if slot.state is State.READY]
        if ready and len(ready) == len(batch.active):
            self._start_chunk(batch, ready)
            return True
        return bool(wanting)

    def _start_resets(self, batch: _Batch, due: list[Slot]) -> None:
        mask = np.zeros(batch.host.rows, dtype=bool)
        values = np.zeros(batch.host.rows, dtype=np.uint64)
        for slot in due:
            assert slot.permit is not None
            mask[slot.rows] = slot.resets_due()
            values[slot.rows] = self._first_seeds(slot, slot.permit)
        batch.resetting, batch.reset_mask = due, mask
        self.meter.count("slots_reset", len(due))
        batch.begun, batch.began_s = batch.begun + 1, time.monotonic()
        batch.host.start_reset(mask, values)

    def _first_seeds(self, slot: Slot, permit: Permit) -> np.ndarray:
        """Reset seeds u64[k] with which a segment begins."""
        if self._plan is not None:
            return self._plan.seeds(permit.ticket)
        return seeds.reset_seeds(self.config.seed, permit.ticket, 0, slot.k, shared=slot.whole_episode)

    def _start_chunk(self, batch: _Batch, ready: list[Slot]) -> None:
        first = ready[0].reply
        assert first is not None
        rows, (chunk, dims) = batch.host.rows, first.actions.shape[1:]
        actions = np.zeros((rows, chunk, dims), dtype=np.float32)
        active, reset_rows = np.zeros(rows, dtype=bool), np.zeros(rows, dtype=bool)
        values = np.zeros(rows, dtype=np.uint64)
        for slot in ready:
            assert slot.reply is not None and slot.permit is not None
            actions[slot.rows] = slot.reply.actions
            active[slot.rows] = ~slot.held
            reset_rows[slot.rows] = slot.resets_after()
            values[slot.rows] = seeds.reset_seeds(
                self.config.seed, slot.permit.ticket, slot.step + 1, slot.k, shared=False
            )
            slot.state = State.STEPPING
        batch.begun, batch.began_s = batch.begun + 1, time.monotonic()
        batch.host.start_chunk(actions, active, reset_rows, values)

    def _poll_host(self, batch: _Batch) -> bool:
        outcome = batch.host.poll()
        if outcome is None:
            return False
        for cause in outcome.causes:
            self.worker.say("environment", f"{cause}; replaced, its segments are aborted")
        if not outcome.causes:
            self._count_time(outcome, 1000 * (time.monotonic() - batch.began_s))
        # All slots with rows in a lost process, whatever they are doing: an idle one must not go on without a reset.
        for slot in [slot for slot in batch.slots if outcome.failed[slot.rows].any()]:
            self._abort(slot, None)
        if outcome.chunk is None:
            self._after_reset(batch, outcome)
        else:
            self._after_chunk(batch, outcome)
        return True

    def _count_time(self, outcome: Outcome, took_ms: float) -> None:
        """What a batch's resets and chunks take is told by mean and spread (cli/costs.py)."""
        if outcome.chunk is None:
            self.meter.count("resets")
            self.meter.count("reset_ms", took_ms)
        else:
            self.meter.count("chunks")
            self.meter.count("chunk_ms", took_ms)
            self.meter.count("chunk_ms2", took_ms**2)
            self.meter.count("environment_cpu_s", outcome.cpu_s)

    def _after_reset(self, batch: _Batch, outcome: Outcome) -> None:
        asking = []
        # A slot may have lost its permit meanwhile; it then waits for another and resets again.
        for slot in (slot for slot in batch.resetting if slot.state is State.WANTING):
            asking.append((slot, slot.look(outcome.observations.part(slot.rows), batch.reset_mask[slot.rows])))
        batch.resetting = []
        self._ask(asking)

    def _after_chunk(self, batch: _Batch, outcome: Outcome) -> None:
        assert outcome.chunk is not None
        for slot in [slot for slot in batch.slots if slot.state is State.STEPPING]:
            slot.advance(slot_part(outcome.chunk, slot.rows))
        # Rows of slots that were aborted meanwhile have made theirs, too.
        per_row = outcome.chunk.executed.sum(axis=1)
        self.meter.count("env_steps", int(per_row.sum()))
        self.meter.count("chunk_steps", int(np.count_nonzero(per_row)))
        self._ask(
            [(s, s.last_observations) for s in batch.slots if s.state is State.WANTING and not s.resets_due().any()]
        )

    # ---- requests and segments

    def _ask(self, slots: list[tuple[Slot, Observations]]) -> None:
        """Put the requests of these slots, with what they shall show, into the outbox."""
        if slots and not self._outbox:
            self._oldest_s = time.monotonic()
        for slot, observations in slots:
            try:
                request = slot.ask(observations)
            except PayloadUnreachable as exc:
                self._abort(slot, str(exc))
                self.lanes.failed(slot.lane, str(exc))
            else:
                self._outbox[str(request.id)] = (slot, request)
                lane, size = request.way
                self.meter.count(f"bytes.{lane}", size)

    def _send_requests(self) -> None:
        """All of the outbox in one round trip. A request sent twice is harmless: its second reply is dropped."""
        if not self._outbox:
            return
        sent = list(self._outbox.items())
        with self.worker.client.pipeline(transaction=False) as pipe:
            for _, (_, request) in sent:
                pipe.xadd(self.keys.obs_requests, request.to_fields())  # type: ignore[arg-type]
            entries = pipe.execute()
        self.meter.count("sent", len(sent))
        self.meter.count("sent_ms", 1000 * len(sent) * (time.monotonic() - self._oldest_s))
        for (identity, (slot, _)), entry in zip(sent, entries, strict=True):
            self._asked[identity] = _Asked(slot, entry.decode(), time.monotonic())
        self._outbox.clear()

    def _send_aborts(self) -> None:
        if self._to_abort:
            self.flow.abort(self._to_abort)
            self._to_abort.clear()

    def _publish(self) -> bool:
        moved = False
        for batch in self.batches:
            for slot in [slot for slot in batch.slots if slot.state is State.FINISHED]:
                assert slot.permit is not None
                try:
                    trajectory = slot.finish()
                    self.flow.publish(slot.permit.member, trajectory.to_fields())
                except PayloadUnreachable as exc:
                    self._abort(slot, str(exc))
                    self.lanes.failed(slot.lane, str(exc))
                except Expired as exc:
                    self.worker.say("expired", str(exc))
                    slot.drop()
                else:
                    slot.published()
                    self.worker.progress += 1
                    self.meter.count("segments")
                    self.meter.count("episodes", len(trajectory.episodes))
                    self._next_permit_s = 0.0
                moved = True
        return moved

    def _request_permits(self) -> bool:
        now_s = time.monotonic()
        if self.worker.draining or now_s < self._next_permit_s:
            return False
        moved = False
        for batch in self.batches:
            idle = [slot for slot in batch.slots if slot.state is State.IDLE]
            whole = batch.host.whole_batch
            if not idle or batch.resetting or (whole and len(idle) < len(batch.slots)):
                continue
            granted: list[Permit] | str | None = self.lanes.reason_to_wait(len(idle))
            if granted is None:
                granted = self.flow.grant(len(idle), self.config.flow.lease_s, all_or_none=whole, turns=batch.turns)
            if isinstance(granted, str):
                self._permit_wait_s = min(LONGEST_PERMIT_WAIT_S, self._permit_wait_s * 1.5)
                self.worker.state = f"waiting: {granted}"
                if granted == NO_TURN:
                    continue  # another batch plays another task
                break
            self.worker.state = "running"
            self._permit_wait_s = FIRST_PERMIT_WAIT_S
            for slot, permit in zip(idle, granted, strict=False):
                slot.begin(permit, *self.lanes.choose(permit))
                moved = True
        self._next_permit_s = now_s + self._permit_wait_s
        return moved

    def _renew_and_ask_again(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_renewal_s:
            return
        active = {s.permit.member: s for b in self.batches for s in b.active if s.permit is not None}
        gone = self.flow.renew(list(active), self.config.flow.lease_s)
        # Only now: a renewal that failed is tried again at once, not a third of the lease later.
        self._next_renewal_s = now_s + self.config.flow.lease_s / 3
        for member in gone:
            self.worker.say("expired", f"permit {member} is no longer held; its segment is dropped")
            self._forget_request(active[member])
            active[member].drop()
        for slot in active.values():
            slot.renew()
        if not self.replies.renew():
            self.replies.open()
        overdue_s = now_s - self.config.flow.reply_deadline_s
        for identity, asked in list(self._asked.items()):
            if asked.since_s < overdue_s:
                self._ask_again(identity, asked)

    def _register_anew(self) -> None:
        """The server lost permits, requests and our stream: what is in the making goes on, and is asked for again."""
        generation = self.worker.generation
        if self._generation:
            # A launcher that had not yet seen the shapes cannot say them again.
            self.flow.announce(self.batches[0].host.specification)
            members = [s.permit.member for b in self.batches for s in b.active if s.permit is not None]
            kept = self.flow.register(generation, members, self.config.flow.lease_s)
            self.replies.open()
            for identity, asked in self._asked.items():
                if asked.slot.request is not None:
                    self._outbox[identity] = (asked.slot, asked.slot.request)
            self.worker.say("registered", f"the server lost the run; {kept} segments in the making go on")
        self._generation, self._next_renewal_s = generation, 0.0

    def _ask_again(self, identity: str, asked: _Asked) -> None:
        """The same request under the same id, if it is gone from the stream."""
        asked.since_s = time.monotonic()
        if self.worker.client.xrange(self.keys.obs_requests, asked.entry, asked.entry):
            deadline_s = self.config.flow.reply_deadline_s
            self.worker.say("waiting", f"request {identity} has no reply for {deadline_s:g} s: no generator serves it")
            return
        assert asked.slot.request is not None
        self._outbox[identity] = (asked.slot, asked.slot.request)
        self.worker.say("asked again", f"request {identity} was lost from the stream; sent again")

    def _forget_request(self, slot: Slot) -> None:
        if slot.request is not None:
            self._asked.pop(str(slot.request.id), None)
            self._outbox.pop(str(slot.request.id), None)

    def _abort(self, slot: Slot, cause: str | None) -> None:
        self._forget_request(slot)
        if slot.permit is not None:
            # Should this word be lost with the connection, the permit's lease returns it.
            self._to_abort.append(slot.permit.member)
            self.meter.count("aborted")
            if cause is not None:
                self.worker.say("aborted", f"segment {slot.permit.member}: {cause}")
        slot.drop()


def make_hosts(config: Config, make: Callable[[Config, int], Host], simulator: str) -> list[Host]:
    """One host per environment batch of this simulator, each with the config of its task."""
    rows = config.simulators.slots * config.simulators.envs_per_slot
    hosts: list[Host] = []
    try:
        for task in tasks.of_batches(config, simulator):
            hosts.append(make(tasks.config_for(config, task), rows))
    except BaseException:
        for host in hosts:
            host.close()
        raise
    return hosts


def own_environment(worker: Worker, config: Config) -> Config:
    """The run's config, or that of another simulator, which whoever started this process named."""
    other = os.environ.get(ENVIRONMENT_VARIABLE)
    if other is None:
        return config
    changed = config.model_copy(update={"environment": Environment.model_validate_json(other)})
    worker.say("environment", f"{worker.id} simulates {changed.environment.name}, named when it was attached")
    return changed


def _wait(descriptors: list[int], timeout_s: float) -> Set[int]:
    """Those that are readable, once one is; none when the time is over."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(1000 * timeout_s)}


def serve(worker: Worker, config: Config) -> None:
    """The main loop of a simulator process: until drained, stopped, or its environments keep failing."""
    admit(worker)
    config = own_environment(worker, config)
    with worker.long_step("starting environments"):
        hosts = make_hosts(config, ProcessHost, worker.id)
    simulator = Simulator(worker, config, hosts)
    try:
        worker.patiently(simulator.open)
        reader = Replies(worker.connect(), simulator.replies.stream)
        drain_until_s: float | None = None

        def hear() -> list[Entry]:
            return reader.poll(readable)

        def work() -> bool:
            simulator.account()  # before the sample that it belongs to
            worker.beat()
            return simulator.step(replies, readable)

        def ask() -> int:
            return reader.ask(int(BLOCK_S * 1000))

        readable: Set[int] = frozenset()
        while not worker.stopping:
            replies = worker.patiently(hear) or []
            worker.patiently(work)
            if worker.draining:
                drain_until_s = drain_until_s or time.monotonic() + config.flow.drain_deadline_s
                if simulator.idle or time.monotonic() > drain_until_s:
                    break
            waitables = [waitable for batch in simulator.batches for waitable in batch.host.waitables()]
            if (asked := worker.patiently(ask)) is not None:
                waitables.append(asked)
            readable = _wait(waitables, simulator.patience_s())
    finally:
        simulator.close()


def main() -> None:
    run_process("simulator", serve)


if __name__ == "__main__":
    main()
