"""Recorded updates, and `vla-stream replay` of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from live_run import Run
from trainer_bench import Bench, Make

from vla_stream.cli.replay import replay
from vla_stream.errors import InputError, RunFailed
from workers import records

WAYS: dict[str, dict[str, Any]] = {
    "buffered": {},
    "streaming": {"trainer__update": "streaming", "trainer__optimiser_steps": 2},
    # What it needs beside segments and weights: the versions, the run's first weights.
    "interpolated": {
        "trainer__update": "streaming",
        "algorithm": {"proximal": "interpolated", "reference_kl_coefficient": 0.1},
    },
}
FIGURES = ("policy_loss", "kl_behaviour", "clip_fraction", "explained_variance", "gradient_norm", "ratio_max")


def recorded(make: Make, **changes: Any) -> Bench:
    """A run of three updates of two segments, of which two are recorded."""
    bench = make(updates=9, trainer__record_every=1, trainer__keep_records=2, **changes)
    trainer = bench.trainer()
    for _ in range(3):
        first, second = bench.permits(2)
        bench.publish(second, trainer.version)
        bench.publish(first, trainer.version, shm=True)
        assert trainer.step(None)
    write_config(bench)
    return bench


def write_config(bench: Bench, **trainer: Any) -> None:
    data = bench.config.model_dump(mode="json")
    data["trainer"] |= trainer
    (bench.config.run_dir / "config.yaml").write_text(yaml.safe_dump(data))


def call(bench: Bench, update: int) -> str:
    """What replay prints. Raises what it raises."""
    arguments = [bench.config.name, str(update), "--runs", str(bench.config.runs_dir)]
    result = CliRunner().invoke(replay, arguments, catch_exceptions=False, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.mark.parametrize("way", WAYS)
def test_a_replayed_update_gives_what_was_recorded_bit_for_bit(make: Make, run: Run, way: str) -> None:
    bench = recorded(make, **WAYS[way])
    assert records.recorded(bench.config.run_dir / records.RECORDS) == [2, 3]
    for update in (2, 3):
        record = records.read(bench.config.run_dir / records.RECORDS, update)
        order = [2 * update - 1, 2 * update] if WAYS[way] == {} else [2 * update, 2 * update - 1]
        assert [segment.ticket for segment in record.segments] == order
        output = call(bench, update)
        assert output.endswith("bit for bit the same\n")
        for name in FIGURES:
            (line,) = (line for line in output.splitlines() if line.startswith(name))
            sample = bench.samples()[update - 1]
            assert float(line.split()[1]) == float(line.split()[2]) == pytest.approx(sample[name], rel=1e-6)
        (line,) = (line for line in output.splitlines() if line.startswith("staleness"))
        assert line.split()[1:3] == ["0", "0"]


def test_an_update_that_would_be_another_today_is_told(make: Make) -> None:
    bench = recorded(make)
    write_config(bench, epochs=2)
    with pytest.raises(RunFailed, match=r"update 3: .*optimiser_steps.* differ by more than 1e-05 of their size"):
        call(bench, 3)


def test_what_was_not_recorded_is_refused_with_what_was(make: Make) -> None:
    bench = recorded(make)
    with pytest.raises(InputError, match=r"update 1 is not recorded, expected one of: 2, 3; record with --set"):
        call(bench, 1)
    place = bench.config.run_dir / records.RECORDS / "000003"
    (place / records.UPDATE).rename(place / "elsewhere.json")
    with pytest.raises(InputError, match=r"update 3 is not recorded, expected one of: 2;"):
        call(bench, 3)


@pytest.mark.parametrize("damage", ["cut", "other", "gone", "figures"])
def test_a_damaged_record_is_refused_in_one_line(make: Make, damage: str) -> None:
    bench = recorded(make)
    place = bench.config.run_dir / records.RECORDS / "000003"
    first, second = sorted(place.glob("*.segment"))
    if damage == "cut":
        first.write_bytes(first.read_bytes()[:-9])
    elif damage == "other":
        first.write_bytes(second.read_bytes())
    elif damage == "gone":
        first.unlink()
    else:
        about = json.loads((place / records.UPDATE).read_text())
        (place / records.UPDATE).write_text(json.dumps({**about, "metrics": [1]}))
    with pytest.raises(InputError, match=r"000003: damaged .*; replay another update") as raised:
        call(bench, 3)
    assert "\n" not in str(raised.value)


def test_a_run_goes_on_where_the_disk_takes_no_record(make: Make, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    bench = make(trainer__record_every=1)
    trainer = bench.trainer()
    bench.feed(2)
    monkeypatch.setattr(records.checkpoint, "save", full)
    assert trainer.step(None) and trainer.update == 1
    assert "update 1 is not recorded whole" in str(run.events())


def test_no_such_run_is_told(tmp_path: Path) -> None:
    result = CliRunner().invoke(replay, ["nobody", "3", "--runs", str(tmp_path)], standalone_mode=False)
    assert isinstance(result.exception, InputError) and "holds no run" in str(result.exception)
