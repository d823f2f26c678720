"""Edge workers → people: the `worker:<id>` hashes, of which each live worker keeps its own alive.

A hash is also the claim to a name: its token tells who holds it. A supervisor claims names before it starts workers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vla_stream.broker.connection import Client
from vla_stream.broker.scripts import CLAIM_WORKER, RELEASE_WORKER, Scripts
from vla_stream.streams.keys import Keys

READERS = ("generator", "trainer")  # of observations
LAUNCHER = "launcher"
EVALUATED = "evaluated"  # field of its hash: what the last evaluation beside the run said


@dataclass(frozen=True, slots=True)
class Presence:
    """One worker that is, or was a moment ago, alive.

    state: starting, loading, running, draining …; progress: a counter that its main loop raises; version: of weights;
    shm: whether it sees the run's folder under /dev/shm, yes, no, or empty when it has not looked.

    pid_space: what tells apart equal pids of containers with one host name, and of two boots.

    Example, as redis-cli shows it: role simulator · host node7 · pid 4711 · pid_space 9c1e… · device … · version 12 ·
    state running · progress 380 · started_ms 1764450000000 · shm yes · token …
    """

    id: str
    role: str
    host: str
    pid: int
    pid_space: str
    device: str
    version: int
    state: str
    progress: int
    started_ms: int
    shm: str

    @classmethod
    def from_hash(cls, worker_id: str, raw: Mapping[bytes, bytes]) -> Presence:
        """Never raises: a field that is missing or no number reads as empty or 0."""

        def text(name: str) -> str:
            return raw.get(name.encode(), b"").decode(errors="replace")[:200]

        def number(name: str) -> int:
            return int(text(name)) if text(name).isdecimal() else 0

        return cls(
            worker_id,
            text("role") or worker_id.rpartition("-")[0] or worker_id,
            text("host"),
            number("pid"),
            text("pid_space"),
            text("device"),
            number("version"),
            text("state"),
            number("progress"),
            number("started_ms"),
            text("shm"),
        )

    @property
    def gone(self) -> bool:
        """Whether its process has surely ended: it was on this host, among processes that we see, and its pid is no
        longer there.

        A killed worker's hash stays until its TTL; this tells a person sooner. Elsewhere only the TTL knows.
        """
        if self.host != socket.gethostname() or self.pid == 0 or self.pid_space != pid_space():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        # In a container whose first process reaps nobody, the killed stay as zombies.
        with contextlib.suppress(OSError, IndexError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return False


@functools.cache
def pid_space() -> str:
    """Names the set of processes that this one sees; the same for all of a boot and a pid namespace."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    return socket.gethostname()  # macOS has no containers of its own


def process_fields() -> dict[str, str | int]:
    """What a worker's hash says of the process that writes it."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "pid_space": pid_space()}


def claim(
    scripts: Scripts, keys: Keys, worker_id: str, token: str, ttl_s: float, fields: Mapping[str, str | int]
) -> bool:
    """Take the name, or keep it, and write `fields`; False when a live worker has it under another token (F53)."""
    flat = [item for pair in fields.items() for item in pair]
    return bool(scripts.call(CLAIM_WORKER, [keys.worker(worker_id)], [token, int(ttl_s * 1000), *flat]))


def release(scripts: Scripts, keys: Keys, worker_id: str, token: str) -> None:
    """Give the name back; does nothing when somebody else has it."""
    scripts.call(RELEASE_WORKER, [keys.worker(worker_id)], [token])


def forget_ended(client: Client, keys: Keys) -> None:
    """Free the names of workers whose process has surely ended, without waiting for their TTL."""
    for item in _all(client, keys):
        if item.gone:
            client.delete(keys.worker(item.id))


def alive(client: Client, keys: Keys) -> list[Presence]:
    """All workers whose hash is there and whose process is not known to have ended, by role and number."""
    return sorted((item for item in _all(client, keys) if not item.gone), key=_order)


def _all(client: Client, keys: Keys) -> list[Presence]:
    names = sorted({bytes(name) for name in client.scan_iter(match=keys.workers_pattern, count=500)})
    prefix = len(keys.worker("").encode())
    with client.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hgetall(name)
        hashes = pipe.execute(raise_on_error=False) if names else []
    return [
        Presence.from_hash(name[prefix:].decode(errors="replace"), raw)
        for name, raw in zip(names, hashes, strict=True)
        if raw and isinstance(raw, dict)  # not expired since the scan, and no key of another type
    ]


def _order(item: Presence) -> tuple[str, int, str]:
    number = item.id.rpartition("-")[2]
    return item.role, int(number) if number.isdecimal() else 0, item.id
