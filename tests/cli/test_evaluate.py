"""`vla-stream eval`: equal numbers for equal seeds, per instruction, and films that show what happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import Line
from PIL import Image

from vla_stream import config as configs
from vla_stream.cli import films
from vla_stream.cli.main import call
from vla_stream.environments.protocol import Observations
from vla_stream.evaluation import Outcomes
from vla_stream.learning import checkpoint
from workers.models import make_policy

CONFIG = """
environment: {name: "fakes:Line", max_steps: 12}
policy: {name: "fake_policies:Linear", chunk: 2}
trainer: {segments_per_update: 2}
evaluation: {episodes: 40}
"""


@pytest.fixture
def evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Calls eval on a random policy and returns what it prints."""
    file = tmp_path / "mini.yaml"
    file.write_text(CONFIG)
    torch.manual_seed(0)
    policy = make_policy(configs.load([file]), Line(1, 12, Line.Options()).specification, torch.device("cpu"))
    counters = {"trained": 0, "skipped": 0, "score": 0.5}
    checkpoint.save(tmp_path / "checkpoints", 3, 4, policy.state_dict(), {}, counters)
    checkpoint.mark_best(tmp_path / "checkpoints", 3)

    def run(*arguments: str) -> str:
        place = str(tmp_path / "checkpoints" / "best")
        code = call(["eval", str(file), "--checkpoint", place, *arguments])
        shown = capsys.readouterr()
        assert code == 0, shown.err
        return shown.out

    return run


def test_equal_seeds_give_equal_numbers_and_samples_follow_the_configs_seed(evaluate: Any) -> None:
    mode, sampled = evaluate("--json"), evaluate("--json", "--sample")
    assert (mode, sampled) == (evaluate("--json"), evaluate("--json", "--sample"))
    found, other = json.loads(sampled), json.loads(evaluate("--json", "--sample", "--set", "seed=7"))
    assert found["sampled"] and not json.loads(mode)["sampled"]
    assert len({json.loads(mode)["return"], found["return"], other["return"]}) == 3
    assert found["episodes"] == 40 and found["success_once"] == found["success"] >= found["success_at_end"]


def test_success_is_told_per_instruction_with_its_interval(evaluate: Any) -> None:
    found = json.loads(evaluate("--json", "--sample"))
    per = found["instructions"]
    assert sum(figures["episodes"] for figures in per.values()) == found["episodes"] == len(found["successes"])
    successes = sum(figures["episodes"] * figures["success"] for figures in per.values())
    assert successes == pytest.approx(sum(found["successes"]))
    assert all(figures["low"] <= figures["success"] <= figures["high"] for figures in per.values())
    shown = evaluate("--sample")
    assert f"success {sum(found['successes'])}/40 = " in shown and "at the end " in shown


def test_films_show_each_step_of_a_few_successes_and_failures(evaluate: Any, tmp_path: Path) -> None:
    folder = tmp_path / "films"
    found = json.loads(evaluate("--json", "--sample", "--video", str(folder)))
    assert sorted(found["videos"]) == sorted(str(path) for path in folder.iterdir())
    kinds = {True: 0, False: 0}
    for path in folder.iterdir():
        kind, _, seed = path.stem.partition("-")
        success = bool(found["successes"][int(seed) - found["seed"]])
        assert kind == ("success" if success else "failure")
        kinds[success] += 1
        with Image.open(path) as film:
            assert film.format == "GIF" and 1 < getattr(film, "n_frames") <= 13  # noqa: B009
    assert 1 <= kinds[True] <= 4 and 1 <= kinds[False] <= 4


def test_where_all_rows_take_too_much_memory_the_first_ones_are_filmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(films, "MOST_BYTES", 3 * 3 * 16 * 16 * 3)
    made, everyone, outcomes = films.Films(tmp_path), np.ones(8, dtype=bool), Outcomes.blank(8)
    for _ in range(2):
        for step in range(4):
            made.see(
                Observations({"front": np.full((8, 16, 16, 3), step, np.uint8)}, np.zeros((8, 1)), ["go"] * 8), everyone
            )
        made.end(np.arange(8, dtype=np.uint64), outcomes)
    assert {path.name for path in made.saved} == {"failure-0.gif", "failure-1.gif"}
