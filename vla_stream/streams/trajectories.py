"""Edge simulator → trainer: `trajectories`.

Delivery: published exactly once per ticket and attempt, by the script PUBLISH; acknowledged and deleted by the script
that commits the update it went into, or by the one that refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from vla_stream.broker.codec import Fields, pack, seal, unpack, unseal
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage
from vla_stream.learning.segments import Segment
from vla_stream.streams.observations import MAX_ROWS, describe, unpack_observations

SCHEMA = 3
MAX_STEPS = 100_000
# Name in the packet -> dtype and shape, in letters: T chunk steps, k rows, H actions per chunk, A action dims.
ARRAYS = {
    "actions": (np.float32, "TkHA"),
    "logprobs": (np.float32, "TkHA"),
    "executed": (np.bool_, "TkH"),
    "valid": (np.bool_, "Tk"),
    "rewards": (np.float32, "Tk"),
    "terminated": (np.bool_, "Tk"),
    "truncated": (np.bool_, "Tk"),
    "success": (np.bool_, "Tk"),
    "versions": (np.int64, "T"),
}


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode that ended inside a segment. version: weights at its first chunk step, even in an older segment;
    success: at least once; at_end: in its last step; reward: their sum; steps: environment steps."""

    version: int
    success: bool
    at_end: bool
    reward: float
    steps: int


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One published segment.

    id              `<simulator>/<incarnation>/<batch>.<slot>/<ticket>.<attempt>`
    segment         arrays as in learning/segments.py; its observations are empty here, see `payloads`
    payloads        T+1 observation packets, or their references; `final_payload` the same for `segment.final`, or None
    episodes        those that ended here, by chunk step, then by row

    Example, as redis-cli shows it: id simulator-0/9f2c11ab/0.1/17.1 · simulator simulator-0 · ticket 17.1 · n 8 ·
    steps 16 · version 5 · episodes 11 · success 7 · data …
    """

    id: str
    attempt: int
    segment: Segment
    payloads: tuple[bytes | str, ...]
    final_payload: bytes | str | None
    episodes: tuple[Episode, ...]

    @property
    def member(self) -> str:
        return f"{self.segment.ticket}.{self.attempt}"

    @property
    def version(self) -> int:
        """Version of the oldest chunk step: what staleness is measured from."""
        return int(self.segment.versions.min())

    def references(self) -> list[str]:
        """References among the payloads; all belong to one segment of one lane."""
        return [item for item in (*self.payloads, self.final_payload) if isinstance(item, str)]

    def to_fields(self) -> dict[bytes, bytes]:
        segment = self.segment
        arrays = {name: getattr(segment, name) for name in ARRAYS} | {"final_index": segment.final_index}
        arrays |= {f"extra.{name}": array for name, array in segment.extras.items()}
        places = [*self.payloads, *([] if self.final_payload is None else [self.final_payload])]
        inline = {f"payload.{i}": item for i, item in enumerate(places) if isinstance(item, bytes)}
        arrays |= {name: np.frombuffer(item, dtype=np.uint8) for name, item in inline.items()}
        meta = {
            "references": [item if isinstance(item, str) else "" for item in places],
            "episodes": [
                [int(e.version), bool(e.success), bool(e.at_end), float(e.reward), int(e.steps)] for e in self.episodes
            ],
        }
        fields: dict[str, str | bytes | int] = {
            "id": self.id,
            "simulator": self.id.partition("/")[0],
            "ticket": self.member,
            "n": segment.rows,
            "steps": segment.steps,
            "version": self.version,
            "episodes": len(self.episodes),
            "success": sum(e.success for e in self.episodes),
            "data": pack(arrays, meta),
        }
        return seal(SCHEMA, fields)

    @classmethod
    def from_fields(cls, raw: Mapping[bytes, bytes]) -> Trajectory:
        """Raises BadMessage."""
        fields: Fields = unseal(SCHEMA, raw)
        steps, rows = fields.integer("steps", 1, MAX_STEPS), fields.integer("n", 1, MAX_ROWS)
        arrays, meta = unpack(fields.data("data"))
        ticket, attempt = parse_member(fields.text("ticket", 32))
        sizes = {"T": steps, "k": rows}
        checked = {name: _checked(arrays.pop(name, None), name, sizes) for name in ARRAYS}
        final_index = arrays.pop("final_index", None)
        _check_final(final_index, steps, rows)
        assert final_index is not None
        places = _places(meta.get("references"), arrays)
        if len(places) != steps + 1 + (len(final_index) > 0):
            raise BadMessage(f"{len(places)} observation packets, expected {steps + 1 + (len(final_index) > 0)}")
        extras = {
            name.removeprefix("extra."): array.copy() for name, array in arrays.items() if name.startswith("extra.")
        }
        if any(array.shape[:2] != (steps, rows) for array in extras.values()):
            raise BadMessage(f"an extra array does not start with [{steps}, {rows}]")
        segment = Segment(ticket, (), None, final_index.copy(), **checked, extras=extras)
        final_payload = places.pop() if len(final_index) else None
        return cls(fields.text("id", 256), attempt, segment, tuple(places), final_payload, _episodes(meta))

    def load(self, read: Callable[[str], bytes | memoryview]) -> Segment:
        """The segment with its observations. `read` opens references. Raises BadMessage or PayloadUnreachable."""

        def observations(place: bytes | str, rows: int) -> Observations:
            return unpack_observations(read(place) if isinstance(place, str) else place, rows)

        s = self.segment
        final = None if self.final_payload is None else observations(self.final_payload, len(s.final_index))
        loaded = [observations(place, s.rows) for place in self.payloads]
        shapes = [_row_shapes(item) for item in (*loaded, *([] if final is None else [final]))]
        if any(shape != shapes[0] for shape in shapes):
            raise BadMessage(f"segment {self.member}: cameras or state change their shape between chunk steps")
        arrays = {name: getattr(s, name) for name in ARRAYS}
        return Segment(s.ticket, loaded, final, s.final_index, **arrays, extras=s.extras)


def _row_shapes(observations: Observations) -> dict[str, tuple[int, ...]]:
    images = {f"image.{camera}": image.shape[1:] for camera, image in observations.images.items()}
    return {**images, "state": observations.state.shape[1:]}


def parse_member(text: str) -> tuple[int, int]:
    """`<ticket>.<attempt>` as two numbers. Raises BadMessage."""
    ticket, _, attempt = text.partition(".")
    if not (ticket.isdecimal() and attempt.isdecimal() and text.isascii()):
        raise BadMessage(f"ticket {text[:40]!r}, expected <number>.<attempt>")
    return int(ticket), int(attempt)


def _checked(array: np.ndarray | None, name: str, sizes: dict[str, int]) -> np.ndarray:
    dtype, letters = ARRAYS[name]
    if array is None or array.dtype != dtype or array.ndim != len(letters):
        raise BadMessage(f"{name} is {describe(array)}, expected {np.dtype(dtype)}[{', '.join(letters)}]")
    for letter, size in zip(letters, array.shape, strict=True):
        if sizes.setdefault(letter, size) != size:
            raise BadMessage(f"{name} is {describe(array)}, expected {letter} = {sizes[letter]}")
        if size < 1:
            raise BadMessage(f"{name} is {describe(array)}, expected {letter} of at least 1")
    if dtype is np.float32 and not np.isfinite(array).all():
        raise BadMessage(f"{name} holds NaN or infinity")
    return array.copy()  # small, and torch wants to own what it wraps


def _check_final(index: np.ndarray | None, steps: int, rows: int) -> None:
    if index is None or index.dtype != np.int64 or index.ndim != 2 or index.shape[1] != 2:
        raise BadMessage(f"final_index is {describe(index)}, expected int64[N, 2]")
    if len(index) and (index.min() < 0 or (index >= np.array([steps, rows])).any()):
        raise BadMessage(f"final_index points outside of {steps} chunk steps × {rows} rows")


def _places(references: object, arrays: dict[str, np.ndarray]) -> list[bytes | str]:
    if not isinstance(references, list) or not all(isinstance(item, str) for item in references):
        raise BadMessage("trajectory lacks its list of references")
    places: list[bytes | str] = []
    for i, reference in enumerate(references):
        inline = arrays.pop(f"payload.{i}", None)
        if not reference and inline is None:
            raise BadMessage(f"observations {i} have neither bytes nor a reference")
        places.append(reference or (b"" if inline is None else inline.tobytes()))
    return places


def _episodes(meta: Mapping[str, object]) -> tuple[Episode, ...]:
    items = meta.get("episodes")
    try:
        if not isinstance(items, list):
            raise TypeError(f"episodes are {type(items).__name__}")
        return tuple(Episode(int(v), bool(s), bool(e), float(r), int(n)) for v, s, e, r, n in items)
    except (TypeError, ValueError, OverflowError) as exc:
        raise BadMessage(
            "trajectory's episodes do not decode, expected [[version, success, at_end, reward, steps]…]"
        ) from exc
