"""The main job, CI-sized: the quick start's own config, fewer updates and seeds, a lower bar than the full run's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
EPISODES = 100


def command_line(*arguments: str, cwd: Path) -> str:
    """Runs `vla-stream` and returns what it printed; a failure shows all of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vla_stream.cli.main", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def success(checkpoint: Path, *arguments: str, cwd: Path) -> float:
    options = ["--checkpoint", str(checkpoint), "--episodes", str(EPISODES), "--json", *arguments]
    figures: dict[str, Any] = json.loads(command_line("eval", str(QUICKSTART), *options, cwd=cwd))
    return float(figures["success"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_start_turns_a_mediocre_policy_into_a_better_one_and_language_decides(tmp_path: Path) -> None:
    settings = ["--set", "evaluation.episodes=0"]
    command_line("run", str(QUICKSTART), "--run", "learns", "--updates", "25", *settings, cwd=tmp_path)
    checkpoints = tmp_path / "runs" / "learns" / "checkpoints"
    before, after = (success(checkpoints / name, cwd=tmp_path) for name in ("000000", "000025"))
    wrong = success(checkpoints / "000025", "--replace", "red=green,green=blue,blue=red", cwd=tmp_path)
    # Measured with four seeds: .51 before, .92 to .97 after 25 updates; three deviations of 100 episodes are .15.
    assert 0.3 <= before <= 0.65
    assert after >= 0.7 and after - before >= 0.12
    assert wrong < 0.15


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_learning_rate_0_nothing_is_learned(tmp_path: Path) -> None:
    frozen = ["--set", "trainer.learning_rate=0", "--set", "trainer.value_learning_rate=0"]
    short = ["--set", "evaluation.episodes=0", "--set", "pretrain.steps=20", "--set", "pretrain.grounding_steps=20"]
    command_line("run", str(QUICKSTART), "--run", "frozen", "--updates", "3", *frozen, *short, cwd=tmp_path)
    checkpoints = tmp_path / "runs" / "frozen" / "checkpoints"
    first, last = ((checkpoints / name / "policy.safetensors").read_bytes() for name in ("000000", "000003"))
    assert first == last


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_trainer_ranks_train_it_and_its_books_balance(tmp_path: Path) -> None:
    short = ["--set", "evaluation.episodes=0", "--set", "pretrain.steps=20", "--set", "pretrain.grounding_steps=20"]
    arguments = ["--run", "ranks", "--updates", "4", "--set", "trainer.ranks=2", *short]
    command_line("run", str(QUICKSTART), *arguments, cwd=tmp_path)
    run = tmp_path / "runs" / "ranks"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    books, updates = ([record for record in records if record["kind"] == kind] for kind in ("books", "update"))
    assert [(record["balance"], record["trained"]) for record in books] == [(0, 32)]
    assert [record["update"] for record in updates] == [1, 2, 3, 4]
    # What a rank alone would tell: one sample per row and chunk step of its own four segments.
    assert all(record["samples"] == 8 * 16 * 8 and record["first_ratio_error"] < 1e-4 for record in updates)
    assert (run / "logs" / "trainer-1.log").is_file() and (run / "checkpoints" / "000004").is_dir()
