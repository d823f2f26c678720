"""One slot of a simulator: k rows of a batch that travel together, and the segment they are making."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from vla_stream.broker.connection import UNREACHABLE
from vla_stream.broker.lanes import Lane, segment_name
from vla_stream.environments.chunks import ChunkResult
from vla_stream.environments.protocol import Observations
from vla_stream.errors import EnvironmentFailed, PayloadUnreachable
from vla_stream.flow import Permit
from vla_stream.learning.segments import Segment
from vla_stream.policies.protocol import Act
from vla_stream.streams.obs_requests import ObsRequest, RequestId
from vla_stream.streams.observations import observation_pieces
from vla_stream.streams.trajectories import Episode, Trajectory


class State(Enum):
    """IDLE: no permit. WANTING: to send its next request, after a reset where one is due. ASKED: waits for the reply.
    READY: has it, waits for its batch. STEPPING: its chunk runs. FINISHED: its segment waits to be published."""

    IDLE = "idle"
    WANTING = "wanting"
    ASKED = "asked"
    READY = "ready"
    STEPPING = "stepping"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a slot lives; the constant part of its request ids."""

    simulator: str
    incarnation: str
    batch: int
    slot: int


def new_incarnation() -> str:
    """Random token of one life of a simulator process: replies to an earlier life are dropped."""
    return secrets.token_hex(4)


@dataclass
class _Record:
    """Chunk steps of the segment in the making, in order."""

    payloads: list[bytes | str] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    chunks: list[dict[str, np.ndarray]] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finals: list[Observations] = field(default_factory=list)
    final_payload: bytes | str | None = None
    final_index: list[tuple[int, int]] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)


