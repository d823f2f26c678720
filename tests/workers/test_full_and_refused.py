"""Servers that turn on their workers in mid-run: permission or password withdrawn, memory full, replies cut off.

Each test has a server of its own, whose settings it changes; workers are processes with a user of their own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live_run import Processes, Run
from own_server import own_server

from vla_stream.broker.connection import Client, connect
from vla_stream.environments.protocol import Specification
from workers.worker import WAITING_FOR_MEMORY, Worker

SPECIFICATION = Specification({"front": (16, 16)}, 3, 2)  # of fakes:Line


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with own_server(tmp_path_factory.mktemp("own")) as made:
        yield made


@pytest.fixture
def admin(port: int) -> Iterator[Client]:
    with contextlib.closing(connect(f"redis://127.0.0.1:{port}/0", name="admin")) as made:
        made.execute_command("ACL", "SETUSER", "worker", "reset", "on", ">word", "~*", "+@all")
        yield made


@pytest.fixture
def own_run(port: int, admin: Client, run_name: str, tmp_path: Path) -> Iterator[Run]:
    with contextlib.closing(Run(f"redis://worker:word@127.0.0.1:{port}/0", run_name, tmp_path, admin)) as made:
        yield made


@pytest.fixture
def processes(own_run: Run) -> Iterator[Processes]:
    made = Processes(own_run)
    yield made
    made.close()


def withdraw(*rules: str) -> Callable[[Client], None]:
    return lambda admin: admin.execute_command("ACL", "SETUSER", "worker", *rules)


def change_password(admin: Client) -> None:
    admin.execute_command("ACL", "SETUSER", "worker", "resetpass", ">other")
    admin.execute_command("CLIENT", "KILL", "USER", "worker")


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("role", "change", "said"),
    [
        ("simulator", withdraw("-xread"), "its ACL refuses this user: "),
        ("simulator", withdraw("-hmget"), "its ACL refuses this user: "),  # inside a script
        ("simulator", withdraw("resetkeys", "~vla:*:worker:*"), "its ACL refuses this user: "),
        ("simulator", change_password, "wrong user name or password"),
        ("generator", withdraw("-xreadgroup"), "its ACL refuses this user: "),
        ("trainer", withdraw("-xreadgroup"), "its ACL refuses this user: "),
    ],
    ids=["simulator-thread", "simulator-script", "simulator-keys", "simulator-password", "generator", "trainer"],
)
def test_f33_a_permission_that_is_withdrawn_ends_a_worker_with_one_line(
    own_run: Run, processes: Processes, admin: Client, role: str, change: Callable[[Client], None], said: str
) -> None:
    own_run.start()
    if role != "simulator":
        own_run.flow.announce(SPECIFICATION)
    worker_id = processes.start(role)
    ready = ("running", "waiting: no weights")
    processes.wait_for(lambda: processes.states().get(worker_id) in ready, f"{worker_id} at work")
    before = processes.log(worker_id).read_text()
    change(admin)
    assert processes.started[worker_id].wait(20) == 2
    lines = processes.log(worker_id).read_text()[len(before) :].splitlines()
    # A connection that was cut is mentioned, before the password is found to be wrong.
    assert [line for line in lines if not line.endswith("; waiting for it")] == lines[-1:]
    assert lines[-1].startswith(f"{worker_id}: Redis at redis://127.0.0.1:") and said in lines[-1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("lane", ["inline", "redis"])
def test_f23_a_full_server_is_waited_for_visibly_drained_and_the_run_goes_on_when_there_is_room_again(
    own_run: Run, processes: Processes, admin: Client, lane: str
) -> None:
    own_run.start(updates=1000, trainer__checkpoint_every=1000, broker={"lane": lane, "inline_below_bytes": 0})

    def update() -> int:
        state = own_run.flow.state()
        return 0 if state is None else state.update

    for role in ("trainer", "generator", "simulator"):
        processes.start(role)
    processes.wait_for(lambda: update() >= 2, "two updates")
    admin.config_set("maxmemory", 1)
    try:
        processes.wait_for(lambda: processes.states()["simulator-0"] == WAITING_FOR_MEMORY, "the simulator's state")
        events = [text for kind, text in own_run.events() if kind == "memory" and "simulator-0 waits" in text]
        assert len(events) == 1
        assert "its memory is full (maxmemory under noeviction)" in events[0] and "raise maxmemory there" in events[0]
        processes.wait_for(lambda: admin.xlen(own_run.keys.obs_requests) == 0, "requests drained")
        processes.wait_for(lambda: admin.xlen(own_run.keys.trajectories) < 2, "segments drained")
        # Longer than the longest wait between two tries: whoever crashes of it has crashed by then.
        stuck, until_s = update(), time.monotonic() + 3.0
        while time.monotonic() < until_s:
            processes.wait_for(lambda: True, "nobody crashed")
            time.sleep(0.05)
        assert update() <= stuck + 1
        assert set(processes.states()) == {"trainer-0", "generator-0", "simulator-0"}
    finally:
        admin.config_set("maxmemory", 0)
    full = update()
    processes.wait_for(lambda: update() >= full + 2, "updates after memory was freed")
    processes.wait_for(lambda: WAITING_FOR_MEMORY not in processes.states().values(), "the state of work again")
    assert own_run.flow.books().balance == 0
    assert not any("Traceback" in processes.log(name).read_text() for name in processes.started)


def test_f25_a_reply_that_the_server_cuts_off_is_named_by_an_event(own_run: Run, admin: Client) -> None:
    own_run.start()
    worker: Worker = own_run.worker("generator")
    stream = own_run.keys.obs_requests
    with admin.pipeline(transaction=False) as pipe:
        for _ in range(2048):
            pipe.xadd(stream, {"data": bytes(4096)})
        pipe.execute()
    admin.config_set("client-output-buffer-limit", "normal 65536 0 0")
    got: list[int | None] = []
    thread = threading.Thread(target=lambda: got.append(worker.patiently(lambda: len(worker.client.xrange(stream)))))
    try:
        thread.start()
        deadline_s = time.monotonic() + 20
        while "redis" not in own_run.kinds():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        [text] = [text for kind, text in own_run.events() if kind == "redis"]
        assert "closes the connection at the same request again and again" in text
        assert 'CONFIG SET client-output-buffer-limit "normal 0 0 0"' in text
    finally:
        admin.config_set("client-output-buffer-limit", "normal 0 0 0")
        thread.join(20)
    # Once the limit is gone, the same wait ends with the reply.
    assert got == [2048]
