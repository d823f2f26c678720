"""Edge workers → people: `events`, `metrics`, `trace` and `dead-letters`. All capped, never acknowledged."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vla_stream.broker.complaints import not_stored
from vla_stream.broker.connection import Client, ResponseError
from vla_stream.broker.queue import Entry
from vla_stream.broker.scripts import ADD_EVENT, Scripts
from vla_stream.metrics import Span
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys

CONTROL_KEPT = 1000
EVENTS_KEPT = 5000
SAMPLES_KEPT = 20_000
TRACES_KEPT = 1000  # of at most 5,000 spans, or 300 KB, and mostly a hundredth of that
DEAD_LETTERS_KEPT = 1000
DEAD_LETTER_BYTES = 4096
TEXT_KEPT = 2000


def one_line(text: str | bytes) -> str:
    """What anybody may have written, safe to print: no line ends, no terminal commands, not endless."""
    whole = text.decode(errors="replace") if isinstance(text, bytes) else text
    return " ".join("".join(c if c.isprintable() else " " for c in whole[: 2 * TEXT_KEPT]).split())[:TEXT_KEPT]


@contextlib.contextmanager
def expendable() -> Iterator[None]:
    """What is written in here may be lost: on a full server, or where the stream's key holds somebody's string, the
    words of a worker must not end it."""
    try:
        yield
    except ResponseError as exc:
        if not not_stored(exc):
            raise


def say(client: Client, keys: Keys, worker: str, kind: str, sentence: str) -> None:
    """One event. kind: a word to filter by (started, lost, refused, poisoned, …)."""
    fields: dict[Any, Any] = {"worker": worker, "kind": kind, "text": one_line(sentence)}
    client.xadd(keys.events, fields, maxlen=EVENTS_KEPT, approximate=True)


def say_although_full(scripts: Scripts, keys: Keys, worker: str, kind: str, sentence: str) -> None:
    """The same on a server whose memory is full (F23), which is just when people need to hear of it."""
    scripts.call(ADD_EVENT, [keys.events], [EVENTS_KEPT, "worker", worker, "kind", kind, "text", one_line(sentence)])


def sample(client: Client, keys: Keys, worker: str, role: str, kind: str, numbers: Mapping[str, float]) -> None:
    """One sample of a worker's meter. kind: `second`, or `update` for what one update of the trainer was like."""
    fields: dict[Any, Any] = {"worker": worker, "role": role, "kind": kind}
    fields |= {name: f"{value:.8g}" for name, value in numbers.items()}
    client.xadd(keys.metrics, fields, maxlen=SAMPLES_KEPT, approximate=True)


def trace(
    client: Client, keys: Keys, worker: str, role: str, clock_us: float, spans: Sequence[Span], dropped: int
) -> None:
    """What a worker did since its last entry, in microseconds of its own clock: `[[track, stage, start, end], …]`, with
    the span's `parts` as a fifth where it has some. clock_us: what to add for the server's clock."""
    fields: dict[Any, Any] = {"worker": worker, "role": role, **presence.process_fields(), "dropped": dropped}
    shown: list[list[Any]] = []
    for span in spans:
        parts = [{name: round(share, 4) for name, share in span.parts.items()}] if span.parts else []
        shown.append([span.track, span.stage, int(1e6 * span.start_s), int(1e6 * span.end_s), *parts])
    fields |= {"clock_us": f"{clock_us:.0f}", "spans": json.dumps(shown, separators=(",", ":"))}
    client.xadd(keys.trace, fields, maxlen=TRACES_KEPT, approximate=True)


def trim(client: Client, keys: Keys) -> None:
    """Cut the capped streams down, also where others than our workers fill them."""
    kept = {keys.control: CONTROL_KEPT, keys.events: EVENTS_KEPT, keys.metrics: SAMPLES_KEPT, keys.trace: TRACES_KEPT}
    with client.pipeline(transaction=False) as pipe:
        for stream, number in (kept | {keys.dead_letters: DEAD_LETTERS_KEPT}).items():
            pipe.xtrim(stream, maxlen=number, approximate=True)
        pipe.execute()


def dead_letters(client: Client, keys: Keys, worker: str, stream: str, letters: Sequence[tuple[Entry, str]]) -> None:
    """Keep up to 4 KB of each entry that could not be used, with the reason why."""
    with client.pipeline(transaction=False) as pipe:
        for entry, reason in letters:
            fields = _letter(worker, stream, entry, reason)
            pipe.xadd(keys.dead_letters, fields, maxlen=DEAD_LETTERS_KEPT, approximate=True)
        pipe.execute()


def dead_letters_in_all(client: Client, keys: Keys) -> int:
    """How many there ever were; the stream holds the last of them."""
    try:
        about: Any = client.xinfo_stream(keys.dead_letters)
    except ResponseError as exc:
        if "no such key" not in str(exc):
            raise
        return 0
    return int(about["entries-added"])


def _letter(worker: str, stream: str, entry: Entry, reason: str) -> dict[Any, Any]:
    raw, budget = {}, DEAD_LETTER_BYTES
    for name, value in entry.fields.items():
        raw[name[:64].decode(errors="replace")] = value[: max(0, budget)]
        budget -= len(value) + len(name)
        if budget <= 0:
            break
    letter: dict[Any, Any] = {f"raw.{name}": value for name, value in raw.items()}
    return letter | {
        "stream": stream,
        "entry": entry.id,
        "reason": one_line(reason)[:500],
        "deliveries": str(entry.deliveries),
        "worker": worker,
    }