class Slot:
    """Decides what its rows do next; the simulator does the talking.

    rows: its part of the batch. whole_episode: `segment: episode`, no resets, rows that ended are held. mode: of its
    requests.
    """

    def __init__(self, place: Place, rows: slice, steps: int, *, whole_episode: bool, mode: str = "sample") -> None:
        self.place, self.rows, self.steps, self.whole_episode = place, rows, steps, whole_episode
        self.mode = mode
        self.k = rows.stop - rows.start
        self.lane: Lane | None = None
        self.inline_below = 0
        self.state = State.IDLE
        self.permit: Permit | None = None
        self.request: ObsRequest | None = None
        self.needs_reset = np.ones(self.k, dtype=bool)
        self.held = np.zeros(self.k, dtype=bool)
        self.reply: Act | None = None
        self.reply_version = 0
        self._record = _Record()
        self._segment = ""
        self._observations: Observations | None = None
        # Running episodes may span segments: their rows' own book-keeping stays.
        self._episode_version = np.full(self.k, -1, dtype=np.int64)
        self._episode_reward = np.zeros(self.k)
        self._episode_steps = np.zeros(self.k, dtype=np.int64)
        self._episode_success = np.zeros(self.k, dtype=bool)

    def __repr__(self) -> str:
        member = self.permit.member if self.permit else "-"
        return f"<Slot {self.place.batch}.{self.place.slot} {self.state.value} {member} step {self.step}>"

    @property
    def step(self) -> int:
        """Chunk steps done in this segment."""
        return len(self._record.chunks)

    def begin(self, permit: Permit, lane: Lane | None = None, inline_below: int = 0) -> None:
        """A permit was given. Observations of at least `inline_below` bytes take `lane`, if there is one."""
        self.permit = permit
        self.lane, self.inline_below = lane, inline_below
        self._segment = segment_name(permit.ticket, permit.attempt)
        self._record = _Record()
        if self.whole_episode:
            self.needs_reset[:] = True
        self.held[:] = False
        self.state = State.WANTING

    def resets_due(self) -> np.ndarray:
        """bool[k]: rows to reset before the next request. Inside a segment the chunk itself has reset them."""
        return self.needs_reset.copy() if self.step == 0 else np.zeros(self.k, dtype=bool)

    def look(self, observations: Observations, fresh: np.ndarray) -> Observations:
        """What the next request shows: `observations` (k rows) where fresh bool[k], else what the rows saw last."""
        if fresh.all() or self._observations is None:
            return observations
        both = Observations.concatenate([self._observations, observations])
        return both.take(np.arange(self.k) + np.where(fresh, self.k, 0))

    @property
    def last_observations(self) -> Observations:
        """What the rows saw last, after their chunk or reset."""
        assert self._observations is not None
        return self._observations

    def ask(self, observations: Observations) -> ObsRequest:
        """The request for the next chunk step, from this slot's rows of the batch. Raises PayloadUnreachable."""
        assert self.permit is not None
        self._observations = observations
        payload = self._write(observations)
        self._record.payloads.append(payload)
        identity = RequestId(
            self.place.simulator,
            self.place.incarnation,
            self.place.batch,
            self.place.slot,
            self.permit.ticket,
            self.permit.attempt,
            self.step,
        )
        inline, ref = (payload, "") if isinstance(payload, bytes) else (None, payload)
        self.request = ObsRequest(identity, self.k, self.permit.min_version, self.mode, inline, ref)
        self.needs_reset[:] = False
        self.state = State.ASKED
        return self.request

    def answer(self, act: Act, version: int) -> None:
        """The reply to the open request. Raises EnvironmentFailed when its shape is not that of the rows."""
        if len(act.actions) != self.k:
            raise EnvironmentFailed(f"reply has {len(act.actions)} rows, expected {self.k}")
        self.reply, self.reply_version, self.request = act, version, None
        self.state = State.READY

    def advance(self, chunk: ChunkResult) -> None:
        """Record a finished chunk (its arrays cut to this slot's rows); FINISHED when the segment is complete."""
        assert self.reply is not None
        record, step = self._record, self.step
        valid = ~self.held
        starts = valid & (self._episode_version < 0)
        self._episode_version[starts] = self.reply_version
        record.acts.append(self.reply)
        record.versions.append(self.reply_version)
        for row, observations in _rows_of(chunk):
            record.finals.append(observations)
            record.final_index.append((step, row))
        record.chunks.append(
            {
                "executed": chunk.executed,
                "valid": valid,
                "rewards": chunk.rewards,
                "terminated": chunk.terminated,
                "truncated": chunk.truncated,
                "success": chunk.success,
            }
        )
        self._count_episodes(chunk, valid)
        ended = chunk.terminated | chunk.truncated
        if self.whole_episode:
            self.held |= ended
        elif self.step >= self.steps:
            self.needs_reset |= ended
        self.reply = None
        # Held rows keep what they saw last: a host may have zeros and no sentence for rows that it did not step.
        self._observations = self.look(chunk.observations, valid)
        done = bool(self.held.all()) if self.whole_episode else self.step >= self.steps
        self.state = State.FINISHED if done or self.step >= self.steps else State.WANTING

    def resets_after(self) -> np.ndarray:
        """bool[k]: rows that the running chunk shall reset if they end in it, so that the next request can follow."""
        goes_on = not self.whole_episode and self.step + 1 < self.steps
        return np.full(self.k, goes_on, dtype=bool)

    def finish(self) -> Trajectory:
        """The complete segment. Writes the closing and the pre-reset observations, but once: called again after a lost
        reply, it may be trained, and its file another segment's. Raises PayloadUnreachable."""
        assert self.permit is not None and self._observations is not None
        record = self._record
        if len(record.payloads) == self.step:
            record.payloads.append(self._write(self._observations))
        if record.finals and record.final_payload is None:
            record.final_payload = self._write(Observations.concatenate(record.finals))
        stacked = {name: np.stack([chunk[name] for chunk in record.chunks]) for name in record.chunks[0]}
        segment = Segment(
            ticket=self.permit.ticket,
            observations=(),
            final=None,
            final_index=np.array(record.final_index, dtype=np.int64).reshape(-1, 2),
            actions=np.stack([act.actions for act in record.acts]),
            logprobs=np.stack([act.logprobs for act in record.acts]),
            versions=np.array(record.versions, dtype=np.int64),
            extras={name: np.stack([act.extras[name] for act in record.acts]) for name in record.acts[0].extras},
            **stacked,
        )
        place = self.place
        identity = f"{place.simulator}/{place.incarnation}/{place.batch}.{place.slot}/{self.permit.member}"
        payloads = tuple(record.payloads)
        return Trajectory(
            identity, self.permit.attempt, segment, payloads, record.final_payload, tuple(record.episodes)
        )

    def published(self) -> None:
        """The segment is in the trainer's hands: its bytes stay, the slot is free."""
        if self.lane is not None:
            self.lane.release(self._segment)
        self._clear()

    def drop(self) -> None:
        """The segment will never be published: forget its bytes, and start afresh with a reset."""
        if self.lane is not None and self._segment:
            # Its bytes have a lifetime of their own; the slot must be free in any case.
            with contextlib.suppress(*UNREACHABLE):
                self.lane.remove(self._segment)
        self.needs_reset[:] = True
        self._episode_version[:] = -1
        self._episode_reward[:] = 0.0
        self._episode_steps[:] = 0
        self._episode_success[:] = False
        self._clear()

    def renew(self) -> None:
        """Keep the segment's bytes alive."""
        if self.lane is not None and self.permit is not None:
            self.lane.renew(self._segment)

    def _clear(self) -> None:
        self.permit, self.request, self.reply, self._segment = None, None, None, ""
        self._record = _Record()
        self.state = State.IDLE

    def _write(self, observations: Observations) -> bytes | str:
        pieces = observation_pieces(observations)
        if self.lane is None or sum(map(len, pieces)) < self.inline_below:
            return b"".join(pieces)
        try:
            return self.lane.write(self._segment, len(self._record.payloads), *pieces)
        except PayloadUnreachable:
            self.lane.remove(self._segment)
            raise

    def _count_episodes(self, chunk: ChunkResult, valid: np.ndarray) -> None:
        self._episode_reward += np.where(valid, chunk.rewards, 0.0)
        self._episode_steps += chunk.executed.sum(axis=1)
        self._episode_success |= chunk.success
        for row in np.flatnonzero(valid & (chunk.terminated | chunk.truncated)):
            self._record.episodes.append(
                Episode(
                    version=int(self._episode_version[row]),
                    success=bool(self._episode_success[row]),
                    at_end=bool(chunk.at_end[row]),
                    reward=float(self._episode_reward[row]),
                    steps=int(self._episode_steps[row]),
                )
            )
            self._episode_version[row] = -1
            self._episode_reward[row] = self._episode_steps[row] = 0
            self._episode_success[row] = False


def slot_part(chunk: ChunkResult, rows: slice) -> ChunkResult:
    """A batch's outcome, cut to the rows of one slot."""
    inside = (chunk.final_rows >= rows.start) & (chunk.final_rows < rows.stop)
    final = None
    if chunk.final is not None and inside.any():
        final = chunk.final.take(np.flatnonzero(inside))
    return ChunkResult(
        chunk.observations.part(rows),
        final,
        chunk.final_rows[inside] - rows.start,
        chunk.executed[rows],
        chunk.rewards[rows],
        chunk.terminated[rows],
        chunk.truncated[rows],
        chunk.success[rows],
        chunk.at_end[rows],
    )


def _rows_of(chunk: ChunkResult) -> list[tuple[int, Observations]]:
    if chunk.final is None:
        return []
    return [(int(row), chunk.final.take([index])) for index, row in enumerate(chunk.final_rows)]
