"""Evaluations beside a run: the newest due checkpoint is played, the best one is chosen by it, nothing waits for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_policies import Linear
from fakes import Line

from vla_stream import config as configs
from vla_stream.cli import beside, finish, samples
from vla_stream.cli.beside import Beside
from vla_stream.config import Config
from vla_stream.errors import InputError
from vla_stream.learning import checkpoint

CONFIG = """
name: mini
updates: 4
environment: {name: "fakes:Line", max_steps: 12}
policy: {name: "fake_policies:Linear", chunk: 2}
simulators: {count: 1, slots: 1, envs_per_slot: 4, segment: {steps: 3}}
generators: {max_batch_size: 4}
trainer: {segments_per_update: 2, epochs: 1, checkpoint_every: 2, critic_warmup_updates: 0}
evaluation: {episodes: 10, every: 2}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Its run's folder holds its config, and no checkpoint yet."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers know the fakes, too
    (tmp_path / "mini.yaml").write_text(CONFIG)
    made = configs.load([tmp_path / "mini.yaml"], [f"runs_dir={tmp_path / 'runs'}"])
    (made.run_dir / "logs").mkdir(parents=True)
    (made.run_dir / "config.yaml").write_text(json.dumps(made.model_dump(mode="json")))
    return made


def save(config: Config, update: int, chunk: int = 2) -> Path:
    torch.manual_seed(update)
    policy = Linear(Linear.Options(), Line(1, 12, Line.Options()).specification, chunk)
    counters = {"trained": 0, "skipped": 0}
    return checkpoint.save(config.run_dir / "checkpoints", update, update + 1, policy.state_dict(), {}, counters)


def result(success: float, seed: int = 10_000_000) -> dict[str, Any]:
    figures = dict.fromkeys(("low", "high", "success_at_end", "return", "steps"), 0.5)
    return {"episodes": 10, "seed": seed, "sampled": False, "success": success, **figures}


def test_the_best_checkpoint_is_the_newest_of_those_with_the_highest_success(config: Config) -> None:
    folder, told = config.run_dir / "checkpoints", list[str]()
    best = []
    for update, success in ((0, 0.3), (2, 0.6), (4, 0.5), (6, 0.6), (8, 0.1)):
        beside.keep(config, save(config, update), result(success), told.append)
        best.append(checkpoint.marked(folder, checkpoint.BEST))
    assert best == ["000000", "000002", "000002", "000006", "000006"]
    # Of other seeds nothing can be compared.
    beside.keep(config, save(config, 10), result(0.2) | {"seed": 5}, told.append)
    assert checkpoint.marked(folder, checkpoint.BEST) == "000006"
    other = configs.validate(config.model_dump(mode="json") | {"evaluation": {"episodes": 10, "seed": 5, "every": 2}})
    beside.keep(other, folder / "000010", result(0.2) | {"seed": 5}, told.append)
    assert checkpoint.marked(folder, checkpoint.BEST) == "000010" and told == []


def test_without_evaluations_beside_the_run_an_evaluation_chooses_no_best_one(config: Config) -> None:
    alone = configs.validate(config.model_dump(mode="json") | {"evaluation": {"episodes": 10}})
    place = save(config, 4)
    beside.keep(alone, place, result(0.9), lambda text: pytest.fail(text))
    assert checkpoint.marked(place.parent, checkpoint.BEST) is None
    assert beside.is_of(alone, checkpoint.evaluation(place)) and not beside.is_of(alone, None)


def test_a_checkpoint_that_is_gone_loses_its_evaluation_and_that_is_said(config: Config) -> None:
    told = list[str]()
    beside.keep(config, config.run_dir / "checkpoints" / "000004", result(0.5), told.append)
    assert len(told) == 1 and "its evaluation is not kept" in told[0]


def test_what_is_evaluated_or_the_best_is_protected(tmp_path: Path) -> None:
    assert checkpoint.protected(tmp_path) == set()
    checkpoint.mark(tmp_path, checkpoint.EVALUATED, 4)
    checkpoint.mark(tmp_path, checkpoint.BEST, 2)
    assert checkpoint.protected(tmp_path) == {"000002", "000004"}
    checkpoint.unmark(tmp_path, checkpoint.EVALUATED)
    assert checkpoint.protected(tmp_path) == {"000002"}


