"""A run on the shared server for tests that drive workers, here or as processes; workers/conftest.py has a fixture."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_stream import config as configs
from vla_stream.broker import lanes
from vla_stream.broker.connection import Client
from vla_stream.config import Config
from vla_stream.flow import Flow
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys
from workers.worker import Worker


class Run:
    """One run: its config, its flow, and workers of it in this process."""

    def __init__(self, url: str, name: str, folder: Path, client: Client) -> None:
        self.url, self.name, self.folder, self.client = url, name, folder, client
        self.keys = Keys(name)
        self.flow = Flow(client, self.keys)
        self.workers: list[Worker] = []

    def config(self, **changes: Any) -> Config:
        """Small and fast: 2 slots of 2 rows on `fakes:Line`, T = 3, H = 2, B = 2. `section__field=value` changes it."""
        data: dict[str, Any] = {
            "name": self.name,
            "seed": 5,
            "updates": 3,
            "runs_dir": str(self.folder),
            "environment": {"name": "fakes:Line", "max_steps": 12, "options": {}},
            "policy": {"name": "fake_policies:Linear", "chunk": 2},
            "simulators": {"count": 1, "slots": 2, "envs_per_slot": 2, "segment": {"steps": 3}},
            "generators": {"max_batch_size": 4, "max_wait_ms": 1.0},
            "trainer": {"segments_per_update": 2, "epochs": 1, "critic_warmup_updates": 0},
            "flow": {"lease_s": 5.0},
        }
        for name, value in changes.items():
            section, _, field = name.partition("__")
            if field:
                data.setdefault(section, {})[field] = value
            else:
                data[section] = value
        return configs.validate(data)

    def start(self, **changes: Any) -> Config:
        """The config, and the run's flow on the server."""
        config = self.config(**changes)
        assert self.flow.create(config)
        self.shm.mkdir(mode=0o700)  # as a launcher does
        return config

    def worker(self, role: str, number: int = 0) -> Worker:
        made = Worker(role, f"{role}-{number}", secrets.token_hex(8), self.name, self.url)
        made.claim()
        self.workers.append(made)
        return made

    def allow(self, version: int = 1) -> None:
        """As if a trainer had published weights `version`: permits are given."""
        self.client.hset(self.keys.flow, "version", version)

    def events(self) -> list[tuple[str, str]]:
        """(kind, sentence) of all events so far."""
        entries: Any = self.client.xrange(self.keys.events)
        return [(fields[b"kind"].decode(), fields[b"text"].decode()) for _, fields in entries]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events()]

    @property
    def shm(self) -> Path:
        return self.flow.shm_folder()

    def close(self) -> None:
        for worker in self.workers:
            with contextlib.closing(worker.client):
                worker.release()
        for folder in lanes.SHM_ROOT.glob(f"vla-stream-*-{self.name}-*"):
            shutil.rmtree(folder, ignore_errors=True)


def in_use(folder: Path) -> list[str]:
    """Segments that have a file in a run's folder under /dev/shm; a file that waits for another segment is nobody's."""
    found = (path.name for path in folder.iterdir()) if folder.exists() else ()
    return sorted(name for name in found if not name.startswith(lanes.FREE))


def sockets_of(pid: int) -> set[str]:
    """The sockets that a process holds beyond its standard streams, by the kernel's numbers."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(descriptor)
            if target.startswith("socket:") and int(descriptor.name) > 2:
                found.add(target)
    return found


class Processes:
    """Workers started by hand, as a supervisor would."""

    DEADLINE_S = 50.0

    def __init__(self, run: Run) -> None:
        self.run = run
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, number: int = 0, command: Callable[[str], list[str]] | None = None) -> str:
        """command: gives the start of the command line for a role; default: this Python's `-m workers.<role>`."""
        worker_id = f"{role}-{number}"
        first = [sys.executable, "-m", f"workers.{role}"] if command is None else command(role)
        environment = {"VLA_STREAM_REDIS": self.run.url, "VLA_STREAM_TOKEN": worker_id}
        with self.log(worker_id).open("wb") as log:
            self.started[worker_id] = subprocess.Popen(
                [*first, self.run.name, worker_id],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )
        return worker_id

    def log(self, worker_id: str) -> Path:
        return self.run.folder / f"{worker_id}.log"

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + self.DEADLINE_S
        while not condition():
            dead = [name for name, process in self.started.items() if process.poll()]
            logs = {name: self.log(name).read_text()[-1500:] for name in self.started}
            assert not dead and time.monotonic() < deadline_s, (what, dead, logs, self.states())
            time.sleep(0.02)

    def states(self) -> dict[str, str]:
        return {item.id: item.state for item in presence.alive(self.run.client, self.run.keys)}

    def close(self) -> None:
        for process in self.started.values():
            process.kill()
            process.wait()
