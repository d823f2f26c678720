"""The pipeline benchmark: small real runs, and the arithmetic of its table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click.testing
import live
import pipeline
import pytest
from live import Measured
from model import CONFIGS

from vla_stream import config as settings
from vla_stream.cli.main import call
from vla_stream.errors import InputError, RunFailed

TINY = """
environment:
  max_steps: 4
  options: {image_size: 16, step_ms: 2.0, reset_ms: 1.0}
policy:
  chunk: 2
  options: {batch_ms: 1.0, row_ms: 1.0, sample_ms: 2.0, optimiser_step_ms: 2.0, load_ms: 2.0, weights_mb: 0.1}
simulators: {count: 4, envs_per_slot: 1, segment: {steps: 2}}
generators: {max_batch_size: 2}
trainer: {segments_per_update: 8, minibatch_samples: 8}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return file


def measured(rate: float, **changes: Any) -> Measured:
    cpu = {"simulator": 1.0, "trainer": 3.0}
    figures: dict[str, Any] = {"updates": 4, "seconds": 2.0, "load": 1.5, "others": 0.25, "cpu_window_s": 2.0}
    return Measured(rate, **{**figures, "cpu_s": cpu, "figures": {}, **changes})


def descendants() -> dict[int, tuple[str, float]]:
    return {pid: about for pid, about in live.cpu_by_process(os.getpid()).items() if about[0] not in ("bench", "other")}


@pytest.mark.timeout(170)
def test_rows_of_a_profile_are_real_runs_whose_figures_stand_beside_the_models(tiny: Path, tmp_path: Path) -> None:
    before = set(descendants())
    arguments = ["--profile", str(tiny), "--devices", "4", "--rows", "sync", "--rows", "full", "--repeats", "1"]
    arguments += ["--updates", "2", "--warm-up", "1", "--output", str(tmp_path / "out")]
    result = click.testing.CliRunner().invoke(pipeline.pipeline, arguments, catch_exceptions=False)
    (profile,) = json.loads((tmp_path / "out" / "pipeline.json").read_text())["profiles"]
    assert [row["name"] for row in profile["rows"]] == ["sync", "full"]
    for row in profile["rows"]:
        (run,) = row["runs"]
        assert run["updates"] == 2
        # 8 segments of 2 chunk steps of 2 steps of 1 row, per update: the figure is made of the trainer's records.
        assert run["steps_per_s"] * run["seconds"] == pytest.approx(2 * 8 * 2 * 2)
        assert 0 < run["steps_per_s"] <= 1.05 * profile["bound"]
        assert {"trainer", "generator", "simulator", "environment_process", "redis", "bench"} <= set(run["cpu_s"])
    assert [line.split()[0] for line in result.output.splitlines() if line.startswith(("sync ", "full ", "bound"))][:3]
    assert (tmp_path / "out" / "pipeline.png").read_bytes().startswith(b"\x89PNG")
    assert set(descendants()) <= before


@pytest.mark.timeout(120)
def test_ctrl_c_ends_all_processes_of_the_run_at_hand(tiny: Path, tmp_path: Path) -> None:
    arguments = ["bench", "pipeline", "--profile", str(tiny), "--devices", "4", "--rows", "full", "--updates", "10000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vla_stream.cli.main", *arguments, "--output", str(tmp_path / "out")],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline_s = time.monotonic() + 60
        roles: set[str] = set()
        while not {"trainer", "generator", "simulator"} <= roles:
            assert process.poll() is None and time.monotonic() < deadline_s, roles
            started = live.cpu_by_process(process.pid)
            roles = {role for role, _ in started.values()}
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and b"Traceback" not in said
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.glob("vla-stream-bench-*")) == []


def test_errors_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    cases = {
        ("--profile", "libreo"): "--profile libreo: no such profile",
        ("--profile", str(tmp_path / "none.yaml")): "none.yaml: cannot read the config",
        ("--profile", "metaworld", "--rows", "fast"): "--rows fast: no such row",
        ("--profile", "metaworld", "--devices", "200"): "--devices 200: profile metaworld has 128 environments",
        ("--profile", "metaworld", "--set", "trainer.epoch=2"): "unknown key trainer.epoch",
    }
    for arguments, expected in cases.items():
        assert call(["bench", "pipeline", *arguments, "--output", str(tmp_path / "out")]) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and expected in said, said