@pytest.mark.parametrize("text", ["[]", "{}", '{"success": "much"}', "{"])
def test_a_damaged_evaluation_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "evaluation.json").write_text(text)
    assert checkpoint.evaluation(tmp_path) is None


@pytest.mark.parametrize(
    ("evaluation", "words"), [({"every": 3}, "make every a multiple"), ({"every": 2, "episodes": 0}, "raise episodes")]
)
def test_what_cannot_be_evaluated_beside_a_run_is_refused(
    config: Config, evaluation: dict[str, int], words: str
) -> None:
    with pytest.raises(InputError, match=rf"evaluation.every is {evaluation['every']} but .*; .*{words}"):
        configs.validate(config.model_dump(mode="json") | {"evaluation": evaluation})


class Played:
    """Instead of a helper: the test says what it prints, and when it ends."""

    def __init__(self, name: str, arguments: list[str], output: Path, log: Path, *, follows: bool) -> None:
        self.output, self.log, self.process, self.fed = output, log, self, list[str]()
        self.returncode: int | None = None
        output.write_bytes(b"")

    def poll(self) -> int | None:
        return self.returncode

    def feed(self, line: str) -> None:
        if self.returncode is not None:
            raise BrokenPipeError(32, "Broken pipe")
        self.fed.append(line)

    def print(self, text: str) -> None:
        with self.output.open("a") as file:
            file.write(text)

    def last_word(self) -> str:
        return "Killed"

    def kill(self) -> None:
        """It has ended."""


Fixture = tuple[Beside, list[str], Callable[[], Played]]


