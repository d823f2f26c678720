"""Readers that do not see the run's /dev/shm, and a /dev/shm that is full: real processes, real file systems (F28)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_run import Processes, Run, in_use

from vla_stream.broker.queue import WorkQueue
from vla_stream.streams.keys import GENERATORS
from workers.lane_choice import wait_for_segments

Command = Callable[[str], list[str]]

# A container for the poor: a process that sees a /dev/shm of its own. Whoever is not root needs user namespaces.
AS_ROOT = os.geteuid() == 0
UNSHARE = ["unshare", *([] if AS_ROOT else ["--user", "--map-root-user"]), "--mount", "sh", "-c"]
OWN_SHM = [*UNSHARE, 'mount -t tmpfs none /dev/shm && exec "$0" "$@"']


def can_unshare() -> bool:
    return subprocess.run([*OWN_SHM, "true"], capture_output=True, check=False).returncode == 0


def with_own_shm(role: str) -> list[str]:
    return [*OWN_SHM, sys.executable, "-m", f"workers.{role}"]


def with_another_root(role: str) -> list[str]:
    """The same for machines that forbid namespaces: a process that looks elsewhere for /dev/shm, where it is not."""
    root = "from pathlib import Path; from vla_stream.broker import lanes; lanes.SHM_ROOT = Path('/dev/none')"
    return [sys.executable, "-c", f"{root}; from workers.{role} import main; main()"]


@pytest.fixture
def apart() -> Command:
    """The command line of a worker that has no access to the run's /dev/shm."""
    return with_own_shm if can_unshare() else with_another_root


@pytest.fixture
def processes(run: Run) -> Iterator[Processes]:
    with contextlib.closing(Processes(run)) as made:
        yield made


def start(run: Run, **changes: object) -> None:
    """A run without end, whose observations are too large to go inline."""
    run.start(
        updates=100_000,
        environment={"name": "fakes:Line", "max_steps": 12, "options": {"step_s": 0.005}},
        **{"broker__inline_below_bytes": 0, "trainer__checkpoint_every": 5} | changes,
    )


def update(run: Run) -> int:
    state = run.flow.state()
    return 0 if state is None else state.update


def wait_for_updates(run: Run, processes: Processes, count: int) -> None:
    wanted = update(run) + count
    processes.wait_for(lambda: update(run) >= wanted, f"{count} more updates")


def blobs(run: Run) -> list[bytes]:
    return list(run.client.scan_iter(match=run.keys.blob("*")))


def lost(run: Run) -> dict[str, int]:
    books = run.flow.books()
    assert books.balance == 0
    return {name: count for name, count in books.outcomes.items() if count and name != "trained"}


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("apart", [with_own_shm, with_another_root])
def test_f28_a_generator_without_dev_shm_takes_a_live_run_over_by_the_redis_lane_and_no_segment_is_lost(
    run: Run, processes: Processes, apart: Command
) -> None:
    if apart is with_own_shm and not can_unshare():
        pytest.skip("this machine forbids namespaces")
    start(run)
    for role in ("trainer", "generator", "simulator"):
        processes.start(role)
    wait_for_updates(run, processes, 2)
    processes.wait_for(lambda: in_use(run.shm), "a segment in /dev/shm")
    assert blobs(run) == []
    remote = processes.start("generator", 1, apart)
    processes.wait_for(lambda: processes.states().get(remote) == "running", "the remote generator at work")
    at_home = processes.started["generator-0"]
    at_home.send_signal(signal.SIGTERM)
    assert at_home.wait(20) == 0
    wait_for_updates(run, processes, 3)
    processes.wait_for(lambda: not in_use(run.shm), "nothing in /dev/shm any more")
    processes.wait_for(lambda: blobs(run), "a segment in Redis")
    assert lost(run) == {}
    state = run.flow.state()
    assert state is not None and (state.lane, state.remote_reader) == ("auto", remote)
    (text,) = [text for kind, text in run.events() if kind == "lane"]
    assert text.startswith(f"observations travel through Redis from now on: {remote} on ")
    assert {"elsewhere", "aborted", "refused"}.isdisjoint(run.kinds()), "it was admitted after the change"


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_f28_a_trainer_without_dev_shm_trains_a_run_whose_other_workers_share_one(
    run: Run, processes: Processes, apart: Command
) -> None:
    start(run)
    remote = processes.start("trainer", 0, apart)
    for role in ("generator", "simulator"):
        processes.start(role)
    wait_for_updates(run, processes, 3)
    assert lost(run) == {} and in_use(run.shm) == [] and blobs(run)
    state = run.flow.state()
    assert state is not None and (state.lane, state.remote_reader) == ("auto", remote)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_f28_a_trainer_without_dev_shm_refuses_what_an_earlier_one_left_there_and_goes_on_by_the_redis_lane(
    run: Run, processes: Processes, apart: Command
) -> None:
    start(run)
    for role in ("trainer", "generator", "simulator"):
        processes.start(role)
    wait_for_updates(run, processes, 2)
    at_home = processes.started.pop("trainer-0")
    at_home.kill()
    at_home.wait()
    processes.wait_for(lambda: processes.states()["simulator-0"] == "waiting: full", "all permits in use")
    left = len(run.flow.live_members())
    processes.start("trainer", 0, apart)
    processes.wait_for(lambda: "refused" in lost(run), "a refusal")
    wait_for_updates(run, processes, 3)
    counted = lost(run)
    counted.pop("rolled_back", None)
    assert counted == {"refused": left} and blobs(run)


