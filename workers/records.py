"""Recorded updates on disk, for `vla-stream replay`: all that one update was made of, and what it gave.

<records>/000012/000011/           a checkpoint of the learner before update 12
<records>/000012/<place>.segment   its segments in the order in which they were trained, as entries of
                                   `trajectories` that carry their observations in themselves
<records>/000012/update.json       what the update gave; written last: without it the record is not whole
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from vla_stream.environments.protocol import Specification
from vla_stream.errors import BadMessage, InputError
from vla_stream.learning import checkpoint
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import LearnerState, UpdateResult
from vla_stream.streams.observations import pack_observations
from vla_stream.streams.specification import specification_from_json, specification_to_json
from vla_stream.streams.trajectories import Trajectory

RECORDS = "records"
UPDATE = "update.json"
NOT_COUNTED = {counter: 0 for counter in checkpoint.COUNTERS}  # a learner's state belongs to no books


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded update.

    version   of the weights that it started with
    before    the learner's state then
    segments  in the order in which they were trained
    skipped, metrics  what it gave, see `UpdateResult`
    staleness of each segment, in versions
    """

    update: int
    version: int
    specification: Specification
    before: LearnerState
    segments: Sequence[Segment]
    staleness: Sequence[int]
    skipped: str | None
    metrics: Mapping[str, float]


def write(
    folder: Path,
    version: int,
    specification: Specification,
    before: LearnerState,
    trained: Sequence[tuple[Trajectory, Segment]],
    result: UpdateResult,
) -> None:
    """Record one update. Raises OSError if the disk does not take it, BadMessage for a segment too large to record."""
    update = before.updates_done + 1
    place = folder / f"{update:06d}"
    shutil.rmtree(place, ignore_errors=True)  # a trainer that died repeats it
    checkpoint.save(place, before.updates_done, version, before.policy, before.optimiser, NOT_COUNTED)
    for number, (trajectory, segment) in enumerate(trained):
        whole = dataclasses.replace(
            trajectory,
            payloads=tuple(pack_observations(seen) for seen in segment.observations),
            final_payload=None if segment.final is None else pack_observations(segment.final),
        )
        (place / f"{number:06d}.segment").write_bytes(msgpack.packb(whole.to_fields()))
    about = {
        "update": update,
        "version": version,
        "segments": [trajectory.member for trajectory, _ in trained],
        "staleness": [version - trajectory.version for trajectory, _ in trained],
        "skipped": result.skipped,
        "metrics": dict(result.metrics),
        "specification": specification_to_json(specification),
    }
    (place / UPDATE).write_text(json.dumps(about, indent=1), encoding="utf-8")


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` records. Raises OSError."""
    for path in checkpoint.places(folder)[:-keep]:
        shutil.rmtree(path)


def recorded(folder: Path) -> list[int]:
    """The updates whose record is whole, oldest first."""
    return [int(path.name) for path in checkpoint.places(folder) if (path / UPDATE).is_file()]


def read(folder: Path, update: int) -> Record:
    """Raises InputError: no such record, or a damaged one."""
    place = folder / f"{update:06d}"
    if update not in recorded(folder):
        there = ", ".join(map(str, recorded(folder))) or "none"
        raise InputError(
            f"{folder}: update {update} is not recorded, expected one of: {there}; record with "
            "--set trainer.record_every=N"
        )
    before = checkpoint.load(place / f"{update - 1:06d}")
    try:
        about: dict[str, Any] = json.loads((place / UPDATE).read_text(encoding="utf-8"))
        return Record(
            update,
            int(about["version"]),
            specification_from_json(about["specification"]),
            LearnerState(before.update, before.policy, before.optimiser),
            list(_segments(place, about["segments"])),
            [int(number) for number in about["staleness"]],
            about["skipped"],
            {str(name): float(value) for name, value in about["metrics"].items()},
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, BadMessage, msgpack.UnpackException) as exc:
        reason = " ".join(str(exc).split())[:200]
        raise InputError(f"{place}: damaged ({type(exc).__name__}: {reason}); replay another update") from exc


def _segments(place: Path, members: Sequence[str]) -> Iterator[Segment]:
    for number, member in enumerate(members):
        trajectory = Trajectory.from_fields(msgpack.unpackb((place / f"{number:06d}.segment").read_bytes(), raw=True))
        if trajectory.member != member:
            raise BadMessage(f"segment {number} is {trajectory.member}, expected {member}")
        yield trajectory.load(_refuse)


def _refuse(reference: str) -> bytes:
    raise BadMessage(f"a recorded segment refers to {reference}, expected its observations in itself")
