"""A trainer of two ranks as processes: rank 0 takes, commits and publishes, and what happens to one happens to all."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from live_run import Run, in_use
from toy import Toy, make_segment

from vla_stream.config import Config
from vla_stream.errors import InputError
from vla_stream.learning.update import Learner
from vla_stream.streams import presence
from workers import history, ranks
from workers.supervisor import Notice, Supervisor
from workers.trainer import Trainer

DEADLINE_S = 250.0
B = 4

pytestmark = pytest.mark.timeout(900)


class Whole:
    """A whole run in processes, of which `count` are ranks of its trainer."""

    def __init__(self, run: Run, count: int, **changes: object) -> None:
        self.run = run
        self.config: Config = run.start(
            **{
                "updates": 30,
                "environment": {"name": "fakes:LinePairs", "max_steps": 12, "options": {"step_s": 0.005}},
                "trainer__segments_per_update": B,
                "trainer__checkpoint_every": 3,
                "trainer__ranks": count,
                "trainer__rank_deadline_s": 60.0,
                "flow__lease_s": 6.0,
                **changes,
            }
        )
        self.supervisor = Supervisor(run.url, run.name, run.folder, lease_s=6.0, shm=run.shm)
        self.told: list[Notice] = []
        for role, number in (("trainer", count), ("generator", 1), ("simulator", 1)):
            self.supervisor.launch(role, number)

    def until(self, condition: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, (self.run.flow.state(), self.told, self.logs())
            self.told += self.supervisor.step()
            time.sleep(0.02)

    def update(self) -> int:
        state = self.run.flow.state()
        return 0 if state is None else state.update

    def rank(self, number: int) -> int:
        """Its pid, as people see it."""
        return next(item.pid for item in self.ranks() if item.id == f"trainer-{number}")

    def ranks(self) -> list[presence.Presence]:
        return [item for item in presence.alive(self.run.client, self.run.keys) if item.role == "trainer"]

    def train_on(self, count: int) -> None:
        """Two updates by so many ranks; then these are asked to leave."""
        reached = self.update()
        self.until(lambda: self.update() >= reached + 2 and len(self.ranks()) == count)
        trainer = self.supervisor.children["trainer-0"].process
        assert trainer is not None
        trainer.send_signal(signal.SIGTERM)
        self.until(lambda: "trainer-0" not in self.supervisor.children)

    def finish(self) -> None:
        self.until(lambda: "trainer-0" in self.supervisor.finished)
        assert self.supervisor.finished["trainer-0"] == 0 and not self.supervisor.failures, (self.told, self.logs())
        self.supervisor.close()
        books = self.run.flow.books()
        assert self.update() == self.config.updates and books.balance == 0
        assert books.outcomes["trained"] == self.config.updates * B
        tickets = history.trained_tickets(self.config.run_dir, self.config.updates)
        assert len(tickets) == len(set(tickets)) == self.config.updates * B
        assert self.ranks() == [] and in_use(self.run.shm) == []

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in sorted((self.config.run_dir / "logs").glob("*.log")))


@pytest.fixture
def whole(run: Run) -> Iterator[Callable[..., Whole]]:
    with contextlib.ExitStack() as stack:

        def build(count: int = 2, **changes: object) -> Whole:
            made = Whole(run, count, **changes)
            stack.callback(made.supervisor.close)
            return made

        yield build


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


STREAMING = {"trainer__update": "streaming"}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"trainer__parallel": "fsdp", **STREAMING}], ids=["ddp", "fsdp, streaming"])
def test_a_whole_run_of_two_ranks_ends_with_all_its_updates_and_its_books_balance(
    whole: Callable[..., Whole], changes: dict[str, object]
) -> None:
    bench = whole(**changes)
    bench.until(lambda: len(bench.ranks()) == 2 and bench.update() >= 1)
    pids = [bench.rank(number) for number in (0, 1)]
    assert len(set(pids)) == 2
    bench.finish()
    assert all(map(gone, pids))
    assert bench.run.kinds().count("started") == 3, "rank 1 is no worker of its own"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_kill_9_of_any_rank_starts_all_of_them_from_the_newest_checkpoint(
    whole: Callable[..., Whole], number: int
) -> None:
    bench = whole(trainer__checkpoint_every=1000)
    bench.until(lambda: bench.update() >= 4 and len(bench.ranks()) == 2)
    before = [bench.rank(0), bench.rank(1)]
    os.kill(bench.rank(number), signal.SIGKILL)
    bench.until(lambda: "restarted" in [notice.kind for notice in bench.told])
    bench.until(lambda: all(map(gone, before)))
    bench.finish()
    assert bench.run.flow.books().outcomes["rolled_back"] > 0, (
        "all updates since the only checkpoint, of update 0, are repeated"
    )
    crashed = [notice.text for notice in bench.told if notice.kind == "crashed"]
    assert len(crashed) == 1 and "killed by SIGKILL" in crashed[0]
    assert number == 0 or "rank trainer-1 has ended" in crashed[0]


@pytest.mark.slow
def test_a_rank_that_is_frozen_counts_as_hung_after_its_deadline(whole: Callable[..., Whole]) -> None:
    bench = whole(trainer__rank_deadline_s=20.0)  # it is in force while ranks start, too
    bench.until(lambda: bench.update() >= 4 and len(bench.ranks()) == 2)
    frozen = bench.rank(1)
    os.kill(frozen, signal.SIGSTOP)
    bench.until(lambda: gone(frozen))
    bench.finish()
    assert "a rank took longer than trainer.rank_deadline_s, 20 s" in str(bench.told)


@pytest.mark.slow
def test_f48_a_run_goes_on_with_another_number_of_ranks(whole: Callable[..., Whole]) -> None:
    bench = whole(updates=10_000)
    bench.train_on(2)
    for count in (1, 4):
        assert bench.supervisor.launch("trainer", count) == ["trainer-0"]
        bench.train_on(count)
    bench.supervisor.close()
    books = bench.run.flow.books()
    assert books.outcomes["rolled_back"] == 0 and books.balance == 0


def test_whatever_a_trainer_asks_of_its_learner_it_may_ask_of_several_ranks() -> None:
    for name, method in inspect.getmembers(Learner, inspect.isfunction):
        if not name.startswith("_"):
            theirs = inspect.signature(getattr(ranks.Leader, name)).parameters
            assert list(theirs) == list(inspect.signature(method).parameters), name
    trainer = inspect.getsource(sys.modules[Trainer.__module__])
    asked = set(re.findall(r"self\.learner\.(\w+)", trainer))
    leader = inspect.getsource(ranks.Leader)
    assert {name for name in asked if f"def {name}(" not in leader and f"self.{name}" not in leader} == set()


def test_a_segment_arrives_as_it_was_sent() -> None:
    sent = make_segment(Toy(), ticket=7, version=3)
    got = ranks.put_together(ranks.take_apart(sent))
    assert got.ticket == 7 and len(got.observations) == len(sent.observations)
    for name in ("actions", "logprobs", "executed", "valid", "rewards", "terminated", "truncated", "success"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))
    np.testing.assert_array_equal(got.final_index, sent.final_index)
    assert got.final is not None and sent.final is not None
    for mine, theirs in zip((*got.observations, got.final), (*sent.observations, sent.final), strict=True):
        np.testing.assert_array_equal(mine.state, theirs.state)
        assert list(mine.instruction) == list(theirs.instruction)


def test_ranks_have_devices_of_their_own() -> None:
    assert ranks.rank_devices("cpu", 3) == ["cpu", "cpu", "cpu"]
    assert ranks.rank_devices("cuda:4,cuda:6", 2) == ["cuda:4", "cuda:6"]
    with pytest.raises(InputError, match="names 2 devices; name one for each"):
        ranks.rank_devices("cuda:4,cuda:6", 4)
