"""`simulators.python`, `policy.python`: roles that run in another interpreter, and whoever needs one asks there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from other_interpreter import ENVIRONMENT, POLICY, make_interpreter

CONFIG = """
updates: 2
environment: {name: "ENVIRONMENT", max_steps: 8, options: {start: 0.3}}
policy: {name: tiny, chunk: 4}
simulators: {python: there/python, count: 1, slots: 2, envs_per_slot: 2, segment: {steps: 2}}
generators: {count: 1, max_batch_size: 4}
trainer: {segments_per_update: 4, epochs: 1, checkpoint_every: 1}
pretrain: {episodes: 2, steps: 2}
evaluation: {episodes: 3}
"""


POLICY_CONFIG = f"""
environment: {{name: "fakes:Line", max_steps: 8, options: {{start: 0.3}}}}
policy: {{name: "{POLICY}", python: there/python, chunk: 4}}
simulators: {{python: null}}
pretrain: null
trainer: {{record_every: 1}}
"""


pytestmark = pytest.mark.timeout(400)  # each command imports torch, some of them in several processes


@pytest.fixture
def command(tmp_path: Path) -> Any:
    """(exit code, stdout, stderr) of a command in a folder with mini.yaml, policy.yaml and the interpreter that they
    name."""
    make_interpreter(tmp_path)
    (tmp_path / "mini.yaml").write_text(CONFIG.replace("ENVIRONMENT", ENVIRONMENT))
    (tmp_path / "policy.yaml").write_text(POLICY_CONFIG)
    environment = {name: value for name, value in os.environ.items() if name not in ("VLA_STREAM_REDIS", "PYTHONPATH")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])  # the modules that both interpreters have

    def call(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "vla_stream.cli.main", *arguments],
            cwd=tmp_path,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return call


def test_a_run_whose_environment_is_only_there_trains_demonstrates_and_evaluates(
    command: Any, tmp_path: Path, run_name: str
) -> None:
    code, shown, errors = command("run", "mini.yaml", "--run", run_name)
    assert code == 0, shown + errors
    folder = tmp_path / "runs" / run_name
    assert "Warning" not in "".join(log.read_text() for log in (folder / "logs").iterdir())
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["updates"], summary["before"]["episodes"], summary["after"]["episodes"]) == (2, 3, 3)
    assert "2 demonstrations, 2 of them successful" in shown
    assert "Traceback" not in shown + "".join(log.read_text() for log in (folder / "logs").iterdir())


def test_check_tries_it_out_there(command: Any) -> None:
    code, shown, errors = command("check", "mini.yaml")
    assert code == 0, errors
    assert f"environment {ENVIRONMENT}: keeps the protocol\n" in shown and "noise on stdout" not in shown


def test_a_run_whose_policy_is_only_there_trains_and_is_evaluated_and_replayed_there(
    command: Any, tmp_path: Path, run_name: str
) -> None:
    code, shown, errors = command("run", "mini.yaml", "policy.yaml", "--run", run_name)
    assert code == 0, shown + errors
    folder = tmp_path / "runs" / run_name
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["updates"], summary["before"]["episodes"], summary["after"]["episodes"]) == (2, 3, 3)
    assert "Traceback" not in shown + "".join(log.read_text() for log in (folder / "logs").iterdir())
    code, shown, errors = command("replay", run_name, "2")
    assert code == 0, shown + errors
    assert shown.endswith("bit for bit the same\n")
    # Both there, each in a process of its own, which the policy's class asks for.
    both = ("--set", f"environment.name={ENVIRONMENT}", "--set", "simulators.python=there/python")
    code, shown, errors = command("eval", "mini.yaml", "policy.yaml", *both, "--checkpoint", str(folder))
    assert code == 0, shown + errors
    assert "/3 = " in shown


def test_check_tries_a_policy_out_there(command: Any) -> None:
    code, shown, errors = command("check", "mini.yaml", "policy.yaml")
    assert code == 0, errors
    assert f"policy {POLICY}: keeps the protocol\n" in shown and "noise on stdout" not in shown
    broken = ("--set", "policy.name=policy_only_there:Detached")
    code, _, errors = command("check", "mini.yaml", "policy.yaml", *broken)
    assert code == 2
    assert "policy policy_only_there:Detached: gradients: " in errors and "gets no gradient" in errors


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("policy.python=there/pyhton", "policy.python is 'there/pyhton': No such file or directory; give one with"),
        ("policy.options={chekpoint: a}", "policy.options: unknown key chekpoint; did you mean checkpoint?"),
        ("policy.name=policy_only_there:Aprat", "policy_only_there:Aprat: cannot be imported"),
    ],
)
def test_what_is_wrong_with_a_policy_there_is_one_line_before_anything_starts(
    command: Any, tmp_path: Path, setting: str, told: str
) -> None:
    code, _, errors = command("run", "mini.yaml", "policy.yaml", "--set", setting)
    assert code == 2
    assert errors.startswith(f"Error: {told}") and errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_inline_says_that_it_needs_both_in_one_environment(command: Any, tmp_path: Path) -> None:
    code, _, errors = command("run", "mini.yaml", "--inline")
    assert code == 2
    assert errors == (
        "Error: --inline: simulators.python is 'there/python', but one process has one interpreter; "
        "leave out --inline, or install policy and simulator together and add --set simulators.python=null\n"
    )
    code, _, errors = command("run", "mini.yaml", "policy.yaml", "--inline")
    assert code == 2
    assert errors.startswith("Error: --inline: policy.python is 'there/python', but one process has one interpreter; ")
    assert not (tmp_path / "runs").exists()


def test_a_run_with_a_wrong_path_leaves_no_trace(command: Any, tmp_path: Path) -> None:
    code, _, errors = command("run", "mini.yaml", "--set", "simulators.python=there/pyhton")
    assert code == 2
    assert errors.startswith("Error: simulators.python is 'there/pyhton': No such file or directory; give one with")
    assert errors.count("\n") == 1 and not (tmp_path / "runs").exists()
