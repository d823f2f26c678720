"""tools/deploy: the server's config and its users. Every role does its work, and nothing beyond it (F33)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_server import DEPLOY, PASSWORD, USERS, debian_server, deployed_options, tls_server, url_of

from vla_stream import config as configs
from vla_stream.broker.connection import UNREACHABLE, Client, ResponseError, connect
from vla_stream.broker.lanes import RedisLane
from vla_stream.broker.server import find_binary
from vla_stream.cli.control import desire
from vla_stream.cli.dashboard.watch import Watch
from vla_stream.cli.options import Target, connected
from vla_stream.environments.protocol import Observations
from vla_stream.errors import InputError
from vla_stream.flow import Flow
from vla_stream.streams.keys import Keys
from vla_stream.streams.obs_requests import ObsRequest, RequestId
from vla_stream.streams.observations import pack_observations

REFUSED = (ResponseError, *UNREACHABLE)  # an AuthenticationError counts among the latter
ROLES = tuple(user for user in USERS if user != "admin")


@pytest.fixture(scope="module", params=["embedded", "debian"])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """ACLs differ between versions: the newest server that we ship with, and the oldest that we serve."""
    folder = tmp_path_factory.mktemp("deployed")
    binary = find_binary() if request.param == "embedded" else debian_server(folder)
    with tls_server(folder, deployed_options(folder), config=DEPLOY / "redis.conf", binary=binary) as (made, _):
        yield made


@pytest.fixture
def admin(port: int) -> Iterator[Client]:
    with contextlib.closing(connect(url_of("admin", port), name="admin")) as made:
        made.execute_command("ACL", "LOG", "RESET")
        yield made


def refusals(admin: Client) -> list[str]:
    """What the ACL refused since the last reset, for a person to read."""
    found: Any = admin.execute_command("ACL", "LOG", 50)
    entries = [item if isinstance(item, dict) else dict(zip(item[::2], item[1::2], strict=True)) for item in found]
    plain = [
        {str(k if isinstance(k, str) else k.decode()): v.decode() if isinstance(v, bytes) else v for k, v in e.items()}
        for e in entries
    ]
    return [f"{e['username']}: {e['reason']} {e['object']} ({e['context']}) {e['client-info']}" for e in plain]


def wait_for(condition: Callable[[], Any], what: Callable[[], str], deadline_s: float = 80) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what()}"
        time.sleep(0.05)


class Cluster:
    """A run whose parts are started one by one, each under its own user."""

    def __init__(self, folder: Path, port: int, run: str) -> None:
        self.folder, self.port, self.run = folder, port, run
        self.started: list[subprocess.Popen[str]] = []

    def start(self, user: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "vla_stream.cli.main", *arguments, "--run", self.run],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "VLA_STREAM_REDIS": url_of(user, self.port),
            },
        )
        self.started.append(process)
        return process

    def call(self, user: str, *arguments: str) -> tuple[int, str]:
        process = self.start(user, *arguments)
        shown, _ = process.communicate(timeout=60)
        return process.returncode, shown

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.folder.glob("runs/*/logs/*.log"))

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.send_signal(signal.SIGINT)
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)
            process.kill()


@pytest.fixture
def cluster(tmp_path: Path, port: int, run_name: str) -> Iterator[Cluster]:
    made = Cluster(tmp_path, port, run_name)
    yield made
    made.close()


def config_of(cluster: Cluster, **sections: Any) -> configs.Config:
    """Two tiny updates, with observations through Redis and automatic batching: what needs the most rights.

    Without a launcher nobody has the run's folder under /dev/shm, so that readers have `auto` mean Redis."""
    data: dict[str, Any] = {
        "name": cluster.run,
        "updates": 2,
        "runs_dir": str(cluster.folder / "runs"),
        "environment": {"name": "tabletop", "max_steps": 8},
        "policy": {"name": "tiny", "chunk": 4},
        "simulators": {"count": 1, "slots": 2, "envs_per_slot": 2, "segment": {"steps": 2}},
        "generators": {"max_batch_size": 4, "batching": "auto"},
        "trainer": {"segments_per_update": 2, "epochs": 1, "critic_warmup_updates": 0},
        "flow": {"lease_s": 2.0},
        "broker": {"inline_below_bytes": 0},
        "evaluation": {"episodes": 0},
        "trace": True,
    }
    return configs.validate(data | sections)


