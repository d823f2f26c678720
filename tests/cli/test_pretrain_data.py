"""`pretrain.data` on the command line: a run that starts from others' demonstrations, and what does not fit it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from fakes import Line
from recorded import Episode, write_lerobot

from vla_stream.cli.main import call

CONFIG = """
updates: 2
environment: {name: "fakes:Line", max_steps: 8, options: {start: 0.9}}
policy: {name: tiny, chunk: 4, options: {initial_std: 0.1}}
simulators: {count: 1, slots: 2, envs_per_slot: 2, segment: {steps: 2}}
generators: {count: 1, max_batch_size: 4}
trainer: {segments_per_update: 4, epochs: 1, checkpoint_every: 1, learning_rate: 0.0, critic_warmup_updates: 0}
algorithm: {imitation_coefficient: 0.1}
pretrain: {data: {path: data}, steps: 100, batch: 32, learning_rate: 0.003}
evaluation: {episodes: 20}
"""


def demonstrated(count: int) -> list[Episode]:
    """Episodes of an expert that goes straight to the goal."""
    line, made = Line(1, 8, Line.Options(start=0.9)), []
    for seed in range(count):
        seen = line.reset(np.ones(1, bool), np.array([seed], np.uint64))
        images, states, actions = [], [], []
        for _ in range(6):
            towards = np.clip((line.goal - line.position) / 0.25, -1, 1)
            images.append(seen.images["front"][0])
            states.append(seen.state[0])
            actions.append(np.array([towards[0], 0.0], np.float32))
            result = line.step(actions[-1][None], np.ones(1, bool))
            seen = result.observations
            if result.terminated[0]:
                break
        numbers = {"observation.state": np.stack(states), "action": np.stack(actions)}
        made.append(Episode({"observation.images.front": np.stack(images)}, numbers, seen.instruction[0]))
    return made


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLA_STREAM_REDIS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))  # of workers, for fakes
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_starts_from_a_dataset_and_acts_as_its_expert_did(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lerobot(folder / "data", demonstrated(40), "v3.0")
    assert call(["run", "mine.yaml", "--run", "from-data", "--plain"]) == 0
    place = folder / "runs" / "from-data"
    before = json.loads((place / "summary.json").read_text())["before"]
    assert before["success"] >= 0.8, before  # a policy with random weights reaches none
    assert not (place / "demos.safetensors").exists()
    updates = [
        record
        for record in map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
        if record["kind"] == "update"
    ]
    assert len(updates) == 2 and all(record["demonstration_loss"] > 0 for record in updates)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "environment.options.image_size=8"], "is 16×16 pixels, but the camera front of the environment 8×8"),
        (["--set", "pretrain.data.path=gone"], "pretrain.data.path is 'gone', no such file or folder; give a dataset"),
        (["--set", "pretrain.data.images={}"], "set pretrain.data.images to camera: key, it has observation.images.fr"),
        (["--set", "pretrain.data.state=[action]"], "state is 2 numbers (action 2), but this run's environment has 3"),
        (["--set", "pretrain.demos=mine.yaml"], "pretrain.demos and pretrain.data are both set; remove one"),
        (["--set", "pretrain.grounding_scenes=5"], "but pretrain.data is set, which holds no scenes; set it to 0"),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_starts(
    arguments: list[str], told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lerobot(folder / "data", demonstrated(2), "v3.0", images="image")
    for command in ("run", "check"):
        assert call([command, "mine.yaml", *arguments]) == 2
        shown = capsys.readouterr().err
        assert told in shown and shown.count("\n") == 1
    assert not (folder / "runs").exists()


def test_demos_says_that_data_needs_no_recording(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["demos", "mine.yaml"]) == 2
    assert "pretrain.data is 'data', which is imitated as it is; nothing is to be recorded" in capsys.readouterr().err


def test_where_no_simulator_runs_the_data_alone_is_looked_at(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lerobot(folder / "data", demonstrated(2), "v2.1")
    other = ["--set", "simulators.count=0", "--set", "environment.name=not_here:AtAll"]
    assert call(["check", "mine.yaml", *other]) in (0, 2)
    assert "pretrain.data" not in capsys.readouterr().err
