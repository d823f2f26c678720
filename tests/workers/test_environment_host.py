"""Environments in child processes: the same results as in this one, and whatever happens to a child is survived."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_run import Run, sockets_of

from vla_stream.config import Config
from vla_stream.environments.protocol import Observations
from vla_stream.errors import InputError, RunFailed
from workers import packets
from workers.environment_host import Host, LocalHost, Outcome, ProcessHost
from workers.processes import RestartBudget

ROWS, H = 4, 2
ALL = np.ones(ROWS, dtype=bool)
SEEDS = np.array([21, 22, 23, 24], dtype=np.uint64)
DEADLINE_S = 20.0

Make = Callable[..., ProcessHost]


@pytest.fixture
def make(run: Run) -> Iterator[Make]:
    made: list[ProcessHost] = []

    def build(name: str = "fakes:LineApart", **options: object) -> ProcessHost:
        made.append(ProcessHost(line_config(run, name, **options), ROWS))
        return made[-1]

    yield build
    for host in made:
        host.close()


def line_config(run: Run, name: str, **options: object) -> Config:
    deadlines: dict[str, Any] = {f"simulators__{key}": options.pop(key) for key in list(options) if "deadline" in key}
    return run.config(environment={"name": name, "max_steps": 6, "options": options}, **deadlines)


def finish(host: Host) -> Outcome:
    deadline_s = time.monotonic() + DEADLINE_S
    while (outcome := host.poll()) is None:
        assert time.monotonic() < deadline_s
        wait(host.waitables(), timeout=0.2)
    return outcome


def stop(child: int) -> None:
    """Until it stands still: one that is told to stop goes on sending for as long as somebody takes what it sends."""
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED)


def reset(host: Host, mask: np.ndarray = ALL) -> Outcome:
    host.start_reset(mask, SEEDS)
    return finish(host)


def chunk(host: Host, active: np.ndarray = ALL, resets: np.ndarray = ALL) -> Outcome:
    actions = np.ones((ROWS, H, 2), dtype=np.float32) * np.array([1, 0.5, -1, 1], dtype=np.float32)[:, None, None]
    host.start_chunk(actions, active, resets, SEEDS + np.uint64(100))
    return finish(host)


def assert_same(ours: Observations | None, theirs: Observations | None, rows: np.ndarray | None = None) -> None:
    if ours is None or theirs is None:
        assert ours is None and theirs is None
        return
    rows = np.arange(len(ours)) if rows is None else np.flatnonzero(rows)
    ours, theirs = ours.take(rows), theirs.take(rows)
    assert np.array_equal(ours.state, theirs.state)
    assert np.array_equal(ours.images["front"], theirs.images["front"])
    assert list(ours.instruction) == list(theirs.instruction)


@pytest.mark.parametrize("name", ["fakes:Line", "fakes:LineApart"])
def test_child_processes_give_what_the_same_environment_gives_here(run: Run, make: Make, name: str) -> None:
    there, here = make(name), LocalHost(line_config(run, "fakes:Line"), ROWS)
    assert there.specification == here.specification
    assert_same(reset(there).observations, reset(here).observations)
    ends = 0
    some = np.array([True, False, True, True])
    for active in (ALL, some, ALL, ALL, ALL, ALL):
        theirs, ours = chunk(there, active), chunk(here, active)
        assert not theirs.failed.any() and theirs.causes == ()
        assert theirs.chunk is not None and ours.chunk is not None
        assert_same(theirs.observations, ours.observations, active)
        for field in ("executed", "rewards", "terminated", "truncated", "success"):
            assert np.array_equal(getattr(theirs.chunk, field), getattr(ours.chunk, field)), field
        # Rows that end in different steps may come in another order.
        order, expected = np.argsort(theirs.chunk.final_rows), np.argsort(ours.chunk.final_rows)
        assert theirs.chunk.final_rows[order].tolist() == ours.chunk.final_rows[expected].tolist()
        if theirs.chunk.final is not None and ours.chunk.final is not None:
            assert_same(theirs.chunk.final.take(order), ours.chunk.final.take(expected))
            ends += len(order)
    assert ends >= 2


def test_images_are_rendered_once_for_all_slots_also_in_this_process(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Rendered(UserDict[str, np.ndarray]):
        def __getitem__(self, camera: str) -> np.ndarray:
            reads.append(camera)
            return self.data[camera]

    def lazy(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = method(*arguments)
            seen = result if isinstance(result, Observations) else result.observations
            seen = dataclasses.replace(seen, images=Rendered(seen.images))
            return seen if isinstance(result, Observations) else dataclasses.replace(result, observations=seen)

        return call

    reads: list[str] = []
    here = LocalHost(line_config(run, "fakes:Line"), ROWS)
    for name in ("reset", "step"):
        monkeypatch.setattr(here._batch, name, lazy(getattr(here._batch, name)))
    for outcome in (reset(here), chunk(here)):
        for row in range(ROWS):
            outcome.observations.part(slice(row, row + 1))
    assert reads == ["front"] * 2


def test_rows_whose_process_was_not_asked_hold_zeros(make: Make) -> None:
    host = make()
    reset(host)
    result = chunk(host, np.array([False, True, False, True]), ~ALL)
    assert result.chunk is not None
    assert result.observations.state[[0, 2]].tolist() == [[0.0] * 3] * 2
    assert result.chunk.executed.any(axis=1).tolist() == [False, True, False, True]
    # They were left alone: their next chunk starts from where the reset put them.
    assert chunk(host, resets=~ALL).observations.state[[0, 2], 2].tolist() == pytest.approx([2 / 6, 2 / 6])


def test_f05_environment_processes_share_no_socket_with_the_simulator(make: Make, run: Run) -> None:
    assert run.client.ping()
    host = make()
    ours = sockets_of(os.getpid())
    assert len(ours) > ROWS, "one to Redis, and one to each child"
    assert not any(ours & sockets_of(child.pid) for child in host._children)


def test_f40_an_environment_that_hangs_is_replaced_in_time_and_fails_its_own_rows_only(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    host = make("fakes:LinePairs", fault="hang", fault_seed=22, fault_step=3, step_deadline_s=0.5)
    pids = [child.pid for child in host._children]
    reset(host)
    assert not chunk(host).failed.any()
    started_s = time.monotonic()
    outcome = chunk(host)
    assert time.monotonic() - started_s < 0.5 + 2.0
    assert outcome.failed.tolist() == [True, True, False, False]
    assert outcome.chunk is not None and outcome.chunk.executed.any(axis=1).tolist() == [False, False, True, True]
    (cause,) = outcome.causes
    assert "rows 0 to 1" in cause and "simulators.step_deadline_s, 0.5 s" in cause and "hangs" in cause
    assert "in step" in capfd.readouterr().err, "the traceback of the hang belongs into the log"
    assert [child.pid == pid for child, pid in zip(host._children, pids, strict=True)] == [False, True]
    # Its replacement works.
    again = reset(host, outcome.failed)
    assert not again.failed.any() and again.observations.state[1, 2] == 0.0
    assert not chunk(host, ~outcome.failed).failed.any()


@pytest.mark.parametrize("when", ["before it reads", "while it sends"])
def test_f40_a_process_that_is_stopped_holds_nobody_up_for_longer_than_one_that_hangs(
    make: Make, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No alarm ends it then, and what it reads and sends is more than a socket holds."""
    monkeypatch.setattr(packets, "MOST_ROOMS", 0)
    deadline_s = 0.4
    host = make("fakes:LinePairs", image_size=512, step_deadline_s=deadline_s, start_deadline_s=60.0)
    reset(host)
    assert not chunk(host).failed.any()
    stopped = host._children[0].pid
    if when == "before it reads":
        stop(stopped)
    started_s = time.monotonic()
    host.start_chunk(np.zeros((ROWS, 100_000, 2), dtype=np.float32), ALL, ~ALL, SEEDS)
    if when == "while it sends":
        # The chunk ends with the episode. As long as nobody reads, what is there to be read is not all of the answer.
        assert wait(host.waitables()[:1], timeout=DEADLINE_S)
        started_s = time.monotonic()
        stop(stopped)
    outcome = finish(host)
    assert time.monotonic() - started_s < deadline_s + 2.0
    assert outcome.failed.tolist() == [True, True, False, False]
    assert "no sign of life for 0.4 s" in outcome.causes[0] and "rows 0 to 1" in outcome.causes[0]
    assert not running(stopped)
    assert not reset(host, outcome.failed).failed.any()


