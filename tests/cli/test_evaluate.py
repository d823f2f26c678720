"""`vla-stream eval`: equal numbers for equal seeds, per instruction, films that show what happened; whoever plays, and
whoever is killed meanwhile."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_policies import Linear
from fakes import Line
from PIL import Image

from vla_stream import config as configs
from vla_stream import evaluation
from vla_stream.broker.connection import Client, connect
from vla_stream.cli import films
from vla_stream.cli.main import call
from vla_stream.environments.protocol import Observations
from vla_stream.evaluation import Outcomes
from vla_stream.learning import checkpoint
from vla_stream.policies.protocol import Act
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys
from workers.models import make_policy

CONFIG = """
name: mini
environment: {name: "fakes:Line", max_steps: 12}
policy: {name: "fake_policies:Linear", chunk: 2}
trainer: {segments_per_update: 2}
simulators: {slots: 1}
evaluation: {episodes: 40}
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A config, beside a random policy's checkpoint 3."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # workers know the fakes, too
    file = tmp_path / "mini.yaml"
    file.write_text(f"runs_dir: {tmp_path / 'runs'}\n{CONFIG}")
    save(tmp_path / "checkpoints", file, 3)
    checkpoint.mark(tmp_path / "checkpoints", checkpoint.BEST, 3)
    return file


