"""Edge workers → people: `events` (plain sentences) and `dead-letters` (unusable entries). Capped, never acked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_stream.broker.connection import Client
from vla_stream.streams.keys import Keys

EVENTS_KEPT = 5000
DEAD_LETTERS_KEPT = 1000
DEAD_LETTER_BYTES = 4096


def say(client: Client, keys: Keys, worker: str, kind: str, sentence: str) -> None:
    """One event. kind: a word to filter by (started, lost, refused, poison, …)."""
    fields: dict[Any, Any] = {"worker": worker, "kind": kind, "text": sentence[:2000]}
    client.xadd(keys.events, fields, maxlen=EVENTS_KEPT, approximate=True)


def dead_letter(
    client: Client,
    keys: Keys,
    worker: str,
    stream: str,
    entry: str,
    fields: Mapping[bytes, bytes],
    reason: str,
    deliveries: int,
) -> None:
    """Keep up to 4 KB of an entry that could not be used, and say so."""
    raw, budget = {}, DEAD_LETTER_BYTES
    for name, value in fields.items():
        raw[name[:64].decode(errors="replace")] = value[: max(0, budget)]
        budget -= len(value) + len(name)
        if budget <= 0:
            break
    letter: dict[Any, Any] = {f"raw.{name}": value for name, value in raw.items()}
    letter |= {
        "stream": stream,
        "entry": entry,
        "reason": reason[:500],
        "deliveries": str(deliveries),
        "worker": worker,
    }
    client.xadd(keys.dead_letters, letter, maxlen=DEAD_LETTERS_KEPT, approximate=True)
