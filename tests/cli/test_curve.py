"""The learning curve: what counts as time, which updates stay, and that a picture comes out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vla_stream.cli.curve import draw, trace
from vla_stream.cli.samples import Record, append, load, number


def update(time: float, number: int, **metrics: float) -> Record:
    return {
        "time": time,
        "kind": "update",
        "role": "trainer",
        "update": float(number),
        "trained_env_steps": 100.0,
        **metrics,
    }


def steps(time: float, env_steps: float) -> Record:
    return {"time": time, "kind": "second", "role": "simulator", "env_steps": env_steps, "seconds": 1.0}


def test_neither_the_warm_start_nor_the_time_between_sessions_counts() -> None:
    first: list[Record] = [{"time": 0.0, "kind": "start"}, steps(31.0, 0), steps(61.0, 50), update(120.0, 1)]
    second: list[Record] = [{"time": 9000.0, "kind": "start"}, steps(9011.0, 50), update(9070.0, 2)]
    assert trace([*first, *second]).minutes == pytest.approx([1.0, 2.0])


def test_updates_that_were_rolled_back_leave_the_curve() -> None:
    curve = trace([update(1, 1), update(2, 2), update(3, 3), update(4, 2, success=0.5), update(5, 3)])
    assert [record["update"] for record in curve.updates] == [1, 2, 3]
    assert curve.env_steps == [100, 200, 300]
    assert curve.series("success", curve.env_steps) == ([200], [0.5])


def test_a_picture_is_drawn_from_records_with_gaps(tmp_path: Path) -> None:
    records = [steps(second, 100.0) for second in range(20)]
    records += [update(second, second, success=second / 20) for second in range(5, 20)]
    records += [
        {"time": 21.0, "kind": "evaluation", "when": when, "success": rate, "low": rate - 0.1, "high": rate + 0.1}
        for when, rate in (("before", 0.2), ("after", 0.9))
    ]
    draw(trace(records), tmp_path / "curve.png", "demo")
    from PIL import Image

    with Image.open(tmp_path / "curve.png") as image:
        assert image.size == (1430, 770)
        colours = {tuple(colour) for colour in np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)}
    assert (47, 109, 179) in colours  # the line of the training success
    assert (217, 130, 43) in colours  # the evaluations


def test_records_survive_the_file_and_a_line_cut_off_by_a_crash(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append(file, [{"time": 1.0, "kind": "update", "policy_loss": float("nan")}, {"time": 2.0, "worker": "simulator-0"}])
    with file.open("a") as out:
        out.write('{"time": 3.0, "wor')
    assert number({"update": 10**400}, "update") is None and number({"update": 7}, "update") == 7.0
    assert load(file) == [{"time": 1.0, "kind": "update"}, {"time": 2.0, "worker": "simulator-0"}]
