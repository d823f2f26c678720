"""Environments of another interpreter: played as if they were here; one line for an interpreter that will not do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from live_run import Run
from other_interpreter import ENVIRONMENT, make_interpreter

from vla_stream.config import Config
from vla_stream.environments.protocol import EnvironmentBatch, Expert, Grounding
from vla_stream.errors import EnvironmentFailed, InputError
from workers import environment_apart

ROWS = 3
SEEDS = np.arange(4, 4 + ROWS, dtype=np.uint64)
EVERYONE = np.ones(ROWS, dtype=bool)


def config_with(run: Run, python: Path | None, **environment: Any) -> Config:
    described = {"name": ENVIRONMENT, "max_steps": 12, "options": {}, **environment}
    return run.config(environment=described, simulators__python=None if python is None else str(python))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    return make_interpreter(tmp_path)


@pytest.fixture
def batch(run: Run, python: Path) -> Iterator[EnvironmentBatch]:
    made = environment_apart.make_batch(config_with(run, python), ROWS)
    yield made
    made.close()


def test_it_plays_what_the_environment_would_play_here(batch: EnvironmentBatch) -> None:
    here = fakes.Line(ROWS, 12, fakes.Line.Options())
    assert (batch.rows, batch.max_steps, batch.specification) == (ROWS, 12, here.specification)
    seen, expected = batch.reset(EVERYONE, SEEDS), here.reset(EVERYONE, SEEDS)
    np.testing.assert_array_equal(seen.images["front"], expected.images["front"])
    assert list(seen.instruction) == list(expected.instruction)
    assert seen.state.flags.writeable and seen.images["front"].flags.writeable  # torch takes no others
    running, ended = EVERYONE.copy(), 0
    for _ in range(12):
        actions = np.ones((ROWS, fakes.A), dtype=np.float32)
        result, wanted = batch.step(actions, running), here.step(actions, running)
        for name in ("reward", "terminated", "truncated", "success"):
            np.testing.assert_array_equal(getattr(result, name), getattr(wanted, name))
        np.testing.assert_array_equal(result.observations.state, wanted.observations.state)
        np.testing.assert_array_equal(result.observations.images["front"], wanted.observations.images["front"])
        running &= ~(result.terminated | result.truncated)
        ended += int((~running).sum())
        if not running.any():
            break
    assert ended and not running.any()


def test_images_are_asked_for_when_they_are_read_and_not_later(batch: EnvironmentBatch) -> None:
    batch.reset(EVERYONE, SEEDS)
    actions = np.ones((ROWS, fakes.A), dtype=np.float32)
    old = batch.step(actions, EVERYONE).observations
    new = batch.step(actions, EVERYONE).observations
    assert new.images["front"].shape == (ROWS, 16, 16, 3) and list(new.images) == ["front"]
    with pytest.raises(EnvironmentFailed, match="read after the next step or reset"):
        old.images["front"]
    batch.reset(EVERYONE, SEEDS)
    assert new.images["front"].shape == (ROWS, 16, 16, 3)  # was read in time


def test_its_class_has_the_name_and_the_optional_methods_of_the_one_there(batch: EnvironmentBatch) -> None:
    assert type(batch).__name__ == "Apart"
    assert isinstance(batch, Expert) and not isinstance(batch, Grounding)
    batch.reset(EVERYONE, SEEDS)
    np.testing.assert_array_equal(batch.expert_actions(), np.ones((ROWS, fakes.A), dtype=np.float32))


def test_what_it_raises_and_its_death_are_told(run: Run, python: Path) -> None:
    for fault, told in (("raise", "ValueError: the line broke"), ("kill", "signal SIGKILL"), ("nan", "NaN")):
        config = config_with(run, python, options={"fault": fault, "fault_seed": 4, "fault_step": 1})
        batch = environment_apart.make_batch(config, ROWS)
        batch.reset(EVERYONE, SEEDS)
        with pytest.raises(EnvironmentFailed, match=told):
            batch.step(np.ones((ROWS, fakes.A), dtype=np.float32), EVERYONE)
        batch.close()


def test_what_the_class_there_refuses_is_told_without_making_it(run: Run, python: Path) -> None:
    with pytest.raises(InputError, match="no entry in the attic, expected one"):
        environment_apart.ask(config_with(run, python, options={"missing": True}))
    with pytest.raises(InputError, match=r"environment\.options: .*fautl.*fault"):
        environment_apart.ask(config_with(run, python, options={"fautl": ""}))
    with pytest.raises(InputError, match=r"only_there:Bare: lacks rows_per_process.*environments/protocol\.py"):
        environment_apart.ask(config_with(run, python, name="only_there:Bare"))
    with pytest.raises(InputError, match="only_there:Aprat: cannot be imported"):
        environment_apart.ask(config_with(run, python, name="only_there:Aprat"))


def test_the_conformance_suite_runs_there(run: Run, python: Path) -> None:
    about = environment_apart.ask(config_with(run, python), "try")
    assert about.reports[""].problems == {} and about.offers == ("expert_actions",)
    report = environment_apart.ask(
        config_with(run, python, options={"fault": "shape", "fault_seed": 1}), "try"
    ).reports[""]
    assert "state is float32[3, 2]" in report.problems["shapes"]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (None, "No such file or directory; give one with vla-stream"),
        ("exit 0", "it said nothing and ended with code 0"),
        (f"exec {sys.executable} -I -S $*", "No module named .workers"),
        ("echo '{}'", "cannot run vla-stream there"),
        ('echo \'{"version": "0.0.1"}\'', r"has vla-stream 0\.0\.1, expected 0\.1\.0"),
        ("sleep 30", r"no answer within 0\.3 s; raise simulators\.start_deadline_s"),
    ],
    ids=["missing", "no python", "without vla-stream", "another program", "another version", "silent"],
)
def test_an_interpreter_that_will_not_do_is_one_line(run: Run, tmp_path: Path, script: str | None, told: str) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
        python.chmod(0o755)
    limit_s = 0.3 if script == "sleep 30" else 60.0
    config = run.config(simulators__python=str(python), simulators__start_deadline_s=limit_s)
    with pytest.raises(InputError, match=told) as refused:
        environment_apart.ask(config)
    assert str(refused.value).startswith(f"simulators.python is {str(python)!r}: ")
    assert "\n" not in str(refused.value)


def test_a_file_that_may_not_be_executed_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    with pytest.raises(InputError, match=r"python': Permission denied; give one"):
        environment_apart.ask(config_with(run, tmp_path / "python"))
