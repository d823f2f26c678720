"""tools/bench/metrics.py: which workers rest, and what a pair of blocks says of the cost."""

from __future__ import annotations

import inspect
import math
from pathlib import Path

import pytest
import resting
from metrics import Block, Cost, costs, rates
from resting import RESTING, emit_or_rest, let_rest

from vla_stream.cli.samples import Record
from vla_stream.metrics import Meter, Span, Usage
from workers.worker import Worker


def exercise(meter: Meter) -> dict[str, float]:
    meter.count("a")
    meter.mean("b", 1.0)
    meter.highest("c", 1.0)
    meter.gauge("d", 1.0)
    meter.bucket("e", 1.0, (2.0,))
    meter.spend("f", 1.0)
    meter.note(Span("g", "g", 0.0, 1.0))
    with meter.busy("h"):
        pass
    return meter.sample()


def test_a_meter_that_rests_does_nothing_at_all_and_then_counts_as_before() -> None:
    public = {name for name, _ in inspect.getmembers(Meter, inspect.isfunction) if not name.startswith("_")}
    assert set(RESTING[Meter]) == public
    meter, usage = Meter(), Usage()
    before = set(exercise(meter))
    try:
        let_rest(True)
        assert exercise(meter) == {} == usage.sample() and meter.spans() == ([], 0)
    finally:
        let_rest(False)
    assert len(meter.spans()[0]) == 1, "that of the time before"
    assert set(exercise(meter)) == before and usage.sample().keys() == {"cpu", "memory_mb"}


def test_while_the_file_is_there_only_records_of_updates_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(resting, "emit", lambda worker, kind, sample: said.append(kind))
    monkeypatch.setenv(resting.FILE, str(tmp_path / "resting"))
    worker = Worker.__new__(Worker)
    try:
        for there in (False, True, False):
            (tmp_path / "resting").touch() if there else (tmp_path / "resting").unlink(missing_ok=True)
            for kind in ("update", "second"):
                emit_or_rest(worker, kind, {})
    finally:
        let_rest(False)
    assert said == ["update", "second", "update", "update", "second"]


def block(counting: bool, first: int, cpu_s: float = 1.0) -> Block:
    return Block(counting, first, first + 2, cpu_s, 1.0)


def test_a_block_has_the_steps_and_the_time_of_its_own_updates() -> None:
    records: list[Record] = [
        {"kind": "update", "update": float(number), "time": 10.0 + 2 * number, "trained_env_steps": 500.0}
        for number in range(1, 12)
    ]
    records.append({"kind": "second", "update": 5.0, "time": 0.0, "trained_env_steps": 9e9})
    assert rates([block(True, 3), block(False, 8, cpu_s=0.5)], records) == [(250.0, 1000.0), (250.0, 500.0)]


def test_what_metrics_cost_is_the_mean_of_neighbours_whichever_comes_first() -> None:
    blocks = [block(True, 1), block(False, 4), block(False, 7), block(True, 10)]
    speed, cpu = costs(blocks, [(100.0, 1.1), (200.0, 1.0), (400.0, 2.0), (200.0, 2.2)])
    assert (speed.mean, cpu.mean) == pytest.approx((1.0, 0.1)) and (speed.half, cpu.half) == pytest.approx((0.0, 0.0))
    assert str(cpu) == "+10.00 % ± 0.00"
    uneven = Cost.of([1.0, 1.21])
    assert uneven.mean == pytest.approx(0.1) and uneven.half == pytest.approx(1.96 * math.log(1.21) / 2)