@pytest.mark.timeout(120)
def test_f33_a_run_works_with_every_worker_and_every_command_under_its_own_user(
    cluster: Cluster, admin: Client, port: int
) -> None:
    with contextlib.closing(connect(url_of("launcher", port), name="launcher")) as launcher:
        flow = Flow(launcher, Keys(cluster.run))
        flow.create(config_of(cluster))
        for user, pool in (("simulator", "simulators"), ("generator", "generators"), ("trainer", "trainers")):
            cluster.start(user, pool)

        def update() -> int:
            state = flow.state()
            return 0 if state is None else state.update

        wait_for(lambda: update() >= 2 or refusals(admin), cluster.logs)
        assert refusals(admin) == []
        state = flow.state()
        assert state is not None and state.remote_reader in ("generator-0", "trainer-0")
        assert list(admin.scan_iter(match=Keys(cluster.run).blob("*")))
        code, shown = cluster.call("launcher", "lane", "auto")
        assert code == 0 and "which is through Redis for" in shown, shown
        for arguments in (("status",), ("events",), ("inspect", "trajectories"), ("inspect", "metrics")):
            code, shown = cluster.call("viewer", *arguments)
            assert code == 0, shown
        code, shown = cluster.call("launcher", "stop")
        assert code == 0, shown
        for process in cluster.started:
            assert process.wait(30) == 0, process.communicate()[0]
    assert refusals(admin) == []


@pytest.mark.timeout(120)
def test_f33_the_launcher_runs_all_roles_and_clears_up_under_its_own_user(cluster: Cluster, admin: Client) -> None:
    config = config_of(cluster).model_dump_json()
    (cluster.folder / "all.yaml").write_text(config)
    code, shown = cluster.call("launcher", "run", "all.yaml")
    assert code == 0, shown
    assert refusals(admin) == []
    assert list(admin.scan_iter(match=Keys(cluster.run).everything_pattern)) == []


def test_f33_a_viewer_sees_all_of_the_dashboard_and_its_buttons_say_what_he_lacks(
    cluster: Cluster, port: int, admin: Client
) -> None:
    keys, url = Keys(cluster.run), url_of("viewer", port)
    assert Flow(admin, keys).create(config_of(cluster))
    admin.hset(keys.worker("simulator-0"), mapping={"role": "simulator", "host": "node7", "pid": 1})
    seen = Observations({"front": np.zeros((1, 8, 8, 3), np.uint8)}, np.zeros((1, 3), np.float32), ["go"])
    reference = RedisLane(admin, keys.blob, 60).write("1.1-9f2c11ab", 0, pack_observations(seen))
    request = ObsRequest(RequestId("simulator-0", "9f2c11ab", 0, 0, 1, 1, 0), 1, 0, "sample", None, reference)
    with connected(url, block_s=1.0) as client:
        watch = Watch(client, Target(cluster.run, url, cluster.folder))
        assert watch.look()["alive"] == {"simulator": 1}
        admin.xadd(keys.obs_requests, request.to_fields())  # type: ignore[arg-type]
        watch.cameras.follow(["simulator-0/0.0"], 1.0)
        assert list(watch.cameras.pictures) == ["simulator-0/0.0"], watch.cameras.problem
    assert refusals(admin) == []
    with pytest.raises(InputError, match="permission"), connected(url) as client:
        desire(client, cluster.run, "paused", by="vla-stream dashboard")