@pytest.mark.parametrize("role", ["simulator", "generator", "trainer"])
def test_f28_a_worker_without_dev_shm_is_refused_by_a_run_that_insists_on_it(
    run: Run, processes: Processes, apart: Command, role: str
) -> None:
    start(run, broker__lane="shm")
    worker_id = processes.start(role, 0, apart)
    assert processes.started[worker_id].wait(20) == 2
    last = processes.log(worker_id).read_text().splitlines()[-1]
    assert last.startswith(f"{worker_id}: lane of run {run.name}: shm, but ")
    assert last.endswith(f"change it with: vla-stream lane auto --run {run.name}")


class SmallShm:
    """A /dev/shm of 1 MiB that several processes share."""

    def __init__(self, run: Run) -> None:
        state = run.flow.state()
        assert state is not None
        folder = f'"/dev/shm/vla-stream-$(id -u)-{run.name}-{state.shm_token}"'
        script = f"mount -t tmpfs -o size=1m none /dev/shm && mkdir -m 700 {folder} && echo up && exec sleep 600"
        self.holder = subprocess.Popen([*UNSHARE, script], stdout=subprocess.PIPE, text=True)
        assert self.holder.stdout is not None and self.holder.stdout.readline() == "up\n"
        self.filler = Path(f"/proc/{self.holder.pid}/root/dev/shm/filler")

    def command(self, role: str) -> list[str]:
        enter = ["nsenter", *([] if AS_ROOT else ["--user", "--preserve-credentials"]), "--mount"]
        return [*enter, "--target", str(self.holder.pid), sys.executable, "-m", f"workers.{role}"]

    def fill(self) -> None:
        """Take what is free, as another program would."""
        with contextlib.suppress(OSError), self.filler.open("ab", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    def close(self) -> None:
        self.holder.kill()
        self.holder.communicate()


@pytest.fixture
def small_shm(run: Run) -> Iterator[SmallShm]:
    """For a run that insists on it."""
    if not can_unshare():
        pytest.skip("this machine forbids namespaces")
    start(run, broker__lane="shm")
    with contextlib.closing(SmallShm(run)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_f28_a_run_that_insists_on_a_full_dev_shm_waits_and_goes_on_when_there_is_room_or_another_lane(
    run: Run, processes: Processes, small_shm: SmallShm
) -> None:
    small_shm.fill()
    for role in ("trainer", "generator", "simulator"):
        processes.start(role, 0, small_shm.command)
    processes.wait_for(
        lambda: processes.states().get("simulator-0") == "waiting: /dev/shm is full", "the simulator's state"
    )
    (text,) = [text for kind, text in run.events() if kind == "lane"]
    assert text.startswith("simulator-0 waits: /dev/shm is full; make room there, or: vla-stream lane redis")
    stuck = run.flow.books()
    until_s = time.monotonic() + 1.0
    processes.wait_for(lambda: time.monotonic() > until_s, "nothing begins")
    assert run.flow.books() == stuck and stuck.in_flight == 0
    small_shm.filler.unlink()
    wait_for_updates(run, processes, 3)
    assert blobs(run) == []
    small_shm.fill()
    run.flow.set_lane("redis", by="a person")
    wait_for_updates(run, processes, 3)
    assert blobs(run)
    # Those that were begun before their size was known, and those that were being made when it became full.
    counted = lost(run)
    assert counted.pop("aborted", 0) <= 6 and counted == {}


# ---- step by step


def test_a_reader_that_does_not_see_dev_shm_says_so_whenever_lane_auto_would_mean_it(run: Run) -> None:
    run.start()
    simulator, generator = run.worker("simulator"), run.worker("generator")
    run.shm.rmdir()

    def told(worker: object) -> str:
        for one in (simulator, generator):
            if one is worker:
                one.look_again()
                one.beat()
        state = run.flow.state()
        assert state is not None
        return state.remote_reader

    assert told(simulator) == "" and told(generator) == "generator-0"
    run.flow.set_lane("redis", by="a person")
    assert told(generator) == ""
    run.flow.set_lane("auto", by="a person")
    assert told(generator) == "generator-0"
    run.shm.mkdir()
    run.flow.set_lane("auto", by="a person")
    assert told(generator) == told(simulator) == told(generator) == told(simulator) == ""
    shown = {worker.keys.worker(worker.id): worker for worker in (simulator, generator)}
    assert [run.client.hget(key, "shm") for key in shown] == [b"yes", b"yes"]


def test_a_generator_waits_for_segments_that_it_cannot_read_as_long_as_another_one_serves_them(run: Run) -> None:
    run.start()
    run.allow()
    granted = run.flow.grant(2, 60.0)
    assert isinstance(granted, list)
    members = {permit.member for permit in granted}
    worker = run.worker("generator", 1)

    def queue(consumer: str) -> WorkQueue:
        made = WorkQueue(run.client, run.flow.scripts, run.keys.obs_requests, GENERATORS, consumer, 60.0)
        made.ensure_group()
        return made

    mine, other = queue("generator-1"), queue("generator-0")
    started_s = time.monotonic()
    wait_for_segments(worker, mine, members, 30.0)
    assert time.monotonic() - started_s < 5, "nobody else is there"
    run.client.xadd(run.keys.obs_requests, {"a": "b"})
    other.read(1)
    thread = threading.Thread(target=wait_for_segments, args=(worker, mine, members, 30.0))
    thread.start()
    for ended in granted:
        thread.join(0.3)
        assert thread.is_alive() and worker.state.endswith("segments are finished in another /dev/shm")
        run.flow.abort([ended.member])
    thread.join(10)
    assert not thread.is_alive()
