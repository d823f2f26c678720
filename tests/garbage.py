"""Entries as they get damaged, or as somebody writes them who guessed the format."""

from __future__ import annotations

import random
from collections.abc import Mapping

ODD_VALUES = (b"", b"NaN", b"-1", b"[]", b"\xff\xfe", b"9" * 30, b'{"a": 1}', b"None", b"\x1b[2J", b"\x00" * 64)


def mutated(fields: Mapping[bytes, bytes], source: random.Random) -> dict[bytes, bytes]:
    """A copy with one field cut short, changed by a bit, of another type, random, gone, or added; never the same."""
    while True:
        copy = dict(fields)
        name = source.choice(sorted(copy))
        raw = bytearray(copy[name])
        match source.randrange(6):
            case 0:
                copy[name] = bytes(raw[: source.randrange(len(raw) + 1)])
            case 1 if raw:
                raw[source.randrange(len(raw))] ^= 1 << source.randrange(8)
                copy[name] = bytes(raw)
            case 2:
                copy[name] = source.choice(ODD_VALUES)
            case 3:
                copy[name] = source.randbytes(source.randrange(1, 300))
            case 4 if len(copy) > 1:
                del copy[name]
            case _:
                copy[source.randbytes(source.randrange(1, 20))] = source.choice(ODD_VALUES)
        if copy != fields:
            return copy
