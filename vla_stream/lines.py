"""Files of one JSON object per line, written by one process at a time, in spite of full disks and crashes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def append(file: Path, records: Iterable[object]) -> None:
    """Add one line per record. Raises OSError if the disk does not take it."""
    text = "".join(json.dumps(record) + "\n" for record in records).encode()
    if not text:
        return
    with file.open("ab+") as out:
        # A full disk may have cut the last line off: without an end of it the next record would be lost too.
        if out.seek(0, os.SEEK_END) > 0:
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                text = b"\n" + text
        out.write(text)


def read(file: Path) -> Iterator[dict[str, Any]]:
    """All records in order; lines that are damaged are left out. Raises OSError."""
    with file.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                yield record