@pytest.fixture
def played(config: Config, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    """And what gives its present helper."""
    monkeypatch.setattr(beside, "Helper", Played)
    told = list[str]()
    made = Beside(config, told.append)

    def helper() -> Played:
        assert isinstance(made._helper, Played)
        return made._helper

    return made, told, helper


def test_whatever_else_is_printed_beside_the_results_is_passed_over(config: Config, played: Fixture) -> None:
    made, told, helper = played
    place = save(config, 2)
    assert made.look() is None
    for text in ("Loading…\n", "7\n", '{"checkpoint": "another"}\n', "[" * 100_000 + "\n", "{half"):
        helper().print(text)
        assert made.look() is None and made._asked == place
    line = json.dumps(result(0.5) | {"checkpoint": str(place)})
    helper().print(f"\nmore\n{line}")
    assert made.look() is None, "its line is not whole yet"
    helper().print("\n")
    found = made.look()
    assert found is not None and found["success"] == 0.5 and told == []


def test_an_evaluation_that_died_idle_is_noticed_and_another_one_asked(config: Config, played: Fixture) -> None:
    made, told, helper = played
    place = save(config, 2)
    made.look()
    first = helper()
    # Its last result is read, though it has ended.
    first.print(json.dumps(result(0.5) | {"checkpoint": str(place)}) + "\n")
    first.returncode = -9
    assert made.look() is not None and told == []
    place = save(config, 4)
    made.look()
    assert len(told) == 1 and "Killed; it begins anew" in told[0]
    assert helper() is not first and helper().fed == [str(place)]


def test_a_checkpoint_that_is_refused_is_not_asked_again_but_the_next_one_is(config: Config, played: Fixture) -> None:
    made, told, helper = played
    places = [save(config, 2)]
    made.look()
    helper().print(json.dumps({"checkpoint": str(places[0]), "error": "damaged"}) + "\n")
    for _ in range(3):
        assert made.look() is None
    assert len(told) == 1 and "damaged" in told[0] and helper().fed == [str(places[0])]
    places.append(save(config, 4))
    made.look()
    assert helper().fed == [str(place) for place in places]


@pytest.fixture
def running(config: Config) -> Iterator[tuple[Beside, list[str]]]:
    told = list[str]()
    made = Beside(config, told.append)
    yield made, told
    made.close()


def await_figures(made: Beside, told: list[str]) -> dict[str, float]:
    found: list[dict[str, float]] = []
    until(lambda: found.extend(figures for figures in [made.look()] if figures) or found, told)
    return found[0]


def until(condition: Callable[[], object], told: list[str]) -> None:
    deadline_s = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline_s, told
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_newest_due_checkpoint_is_evaluated_once_and_a_killed_evaluation_begins_anew(
    config: Config, running: tuple[Beside, list[str]]
) -> None:
    made, told = running
    assert made.look() is None and made._helper is None, "no checkpoint, no process"
    for update in (0, 2, 3):
        place = save(config, update)
    folder = place.parent
    assert await_figures(made, told)["update"] == 2
    assert checkpoint.protected(folder) == {"000002"} and checkpoint.evaluation(folder / "000000") is None
    first = checkpoint.evaluation(folder / "000002")
    assert first is not None and first["episodes"] == 10
    for _ in range(3):
        assert made.look() is None
    assert made._asked is None, "it is not evaluated again"

    save(config, 4)
    made.look()
    helper = made._helper
    assert helper is not None and made._asked is not None and os.getpriority(os.PRIO_PROCESS, helper.process.pid) >= 10
    os.kill(helper.process.pid, signal.SIGKILL)
    assert await_figures(made, told)["update"] == 4
    assert len(told) == 1 and "it begins anew" in told[0]
    url = config.runs_dir / "mini.eval" / "redis.url"
    assert url.exists()
    made.close()
    assert not url.exists() and not (folder / "evaluated").exists()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_an_evaluation_that_is_refused_is_left_out(config: Config, running: tuple[Beside, list[str]]) -> None:
    made, told = running
    save(config, 2, chunk=3)
    until(lambda: made.look() or told, told)
    assert len(told) == 1 and "belong to another policy" in told[0] and "left out from now on" in told[0]
    made.look()
    assert made._helper is None and len(told) == 1


def test_what_was_evaluated_beside_the_run_is_not_played_again_at_its_end(config: Config) -> None:
    for update, success in ((0, 0.2), (4, 0.7)):
        place = save(config, update)
        checkpoint.keep_evaluation(place, result(success) | {"checkpoint": str(place), "successes": [1] * 10})
    found = finish.evaluate_ends(config, lambda: pytest.fail("nothing is waited for"), lambda text: pytest.fail(text))
    assert {when: item["success"] for when, item in found.items()} == {"before": 0.2, "after": 0.7}
    records = samples.load(config.run_dir / "metrics.jsonl")
    assert [(record["when"], record["update"], record["success"]) for record in records] == [
        ("after", 4, 0.7),
        ("before", 0, 0.2),
    ]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_tells_what_its_evaluations_found_and_ends_them_with_itself(config: Config, tmp_path: Path) -> None:
    folder, main = tmp_path / "runs" / "whole", [sys.executable, "-m", "vla_stream.cli.main"]
    flags = ["--set", f"runs_dir={tmp_path / 'runs'}", "--set", "updates=100000", "--run", "whole", "--plain"]
    flags += ["--set", "environment.options.step_s=0.05"]  # else it leaves an evaluation no core
    process = subprocess.Popen(
        [*main, "run", str(tmp_path / "mini.yaml"), *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        until(lambda: evaluations(folder) or process.poll() is not None, [])
        look = [*main, "status", "--run", "whole", "--runs", str(tmp_path / "runs"), "--json"]
        status = json.loads(subprocess.run(look, capture_output=True, text=True, check=True).stdout)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=200)
    finally:
        process.kill()
        process.communicate()
    newest = evaluations(folder)[-1]
    assert newest["worker"] == "launcher" and newest["episodes"] == 10
    assert status["evaluated"].startswith("update ") and "on 10 held-out seeds" in shown
    best = checkpoint.marked(folder / "checkpoints", checkpoint.BEST)
    assert best is not None and checkpoint.evaluation(folder / "checkpoints" / best) is not None
    assert not list((tmp_path / "runs").glob("*/redis.url")) and not (folder / "checkpoints" / "evaluated").exists()


def evaluations(folder: Path) -> list[samples.Record]:
    return [r for r in samples.load(folder / "metrics.jsonl") if r.get("kind") == "evaluation"]
