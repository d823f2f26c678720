"""Files of one JSON object per line: what is damaged costs itself and nothing more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vla_stream import lines


def test_a_line_that_a_full_disk_cut_off_does_not_swallow_the_next_record(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    lines.append(file, [{"a": 1}])
    with file.open("a") as out:
        out.write('{"b": 2, "c')
    lines.append(file, [{"d": 3}, {"e": 4}])
    lines.append(file, [{"f": 5}])
    assert list(lines.read(file)) == [{"a": 1}, {"d": 3}, {"e": 4}, {"f": 5}]
    assert file.read_bytes().count(b"\n") == 5


@pytest.mark.parametrize("damage", [b"\xff", b'"\xff"', b"[" * 100_000, b"9" * 5000, b"[]", b"7", b"", b"\0", b"{"])
def test_a_damaged_line_is_left_out_and_the_others_are_not(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "some.jsonl"
    file.write_bytes(b'{"a": 1}\n{"x": ' + damage + b'\n{"b": 2}\n' + damage + b"\n")
    assert list(lines.read(file)) == [{"a": 1}, {"b": 2}]


def test_nothing_to_append_makes_no_file_and_a_missing_one_is_an_oserror(tmp_path: Path) -> None:
    file = tmp_path / "some.jsonl"
    lines.append(file, [])
    assert not os.path.exists(file)
    with pytest.raises(FileNotFoundError):
        list(lines.read(file))
