"""What a run's folder remembers of its updates, for the trainer that comes next; a full disk forgets it (F47).

updates.jsonl  one line per update: which segments it consumed, in the order in which they were trained
last_version   the highest version that any trainer of this run has begun to publish
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from vla_stream import lines
from vla_stream.config import MAX_NUMBER

UPDATES_FILE = "updates.jsonl"
LAST_VERSION_FILE = "last_version"


def note_update(folder: Path, update: int, version: int, epoch: int, skipped: str | None, members: list[str]) -> None:
    """One line; members: `<ticket>.<attempt>`."""
    line = {"update": update, "version": version, "epoch": epoch, "skipped": skipped, "segments": members}
    with contextlib.suppress(OSError):
        lines.append(folder / UPDATES_FILE, [line])


def trained_tickets(folder: Path, update: int) -> list[int]:
    """Those that the lineage up to `update` was trained on; damaged lines are skipped."""
    lineage: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for record in lines.read(folder / UPDATES_FILE):
            with contextlib.suppress(ValueError, KeyError, TypeError, OverflowError):
                number, tickets = int(record["update"]), [int(str(m).partition(".")[0]) for m in record["segments"]]
                if max(number, *tickets) > MAX_NUMBER:
                    continue
                # A later trainer repeats what was rolled back: from its first update on, the older lineage is gone.
                while lineage and next(reversed(lineage)) >= number:
                    lineage.popitem()
                lineage[number] = tickets
    return [ticket for number, used in lineage.items() if number <= update for ticket in used]


def note_version(folder: Path, version: int) -> None:
    """Before anybody can see it: no number may ever name two different weights."""
    with contextlib.suppress(OSError):  # then the checkpoint and the server remember it
        unfinished = folder / f".{LAST_VERSION_FILE}"
        unfinished.write_text(f"{version}\n", encoding="utf-8")
        unfinished.replace(folder / LAST_VERSION_FILE)


def last_version(folder: Path, say: Callable[[str, str], None]) -> int:
    """0 where the file is not there, or holds what nobody can count on from."""
    file = folder / LAST_VERSION_FILE
    try:
        version = int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    if version > MAX_NUMBER:
        say("version", f"{file}: holds {str(version)[:30]}, expected at most {MAX_NUMBER}; ignored")
        return 0
    return version