def save(folder: Path, file: Path, update: int, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    policy = Linear(Linear.Options(), Line(1, 12, Line.Options()).specification, configs.load([file]).policy.chunk)
    counters = {"trained": 0, "skipped": 0, "score": 0.5}
    return checkpoint.save(folder, update, update + 1, policy.state_dict(), {}, counters)


@pytest.fixture
def evaluate(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Any:
    """Calls eval in this process, and returns what it prints."""

    def run(*arguments: str, expected: int = 0, inline: bool = True) -> str:
        place = str(tmp_path / "checkpoints" / "best")
        code = call(["eval", str(file), "--checkpoint", place, *arguments, *(["--inline"] if inline else [])])
        shown = capfd.readouterr()
        assert code == expected, shown.err
        return shown.err if expected else shown.out

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


def test_an_episode_that_ends_otherwise_when_it_is_played_again_is_not_filmed(file: Path, tmp_path: Path) -> None:
    config = configs.load([file])
    outcomes, told = Outcomes.blank(config.evaluation.episodes), list[str]()
    outcomes.steps[:], outcomes.instructions[:] = 12, "go"
    still = np.zeros((6, 2, 2), dtype=np.float32)
    away = np.where(np.arange(2) == 0, -1.0, 0.0).astype(np.float32) * np.ones_like(still)
    outcomes.success[0] = True  # as if: both stand still for 12 steps, and reach no goal
    saved = films.shoot(tmp_path, config, outcomes, dict.fromkeys(range(5), still) | {4: away}, told.append)
    first = config.evaluation.seed
    assert [path.name for path in saved] == [f"failure-{first + n}.gif" for n in (1, 2, 3, 4)]
    (told_of,) = told
    assert told_of.startswith(f"seed {first}: the same actions led elsewhere")


def test_the_policy_reads_the_replaced_words_and_the_table_the_environments(
    evaluate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, act = set[str](), Linear.act

    def reading(self: Linear, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        read.update(observations.instruction)
        assert noise_keys is None
        return act(self, observations, noise_keys)

    monkeypatch.setattr(Linear, "act", reading)
    found = json.loads(evaluate("--json", "--replace", "go=fly,to=past", "--episodes", "9"))
    assert {sentence[:9] for sentence in read} == {"fly past "}
    assert {sentence[:6] for sentence in found["instructions"]} == {"go to "}


def test_workers_play_what_one_process_plays_with_the_library(evaluate: Any, file: Path, tmp_path: Path) -> None:
    config = configs.load([file])
    policy = make_policy(config, Line(1, 12, Line.Options()).specification, torch.device("cpu"))
    policy.load_state_dict(checkpoint.load(tmp_path / "checkpoints" / "000003").policy)
    seeds = range(config.evaluation.seed, config.evaluation.seed + 40)
    expected = evaluation.evaluate(policy, Line(8, 12, Line.Options()), 2, seeds)
    found = json.loads(evaluate("--json"))
    assert found["successes"] == expected.success.astype(int).tolist()
    assert found["steps"] == expected.steps.mean() and found["return"] == pytest.approx(expected.returns.mean())
    assert found["success_at_end"] == expected.success_at_end.mean()
    assert set(found["instructions"]) == set(expected.instructions)


@pytest.mark.parametrize("kind", ["Line", "LineWhole"])
def test_slots_that_begin_together_or_alone_play_the_same(evaluate: Any, kind: str) -> None:
    slots = evaluate("--json", "--set", f"environment.name=fakes:{kind}", "--set", "simulators.slots=2")
    found, other = json.loads(slots), json.loads(evaluate("--json"))
    assert found["successes"] == other["successes"] and found["steps"] == other["steps"]


def test_several_tasks_share_the_seeds_by_their_weights(evaluate: Any) -> None:
    tasks = "environment.tasks={near: {weight: 3, options: {start: 0.3}}, far: {batches: 2, options: {start: 9.0}}}"
    flags = ("--json", "--sample", "--set", tasks, "--set", "simulators.count=1")
    found = json.loads(evaluate(*flags, "--set", "simulators.env_batches=3"))
    assert {task: figures["episodes"] for task, figures in found["tasks"].items()} == {"near": 30, "far": 10}
    assert found["tasks"]["near"]["success"] > 0 == found["tasks"]["far"]["success"]


def test_checkpoints_are_evaluated_one_after_the_other_with_the_same_noise_also_as_they_come(
    evaluate: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = save(tmp_path / "others", file, 7, seed=1)
    both = [json.loads(line) for line in evaluate("--json", "--sample", "--checkpoint", str(other)).splitlines()]
    assert [found["checkpoint"] for found in both] == [str(tmp_path / "checkpoints" / "best"), str(other)]
    assert both[0]["return"] != both[1]["return"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{other}\n{tmp_path / 'nothing'}\n{other}\n"))
    lines = evaluate("--json", "--sample", "--checkpoint", "-").splitlines()
    found = [json.loads(line) for line in lines]
    assert [item["checkpoint"] for item in found][1:] == [str(other), str(tmp_path / "nothing"), str(other)]
    assert found[1] == found[3] == both[1] and "no such folder" in found[2]["error"]


def test_what_classes_print_does_not_come_between_the_results(evaluate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    act = Linear.act

    def chatty(self: Linear, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        print("acting")
        os.write(1, b"acting\n")
        return act(self, observations, noise_keys)

    monkeypatch.setattr(Linear, "act", chatty)
    assert json.loads(evaluate("--json", "--episodes", "9"))["episodes"] == 9
    assert "acting" in evaluate("--episodes", "9"), "and afterwards stdout is what it was"


def test_an_evaluations_own_config_is_not_trained(evaluate: Any, tmp_path: Path, capfd: Any) -> None:
    found = evaluate("--json", "--episodes", "9")
    config = tmp_path / "runs" / "mini.eval" / "config.yaml"
    assert call(["run", str(config)]) == 2 and "held_out is set" in capfd.readouterr().err
    place = str(tmp_path / "checkpoints" / "best")
    assert call(["eval", str(config), "--checkpoint", place, "--json", "--inline"]) == 0
    assert capfd.readouterr().out == found, "but evaluated as before"


def test_weights_of_another_policy_are_refused_in_one_line(evaluate: Any, file: Path) -> None:
    shown = evaluate("--set", "policy.chunk=3", expected=2)
    assert "belong to another policy" in shown and "use that one's config" in shown


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_generator_and_four_give_the_same_numbers(evaluate: Any) -> None:
    flags = ("--json", "--sample", "--set", "simulators.env_batches=2")
    alone = evaluate(*flags)
    one, four = (evaluate(*flags, "--set", f"generators.count={n}", inline=False) for n in (1, 4))
    assert one == four == alone
    assert one == evaluate(*flags, "--beside", inline=False)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_seeds_at_which_the_environment_always_fails_end_the_evaluation_with_a_word(evaluate: Any) -> None:
    options = "environment.options={fault: raise, fault_seed: 10000003, fault_step: 1}"
    assert "failed three times" in evaluate("--set", options, expected=1, inline=False)


@pytest.fixture
def playing(file: Path, tmp_path: Path) -> Any:
    """Starts eval as a process, lets somebody meddle once a first segment is in, and returns what it printed."""

    def run(meddle: Callable[[Client, Keys], None]) -> str:
        flags = ["--json", "--checkpoint", str(tmp_path / "checkpoints" / "best"), "--set", "flow.lease_s=2"]
        flags += ["--set", "environment.options.step_s=0.05"]
        process = subprocess.Popen(
            [sys.executable, "-m", "vla_stream.cli.main", "eval", str(file), *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            keys, url = Keys("mini.eval"), tmp_path / "runs" / "mini.eval" / "redis.url"
            until(url.exists)
            client = connect(url.read_text().strip(), name="test")
            until(lambda: client.exists(keys.published))
            meddle(client, keys)
            client.close()
            shown, _ = process.communicate(timeout=100)
        finally:
            process.kill()
            process.communicate()
        assert process.returncode == 0
        return shown

    return run


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_workers_that_are_killed_change_no_number(evaluate: Any, playing: Any) -> None:
    def kill(client: Client, keys: Keys) -> None:
        for worker in presence.alive(client, keys):
            if worker.id in ("simulator-1", "generator-0"):
                os.kill(worker.pid, signal.SIGKILL)

    assert playing(kill) == evaluate("--json")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_evaluation_whose_server_loses_everything_begins_anew(evaluate: Any, playing: Any) -> None:
    assert playing(lambda client, _: client.flushall()) == evaluate("--json")
