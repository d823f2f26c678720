"""The `metrics` stream as records: read as it grows, kept in runs/<name>/metrics.jsonl, and read back from there.

A record is a flat dict: `time` (seconds, the server's clock), `worker`, `role`, `kind`, and one number per metric.
Kinds that workers write: `second` (once a second) and `update`. Kinds that the launcher adds: `start` (a session
began), `books` (it ended) and `evaluation` (of an update's policy).
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vla_stream import lines

if TYPE_CHECKING:
    from vla_stream.broker.connection import Client
    from vla_stream.broker.queue import Entry
    from vla_stream.streams.keys import Keys

Record = dict[str, str | float]

METRICS_FILE = "metrics.jsonl"
READ_AT_ONCE = 1000
READS_IN_A_ROW = 25  # more than the stream holds
LAST_WORDS = 300
MAX_NUMBERS = 600  # in one record; each of up to 100 tasks has five
TEXTS = ("worker", "role", "kind", "id")
ENTRY_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")  # two numbers below 2^64
KINDS = ("second", "update", "evaluation")  # of those that workers and the launcher write


class StreamFile:
    """Moves new entries of a stream into the file, each once, also over restarts of the launcher.

    tell: hears, once, that the disk takes no more; a run that could go on for hours does not end with it (F47).
    ours: whether a worker may have written such a record; others stay in the stream.
    """

    def __init__(
        self, client: Client, stream: str, file: Path, tell: Callable[[str], None], ours: Callable[[Record], bool]
    ) -> None:
        from vla_stream.broker.tail import Tail

        self.file, self._tell, self._ours, self._writable = file, tell, ours, True
        self._tail = Tail(client, stream, last_id(each(file)))

    def read(self) -> Iterator[Record]:
        """New records, in order, moved as they are asked for. Raises what UNREACHABLE lists."""
        # Bounded: somebody else may write faster than this reads.
        for _ in range(READS_IN_A_ROW):
            entries = self._tail.read(READ_AT_ONCE)
            records = [record for record in map(decode, entries) if self._ours(record)]
            self.write(records)
            yield from records
            if len(entries) < READ_AT_ONCE:
                break

    def write(self, records: Sequence[Mapping[str, object]]) -> None:
        """Records of the launcher's own, or of the stream."""
        if not records:
            return  # Nothing written says nothing of the disk.
        try:
            append(self.file, records)
        except OSError as exc:
            if self._writable:
                self._tell(f"{self.file}: not written ({exc.strerror}); the run goes on, these figures are lost")
            self._writable = False
        else:
            self._writable = True


def recent(client: Client, keys: Keys, since_ms: float) -> list[Record]:
    """What workers wrote since then by the server's clock, and at least their last words."""
    from vla_stream.broker.tail import entries_since, newest_entries

    entries = newest_entries(client, keys.metrics, LAST_WORDS)
    if entries and entries[0].born_ms > since_ms:
        entries = entries_since(client, keys.metrics, since_ms)
    return [record for record in map(decode, entries) if is_sample(record)]


def decode(entry: Entry) -> Record:
    """One entry; what is no number stays a text, whatever its name is."""
    record: Record = {"id": entry.id, "time": entry.born_ms / 1000}
    for raw_name, raw in entry.fields.items():
        name, text = raw_name.decode(errors="replace"), raw.decode(errors="replace")
        if name in ("id", "time"):
            continue  # the server's, not a writer's
        try:
            record[name] = text if name in TEXTS else float(text)
        except ValueError:
            record[name] = text
    return record


def is_sample(record: Record) -> bool:
    """Whether a worker may have written it; what anybody else wrote stays in the stream."""
    numbers = [value for name, value in record.items() if name not in TEXTS]
    known = record.get("kind") in KINDS and "worker" in record and len(numbers) <= MAX_NUMBERS
    return known and all(isinstance(value, float) for value in numbers)


def number(record: Mapping[str, str | float], name: str) -> float | None:
    """A metric that is there, is a number, and is finite."""
    value = record.get(name)
    with contextlib.suppress(OverflowError):  # an integer of more than 308 digits
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def append(file: Path, records: Iterable[Mapping[str, object]]) -> None:
    """One JSON object per line; NaN and infinity, which JSON lacks, become null."""
    lines.append(
        file,
        (
            {n: None if isinstance(value, float) and not math.isfinite(value) else value for n, value in record.items()}
            for record in records
        ),
    )


def each(file: Path) -> Iterator[Record]:
    """The records of a file, which may be larger than memory; a line that was cut off by a crash, or damaged, is left
    out."""
    with contextlib.suppress(OSError):
        for record in lines.read(file):
            yield {name: value for name, value in record.items() if isinstance(value, str | int | float)}


def load(file: Path) -> list[Record]:
    """All of them."""
    return list(each(file))


def last_id(records: Iterable[Record]) -> str:
    """The stream's id of the newest of these that came from it; `0-0` where none of the last did."""
    newest = deque(records, maxlen=READ_AT_ONCE)
    ids = (str(record.get("id", "")) for record in reversed(newest))
    return next((found for found in ids if ENTRY_ID.fullmatch(found)), "0-0")
