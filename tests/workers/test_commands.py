"""What a whole run says to Redis, seen by MONITOR. The server is a cluster of one node: it refuses what larger ones do.

The run goes through once; each test looks at all that was said.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_run import Run
from own_server import free_port, own_server, tls_server

from vla_stream.broker.connection import Client, ResponseError, connect
from vla_stream.streams.keys import Keys
from workers.supervisor import Notice, Supervisor

TESTS = Path(__file__).parents[1]
DEADLINE_S = 150.0
UPDATES = 8
SLOTS = 2
LAST_WORD = "that was all"

pytestmark = pytest.mark.timeout(200)


@dataclass(frozen=True)
class Said:
    """The commands, in words, of a run that has ended; and what its supervisor told."""

    keys: Keys
    commands: list[list[str]]
    told: list[Notice]
    client: Client

    def of(self, *names: str) -> list[list[str]]:
        return [words for words in self.commands if words[0] in names]


class Listener(threading.Thread):
    """MONITOR, until the last word."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.client = connect(url, name="monitor", block_s=DEADLINE_S)
        self.commands: list[list[str]] = []
        self.listening, self.complete = threading.Event(), threading.Event()
        self.start()

    def run(self) -> None:
        monitor: Any = self.client.monitor()
        with monitor:
            self.listening.set()
            for heard in monitor.listen():
                words = heard["command"].split(" ")
                if words == ["ECHO", *LAST_WORD.split()]:
                    return self.complete.set()
                self.commands.append([words[0].upper(), *words[1:]])


def drive(run: Run) -> list[Notice]:
    """A whole run in processes of its own, with observations by way of Redis."""
    run.start(
        updates=UPDATES,
        environment={"name": "fakes:LinePairs", "max_steps": 12, "options": {}},
        simulators={"count": 2, "slots": SLOTS, "envs_per_slot": 2, "segment": {"steps": 3}},
        trainer__checkpoint_every=3,
        broker={"lane": "redis", "inline_below_bytes": 0},
        flow__lease_s=0.5,
    )
    environment = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    supervisor = Supervisor(run.url, run.name, run.folder, lease_s=0.5, environment=environment)
    told: list[Notice] = []
    with contextlib.closing(supervisor):
        deadline_s = time.monotonic() + DEADLINE_S
        supervisor.launch("trainer", 1)
        supervisor.launch("simulator", 2)
        # All updates may else be made of what one simulator sends before the other has begun.
        while run.client.xlen(run.keys.obs_requests) < 2 * SLOTS:
            assert time.monotonic() < deadline_s, (told, run.events())
            told += supervisor.step()
            time.sleep(0.02)
        supervisor.launch("generator", 2)
        while "trainer-0" not in supervisor.finished:
            assert time.monotonic() < deadline_s, (told, run.events())
            told += supervisor.step()
            time.sleep(0.02)
    return told


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    folder = tmp_path_factory.mktemp("cluster")
    with own_server(folder, ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]) as port:
        url = f"redis://127.0.0.1:{port}/0"
        with contextlib.closing(connect(url, name="test")) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            deadline_s = time.monotonic() + 20
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            listener = Listener(url)
            assert listener.listening.wait(10)
            with contextlib.closing(Run(url, f"test-{secrets.token_hex(6)}", folder, client)) as run:
                told = drive(run)
                client.echo(LAST_WORD)
                assert listener.complete.wait(20)
                listener.client.close()
                yield Said(run.keys, listener.commands, told, client)


def test_f32_a_whole_run_goes_through_on_a_cluster(said: Said) -> None:
    with pytest.raises(ResponseError, match=r"CROSSSLOT|don't hash to the same slot"):
        said.client.mget("vla:{a}:flow", "vla:{b}:flow")
    assert said.client.hget(said.keys.flow, "update") == b"%d" % UPDATES
    assert {notice.kind for notice in said.told} <= {"ended"}, said.told


def test_f32_every_read_is_of_one_stream_and_every_key_of_a_script_is_of_this_run(said: Said) -> None:
    reads = said.of("XREAD", "XREADGROUP")
    scripts = said.of("EVALSHA")
    assert {words[0] for words in reads} == {"XREAD", "XREADGROUP"} and len(scripts) > UPDATES
    assert all(len(words) - words.index("STREAMS") == 3 for words in reads)
    tag = said.keys.flow.removesuffix("flow")
    for words in scripts:
        assert all(key.startswith(tag) for key in words[3 : 3 + int(words[2])]), words[:9]


def test_f20_whatever_is_acknowledged_is_deleted(said: Said) -> None:
    for stream in (said.keys.obs_requests, said.keys.trajectories):
        acknowledged = {item for words in said.of("XACK") if words[1] == stream for item in words[3:]}
        deleted = {item for words in said.of("XDEL") if words[1] == stream for item in words[2:]}
        assert len(acknowledged) >= 2 * UPDATES and acknowledged <= deleted


def test_f21_nothing_trims_a_stream_of_work(said: Said) -> None:
    added = said.of("XADD")
    capped = {words[1] for words in added if {"MAXLEN", "MINID"} & set(words[2:4])}
    keys = said.keys
    work = {keys.obs_requests, keys.trajectories, keys.actions("simulator-0"), keys.actions("simulator-1")}
    assert work <= {words[1] for words in added}
    assert {keys.events, keys.metrics, keys.weights} <= capped and not capped & work
    assert not said.of("XTRIM")


def test_f24_nobody_asks_for_a_lag(said: Said) -> None:
    assert {words[1] for words in said.of("XINFO")} <= {"CONSUMERS"}


def test_f34_no_command_is_newer_than_redis_7_0(said: Said, tmp_path: Path) -> None:
    with tls_server(tmp_path) as (port, _), contextlib.closing(connect(f"redis://127.0.0.1:{port}/0", name="t")) as old:
        info: Any = old.info("server")
        assert info["redis_version"].startswith("7.0.")
        known = {name.decode().upper() for name in old.command_list()}
    used = {words[0] for words in said.commands}
    assert "XACKDEL" not in known and {"XADD", "XAUTOCLAIM", "EVALSHA"} <= used <= known
