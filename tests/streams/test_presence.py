"""Who is alive: the hashes of workers, without those whose process is known to have ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vla_stream.broker.connection import Client
from vla_stream.streams.keys import Keys
from vla_stream.streams.presence import Presence, alive, forget_ended, pid_space


def put(client: Client, keys: Keys, worker: str, **fields: str | int) -> None:
    about = {"role": worker.rpartition("-")[0], "pid_space": pid_space(), **fields}
    client.hset(keys.worker(worker), mapping=about)
    client.pexpire(keys.worker(worker), 60_000)


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_worker_reads_as_it_wrote_itself(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    put(client, keys, "generator-0", host="node7", pid=4711, pid_space="9c1e", device="cuda:0", version=12,
        state="running", progress=380, started_ms=1764450000000, shm="yes")  # fmt: skip
    assert alive(client, keys) == [
        Presence("generator-0", "generator", "node7", 4711, "9c1e", "cuda:0", 12, "running", 380, 1764450000000, "yes")
    ]


def test_workers_come_by_role_and_number_and_only_those_of_the_run(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    for worker in ("simulator-10", "simulator-9", "generator-0", "trainer-0"):
        put(client, keys, worker, host="node7", pid=1)
    put(client, Keys(run_name + "x"), "simulator-1", host="node7", pid=1)
    assert [item.id for item in alive(client, keys)] == ["generator-0", "simulator-9", "simulator-10", "trainer-0"]
    assert alive(client, Keys(run_name + "-none")) == []


def test_a_worker_whose_process_ended_on_this_host_is_gone_before_its_hash_is(client: Client, run_name: str) -> None:
    keys = Keys(run_name)
    here = socket.gethostname()
    put(client, keys, "generator-0", host=here, pid=os.getpid())
    put(client, keys, "generator-1", host=here, pid=(ended := ended_pid()))
    put(client, keys, "generator-2", host="another host", pid=ended)
    put(client, keys, "generator-3", host=here)
    put(client, keys, "generator-4", host=here, pid=ended, pid_space="a container's with the same host name")
    alive_ids = [item.id for item in alive(client, keys)]
    assert alive_ids == ["generator-0", "generator-2", "generator-3", "generator-4"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_a_killed_worker_that_nobody_reaps_is_gone_too_and_its_name_is_free_at_once(
    client: Client, run_name: str
) -> None:
    keys = Keys(run_name)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        put(client, keys, "generator-0", host=socket.gethostname(), pid=process.pid)
        put(client, keys, "generator-1", host=socket.gethostname(), pid=os.getpid())
        forget_ended(client, keys)
        assert [item.id for item in alive(client, keys)] == ["generator-0", "generator-1"]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert [item.id for item in alive(client, keys)] == ["generator-1"]
        forget_ended(client, keys)
    assert client.exists(keys.worker("generator-0")) == 0 and client.exists(keys.worker("generator-1")) == 1


def test_f27_a_strange_hash_is_shown_as_far_as_it_makes_sense() -> None:
    shown = Presence.from_hash("generator-0", {b"pid": b"many", b"version": b"-3", b"host": b"\xff" * 300})
    assert (shown.role, shown.pid, shown.version, len(shown.host)) == ("generator", 0, 0, 200)
