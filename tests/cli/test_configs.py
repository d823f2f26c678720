"""The configs in configs/: all of them are valid, and what no other test runs is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from vla_stream.cli.check import check

CONFIGS = Path(__file__).parents[2] / "configs"


def checked(*paths: Path, overrides: tuple[str, ...] = ()) -> str:
    """What `vla-stream check` says about a valid config."""
    arguments = [*map(str, paths), *(part for override in overrides for part in ("--set", override))]
    done = CliRunner().invoke(check, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_is_valid(path: Path) -> None:
    assert checked(path).endswith("the config is valid\n")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_gymnasium_environment_runs_through_all_roles(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vla_stream.cli.main", "run", str(CONFIGS / "gymnasium.yaml"), "--run", "gym"]
    command += ["--updates", "2", "--set", "evaluation.episodes=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "runs" / "gym" / "metrics.jsonl").read_text().splitlines()]
    assert [record["update"] for record in records if record["kind"] == "update"] == [1, 2]
    (books,) = [record for record in records if record["kind"] == "books"]
    assert books["balance"] == 0 and books["trained"] == 16
