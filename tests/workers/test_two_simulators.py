"""A live run to which another simulator is attached, by `vla-stream simulators --environment FILE`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fakes import Line
from live_run import Processes, Run

from vla_stream.cli.main import call
from vla_stream.config import Environment
from vla_stream.streams import presence
from workers.simulator import ENVIRONMENT_VARIABLE, own_environment

TWIN = """
environment:
  name: gymnasium
  max_steps: 20
  options: {id: "fake_gymnasium:Twin-v0", images: {front: eye}}
"""


def attach(run: Run, folder: Path, text: str = TWIN) -> list[str]:
    """The arguments."""
    (folder / "other.yaml").write_text(text)
    where = ["--run", run.name, "--redis", run.url, "--runs", str(folder), "--allow", "fake_gymnasium"]
    return ["simulators", *where, "--environment", str(folder / "other.yaml")]


def update(run: Run) -> int:
    state = run.flow.state()
    return 0 if state is None else state.update


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_trains_on_two_different_simulators_and_goes_on_with_the_other_alone(run: Run, tmp_path: Path) -> None:
    run.start(updates=10**6)
    with contextlib.closing(Processes(run)) as processes:
        processes.DEADLINE_S = 150.0  # five processes start one after the other
        for role in ("trainer", "generator", "simulator"):
            processes.start(role)
        processes.wait_for(lambda: update(run) >= 2, "updates with the run's own simulator")
        pool = subprocess.Popen(
            [sys.executable, "-m", "vla_stream.cli.main", *attach(run, tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            processes.wait_for(lambda: processes.states().get("simulator-1") == "running", "the other simulator")
            told = [sentence for kind, sentence in run.events() if kind == "environment"]
            assert told == ["simulator-1 simulates gymnasium, named when it was attached"]
            own = processes.started.pop("simulator-0")
            own.kill()
            own.wait()
            # Twice the segments that can be outstanding, (1 + η)·B: the later ones are all of the other simulator.
            before = update(run)
            processes.wait_for(lambda: update(run) >= before + 4, "updates with the other simulator alone")
            pool.send_signal(signal.SIGINT)
            assert pool.wait(100) == 0
        finally:
            pool.kill()
            pool.communicate()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("policy: {name: tiny}", "other.yaml: has no section environment, expected the simulator to attach; add it"),
        (TWIN.replace("front:", "left:"), "gymnasium has other shapes than run "),
        (TWIN.replace("20", "21"), "policy.chunk is 2 but environment.max_steps is 21; make max_steps a multiple of 2"),
        (TWIN.replace("Twin-v0", "Twin-v7"), "environment.options.id is fake_gymnasium:Twin-v7: "),
        (
            TWIN + "  tasks: {a: {}}\n",
            "environment.tasks has the weights {'a': 1}, but in this run they are none; list",
        ),
    ],
    ids=["no environment", "shapes", "chunk", "id", "tasks"],
)
def test_another_simulator_that_does_not_fit_is_one_line_and_no_worker_starts(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, told: str
) -> None:
    run.start()
    run.flow.announce(Line(1, 12, Line.Options()).specification)
    assert call(attach(run, tmp_path, text)) == 2
    shown = capsys.readouterr().err
    assert told in shown and shown.count("\n") == 1
    assert presence.alive(run.client, run.keys) == []


def test_a_simulator_takes_the_environment_that_it_was_attached_with(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config, worker = run.start(), run.worker("simulator")
    assert own_environment(worker, config) == config and run.events() == []
    other = Environment(name="gymnasium", max_steps=20, options={"id": "fake_gymnasium:Twin-v0"})
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, other.model_dump_json())
    assert own_environment(worker, config) == config.model_copy(update={"environment": other})
    assert run.events() == [("environment", "simulator-0 simulates gymnasium, named when it was attached")]
