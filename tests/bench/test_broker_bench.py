"""The broker benchmark: each way really carries the image, at each depth, and nothing stays behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import broker
import click.testing
import contenders
import pytest
from live import Interrupted

from vla_stream.broker.lanes import SHM_ROOT
from vla_stream.errors import RunFailed

OURS = f"vla-stream-{os.getuid()}-bench-"


def leftovers() -> set[str]:
    """Folders of benchmarks in /dev/shm, and servers of contenders among our children."""
    mine = set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
    servers = {pid for pid in mine if "contenders.py" in Path(f"/proc/{pid}/cmdline").read_text()}
    return {path.name for path in SHM_ROOT.glob(f"{OURS}*")} | servers


def test_every_way_is_measured_at_every_depth_and_what_is_not_installed_is_said(tmp_path: Path) -> None:
    before = leftovers()
    arguments = ["--seconds", "0.05", "--repeats", "2", "--depth", "1", "--depth", "8", "--output", str(tmp_path)]
    result = click.testing.CliRunner().invoke(broker.broker, arguments, catch_exceptions=False)
    rows = json.loads((tmp_path / "broker.json").read_text())["rows"]
    assert [(row["name"], row["depth"]) for row in rows] == [(name, d) for d in (1, 8) for name in broker.NAMES]
    for row in rows:
        if row["name"] == broker.RAY and contenders.why_no_ray():
            assert "pip install" in row["missing"] and row["missing"] in result.output
        else:
            assert len(row["round_trips_per_s"]) == 2 and row["round_trips"] > row["depth"], row
    assert (tmp_path / "broker.png").read_bytes().startswith(b"\x89PNG")
    assert leftovers() - before == set()


def test_ctrl_c_ends_all_servers(tmp_path: Path) -> None:
    before = leftovers()
    asked = iter([False] * 40 + [True] * 1000)
    with pytest.raises(Interrupted):
        broker.measure_all([broker.Row("shm", 4), broker.Row(broker.RAW, 4)], 5.0, 1, lambda: next(asked))
    assert leftovers() - before == set()


def test_an_answer_to_another_image_is_no_round_trip() -> None:
    marks = contenders._Marks(2)
    sent = [int(marks.next(slot)[0, 0, 0, 0]) for slot in (0, 1)]
    marks.check(0, sent[0])
    with pytest.raises(RunFailed, match="answer for slot 1 is to image"):
        marks.check(1, sent[0])


def test_ratios_are_those_of_medians_to_the_raw_limit_at_depth_one_and_to_pickle_at_the_same_depth() -> None:
    rows = [
        broker.Row(broker.RAW, 1, [1000.0, 2000.0, 3000.0], [1.0] * 3, [1.0] * 3, 2.0, 1000),
        broker.Row("shm", 64, [500.0, 800.0, 900.0], [1.0] * 3, [1.0] * 3, 1.0, 1000),
        broker.Row(broker.PICKLE, 64, [200.0, 100.0, 300.0], [1.0] * 3, [1.0] * 3, 4.0, 1000),
    ]
    shm = next(line for line in broker.show(rows).splitlines() if line.startswith("shm")).split()
    assert shm[:4] == ["shm", "64", "800", "(500…900)"]
    assert shm[4:] == ["120", "1,250", "1,000", "0.400", "4.000", "–", "1.0", "1.00"]