CAUSES = {
    "raise": "ValueError: the line broke",
    "nan": "EnvironmentFailed: state holds NaN",
    "shape": "EnvironmentFailed: state is float32[2, 2], expected float32[2, 3]",
    "dtype": "EnvironmentFailed: state is float64[2, 3], expected float32[2, 3]",
    "image": "EnvironmentFailed: image front is float32[2, 8, 16, 3], expected uint8[2, 16, 16, 3]",
    "kill": "process ended with signal SIGKILL",
    "exit": "process ended with exit code 7",
}


@pytest.mark.parametrize("fault", CAUSES)
def test_f41_a_failing_environment_is_replaced_and_the_outcome_says_why(make: Make, fault: str) -> None:
    # Images are looked at once per chunk, after its last step.
    host = make("fakes:LinePairs", fault=fault, fault_seed=23, fault_step=H)
    reset(host)
    outcome = chunk(host)
    assert outcome.failed.tolist() == [False, False, True, True]
    assert len(outcome.causes) == 1 and CAUSES[fault] in outcome.causes[0]
    assert not reset(host, outcome.failed).failed.any()
    alive = chunk(host, ~outcome.failed)
    assert not alive.failed.any() and alive.causes == ()


def test_f41_a_failing_reset_is_survived_too(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    host = make("fakes:Line", fault="raise", fault_seed=21, fault_step=0)
    outcome = reset(host)
    assert outcome.failed.all() and outcome.chunk is None and "the line broke" in outcome.causes[0]
    assert "Traceback" in capfd.readouterr().err
    host.start_reset(ALL, SEEDS + np.uint64(50))
    assert not finish(host).failed.any()


def test_f42_environments_that_crash_in_a_loop_end_the_simulator(make: Make) -> None:
    host = make("fakes:Line", fault="exit", fault_seed=21, fault_step=0)
    with pytest.raises(RunFailed, match="fail again and again, last: process ended with exit code 7"):
        for _ in range(20):
            assert reset(host).failed.all()


def test_f42_restarts_come_back_with_time() -> None:
    budget = RestartBudget(at_once=2, per_minute=4)
    times = {0.0: True, 1.0: True, 2.0: False, 29.0: False, 30.5: True, 31.5: True, 32.0: False}
    assert {now_s: budget.take(now_s) for now_s in times} == times


def test_bad_options_are_a_bad_input_in_one_line(make: Make) -> None:
    with pytest.raises(InputError, match=r"^environment.options: unknown key faultt; did you mean .*fault"):
        make(faultt="x")


def test_an_environment_that_cannot_be_made_says_why(make: Make) -> None:
    with pytest.raises(Exception, match="RuntimeError: no such line"):
        make("fakes:Line", refuse=True)


def test_f49_children_die_with_their_parent(run: Run, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from vla_stream.config import Config\n"
        "from workers.environment_host import ProcessHost\n"
        "if __name__ == '__main__':\n"
        "    host = ProcessHost(Config.model_validate_json(sys.argv[1]), 2)\n"
        "    print(*[child.pid for child in host._children], flush=True)\n"
        "    time.sleep(60)\n"
    )
    config = line_config(run, "fakes:LineApart").model_dump_json()
    with subprocess.Popen([sys.executable, str(script), config], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
    deadline_s = time.monotonic() + DEADLINE_S
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
