"""Several tasks on the command line: recorded, trained, evaluated and told one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from vla_stream.cli.main import call

CONFIG = """
updates: 2
environment:
  name: tabletop
  max_steps: 8
  options: {shaping: 1.0}
  tasks:
    near: {weight: 2}
    far: {options: {step_delay_ms: 1}}
policy: {name: tiny, chunk: 4, options: {words: 6}}
simulators: {count: 2, slots: 2, envs_per_slot: 2, segment: {steps: 2}}
trainer: {segments_per_update: 6, epochs: 1, checkpoint_every: 1}
pretrain: {episodes: 3, steps: 2, grounding_scenes: 6, grounding_steps: 2}
evaluation: {episodes: 5}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLA_STREAM_REDIS", raising=False)
    return tmp_path


@pytest.mark.timeout(240)
def test_a_run_of_two_tasks_ends_with_figures_of_each(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "mine.yaml", "--run", "two", "--plain"]) == 0
    shown = capfd.readouterr().out
    assert "3 demonstrations" in shown and "6 scenes" in shown
    assert "\n  near: " in shown and "on 3 of them" in shown and "\n  far: " in shown and "on 2 of them" in shown
    place = folder / "runs" / "two"
    after = json.loads((place / "summary.json").read_text())["after"]
    assert {name: figures["episodes"] for name, figures in after["tasks"].items()} == {"near": 3, "far": 2}
    updates = [
        record
        for record in map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        if record["kind"] == "update"
    ]
    assert [record["segments.near"] + record["segments.far"] for record in updates] == [6, 6]
    with safe_open(place / "demos.safetensors", framework="numpy") as file:
        about = json.loads((file.metadata() or {})["demonstrations"])
    assert (about["episodes"], about["scenes"]) == (3, 6)
    # Seed by seed the same as without tasks: these two differ in nothing that an outcome depends on.
    play = ["eval", "mine.yaml", "--checkpoint", str(place), "--episodes", "4", "--json"]
    found: list[dict[str, Any]] = []
    alone = yaml.safe_load(CONFIG)
    del alone["environment"]["tasks"]
    for config in (CONFIG, yaml.safe_dump(alone)):
        (folder / "mine.yaml").write_text(config)
        assert call(play) == 0
        found.append(json.loads(capfd.readouterr().out))
    assert found[0]["return"] != 0
    assert found[0].pop("tasks").keys() == {"near", "far"} and found[0] == found[1]


def test_inline_has_one_simulator_which_needs_a_batch_for_each_task(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", "mine.yaml", "--inline"]) == 2
    assert "--inline: its one simulator has no environment batch for far; raise" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_check_tells_the_parts_and_names_the_task_whose_options_are_wrong(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["check", "mine.yaml"]) == 0
    assert "Of the segments 66.7 % are near, 33.3 % are far." in capsys.readouterr().out
    assert call(["check", "mine.yaml", "--set", "environment.tasks.far.options.shapign=1"]) == 2
    shown = capsys.readouterr().err
    assert "environment.options with environment.tasks.far: unknown key shapign; did you mean shaping?" in shown
