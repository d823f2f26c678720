"""Many tasks of each simulator: two episodes of every one go through a run of all roles, as one update.

What the trainer got is looked at, by the update's record: each task's episodes, its sentence, its images, its steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from simulator_interpreters import interpreter

from vla_stream import tasks
from vla_stream.config import load
from vla_stream.environments import maniskill, metaworld
from workers import records

STEPS, CHUNK, EPISODES = 6, 2, 2

ONE_CAMERA = ("PushCube", "PullCube", "PlaceSphere", "LiftPegUpright", "PokeCube", "RollBall", "PullCubeTool")
TWO_CAMERAS = ("StackCube", "StackPyramid", "PegInsertionSide")
SUITES = {
    "libero_spatial": "pick up the black bowl between the plate and the ramekin and place it on the plate",
    "libero_object": "pick up the alphabet soup and place it in the basket",
    "libero_goal": "open the middle drawer of the cabinet",
}
META_WORLD = ("reach-v3", "push-v3", "door-open-v3", "hammer-v3", "window-close-v3")


def play(folder: Path, environment: str, options: Mapping[str, Mapping[str, Any]], python: Path | None) -> list[str]:
    """A run of one update with two episodes of each task, whose options these are; the tasks' sentences."""
    listed: dict[str, Any] = {f"task{number}": {"options": dict(own)} for number, own in enumerate(options.values())}
    config = {
        "environment": {"name": environment, "max_steps": STEPS, "tasks": listed},
        "policy": {"name": "tiny", "chunk": CHUNK, "options": {"words": 24}},
        "simulators": {
            "python": str(python) if python else None,
            "count": 1,
            "env_batches": len(listed),
            "slots": 1,
            "envs_per_slot": 1,
            "segment": "episode",
            "step_deadline_s": 300,
            "start_deadline_s": 600,
        },
        "trainer": {"segments_per_update": EPISODES * len(listed), "record_every": 1, "epochs": 1},
        "flow": {"max_staleness": 0, "reply_deadline_s": 300, "lease_s": 300},
        "evaluation": {"episodes": 0},
        "updates": 1,
    }
    (folder / "many.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-m", "vla_stream.cli.main", "run", "many.yaml", "--run", "many", "--plain"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    place = folder / "runs" / "many"
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    (books,) = [line for line in lines if line["kind"] == "books"]
    assert books["balance"] == 0 and books["aborted"] == 0 and books["trained"] == EPISODES * len(listed)
    record = records.read(place / records.RECORDS, 1)
    section = load([folder / "many.yaml"]).environment
    sentences: dict[str, list[str]] = {}
    for segment in record.segments:
        last = int(np.flatnonzero(segment.valid[:, 0])[-1])
        assert (segment.terminated | segment.truncated)[last, 0]  # a whole episode
        assert segment.executed[:last].all() and segment.executed[last].any()
        seen = [*segment.observations[: last + 1]]
        assert all(image.std() > 1 for moment in seen for image in moment.images.values())
        assert set(record.specification.cameras) == set(seen[0].images)
        told = {moment.instruction[0] for moment in seen}
        sentences.setdefault(tasks.task_of(section, segment.ticket), []).extend(told)
    assert {name: len(found) for name, found in sentences.items()} == dict.fromkeys(listed, EPISODES)
    return [sentences[name][0] for name in listed if len(set(sentences[name])) == 1]


@pytest.mark.slow
@pytest.mark.maniskill
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("names", [ONE_CAMERA, TWO_CAMERAS], ids=["one camera", "two cameras"])
def test_two_episodes_of_each_of_ten_maniskill_tasks(tmp_path: Path, names: Sequence[str]) -> None:
    options = {name: {"task": f"{name}-v1", "camera_size": 32} for name in names}
    told = play(tmp_path, "maniskill", options, None)
    assert told == [maniskill.TASKS[f"{name}-v1"].instruction for name in names]


@pytest.mark.slow
@pytest.mark.libero
@pytest.mark.timeout(1500)
def test_two_episodes_of_a_task_of_each_of_three_libero_suites(tmp_path: Path) -> None:
    options = {suite: {"suite": suite, "tasks": [0], "camera_size": 32, "settle_steps": 0} for suite in SUITES}
    assert play(tmp_path, "libero", options, interpreter("libero")) == list(SUITES.values())


@pytest.mark.slow
@pytest.mark.metaworld
@pytest.mark.timeout(1500)
def test_two_episodes_of_each_of_five_metaworld_tasks(tmp_path: Path) -> None:
    options = {task: {"tasks": [task], "camera_size": 32} for task in META_WORLD}
    assert play(tmp_path, "metaworld", options, interpreter("metaworld")) == [
        metaworld.TASKS[task] for task in META_WORLD
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["Pendulum-v1", "CartPole-v1", "MountainCarContinuous-v0"])
def test_two_episodes_of_each_of_three_gymnasium_ids(tmp_path: Path, name: str) -> None:
    assert play(tmp_path, "gymnasium", {name: {"id": name}}, None) == [name]
