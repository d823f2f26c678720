"""Flow control: the life of a run, its tickets and permits, and its books.

Every change is one atomic script (broker/scripts.py); this module gives them names and types. All calls may raise what
broker/connection.py lists as UNREACHABLE; and Garbled, which is waited for in the same way, where somebody else wrote
into a field of the `flow` or `books` hash.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vla_stream.broker import scripts
from vla_stream.broker.complaints import Garbled, not_stored, refused
from vla_stream.broker.connection import OUT_OF_MEMORY, Client, ResponseError
from vla_stream.broker.lanes import shm_folder
from vla_stream.broker.scripts import Script, Scripts
from vla_stream.config import MAX_NUMBER, Config, LaneName, validate
from vla_stream.environments.protocol import Specification
from vla_stream.errors import BadMessage, Expired, InputError, NoSuchRun, VlaStreamError
from vla_stream.streams.keys import TRAINERS, Keys
from vla_stream.streams.notices import CONTROL_KEPT
from vla_stream.streams.specification import specification_from_json, specification_to_json
from vla_stream.streams.trajectories import parse_member
from vla_stream.streams.weights import ENTRIES_KEPT
from vla_stream.tasks import EVERY_TICKET, Turns

Desired = Literal["running", "paused", "draining", "stopped"]
NO_TURN = "no turn"
DESIRED: tuple[Desired, ...] = ("running", "paused", "draining", "stopped")
LANES: tuple[LaneName, ...] = get_args(LaneName)
SHM_TOKEN = re.compile(r"([0-9a-f]{8})?")
NUMBER = re.compile(r"-?[0-9]{1,15}")  # as scripts write it and read it
SCALABLE = ("simulator", "generator")
MOST_WORKERS = 1000  # of a role on one host, whatever somebody wrote
STATE_NUMBERS = ("update", "version", "first_version", "epoch", "next_ticket")
ADMISSION_NUMBERS = ("segments_per_update", "max_staleness")
TICKETS_JUMPED = 100_000
EPOCHS_JUMPED = 1000
# What can become of a segment that was started; together with those in flight they balance `started`.
OUTCOMES = ("trained", "skipped", "aborted", "expired", "refused", "poisoned", "rolled_back", "lost_with_server")


@dataclass(frozen=True, slots=True)
class Permit:
    """Leave to make one segment. Weights older than min_version must not act in it. lane, remote_reader: the way of
    its observations, as in FlowState when it was given."""

    ticket: int
    attempt: int
    min_version: int
    lane: str = "auto"
    remote_reader: str = ""

    @property
    def member(self) -> str:
        return f"{self.ticket}.{self.attempt}"


@dataclass(frozen=True, slots=True)
class FlowState:
    """The `flow` hash. update: commits of this lineage; version: of the newest weights; generation: one server life;
    lane: what people want; remote_reader: a worker for which `auto` must not mean /dev/shm, or empty; scale: workers of
    a role that the launcher shall have, where people said so;
    trace_until_ms: till when workers send their spans, by the server's clock."""

    desired: Desired
    update: int
    version: int
    first_version: int
    epoch: int
    generation: str
    next_ticket: int
    shm_token: str
    lane: LaneName
    remote_reader: str
    scale: Mapping[str, int]
    trace_until_ms: int


@dataclass(frozen=True, slots=True)
class Books:
    """What became of every segment started. `balance` is 0 unless something was lost uncounted."""

    started: int
    in_flight: int
    outcomes: Mapping[str, int]
    given_up: int

    @property
    def balance(self) -> int:
        return self.started - self.in_flight - sum(self.outcomes.values())

    def __str__(self) -> str:
        counted = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in self.outcomes.items() if number)
        unaccounted = f"; {self.balance} unaccounted for" if self.balance else ""
        return f"segments {self.started} started = {counted or '0 trained'} + {self.in_flight} in flight{unaccounted}"


@dataclass(frozen=True, slots=True)
class LastSeen:
    """What a launcher remembers for a server that may lose everything."""

    state: FlowState
    books: Books


@dataclass(frozen=True, slots=True)
class Consumed:
    """One segment that an update consumed: its stream entry and its `<ticket>.<attempt>`."""

    entry: str
    member: str


