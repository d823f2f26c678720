"""Tables and the figures in them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from report import Spread, number, output_folder, ratio, table, write_json

from vla_stream.errors import InputError


def test_a_spread_is_the_median_with_its_range_and_one_figure_is_shown_alone() -> None:
    assert Spread.of([3.0, 100.0, 7.0]) == Spread(7.0, 3.0, 100.0)
    assert str(Spread.of([3000.0, 1000.0, 2000.0])) == "2,000 (1,000…3,000)"
    assert str(Spread.of([12.34])) == "12.3"


def test_numbers_have_three_digits_at_least() -> None:
    assert [number(value) for value in (0.1234, 9.876, 98.76, 987.6, 98765.4)] == [
        "0.12",
        "9.88",
        "98.8",
        "988",
        "98,765",
    ]


def test_a_ratio_to_nothing_is_a_dash() -> None:
    assert (ratio(3.0, 2.0), ratio(3.0, None), ratio(3.0, 0.0)) == ("1.500", "–", "–")


def test_columns_of_a_table_line_up_with_figures_to_the_right() -> None:
    assert table(["row", "rate"], [["sync", "7"], ["all of it", "1,234"]]).splitlines() == [
        "row         rate",
        "---------  -----",
        "sync           7",
        "all of it  1,234",
    ]


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match=r"--output .*file/x: cannot be made"):
        output_folder(file / "x")


def test_json_appears_whole_under_its_name(tmp_path: Path) -> None:
    write_json(tmp_path / "figures.json", {"load": [1.0], "name": "η"})
    assert json.loads((tmp_path / "figures.json").read_text()) == {"load": [1.0], "name": "η"}
    assert os.listdir(tmp_path) == ["figures.json"]
