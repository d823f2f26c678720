"""Servers that a test configures itself: users, TLS, memory. The shared one of conftest.py may not be touched."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from vla_stream.broker.server import find_binary

DEPLOY = Path(__file__).parents[1] / "tools" / "deploy"
PASSWORD = "pass-word_of-{}"
USERS = ("admin", "simulator", "generator", "trainer", "launcher", "viewer")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def own_server(folder: Path, options: Sequence[str] = (), *, config: Path | None = None) -> Iterator[int]:
    """A server on a loopback port, which it yields; `options` as on its command line, `config` as its file."""
    with tls_server(folder, options, config=config, binary=find_binary()) as (port, _):
        yield port


@contextlib.contextmanager
def tls_server(
    folder: Path, options: Sequence[str] = (), *, config: Path | None = None, binary: Path | None = None
) -> Iterator[tuple[int, int]]:
    """The same with a TLS port as second number, where the binary knows TLS and `options` name a certificate."""
    binary = binary or debian_server(folder)
    port, tls_port = free_port(), free_port()
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    if "--tls-cert-file" in options:
        arguments += ["--tls-port", str(tls_port)]
    log = folder / "own-server.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(binary), *([str(config)] if config else []), *arguments, *options],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline_s = time.monotonic() + 20
        while not answers(port):
            assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.01)
        yield port, tls_port
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as probe:
            probe.sendall(b"PING\r\n")
            return probe.recv(64)[:1] in (b"+", b"-")
    except OSError:
        return False


def debian_server(folder: Path) -> Path:
    """Redis with TLS, of Debian's package redis-tools: the server and redis-check-rdb are one binary, which looks at
    its own name. The package redis-server would put one on PATH, in the embedded server's place in all other tests."""
    found = shutil.which("redis-check-rdb")
    if found is None:
        pytest.fail("redis-check-rdb is not on PATH; run tools/setup dev, or: apt-get install redis-tools")
    link = folder / "redis-server"
    link.unlink(missing_ok=True)
    link.symlink_to(found)
    return link


def users_file(folder: Path) -> Path:
    """tools/deploy/users.acl with a password for every user."""
    text = (DEPLOY / "users.acl").read_text()
    for user in USERS:
        text = text.replace(f"#{user.upper()}_SHA256", f">{PASSWORD.format(user)}")
    assert not re.search(r"_SHA256", text)
    path = folder / "users.acl"
    path.write_text(text)
    return path


def deployed_options(folder: Path) -> list[str]:
    """What differs from tools/deploy/redis.conf, so that it can run as any user in `folder`."""
    return ["--aclfile", str(users_file(folder)), "--dir", str(folder), "--maxmemory", "1gb"]


def url_of(user: str, port: int) -> str:
    return f"redis://{user}:{PASSWORD.format(user)}@127.0.0.1:{port}/0"
