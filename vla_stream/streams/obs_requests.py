"""Edge simulator → generator: `obs-requests`.

Delivery: at least once, to any generator of the group. It is acknowledged and deleted after its reply is published, so
a generator that dies in between leaves it to another one; the simulator drops the second reply by its id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vla_stream.broker.codec import Fields, seal, unseal
from vla_stream.broker.lanes import parse_reference
from vla_stream.errors import BadMessage
from vla_stream.streams.observations import MAX_ROWS

SCHEMA = 2
ID = re.compile(r"([A-Za-z0-9_.-]{1,64})/([0-9a-f]{8})/(\d{1,6})\.(\d{1,6})/(\d{1,18})\.(\d{1,4})/(\d{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestId:
    """`<simulator>/<incarnation>/<batch>.<slot>/<ticket>.<attempt>/<chunk step>`, for example
    `simulator-0/9f2c11ab/0.1/17.1/3`. The incarnation is new each time a simulator process starts."""

    simulator: str
    incarnation: str
    batch: int
    slot: int
    ticket: int
    attempt: int
    step: int

    def __str__(self) -> str:
        place = f"{self.batch}.{self.slot}/{self.ticket}.{self.attempt}/{self.step}"
        return f"{self.simulator}/{self.incarnation}/{place}"

    @classmethod
    def parse(cls, text: str) -> RequestId:
        match = ID.fullmatch(text)
        if match is None:
            raise BadMessage(f"id {text[:120]!r}, expected simulator/incarnation/batch.slot/ticket.attempt/step")
        return cls(match[1], match[2], *(int(part) for part in match.groups()[2:]))


@dataclass(frozen=True, slots=True)
class ObsRequest:
    """A slot asks for one action chunk per row.

    id          see RequestId
    n           rows
    min_version weights older than this version must not serve it
    mode        `sample`, or `mode` for the most likely action
    payload     an observations packet (streams/observations.py), or None when `ref` points to it
    ref         reference of broker/lanes.py, or empty

    Example, as redis-cli shows it: id simulator-0/9f2c11ab/0.1/17.1/3 · simulator simulator-0 · slot 0.1 · n 8 ·
    step 3 · min_version 5 · mode sample · ref shm:17.1-5c0ffee0:166080:55360:0123456789abcdef
    """

    id: RequestId
    n: int
    min_version: int
    mode: str
    payload: bytes | None
    ref: str

    @property
    def way(self) -> tuple[str, int]:
        """The lane that its observations take, and their bytes."""
        if self.payload is not None:
            return "inline", len(self.payload)
        lane, _, _, size, _ = parse_reference(self.ref)
        return lane, size

    def to_fields(self) -> dict[bytes, bytes]:
        fields: dict[str, str | bytes | int] = {
            "id": str(self.id),
            "simulator": self.id.simulator,
            "slot": f"{self.id.batch}.{self.id.slot}",
            "n": self.n,
            "step": self.id.step,
            "min_version": self.min_version,
            "mode": self.mode,
        }
        fields |= {"ref": self.ref} if self.payload is None else {"data": self.payload}
        return seal(SCHEMA, fields)

    @classmethod
    def from_fields(cls, raw: Mapping[bytes, bytes]) -> ObsRequest:
        """Raises BadMessage."""
        fields: Fields = unseal(SCHEMA, raw)
        mode = fields.text("mode", 16)
        if mode not in {"sample", "mode"}:
            raise BadMessage(f"field mode is {mode!r}, expected sample or mode")
        inline = fields.has("data")
        return cls(
            id=RequestId.parse(fields.text("id", 256)),
            n=fields.integer("n", 1, MAX_ROWS),
            min_version=fields.integer("min_version"),
            mode=mode,
            payload=fields.data("data") if inline else None,
            ref="" if inline else fields.text("ref", 256),
        )
