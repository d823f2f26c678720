"""`vla-stream plan`, as a person meets it: by a short run, and from a run's metrics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from measured_run import CONFIG, run

from vla_stream.broker.connection import Client
from vla_stream.cli.folder import RunFolder
from vla_stream.cli.main import call
from vla_stream.cli.plan import calibrate
from vla_stream.cli.samples import Record, append
from vla_stream.config import Config, load, validate
from vla_stream.errors import RunFailed
from vla_stream.flow import Flow
from vla_stream.streams import notices
from vla_stream.streams.keys import Keys

TINY = """
environment: {name: emulated, max_steps: 4, options: {image_size: 16, step_ms: 10.0, reset_ms: 10.0}}
policy:
  name: emulated
  chunk: 2
  options:
    {batch_ms: 6.0, row_ms: 4.0, sample_ms: 60.0, optimiser_step_ms: 20.0, devices: ["0", "1"], trainer_devices: ["2"]}
simulators: {count: 2, env_batches: 2, slots: 1, envs_per_slot: 2, segment: {steps: 2}}
generators: {count: 2, max_batch_size: 4, padded_sizes: [2], max_wait_ms: 0}
trainer: {segments_per_update: 8, minibatch_samples: 32, epochs: 1, update: streaming, critic_warmup_updates: 0}
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run named `done`."""
    folder = tmp_path / "runs" / "done"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(CONFIG)
    append(folder / "metrics.jsonl", run())
    return tmp_path / "runs"


def test_a_finished_run_is_read_and_its_best_placement_named(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(["plan", "--run", "done", "--runs", str(runs), "--devices", "4", "--cores", "64"]) == 0
    said = capfd.readouterr().out
    assert "120.0 ± 20.0 ms" in said and "3.00 + 6.00 · rows ms" in said and "measured on 4" in said
    best = re.search(r"Best: (\d+) simulators, (\d+) generators, (\d+) to train: ([\d,]+) environment steps/s", said)
    assert best is not None and int(best[2]) + int(best[3]) == 4
    # 8 segments of 360 ms on one device, of 90 environment steps each: so much at most on three.
    assert 0 < int(best[4].replace(",", "")) <= 90 / (0.360 / 3)
    assert all(f"One more {name}: " in said for name in ("simulator", "generator", "device to train", "core"))


def test_a_live_run_elsewhere_is_read_from_its_server(
    tmp_path: Path, client: Client, redis_url: str, run_name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    keys = Keys(run_name)
    Flow(client, keys).create(load([file]))
    for count, record in enumerate(run()):
        write(client, keys, record, count)
    arguments = ["--run", run_name, "--redis", redis_url, "--runs", str(tmp_path / "none"), "--devices", "4"]
    assert call(["plan", *arguments, "--cores", "64"]) == 0
    said = capfd.readouterr().out
    assert "120.0 ± 20.0 ms" in said and "3.00 + 6.00 · rows ms" in said and "measured on 4" in said
    assert "Best: " in said
    # Written in a moment, no second lies between the first update and the last.
    client.delete(keys.metrics)
    for record in run():
        numbers = {name: value for name, value in record.items() if isinstance(value, float) and name != "time"}
        notices.sample(client, keys, str(record["worker"]), str(record["role"]), str(record["kind"]), numbers)
    assert call(["plan", *arguments]) == 2
    assert "between update 2 and the last" in capfd.readouterr().err


def write(client: Client, keys: Keys, record: Record, count: int) -> None:
    """As a worker did at the record's time, which the server takes from the entry's id."""
    fields: dict[Any, Any] = {name: value for name, value in record.items() if name != "time"}
    client.xadd(keys.metrics, fields, id=f"{round(1000 * float(record['time']))}-{count}")


def test_errors_are_one_line_and_name_the_remedy(runs: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    cases: dict[tuple[str, ...], str] = {
        ("--run", "none"): "run none: no server given",
        (str(file), "--run", "done"): "CONFIG and --run were given, expected one of them",
        ("--run", "done", "--set", "updates=3"): "a run has its config",
        (str(tmp_path / "none.yaml"),): "none.yaml: cannot read the config",
    }
    for arguments, expected in cases.items():
        assert call(["plan", *arguments, "--runs", str(runs)]) == 2
        said = capfd.readouterr().err
        assert said.count("\n") == 1 and expected in said, said


def test_the_short_run_of_a_config_with_evaluations_beside_the_run_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(TINY + "evaluation: {episodes: 4, every: 20}\n")
    tried = list[Config]()

    def opened(config: Config, **_: object) -> None:
        tried.append(config)
        raise RunFailed("enough")

    monkeypatch.setattr(RunFolder, "open", opened)
    with pytest.raises(RunFailed, match="enough"):
        calibrate(load([file]), 4)
    assert validate(tried[0].model_dump(mode="json")).evaluation.every == 0


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_short_run_measures_what_the_options_say_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(TINY)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert call(["plan", str(file), "--devices", "3", "--cores", "8"]) == 0
    said = capfd.readouterr().out
    chunk, batch, row, segment = (
        float(re.search(pattern, said)[1])  # type: ignore[index]
        for pattern in (
            r"batch +([\d.]+) ±",
            r"inference +([\d.]+) \+",
            r"\+ ([\d.]+) · rows",
            r"training +([\d.]+) ms per segment",
        )
    )
    # Emulated work takes no less than its options say, and on a busy machine more.
    assert 19.0 <= chunk <= 80.0, said
    # Batches here are of one request. What generators tried of others before is timed beside workers that start.
    assert 0.85 * 14 <= batch + 2 * row <= 4 * 14, f"6 + 2 · 4 ms\n{said}"
    assert 0.85 * 240 <= segment <= 2 * 240, f"four samples of 60 ms\n{said}"
    assert "the limit" in said.lower()
    assert list(scratch.glob("vla-stream-plan-*")) == []
