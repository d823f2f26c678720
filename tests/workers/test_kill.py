"""kill -9 of any worker: the run goes on, ends with all its updates, and its books balance."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_run import Run, in_use

from vla_stream import tasks
from vla_stream.config import Config
from workers import history
from workers.supervisor import Notice, Supervisor

DEADLINE_S = 50.0
LEASE_S = 2.0
BUSY_MS = 4000  # on a busy machine nobody asks for some time

pytestmark = pytest.mark.timeout(120)


class Whole:
    """A whole run in processes under a supervisor."""

    def __init__(self, run: Run, updates: int = 12, **changes: object) -> None:
        self.run = run
        self.config: Config = run.start(
            updates=updates,
            environment={"name": "fakes:LinePairs", "max_steps": 12, "options": {"step_s": 0.005}},
            simulators={"count": 2, "slots": 2, "envs_per_slot": 2, "segment": {"steps": 3}},
            trainer__segments_per_update=4,
            trainer__checkpoint_every=3,
            flow__lease_s=LEASE_S,
            **changes,
        )
        self.supervisor = Supervisor(run.url, run.name, run.folder, lease_s=LEASE_S, shm=run.shm)
        self.told: list[Notice] = []
        for role, count in (("trainer", 1), ("generator", 1), ("simulator", self.config.simulators.count)):
            self.supervisor.launch(role, count)

    def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, (self.run.flow.state(), self.told, self.logs())
            self.told += self.supervisor.step()
            time.sleep(0.02)

    def update(self) -> int:
        state = self.run.flow.state()
        return 0 if state is None else state.update

    def segments(self) -> int:
        """Published so far, of whatever became of them."""
        stream: Any = self.run.client.xinfo_stream(self.run.keys.trajectories)
        return int(stream["entries-added"])

    def kill(self, worker_id: str) -> None:
        process = self.supervisor.children[worker_id].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)

    def finish(self) -> None:
        self.until(lambda: "trainer-0" in self.supervisor.finished)
        assert self.supervisor.finished["trainer-0"] == 0 and not self.supervisor.failures
        self.supervisor.close()
        books = self.run.flow.books()
        assert self.update() == self.config.updates
        assert books.outcomes["trained"] == self.config.updates * self.config.trainer.segments_per_update
        assert books.balance == 0 and books.given_up == 0
        newest = f"{self.config.updates:06d}"
        assert (self.config.run_dir / "checkpoints" / newest).is_dir()

    def letters(self) -> list[dict[bytes, bytes]]:
        entries: Any = self.run.client.xrange(self.run.keys.dead_letters)
        return [fields for _, fields in entries]

    def kinds(self) -> list[str]:
        return [notice.kind for notice in self.told]

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in sorted((self.config.run_dir / "logs").glob("*.log")))


@pytest.fixture
def whole(run: Run) -> Iterator[Callable[..., Whole]]:
    with contextlib.ExitStack() as stack:

        def build(**changes: object) -> Whole:
            made = Whole(run, **changes)  # type: ignore[arg-type]
            stack.callback(made.supervisor.close)
            return made

        yield build


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("role", ["simulator", "generator", "trainer"])
def test_a_killed_worker_is_restarted_and_the_run_ends_with_all_its_updates(
    whole: Callable[..., Whole], role: str
) -> None:
    bench = whole()
    bench.until(lambda: bench.update() >= 4)
    bench.kill(f"{role}-0")
    bench.until(lambda: "restarted" in bench.kinds())
    bench.finish()
    assert bench.kinds().count("crashed") == 1 and "killed by SIGKILL" in str(bench.told)
    outcomes = bench.run.flow.books().outcomes
    if role == "trainer":
        # Updates after the checkpoint of update 3 are repeated.
        assert outcomes["rolled_back"] > 0 and outcomes["rolled_back"] % 4 == 0
    else:
        assert outcomes["rolled_back"] == 0


def test_a_slow_task_has_its_part_of_the_trained_segments_though_its_simulator_is_killed(
    whole: Callable[..., Whole],
) -> None:
    slow, quick = ({"weight": weight, "options": {"step_s": step_s}} for weight, step_s in ((1, 0.03), (3, 0.006)))
    bench = whole(updates=15, environment__tasks={"slow": slow, "quick": quick})
    assert [tasks.of_batches(bench.config, name) for name in ("simulator-0", "simulator-1")] == [["slow"], ["quick"]]
    bench.until(lambda: bench.update() >= 4)
    bench.kill("simulator-0")
    bench.finish()
    trained = history.trained_tickets(bench.config.run_dir, 15)
    parts = Counter(tasks.task_of(bench.config.environment, ticket) for ticket in trained)
    assert len(trained) == 60 and abs(parts["slow"] - 15) <= 2, parts  # 2 of the 8 under way are the slow task's
    figures = [record for record in samples_of(bench.run) if record[b"kind"] == b"update"]
    assert sum(float(record[b"segments.slow"]) for record in figures) == parts["slow"]
    assert 0 <= float(figures[-1][b"success.slow"]) <= 1 and 0 <= float(figures[-1][b"success.quick"]) <= 1


def samples_of(run: Run) -> list[dict[bytes, bytes]]:
    entries: Any = run.client.xrange(run.keys.metrics)
    return [fields for _, fields in entries]


def test_the_tickets_of_a_killed_simulator_are_given_out_again_within_two_leases(whole: Callable[..., Whole]) -> None:
    bench = whole(updates=400)
    permits = bench.run.keys.permits
    bench.until(lambda: bench.update() >= 2 and len(bench.run.flow.permits()) == 4)
    bench.kill("simulator-0")
    killed_ms = bench.run.client.time()[0] * 1000
    held = dict(bench.run.client.zrange(permits, 0, -1, withscores=True))
    # By the server's clock: when they run out, whoever asks for a permit next is given them.
    assert max(held.values()) < killed_ms + 1000 + LEASE_S * 1000
    bench.until(lambda: not set(held) & set(bench.run.client.zrange(permits, 0, -1)))
    assert bench.run.client.time()[0] * 1000 < killed_ms + 2000 * LEASE_S + BUSY_MS
    outcomes = bench.run.flow.books().outcomes
    assert outcomes["expired"] > 0 and bench.run.flow.books().balance == 0
    bench.until(lambda: bench.run.client.zcard(bench.run.keys.refunded) == 0)


def test_f41_a_killed_environment_process_costs_its_own_segments_only(whole: Callable[..., Whole]) -> None:
    bench = whole()
    bench.until(lambda: bench.update() >= 4)
    process = bench.supervisor.children["simulator-0"].process
    assert process is not None
    os.kill(children_of(process.pid)[0], signal.SIGKILL)
    bench.finish()
    assert "crashed" not in bench.kinds()
    assert "process ended with signal SIGKILL" in str(bench.run.events())


def test_f40_a_run_whose_environment_hangs_in_step_50_of_one_child_goes_on_within_its_deadline_and_two_seconds(
    whole: Callable[..., Whole], tmp_path: Path
) -> None:
    deadline_s = 1.5
    hang = tmp_path / "hang"
    hang.touch()
    # Its goal is too far away for an episode to end before its 64th step.
    options = {"step_s": 0.002, "fault": "hang", "fault_once": str(hang), "fault_step": 50, "start": 40.0}
    bench = whole(
        updates=10_000,
        environment__max_steps=64,
        environment__options=options,
        simulators__count=1,
        simulators__step_deadline_s=deadline_s,
    )
    bench.until(lambda: not hang.exists())
    hung_s, before = time.monotonic(), bench.segments()
    assert bench.run.flow.books().outcomes["aborted"] == 0
    bench.until(lambda: bench.segments() > before)
    assert deadline_s - 0.5 < time.monotonic() - hung_s < deadline_s + 2.0
    # The two rows that hung cost their own slot's segment, and that slot works again.
    bench.until(lambda: bench.segments() > before + 12)
    books = bench.run.flow.books()
    assert books.outcomes["aborted"] == 1 and books.balance == 0
    assert "a step took longer than simulators.step_deadline_s, 1.5 s" in str(bench.run.events())
    assert "crashed" not in bench.kinds()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("end", ["exit", pytest.param("segfault", marks=pytest.mark.slow)])
def test_f16_an_observation_that_ends_every_generator_is_a_dead_letter_before_the_role_has_failed(
    whole: Callable[..., Whole], tmp_path: Path, end: str
) -> None:
    poison = tmp_path / "poison"
    bench = whole(
        environment__options={"step_s": 0.005, "fault": "poison", "fault_once": str(poison)},
        policy__options={"poison": end},
    )
    bench.until(lambda: bench.update() >= 2)
    poison.touch()
    for times in range(1, 5):
        bench.until(lambda: bench.kinds().count("crashed") >= times)  # noqa: B023
    # Its slot is told and gives its segment up; the other requests that were in the batch each time are served.
    bench.until(lambda: bench.run.flow.books().outcomes["aborted"])
    assert bench.run.flow.books().outcomes["aborted"] == 1
    bench.finish()
    assert bench.kinds().count("crashed") == 4
    (letter,) = bench.letters()
    assert letter[b"stream"].endswith(b":obs-requests") and letter[b"deliveries"] == b"5"
    assert not list(bench.run.client.scan_iter(match=bench.run.keys.trial("*").replace("[", "\\[")))


def test_f49_files_of_a_killed_simulator_in_dev_shm_are_swept(whole: Callable[..., Whole]) -> None:
    bench = whole(updates=400, broker__inline_below_bytes=100)
    bench.until(lambda: bench.update() >= 2)
    bench.kill("simulator-0")
    bench.until(lambda: "restarted" in bench.kinds())
    live = bench.run.flow.live_members()
    at_death = set(in_use(bench.run.shm))
    assert at_death
    bench.until(lambda: not any((bench.run.shm / name).exists() for name in at_death))
    assert live != bench.run.flow.live_members() and bench.run.flow.books().balance == 0
