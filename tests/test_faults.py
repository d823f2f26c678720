"""The table of faults in tests/README.md: complete, and true of the tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUMBERS = [f"F{number:02d}" for number in (*range(1, 36), *range(40, 56))]
ROW = re.compile(r"^\| (F\d\d) \| [^|]+ \| `([\w/.]+)::(\w+)` \| ([^|]*)\|$", re.MULTILINE)
ROWS = {number: (file, test, more) for number, file, test, more in ROW.findall((TESTS / "README.md").read_text())}


def files_with(number: str) -> dict[str, list[str]]:
    """The tests that bear this number, by file."""
    pattern = re.compile(rf"^def (test_(?:f\d\d_)*{number.lower()}_\w+)\(", re.MULTILINE)
    found = {path.relative_to(TESTS).as_posix(): pattern.findall(path.read_text()) for path in TESTS.rglob("test_*.py")}
    return {file: names for file, names in found.items() if names}


def test_every_fault_has_one_row_in_order() -> None:
    lines = re.findall(r"^\| (F\d\d) ", (TESTS / "README.md").read_text(), re.MULTILINE)
    assert lines == list(ROWS) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_the_row_names_a_test_and_all_files_that_hold_tests_of_its_number(number: str) -> None:
    file, test, more = ROWS[number]
    there = files_with(number)
    assert test in there.get(file, [])
    assert sorted([file, *re.findall(r"`([\w/.]+)`", more)]) == sorted(there)
