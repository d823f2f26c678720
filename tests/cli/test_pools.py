"""Attached workers: they come under free names, and go with Ctrl-C, with their run, or with an error."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vla_stream.broker.connection import Client
from vla_stream.cli.main import call
from vla_stream.config import validate
from vla_stream.flow import Flow
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys
from workers.supervisor import Supervisor

UNTIL_TOLD = """
import signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
print("up", flush=True)
while not signals: time.sleep(0.01)
"""
DEADLINE_S = 20.0


@pytest.fixture
def flow(client: Client, run_name: str) -> Flow:
    config = {
        "name": run_name,
        "environment": {"name": "tabletop", "max_steps": 8},
        "policy": {"name": "tiny", "chunk": 4},
        "trainer": {"segments_per_update": 4},
    }
    made = Flow(client, Keys(run_name))
    assert made.create(validate(config))
    return made


@pytest.fixture
def arguments(flow: Flow, redis_url: str, tmp_path: Path) -> list[str]:
    return ["--run", flow.keys.run, "--redis", redis_url, "--runs", str(tmp_path)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make all workers run a script."""

    def use(script: str) -> None:
        command = [sys.executable, "-S", "-E", "-c", script]
        defaults = Supervisor.__init__.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "command", lambda *_: command)

    return use


@contextlib.contextmanager
def meanwhile(condition: Callable[[], bool], act: Callable[[], None]) -> Iterator[None]:
    """Do `act` in a thread as soon as `condition` holds; it must come to that."""
    done = threading.Event()

    def wait() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        done.set()
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def up(folder: Path, *workers: str) -> Callable[[], bool]:
    def all_up() -> bool:
        logs = [folder / "logs" / f"{worker}.log" for worker in workers]
        return all(log.exists() and log.read_text() == "up\n" for log in logs)

    return all_up


def test_ctrl_c_drains_these_workers_and_leaves_the_run_alone(
    flow: Flow, arguments: list[str], fake: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(UNTIL_TOLD)
    ready = up(tmp_path / flow.keys.run, "simulator-0", "simulator-1")
    with meanwhile(ready, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert call(["simulators", *arguments, "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert f"attached simulator-0, simulator-1 to run {flow.keys.run}" in shown
    assert "draining: segments in flight are finished" in shown
    state = flow.state()
    assert state is not None and state.desired == "running"
    assert presence.alive(flow.client, flow.keys) == []


def test_they_end_well_when_their_run_ends(
    flow: Flow, arguments: list[str], fake: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(UNTIL_TOLD)
    ready = up(tmp_path / flow.keys.run, "generator-0")
    with meanwhile(ready, lambda: flow.set_desired("stopped", by="test")):
        assert call(["generators", *arguments]) == 0
    assert f"run {flow.keys.run} is stopped; its workers end" in capsys.readouterr().out


def test_a_worker_that_cannot_run_here_ends_the_pool_with_its_reason(
    flow: Flow, arguments: list[str], fake: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fake("import sys; print('simulator-0: mujoco is missing, install it'); sys.exit(2)")
    assert call(["simulators", *arguments]) == 2
    assert "Error: simulator: mujoco is missing, install it" in capsys.readouterr().err


def test_a_second_trainer_is_refused(
    flow: Flow, arguments: list[str], client: Client, capsys: pytest.CaptureFixture[str]
) -> None:
    client.hset(flow.keys.worker("trainer-0"), mapping={"token": "x", "role": "trainer", "host": "node7", "pid": 5})
    assert call(["trainers", *arguments]) == 2
    assert "has its trainer already, trainer-0 on node7 with pid 5" in capsys.readouterr().err


def test_trainers_are_as_many_ranks_as_asked_for_of_one_trainer(
    flow: Flow, arguments: list[str], fake: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(f"{UNTIL_TOLD}\nimport os; print(os.environ['VLA_STREAM_RANKS'])")
    ready = up(tmp_path / flow.keys.run, "trainer-0")
    with meanwhile(ready, lambda: os.kill(os.getpid(), signal.SIGINT)):
        assert call(["trainers", *arguments, "-n", "2", "--device", "cpu,cpu"]) == 0
    assert f"attached trainer-0 of 2 ranks to run {flow.keys.run}" in capsys.readouterr().out
    assert (tmp_path / flow.keys.run / "logs" / "trainer-0.log").read_text() == "up\n2\n"
    assert not (tmp_path / flow.keys.run / "logs" / "trainer-1.log").exists()


def test_a_number_of_ranks_that_does_not_divide_the_segments_of_an_update_is_refused(
    flow: Flow, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["trainers", *arguments, "-n", "3"]) == 2
    told = capsys.readouterr().err
    assert "trainers -n 3: trainer.ranks is 3 but trainer.segments_per_update is 4" in told
    assert presence.alive(flow.client, flow.keys) == []
