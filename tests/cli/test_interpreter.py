"""`simulators.python`: simulators run in another interpreter than all else, and whoever needs one asks there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from other_interpreter import ENVIRONMENT, make_interpreter

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


@pytest.fixture
def command(tmp_path: Path) -> Any:
    """(exit code, stdout, stderr) of a command in a folder with mini.yaml and the interpreter that it names."""
    make_interpreter(tmp_path)
    (tmp_path / "mini.yaml").write_text(CONFIG.replace("ENVIRONMENT", ENVIRONMENT))
    environment = {name: value for name, value in os.environ.items() if name not in ("VLA_STREAM_REDIS", "PYTHONPATH")}

    def call(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "vla_stream.cli.main", *arguments],
            cwd=tmp_path,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return call


@pytest.mark.timeout(180)
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


def test_inline_says_that_it_needs_both_in_one_environment(command: Any, tmp_path: Path) -> None:
    code, _, errors = command("run", "mini.yaml", "--inline")
    assert code == 2
    assert errors == (
        "Error: --inline: simulators.python is 'there/python', but one process has one interpreter; "
        "leave out --inline, or install policy and simulator together and add --set simulators.python=null\n"
    )
    assert not (tmp_path / "runs").exists()


def test_a_run_with_a_wrong_path_leaves_no_trace(command: Any, tmp_path: Path) -> None:
    code, _, errors = command("run", "mini.yaml", "--set", "simulators.python=there/pyhton")
    assert code == 2
    assert errors.startswith("Error: simulators.python is 'there/pyhton': No such file or directory; give one with")
    assert errors.count("\n") == 1 and not (tmp_path / "runs").exists()
