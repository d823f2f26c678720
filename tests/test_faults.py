"""The table of faults in tests/README.md: complete, and true of the tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
NUMBERS = [f"F{number:02d}" for number in (*range(1, 36), *range(40, 56))]
ROW = re.compile(r"^\| (F\d\d) \| [^|]+ \| `([\w/.]+)::(\w+)` \|$", re.MULTILINE)
ROWS = {number: (file, test) for number, file, test in ROW.findall((TESTS / "README.md").read_text())}


def test_every_fault_has_one_row_in_order() -> None:
    lines = re.findall(r"^\| (F\d\d) ", (TESTS / "README.md").read_text(), re.MULTILINE)
    assert lines == list(ROWS) == NUMBERS


@pytest.mark.parametrize("number", NUMBERS)
def test_the_row_names_a_test_of_its_number(number: str) -> None:
    file, test = ROWS[number]
    assert f"_{number.lower()}_" in test
    assert re.search(rf"^def {test}\(", (TESTS / file).read_text(), re.MULTILINE)
