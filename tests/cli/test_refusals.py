"""A server that will not do: one line with what was found and what helps, exit code 2, within 5 s (F09, F22, F33).

Every command runs as a person runs it, as a process of its own, against a real server; only Redis 6.2 is played.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from own_server import PASSWORD, free_port, tls_server, url_of, users_file

from vla_stream.broker.connection import connect
from vla_stream.broker.scripts import CLAIM_WORKER
from vla_stream.cli.main import call
from vla_stream.config import validate
from vla_stream.flow import Flow
from vla_stream.streams.keys import Keys

LIMIT_S = 5.0
CONFIG = """
environment: {name: tabletop, max_steps: 8}
policy: {name: tiny, chunk: 4}
trainer: {segments_per_update: 4}
"""
RUN = ("run", "mini.yaml", "--run", "demo")
COMMANDS = (RUN, ("simulators", "--run", "demo"), ("status", "--run", "demo"))


@dataclass(frozen=True)
class Servers:
    """One server with users and both kinds of port, and one that evicts."""

    port: int
    tls_port: int
    evicting: int
    authority: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder, other = tmp_path_factory.mktemp("guarded"), tmp_path_factory.mktemp("evicting")
    certificate, key = folder / "server.crt", folder / "server.key"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    options = ["--aclfile", str(users_file(folder)), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no"]
    with (
        tls_server(folder, options) as (port, tls_port),
        tls_server(other, ["--maxmemory-policy", "allkeys-lru"]) as (evicting, _),
    ):
        yield Servers(port, tls_port, evicting, certificate)


class OldServer(socketserver.StreamRequestHandler):
    """Redis 6.2, as far as a client looks at it before it works: RESP2, and the version in HELLO and INFO."""

    INFO = b"# Server\r\nredis_version:6.2.14\r\nredis_mode:standalone\r\n# Memory\r\nmaxmemory_policy:noeviction\r\n"
    HELLO = b"*4\r\n$6\r\nserver\r\n$5\r\nredis\r\n$7\r\nversion\r\n$6\r\n6.2.14\r\n"

    def handle(self) -> None:
        while head := self.rfile.readline():
            words = []
            for _ in range(int(head[1:])):
                length = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(length + 2)[:-2])
            match words[0].upper():
                case b"INFO":
                    reply = b"$%d\r\n%s\r\n" % (len(self.INFO), self.INFO)
                case b"HELLO":
                    reply = self.HELLO
                case b"PING":
                    reply = b"+PONG\r\n"
                case b"CLIENT" | b"SELECT" | b"AUTH":
                    reply = b"+OK\r\n"
                case other:
                    reply = b"-ERR unknown command '%s'\r\n" % other
            self.wfile.write(reply)


@pytest.fixture(scope="module")
def old_port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OldServer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mini.yaml").write_text(CONFIG)
    return tmp_path


def refusal(folder: Path, url: str, *arguments: str) -> str:
    """The one line on stderr of `vla-stream <arguments>`."""
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "vla_stream.cli.main", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "VLA_STREAM_REDIS": url},
        timeout=30,
        check=False,
    )
    lasted_s = time.monotonic() - began_s
    assert done.returncode == 2, done.stderr + done.stdout
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("Error: "), done.stderr
    assert "wrong-word" not in lines[0] and PASSWORD.format("") not in lines[0]
    assert lasted_s < LIMIT_S, (lasted_s, lines[0])
    return lines[0]


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_f09_a_wrong_password(folder: Path, servers: Servers, arguments: tuple[str, ...]) -> None:
    line = refusal(folder, f"redis://launcher:wrong-word@127.0.0.1:{servers.port}/0", *arguments)
    assert f"redis://127.0.0.1:{servers.port}/0: wrong user name or password; put the right ones into the url" in line
    assert not (folder / "runs").exists()


def test_f09_no_password(folder: Path, servers: Servers) -> None:
    line = refusal(folder, f"redis://127.0.0.1:{servers.port}/0", *RUN)
    assert "asks for a password and got none; put it into the url" in line


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_f09_a_closed_port(folder: Path, arguments: tuple[str, ...]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # Bound but not listening: refused for certain.
        port = reserved.getsockname()[1]
        line = refusal(folder, f"redis://127.0.0.1:{port}/0", *arguments)
    assert f"127.0.0.1:{port}/0: nothing listens there; start the server" in line
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_f09_an_unknown_host(folder: Path, arguments: tuple[str, ...]) -> None:
    line = refusal(folder, "redis://no-such-host.invalid:6379/0", *arguments)
    assert "no-such-host.invalid:6379/0: its host name does not resolve; check the spelling" in line


@pytest.mark.parametrize("arguments", COMMANDS[:2], ids=lambda words: words[0])
def test_f09_tls_to_a_plain_port(folder: Path, servers: Servers, arguments: tuple[str, ...]) -> None:
    url = url_of("launcher", servers.port).replace("redis:", "rediss:")
    assert "does not speak TLS there, but the url says rediss://; use redis://" in refusal(folder, url, *arguments)


@pytest.mark.parametrize("arguments", COMMANDS[:2], ids=lambda words: words[0])
def test_f09_plain_to_a_tls_port(folder: Path, servers: Servers, arguments: tuple[str, ...]) -> None:
    line = refusal(folder, url_of("launcher", servers.tls_port), *arguments)
    assert "speaks TLS there, but the url says redis://; use rediss://" in line


def test_f09_a_certificate_that_nobody_vouches_for_and_the_remedy_that_is_told(
    folder: Path, servers: Servers, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of("viewer", servers.tls_port).replace("redis:", "rediss:")
    line = refusal(folder, url, "status", "--run", "demo")
    assert "certificate is not trusted; add ?ssl_ca_certs=FILE" in line
    assert call(["status", "--run", "demo", "--redis", f"{url}?ssl_ca_certs={servers.authority}"]) == 2
    assert "run demo: not on this server" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_redis_6_2(folder: Path, old_port: int, arguments: tuple[str, ...]) -> None:
    line = refusal(folder, f"redis://127.0.0.1:{old_port}/0", *arguments)
    assert f"127.0.0.1:{old_port}/0: version 6.2.14, expected 7.0 or newer; upgrade it" in line
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
def test_f22_a_server_that_evicts(folder: Path, servers: Servers, arguments: tuple[str, ...]) -> None:
    line = refusal(folder, f"redis://127.0.0.1:{servers.evicting}/0", *arguments)
    assert "maxmemory-policy is allkeys-lru" in line and "expected noeviction; run: redis-cli CONFIG SET" in line
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("user", "arguments"),
    [
        ("viewer", RUN),
        ("simulator", RUN),
        ("viewer", ("simulators",)),
        ("viewer", ("pause",)),
        ("generator", ("status",)),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_f33_a_missing_permission(
    folder: Path, servers: Servers, run_name: str, user: str, arguments: tuple[str, ...]
) -> None:
    with contextlib.closing(connect(url_of("admin", servers.port), name="admin")) as admin:
        flow = Flow(admin, Keys(run_name))
        if arguments is RUN:
            arguments = ("run", "mini.yaml")
        else:
            assert flow.create(validate({"name": run_name, **MINI}))
        line = refusal(folder, url_of(user, servers.port), *arguments, "--run", run_name)
        assert f"127.0.0.1:{servers.port}/0: its ACL refuses this user: " in line
        assert "grant it with ACL SETUSER (the run's keys are ~vla:*)" in line


MINI = {
    "environment": {"name": "tabletop", "max_steps": 8},
    "policy": {"name": "tiny", "chunk": 4},
    "trainer": {"segments_per_update": 4},
}


def test_f25_a_reply_that_the_server_cuts_off(folder: Path, servers: Servers, run_name: str) -> None:
    with contextlib.closing(connect(url_of("admin", servers.port), name="admin")) as admin:
        for _ in range(100):
            admin.xadd(Keys(run_name).events, {"worker": "w", "kind": "k", "text": "x" * 10_000})
        admin.config_set("client-output-buffer-limit", "normal 65536 0 0")
        try:
            line = refusal(folder, url_of("viewer", servers.port), "events", "--count", "100", "--run", run_name)
        finally:
            admin.config_set("client-output-buffer-limit", "normal 0 0 0")
    assert "closed the connection; see its log (a reply above its client-output-buffer-limit is one reason)" in line


def test_f50_a_second_run_of_the_same_name(folder: Path, redis_url: str, run_name: str) -> None:
    with contextlib.closing(connect(redis_url, name="test")) as client:
        flow = Flow(client, Keys(run_name))
        assert flow.create(validate({"name": run_name, **MINI}))
        arguments = [secrets.token_hex(8), 30_000, "role", "launcher", "host", "node7", "pid", 4711]
        assert flow.scripts.call(CLAIM_WORKER, [flow.keys.worker("launcher")], arguments) == 1
        line = refusal(folder, redis_url, "run", "mini.yaml", "--run", run_name)
    assert f"run {run_name}: already runs on this server (1 live workers, for example launcher on node7)" in line
    assert f"give another --run NAME, or end it with: vla-stream stop --run {run_name}" in line


def test_f09_a_worker_that_is_refused_at_its_start_says_so_in_one_line(servers: Servers, run_name: str) -> None:
    for url, said in (
        (url_of("viewer", servers.port), "its ACL refuses this user: "),
        (f"redis://simulator:wrong-word@127.0.0.1:{servers.port}/0", "wrong user name or password"),
        (f"redis://127.0.0.1:{free_port()}/0", "nothing listens there"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "workers.simulator", run_name, "simulator-0"],
            capture_output=True,
            text=True,
            env={**os.environ, "VLA_STREAM_REDIS": url, "VLA_STREAM_TOKEN": "t"},
            timeout=30,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.startswith("simulator-0: Redis at redis://127.0.0.1:") and said in done.stderr