FORBIDDEN_TO_ALL = (
    "FLUSHALL",
    "FLUSHDB",
    "CONFIG GET *",
    "CONFIG SET maxmemory-policy allkeys-lru",
    "KEYS *",
    "ACL LIST",
    "ACL SETUSER simulator on nopass ~* +@all",
    "SHUTDOWN NOSAVE",
    "MONITOR",
    "CLIENT LIST",
    "CLIENT KILL TYPE normal",
    "SCRIPT FLUSH",
    "FUNCTION LIST",
    "EVAL return(1) 0",
    "REPLICAOF 127.0.0.1 1",
    "MODULE LIST",
    "PUBLISH a b",
    "SWAPDB 0 1",
    "SET other 1",
    "GET other",
)
FORBIDDEN = {
    "simulator": (
        "XADD vla:{r}:weights * version 9",
        "SET vla:{r}:weights:9.9:0 x",
        "GET vla:{r}:weights:1.1:0",
        "SET vla:{r}:config x",
        "HSET vla:{r}:flow desired stopped",
        "DEL vla:{r}:flow",
        "PEXPIRE vla:{r}:flow 1",
        "XADD vla:{r}:control * desired stopped",
        "XREADGROUP GROUP generators me STREAMS vla:{r}:obs-requests >",
        "XDEL vla:{r}:obs-requests 1-1",
        "XREAD STREAMS vla:{r}:trajectories 0",
        "HSET vla:{r}:worker:trainer-0 token mine",
        "SCAN 0",
    ),
    "generator": (
        "XADD vla:{r}:weights * version 9",
        "SET vla:{r}:weights:9.9:0 x",
        "SET vla:{r}:config x",
        "XADD vla:{r}:trajectories * a 1",
        "XREAD STREAMS vla:{r}:trajectories 0",
        "XADD vla:{r}:obs-requests * a 1",
        "HSET vla:{r}:flow desired stopped",
        "HDEL vla:{r}:flow remote_reader",
        "ZREM vla:{r}:permits 1.1",
        "HSET vla:{r}:blob:1.1-0 0 x",
        "DEL vla:{r}:actions:simulator-0",
        "SCAN 0",
    ),
    "trainer": (
        "SET vla:{r}:config x",
        "XADD vla:{r}:trajectories * a 1",
        "XADD vla:{r}:actions:simulator-0 * a 1",
        "XREADGROUP GROUP generators me STREAMS vla:{r}:obs-requests >",
        "HSET vla:{r}:worker:simulator-0 token mine",
        "DEL vla:{r}:flow",
        "XADD vla:{r}:control * desired stopped",
    ),
    "launcher": ("EXPIRE vla:{r}:flow 1", "RENAME vla:{r}:flow vla:{r}:lost", "XTRIM vla:{r}:trajectories MAXLEN 0"),
    "viewer": (
        "XADD vla:{r}:events * text lies",
        "HSET vla:{r}:flow desired stopped",
        "XDEL vla:{r}:trajectories 1-1",
        "XREADGROUP GROUP trainers me STREAMS vla:{r}:trajectories >",
        "DEL vla:{r}:flow",
        "EVALSHA 0000000000000000000000000000000000000000 1 vla:{r}:flow",
        "SCRIPT LOAD return(1)",
        "EXPIRE vla:{r}:flow 1",
    ),
}


@pytest.mark.parametrize("user", ROLES)
def test_f33_a_role_is_refused_what_is_not_its_work(user: str, port: int, admin: Client) -> None:
    admin.set("other", 1)
    with contextlib.closing(connect(url_of(user, port), name=user)) as client:
        for command in (*FORBIDDEN_TO_ALL, *FORBIDDEN[user]):
            with pytest.raises(ResponseError, match="permission") as caught:
                client.execute_command(*command.split())
            assert type(caught.value).__name__ == "NoPermissionError", command


def test_f33_a_generator_may_mark_the_request_that_it_serves_alone(port: int, admin: Client) -> None:
    with contextlib.closing(connect(url_of("generator", port), name="generator")) as client:
        mark = Keys("r").trial("1-0")
        assert client.set(mark, "generator-0", ex=60) and client.exists(mark) and client.delete(mark)


def test_nobody_gets_in_without_a_name_and_a_password(port: int) -> None:
    for place in ("127.0.0.1", "simulator:wrong@127.0.0.1", "nobody:wrong@127.0.0.1"):
        with (
            contextlib.closing(connect(f"redis://{place}:{port}/0", name="test")) as client,
            pytest.raises(REFUSED, match=r"Authentication required|invalid username-password|WRONGPASS"),
        ):
            client.ping()


@pytest.mark.parametrize("binary", [lambda _: find_binary(), debian_server], ids=["embedded", "debian"])
def test_the_config_is_understood_and_means_what_its_comments_say(
    tmp_path: Path, binary: Callable[[Path], Path]
) -> None:
    with (
        tls_server(tmp_path, deployed_options(tmp_path), config=DEPLOY / "redis.conf", binary=binary(tmp_path)) as (
            port,
            _,
        ),
        contextlib.closing(connect(url_of("admin", port), name="admin")) as admin,
    ):
        settings: Any = admin.config_get("*")
        assert {name: settings[name] for name in ("appendonly", "appendfsync", "maxmemory-policy")} == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
        }
        assert settings["protected-mode"] == "yes"
        assert "normal 0 0 0" in settings["client-output-buffer-limit"]
        users: Any = admin.execute_command("ACL", "USERS")
        assert {name.decode() for name in users} == {"default", *USERS}


def test_no_password_is_shipped() -> None:
    text = (DEPLOY / "users.acl").read_text()
    assert PASSWORD.format("") not in text and ">" not in text and "nopass" not in text
    assert text.count("#") == text.count("_SHA256") == len(USERS)