def test_a_benchmark_that_is_not_there_says_where_it_would_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("vla_stream.cli.bench.FOLDER", tmp_path / "tools" / "bench")
    assert call(["bench", "broker"]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "run it from a clone" in said


def test_the_table_holds_medians_and_their_ratios_to_model_sync_and_bound() -> None:
    rows = {name: pipeline.Row("p", name, "4:4", [], {}, predicted) for name, predicted in ROWS.items()}
    for name, rate in (("sync colocated", 400.0), ("sync", 250.0), ("full", 800.0)):
        rows[name].runs = [measured(rate), measured(0.5 * rate), measured(2 * rate)]
    lines = pipeline.show(pipeline.Plan("p", list(rows.values()), 1000.0, "4:4")).splitlines()
    assert lines[4].split() == ["full", "4:4", "800", "(400…1,600)", "1,000", *FULL_RATIOS, "1.5", "0.25", "2.00"]
    assert lines[5].split() == ["bound", "4:4", "1,000"]
    # Per 1000 steps: 1 CPU second in 2 s of 800 steps/s, and 3.
    assert lines[-1].split() == ["full", "0.625", "1.875"]


ROWS = {"sync colocated": 500.0, "sync": 300.0, "full": 1000.0}
FULL_RATIOS = ["0.800", "2.000", "3.200", "0.800"]


def test_repeats_are_interleaved() -> None:
    rows = [pipeline.Row("p", name, "", [], {}) for name in ("a", "b")]
    assert [(row.name, run) for row, run in pipeline.interleaved(rows, 2)] == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_the_rate_is_steps_of_the_updates_after_the_warm_up_over_the_time_from_its_last_commit() -> None:
    times = {1: 100.0, 2: 110.0, 3: 114.0, 4: 120.0}
    records: list[live.Record] = [
        {"kind": "update", "time": time_s, "update": float(update), "trained_env_steps": 50.0, "wait_s": 1.0}
        for update, time_s in times.items()
    ]
    window = live.Window(
        0.0, 10.0, {7: ("trainer", 1.0)}, {7: ("trainer", 3.0), 8: ("simulator", 4.0)}, [0.0, 8.0], [2.0]
    )
    result = live._evaluate(records, window, warm_up=2)
    assert (result.steps_per_s, result.updates, result.seconds) == (pytest.approx(100 / 10), 2, 10.0)
    assert result.cpu_s == {"simulator": 4.0, "trainer": 2.0} and result.others == pytest.approx(0.2)
    with pytest.raises(RunFailed, match="2 updates were recorded, expected more"):
        live._evaluate(records[:2], window, warm_up=2)


def test_every_row_of_every_profile_and_of_the_real_run_has_a_valid_config(tmp_path: Path) -> None:
    plans = [pipeline.emulated_plan(CONFIGS / f"{name}.yaml", 8, []) for name in pipeline.profile_names()]
    plans.append(pipeline.real_plan([]))
    for row in (row for plan in plans for row in plan.rows):
        over = tmp_path / "over.yaml"
        over.write_text(json.dumps(row.overlay))
        config = settings.load([*row.files, over])
        sync = row.name in ("sync", "sync colocated", "full, η = 0", pipeline.SYNC_ROW)
        assert config.flow.max_staleness == (0 if sync else 1), row.name
        assert config.evaluation.episodes == 0 and config.pretrain is None


def test_the_real_rows_differ_in_order_alone(tmp_path: Path) -> None:
    work = {}
    for row in pipeline.real_plan([]).rows:
        over = tmp_path / "over.yaml"
        over.write_text(json.dumps(row.overlay))
        config = settings.load([*row.files, over])
        slots = config.simulators.count * config.simulators.env_batches * config.simulators.slots
        environments = slots * config.simulators.envs_per_slot
        rows = config.trainer.segments_per_update * config.simulators.envs_per_slot
        work[row.name] = environments, rows, config.trainer.epochs, config.trainer.minibatch_samples, config.environment
    assert work[pipeline.SYNC_ROW] == work[pipeline.ASYNC_ROW] and work[pipeline.ASYNC_ROW][:2] == (64, 64)


def test_an_unknown_row_is_refused_with_those_that_there_are() -> None:
    plan = pipeline.real_plan([])
    with pytest.raises(InputError, match="expected one of: sync lockstep, async"):
        pipeline.select([plan], ["full"])
    assert [row.name for row in pipeline.select([plan], ["async"])] == ["async"]