class Flow:
    """One process's view of a run's flow control."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client, self.keys = client, keys
        self.scripts = Scripts(client)

    # ---- the run

    def create(self, config: Config, last: LastSeen | None = None) -> bool:
        """Start the run's flow; False when a run of this name exists on this server.

        last: what was seen before the server lost it. Versions and tickets go on from there, since generators still
        hold the old weights and simulators the old tickets; tickets granted and epochs taken after that look are jumped
        over, what was in flight is counted as lost with the server, and permits wait for one lease (see `register`).
        """
        state: dict[str, str | int] = {
            "desired": "running",
            "segments_per_update": config.trainer.segments_per_update,
            "max_staleness": config.flow.max_staleness,
            "update": 0,
            "version": 0,
            "first_version": 0,
            "epoch": 0,
            "next_ticket": 0,
            "generation": secrets.token_hex(8),
            "shm_token": secrets.token_hex(4),
            "lane": config.broker.lane,
        }
        counters: dict[str, int] = {}
        if last is not None:
            seen, books = last.state, last.books
            kept = ("desired", "update", "version", "first_version", "shm_token", "lane")
            state |= {name: getattr(seen, name) for name in kept}
            state["epoch"] = seen.epoch + EPOCHS_JUMPED
            state["next_ticket"] = seen.next_ticket + TICKETS_JUMPED
            counters = {**books.outcomes, "started": books.started, "given_up": books.given_up}
            # What was in flight, and also what a damaged key had lost before.
            counters["lost_with_server"] += books.started - sum(books.outcomes.values())
        hold_ms = int(config.flow.lease_s * 1000) if last is not None else 0
        arguments = [config.model_dump_json(), hold_ms, len(counters), *_flat(counters), *_flat(state)]
        k = self.keys
        keys = [k.flow, k.config, k.books, k.permits, k.published, k.kept, k.entries, k.refunded]
        return bool(self._call(scripts.CREATE_RUN, keys, arguments))

    def adopt(self, config: Config) -> None:
        """The run that is there goes on with another config: its admission and its attached workers follow it."""
        arguments = [
            config.model_dump_json(),
            *("segments_per_update", config.trainer.segments_per_update),
            *("max_staleness", config.flow.max_staleness),
        ]
        if self._call(scripts.ADOPT_CONFIG, [self.keys.flow, self.keys.config], arguments) != 1:
            raise self._no_such_run()

    def state(self) -> FlowState | None:
        """None when there is no such run on this server (not yet, or flushed)."""
        found: Any = self.client.hgetall(self.keys.flow)
        return self._parse_state(_texts(found))

    def _parse_state(self, raw: Mapping[str, str]) -> FlowState | None:
        desired = raw.get("desired")
        if desired is None:
            return None
        if desired not in DESIRED:
            raise self._garbled("desired", desired, f"one of {', '.join(DESIRED)}")
        numbers = {name: _number(self.keys.flow, name, raw.get(name, "0")) for name in STATE_NUMBERS}
        token, lane = raw.get("shm_token", ""), raw.get("lane", "auto")
        # The token becomes a part of a folder's name, in which files are removed.
        if not SHM_TOKEN.fullmatch(token):
            raise self._garbled("shm_token", token, "8 hexadecimal digits")
        if lane not in LANES:
            raise self._garbled("lane", lane, f"one of {', '.join(LANES)}")
        generation, reader = raw.get("generation", ""), raw.get("remote_reader", "")
        scale = {
            role: min(MOST_WORKERS, _number(self.keys.flow, f"scale.{role}", raw[f"scale.{role}"]))
            for role in SCALABLE
            if f"scale.{role}" in raw
        }
        trace_until_ms = self._milliseconds(raw, "trace_until_ms")
        return FlowState(
            desired=desired,
            generation=generation,
            shm_token=token,
            lane=lane,
            remote_reader=reader,
            scale=scale,
            trace_until_ms=trace_until_ms,
            **numbers,
        )

    def _milliseconds(self, raw: Mapping[str, str], name: str) -> int:
        return _number(self.keys.flow, name, raw.get(name, "0"), high=10 * MAX_NUMBER)

    def _garbled(self, field: str, text: str, expected: str) -> Garbled:
        return _garbled(self.keys.flow, field, text, expected)

    def config(self) -> Config:
        """The run's resolved config, checked as if it were a file. Raises NoSuchRun, InputError."""
        raw: Any = self.client.get(self.keys.config)
        if raw is None:
            raise self._no_such_run()
        subject = f"config of run {self.keys.run}"
        try:
            data = dict(json.loads(raw))
        except (ValueError, TypeError) as exc:
            raise InputError(f"{subject}: not a JSON object, expected what `vla-stream run` wrote there") from exc
        return validate(data, subject)

    def set_desired(self, desired: Desired, by: str) -> None:
        """Change the desired state, and announce it: a value, so that late joiners see it too (F55). Raises
        NoSuchRun: writing it anyway would make half a run that keeps the name."""
        if self._call(scripts.SET_DESIRED, [self.keys.flow, self.keys.control], [desired, by, CONTROL_KEPT]) != 1:
            raise self._no_such_run()

    def set_lane(self, lane: LaneName, by: str, remote_reader: str = "") -> None:
        """Change the lane of the segments that are begun from now on, and announce it. remote_reader: a live worker
        that does not see the run's /dev/shm. Raises NoSuchRun."""
        arguments = [lane, by, CONTROL_KEPT, remote_reader]
        if self._call(scripts.SET_LANE, [self.keys.flow, self.keys.control], arguments) != 1:
            raise self._no_such_run()

    def set_scale(self, role: str, count: int, by: str) -> None:
        """The launcher shall have so many workers of a role (one of SCALABLE), and announce it. Raises NoSuchRun."""
        arguments = [role, count, by, CONTROL_KEPT]
        if self._call(scripts.SET_SCALE, [self.keys.flow, self.keys.control], arguments) != 1:
            raise self._no_such_run()

    def ask_for_trace(self, seconds: float) -> int:
        """Have all workers send what they do, from their last look at `flow` on and for so long; returns the server's
        time now, in ms. Raises NoSuchRun."""
        answer = self._call(scripts.SET_TRACE, [self.keys.flow], [int(1000 * seconds)])
        if answer is None:
            raise self._no_such_run()
        return int(answer[0])

    def add_remote_reader(self, worker_id: str) -> bool:
        """From now on `auto` means no /dev/shm, since this worker does not see it; False when another one said so."""
        return bool(self._call(scripts.ANNOUNCE, [self.keys.flow], ["remote_reader", worker_id]) == worker_id.encode())

    def specification(self) -> Specification | None:
        """The shapes that the first simulator announced, or None as long as there was none."""
        raw: Any = self.client.hget(self.keys.flow, "specification")
        return None if raw is None else self._parse_specification(bytes(raw).decode(errors="replace"))

    def _parse_specification(self, text: str) -> Specification:
        try:
            return specification_from_json(text)
        except BadMessage as exc:
            raise self._garbled("specification", text, "shapes as simulators announce them") from exc

    def shm_folder(self) -> Path:
        """The run's folder in /dev/shm, on whichever host this is. Raises NoSuchRun."""
        state = self.state()
        if state is None:
            raise self._no_such_run()
        return shm_folder(self.keys.run, state.shm_token)

    # ---- simulators

    def announce(self, specification: Specification) -> None:
        """Say, as a simulator, what the environments' shapes are. Raises InputError when the run has others (F45)."""
        ours = specification_to_json(specification)
        theirs = self._call(scripts.ANNOUNCE, [self.keys.flow], ["specification", ours])
        if isinstance(theirs, bytes) and theirs != ours.encode():
            first = theirs.decode(errors="replace")
            self._parse_specification(first)
            raise InputError(
                f"run {self.keys.run}: this simulator's shapes are {ours}, expected {first} as its first; "
                "attach simulators of the same observation and action shapes"
            )

    def grant(
        self, wanted: int, lease_s: float, *, all_or_none: bool = False, turns: Turns = EVERY_TICKET
    ) -> list[Permit] | str:
        """Up to `wanted` permits of the task whose turns these are, or the word why there is none: paused, draining,
        stopped, holding, no weights, full, no turn (what is free is other tasks'), missing (no such run)."""
        k = self.keys
        keys = [k.flow, k.permits, k.published, k.kept, k.refunded, k.books]
        arguments = [wanted, int(lease_s * 1000), int(all_or_none), turns.task, *turns.order]
        reply = self._call(scripts.GRANT, keys, arguments)
        if isinstance(reply, bytes):
            return reply.decode(errors="replace")
        return [self._parse_permit(*(part.decode(errors="replace") for part in parts)) for parts in reply]

    def _parse_permit(self, member: str, min_version: str, lane: str, remote_reader: str) -> Permit:
        if lane not in LANES:
            raise self._garbled("lane", lane, f"one of {', '.join(LANES)}")
        try:
            ticket, attempt = parse_member(member)
        except BadMessage as exc:
            raise self._garbled("next_ticket", member, "a number") from exc
        return Permit(ticket, attempt, _number(self.keys.flow, "version", min_version), lane, remote_reader)

    def register(self, generation: str, members: Sequence[str], lease_s: float) -> int:
        """Segments in the making when the server lost everything go on under their old permits; returns how many:
        none once new permits are given."""
        if not members:
            return 0
        keys = [self.keys.flow, self.keys.permits, self.keys.published, self.keys.books]
        return int(self._call(scripts.REGISTER, keys, [generation, int(lease_s * 1000), *members]))

    def renew(self, members: Sequence[str], lease_s: float) -> list[str]:
        """Renew permits; returns those that are gone: their segments must be dropped."""
        if not members:
            return []
        gone = self._call(scripts.RENEW_PERMITS, [self.keys.permits], [int(lease_s * 1000), *members])
        return [member.decode() for member in gone]

    def publish(self, member: str, fields: Mapping[bytes, bytes]) -> Literal["added", "repeat"]:
        """Add a segment to `trajectories` exactly once, however often this is called. Raises Expired when its permit
        is gone: only then may the segment be dropped."""
        flat = _flat(fields)
        keys = [self.keys.permits, self.keys.published, self.keys.entries, self.keys.trajectories]
        answer = self._call(scripts.PUBLISH, keys, [member, *flat])
        if answer == b"expired":
            raise Expired(f"permit {member} is no longer held; its segment is dropped")
        return "added" if answer == b"added" else "repeat"

    def abort(self, members: Sequence[str]) -> int:
        """Give permits back whose segments will not be made; returns how many were still held."""
        keys = [self.keys.permits, self.keys.refunded, self.keys.books]
        return int(self._call(scripts.ABORT, keys, list(members))) if members else 0

    # ---- trainer

    def published_as(self, members: Sequence[str]) -> list[str]:
        """The entry that each of these was published as, or '': any other is a copy, a forgery or a ghost (F19)."""
        entries: Any = self.client.hmget(self.keys.entries, list(members)) if members else []
        return [(entry or b"").decode(errors="replace") for entry in entries]

    def refuse(self, epoch: int, entry: str, counter: Literal["refused", "poisoned", "lost_with_server"]) -> bool:
        """An entry of `trajectories` is not trained: remove it, count it, give its ticket out again (unless it was
        lost with the server: then it was trained before). False when it was no published segment, but somebody else's
        entry. Raises Expired when a newer trainer took over."""
        return entry in self.refuse_all(epoch, [entry], counter)

    def refuse_all(
        self, epoch: int, entries: Sequence[str], counter: Literal["refused", "poisoned", "lost_with_server"]
    ) -> set[str]:
        """The same for some entries at once; returns those that were published segments."""
        answer = self._call(scripts.REFUSE, self._published_keys(), [epoch, TRAINERS, counter, *entries])
        if answer == b"fenced":
            raise self._fenced(f"trainer of epoch {epoch} was replaced by a newer one")
        return set() if answer == b"missing" else {entry.decode() for entry in answer}

    def miss(self, epoch: int, taken: Collection[str]) -> list[str]:
        """Published segments whose entry is gone from the stream, except those that the trainer has taken: counted as
        poisoned, their tickets given back."""
        return [member.decode() for member in self._call(scripts.MISS, self._published_keys(), [epoch, *taken])]

    def ready_in_order(self, count: int) -> list[str]:
        """The lowest published members, at most `count`, that no lower ticket can still come before."""
        keys = [self.keys.permits, self.keys.published, self.keys.refunded, self.keys.books]
        return [member.decode() for member in self._call(scripts.READY_IN_ORDER, keys, [count])]

    def commit(
        self,
        epoch: int,
        expected_update: int,
        version: int,
        consumed: Sequence[Consumed],
        manifest: Mapping[bytes, bytes],
        *,
        skipped: bool,
        keep: bool = False,
    ) -> Literal["committed", "repeat", "missing"]:
        """One update becomes real; `missing` when the server lost the run. Raises Expired when a newer trainer took
        over.

        keep: its segments stay, outstanding, until `release`; a `resume` from before this update gives them back.
        """
        keys = self._trained_keys()
        pairs = [item for c in consumed for item in (c.entry, c.member)]
        counter = "skipped" if skipped else "trained"
        fixed = [epoch, expected_update, version, counter, TRAINERS, ENTRIES_KEPT, int(keep), len(consumed)]
        flat = _flat(manifest)
        answer = self._call(scripts.COMMIT, keys, [*fixed, *pairs, *flat])
        if answer == b"fenced":
            raise self._fenced(
                f"trainer of epoch {epoch} was replaced by a newer one; its update {expected_update + 1} is void"
            )
        if answer == b"missing":
            return "missing"
        return "committed" if answer == b"committed" else "repeat"

    def release(self, epoch: int, update: int) -> int:
        """The checkpoint of `update` is durable: the segments kept for it go; returns how many."""
        k = self.keys
        return int(self._call(scripts.RELEASE, [k.flow, k.kept, k.entries, k.trajectories], [epoch, TRAINERS, update]))

    def resume(
        self,
        epoch: int,
        update: int,
        version: int,
        trained: int,
        skipped: int,
        manifest: Mapping[bytes, bytes],
        last_ticket: int = 0,
    ) -> None:
        """A trainer takes over at `update` with weights `version`, as epoch + 1. `trained` and `skipped` are the
        checkpoint's counters: what was trained beyond them is given back where it was kept, else rolled back.
        No ticket up to `last_ticket` is given out for the first time after this. Raises Expired."""
        counters = [TRAINERS, trained, skipped, last_ticket]
        arguments = [epoch, update, version, ENTRIES_KEPT, *counters, *_flat(manifest)]
        answer = self._call(scripts.RESUME, self._trained_keys(), arguments)
        if answer != b"resumed":
            raise self._fenced(f"run {self.keys.run}: another trainer took over while this one started")

    def _fenced(self, sentence: str) -> VlaStreamError:
        """A damaged epoch or update fences too; but then nobody took over."""
        return self._damage() or Expired(sentence)

    # ---- people

    def remove_strangers(self) -> list[str]:
        """Remove keys of the run that hold another type than ours, as after somebody's SET; one sentence for each.

        The streams are made again by those who use them. Where a set or a counter was lost, or a field was written
        over, the flow goes too, so that it is made again as a whole (see `create`), and its books count what that cost.
        """
        types = self.keys.types
        found = self._send(lambda pipe: [pipe.type(key) for key in types], transaction=False)
        strange = {key: got.decode() for key, got in zip(types, found, strict=True) if got.decode() != "none"}
        strange = {key: got for key, got in strange.items() if got != types[key]}
        if any(types[key] != "stream" for key in strange):
            self.client.unlink(self.keys.flow)
        if strange:
            self.client.unlink(*strange)
        told = [f"{key}: somebody wrote a {got}, expected our {types[key]}; removed" for key, got in strange.items()]
        if self.keys.flow not in strange and self.keys.books not in strange:
            damage = self._damage()
            if damage is not None:
                self.client.unlink(self.keys.flow)
                told.append(f"{damage}; removed")
        return told

    def _damage(self) -> Garbled | None:
        """What is wrong with the fields of `flow` or `books`; None where all are ours, or there is no flow."""
        found, counters = self._send(
            lambda pipe: pipe.hgetall(self.keys.flow).hgetall(self.keys.books), transaction=False
        )
        raw = _texts(found)
        try:
            if raw and self._parse_state(raw) is None:
                raise self._garbled("desired", "", f"one of {', '.join(DESIRED)}")
            for name in (*STATE_NUMBERS, *ADMISSION_NUMBERS) if raw else ():
                _number(self.keys.flow, name, raw.get(name, ""))
            self._milliseconds(raw, "hold_until_ms")
            if "specification" in raw:
                self._parse_specification(raw["specification"])
            self._counters(counters)
        except Garbled as exc:
            return exc
        return None

    def books(self) -> Books:
        """All counters, and what is in flight, read in one transaction."""
        keys = self.keys
        raw, permits, published = self._together(
            lambda pipe: pipe.hgetall(keys.books).zcard(keys.permits).zcard(keys.published)
        )
        counters = self._counters(raw)
        outcomes = {name: counters.get(name, 0) for name in OUTCOMES}
        return Books(counters.get("started", 0), permits + published, outcomes, counters.get("given_up", 0))

    def _counters(self, found: Mapping[bytes, bytes]) -> dict[str, int]:
        raw = _texts(found)
        names = [name for name in ("started", "given_up", *OUTCOMES) if name in raw]
        return {name: _number(self.keys.books, name, raw[name], low=-MAX_NUMBER) for name in names}

    def permits(self) -> set[str]:
        """`<ticket>.<attempt>` of all segments in the making."""
        members: Any = self.client.zrange(self.keys.permits, 0, -1)
        return {member.decode() for member in members}

    def waiting_tickets(self) -> set[int]:
        """Tickets that could be given out: those that failed, and those that were passed over for their task."""
        members: Any = self.client.zrange(self.keys.refunded, 0, -1)
        return {int(ticket) for member in members if (ticket := member.partition(b".")[0]).isdigit()}

    def live_members(self) -> set[str]:
        """`<ticket>.<attempt>` of all segments in the making, waiting for their update, or kept for a checkpoint."""
        zsets = (self.keys.permits, self.keys.published, self.keys.kept)
        parts = self._together(lambda pipe: [pipe.zrange(zset, 0, -1) for zset in zsets])
        return {member.decode() for part in parts for member in part}

    def _together(self, queue: Callable[[Any], object]) -> list[Any]:
        """Replies to the commands that `queue` adds, of one moment. Redis 7 queues nothing on a full server, not even
        what only reads (F23): there the commands are sent one by one, and the moment is a little longer."""
        try:
            return self._send(queue, transaction=True)
        except OUT_OF_MEMORY:
            return self._send(queue, transaction=False)

    def _send(self, queue: Callable[[Any], object], *, transaction: bool) -> list[Any]:
        with self.client.pipeline(transaction=transaction) as pipe:
            queue(pipe)
            return list(pipe.execute())

    def _published_keys(self) -> list[str]:
        k = self.keys
        return [k.flow, k.published, k.entries, k.refunded, k.books, k.trajectories]

    def _trained_keys(self) -> list[str]:
        k = self.keys
        return [k.flow, k.published, k.kept, k.entries, k.books, k.trajectories, k.weights]

    def _no_such_run(self) -> NoSuchRun:
        return NoSuchRun(f"run {self.keys.run}: not on this server; give the name and URL that `vla-stream run` prints")

    def _call(self, script: Script, keys: Sequence[str], arguments: Sequence[object]) -> Any:
        try:
            return self.scripts.call(script, keys, arguments)
        except ResponseError as exc:
            if refused(exc) or not_stored(exc):
                raise
            # A script stumbles over fields of others, each in words of its own.
            damage = self._damage()
            if damage is None and self.client.exists(self.keys.flow):
                raise
            raise damage or Garbled(f"{self.keys.flow}: removed, and not yet made anew") from exc


def _texts(found: Mapping[bytes, bytes]) -> dict[str, str]:
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in found.items()}


def _number(key: str, field: str, text: str, low: int = 0, high: int = MAX_NUMBER) -> int:
    if not NUMBER.fullmatch(text) or not low <= int(text) <= high:
        raise _garbled(key, field, text, f"a number from {low} to {high}")
    return int(text)


def _garbled(key: str, field: str, text: str, expected: str) -> Garbled:
    return Garbled(f"{key}: field {field} is {text[:40]!r}, expected {expected}; somebody else wrote it")


def _flat(fields: Mapping[Any, object]) -> list[object]:
    return [item for pair in fields.items() for item in pair]
