"""tools/deploy/slurm.sh, with stand-ins for what Slurm has: all of its nodes are this one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from own_server import DEPLOY, free_port

STAND_INS = {
    "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then printf "127.0.0.1\\n127.0.0.1\\n"; else echo "$@" >>scontrol.log; fi',
}
CONFIG = {
    "updates": 4,
    "environment": {"name": "tabletop", "max_steps": 8},
    "policy": {"name": "tiny", "chunk": 4},
    "simulators": {"slots": 2, "envs_per_slot": 2, "segment": {"steps": 2}},
    "generators": {"max_batch_size": 4},
    "trainer": {"segments_per_update": 2, "epochs": 1, "critic_warmup_updates": 0},
    "evaluation": {"episodes": 0},
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """The job, as its first node would start it."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_SUBMIT_DIR": str(folder),
        "REDIS_PORT": str(free_port()),
        "VLA_STREAM": str(Path(sys.executable).with_name("vla-stream")),
        "SIMULATORS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with (folder / "slurm.log").open("ab") as log:
        return subprocess.Popen(
            ["bash", str(DEPLOY / "slurm.sh"), "mine", "config.yaml", *options],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables},
        )


def wait_for(folder: Path, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline_s, (folder / "slurm.log").read_text()
        time.sleep(0.1)


def test_a_job_that_runs_out_of_time_drains_queues_again_and_goes_on_to_its_end(tmp_path: Path) -> None:
    log, metrics = tmp_path / "slurm.log", tmp_path / "runs/mine/metrics.jsonl"
    job = start(tmp_path, "--set", "updates=100000")
    wait_for(tmp_path, lambda: metrics.exists() and '"update": 2' in metrics.read_text())
    job.send_signal(signal.SIGINT)  # as --signal=B:INT does
    job.wait(120)
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n", log.read_text()
    reached = max(int(path.name) for path in (tmp_path / "runs/mine/checkpoints").iterdir() if path.name.isdigit())
    assert reached >= 2
    assert start(tmp_path, "--set", f"updates={reached + 3}").wait(300) == 0, log.read_text()
    assert f"{reached + 3:06d}" in {path.name for path in (tmp_path / "runs/mine/checkpoints").iterdir()}
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"


def test_a_config_that_does_not_hold_ends_the_job_with_its_line(tmp_path: Path) -> None:
    job = start(tmp_path, "--set", "trainer.segments_per_update=0")
    assert job.wait(200) == 2
    assert "trainer.segments_per_update" in (tmp_path / "slurm.log").read_text()
    assert not (tmp_path / "scontrol.log").exists()
