"""A live run is flooded with damaged entries, in every stream: nobody restarts, nobody grows, all are counted."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from garbage import mutated

from vla_stream.broker.connection import Client, connect
from vla_stream.cli import samples
from vla_stream.cli.main import call
from vla_stream.flow import Flow
from vla_stream.streams import notices, presence
from vla_stream.streams.keys import Keys

EACH = 100_000
GROWTH_MB = 50.0
AT_ONCE = 500
BACKLOG = 2000  # of what workers read: the test is of them, and not of a server that fills up
BEYOND_CAP = 5000  # of what nobody reads: the launcher cuts it down once a second
WEIGHTS_AT_ONCE = 25  # fewer than a commit leaves in the stream

# Few updates, since for a minute the server keeps the weights of each; observations in /dev/shm, so small entries.
CONFIG = """
updates: 1000000
environment: {name: tabletop, max_steps: 16}
policy: {name: tiny, chunk: 4}
simulators: {count: 1, slots: 2, envs_per_slot: 4, segment: {steps: 4}}
generators: {count: 1, max_batch_size: 8}
trainer: {segments_per_update: 48, epochs: 1, critic_warmup_updates: 0, checkpoint_every: 10}
broker: {inline_below_bytes: 0}
evaluation: {episodes: 0}
"""

Fields = dict[bytes, bytes]


class Flooded:
    """The run, and what is written into it."""

    def __init__(self, client: Client, run: str) -> None:
        self.client, self.keys, self.flow = client, Keys(run), Flow(client, Keys(run))
        self.source = random.Random(7)
        server: Any = client.info("server")
        self.server_pid = int(server["process_id"])
        keys = self.keys
        self.work = {"obs-requests": keys.obs_requests, "actions": keys.actions("simulator-0")}
        self.work["trajectories"] = keys.trajectories
        self.capped = {
            keys.control: notices.CONTROL_KEPT,
            keys.events: notices.EVENTS_KEPT,
            keys.metrics: notices.SAMPLES_KEPT,
            keys.dead_letters: notices.DEAD_LETTERS_KEPT,
        }

    def update(self) -> int:
        state = self.flow.state()
        return 0 if state is None else state.update

    def letters(self) -> int:
        return notices.dead_letters_in_all(self.client, self.keys)

    def pids(self) -> dict[str, int]:
        return {worker.id: worker.pid for worker in presence.alive(self.client, self.keys)}

    def memory_mb(self) -> dict[str, float]:
        """The least of some seconds: an update takes some MB for as long as it lasts."""
        pids, looks = {**self.pids(), "server": self.server_pid}, []
        for _ in range(30):
            looks.append({name: resident_mb(pid) for name, pid in pids.items()})
            time.sleep(0.1)
        return {name: min(look[name] for look in looks) for name in pids}

    def collect(self, stream: str, number: int = 10) -> list[Fields]:
        """Real entries; some live for milliseconds only."""
        found: list[Fields] = []

        def enough() -> bool:
            entries: Any = self.client.xrange(stream, count=number)
            found.extend(dict(fields) for _, fields in entries if fields)
            return len(found) >= number

        wait_for(enough, f"entries of {stream}", pause_s=0.0)
        return found

    def write(self, stream: str, real: list[Fields], number: int) -> None:
        with self.client.pipeline(transaction=False) as pipe:
            for _ in range(number):
                pipe.xadd(stream, mutated(self.source.choice(real), self.source))  # type: ignore[arg-type]
            pipe.execute()

    def flood_work(self, stream: str, real: list[Fields], number: int) -> None:
        before = self.letters()
        for _ in range(0, number, AT_ONCE):
            wait_for(lambda: self.client.xlen(stream) <= BACKLOG, f"readers of {stream}")
            self.write(stream, real, AT_ONCE)
        wait_for(lambda: self.letters() >= before + number, f"a dead letter for each entry of {stream}")
        assert self.letters() == before + number

    def flood_weights(self, real: list[Fields], number: int) -> None:
        stream, before = self.keys.weights, self.letters()
        for sent in range(0, number, WEIGHTS_AT_ONCE):
            # Every commit cuts the stream down, to more than so many: they are read before the next ones come.
            wait_for(lambda: self.letters() >= before + sent, "readers of weights", pause_s=0.001)  # noqa: B023
            self.write(stream, real, WEIGHTS_AT_ONCE)
        wait_for(lambda: self.letters() == before + number, "a dead letter for each entry of weights")

    def flood_capped(self, stream: str, real: list[Fields], number: int) -> None:
        for _ in range(0, number, AT_ONCE):
            limit = self.capped[stream] + BEYOND_CAP
            wait_for(lambda: self.client.xlen(stream) <= limit, f"{stream} to be cut down")  # noqa: B023
            self.write(stream, real, AT_ONCE)

    def flood(self, number: int) -> None:
        """So many into every stream. Letters are counted exactly, so those of dead-letters itself come last."""
        for stream in self.work.values():
            self.flood_work(stream, self.real[stream], number)
        self.flood_weights(self.real[self.keys.weights], number)
        for stream in self.capped:
            self.flood_capped(stream, self.real[stream], number)

    def look_at_all(self) -> None:
        """`real`: what mutations start from. Nobody has changed this run's state yet, nor written a dead letter."""
        streams = [*self.work.values(), self.keys.weights, self.keys.events, self.keys.metrics]
        self.real = {stream: self.collect(stream) for stream in streams}
        self.real[self.keys.control] = [{b"desired": b"draining", b"by": b"somebody"}]
        letter: Any = {**self.real[self.keys.trajectories][0], b"reason": b"none", b"deliveries": b"1"}
        self.real[self.keys.dead_letters] = [{b"raw." + name: value[:4000] for name, value in letter.items()}]


def resident_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def wait_for(condition: Callable[[], object], what: str, deadline_s: float = 60, pause_s: float = 0.02) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(pause_s)


@contextlib.contextmanager
def live_run(folder: Path, run: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    (folder / "mini.yaml").write_text(CONFIG)
    environment = {name: value for name, value in os.environ.items() if name != "VLA_STREAM_REDIS"}
    with (folder / "shown").open("wb") as shown:
        process = subprocess.Popen(
            [sys.executable, "-m", "vla_stream.cli.main", "run", "mini.yaml", "--run", run],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=shown,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        address = folder / "runs" / run / "redis.url"
        wait_for(address.exists, "the embedded server's address")
        yield process, address
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_f27_a_hundred_thousand_damaged_entries_in_each_stream_restart_nobody_and_fill_no_memory(
    tmp_path: Path, run_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        live_run(tmp_path, run_name) as (process, address),
        contextlib.closing(connect(address.read_text().strip(), name="flood")) as client,
    ):
        flooded = Flooded(client, run_name)
        wait_for(lambda: flooded.update() >= 2, "two updates", 120)
        flooded.look_at_all()
        # What every process allocates once is none of the flood's.
        flooded.flood(2 * AT_ONCE)
        wait_for(lambda: flooded.update() >= 4, "two more updates", 120)
        pids, before, update = flooded.pids(), flooded.memory_mb(), flooded.update()
        assert len(pids) == 4

        flooded.flood(EACH)
        assert flooded.pids() == pids and process.poll() is None
        after = flooded.memory_mb()
        with capsys.disabled():
            print(f"\nresident MB before {before}, after {after}; {flooded.update() - update} updates meanwhile")
        assert all(after[name] - before[name] < GROWTH_MB for name in before), (before, after)
        assert flooded.update() >= update + 3
        now = flooded.update()
        wait_for(lambda: flooded.update() >= now + 2, "updates after the flood", 120)

        where = ["--run", run_name, "--redis", address.read_text().strip()]
        assert call(["status", *where]) == call(["events", *where, "--count", "5000"]) == 0
        for stream in ("control", "events", "metrics", "dead-letters", "weights"):
            assert call(["inspect", stream, *where, "--count", "500"]) == 0
        assert "\x1b" not in capsys.readouterr().out
        assert flooded.pids() == pids
        process.send_signal(signal.SIGINT)
        wait_for(lambda: process.poll() is not None, "the end of the run")
    shown = (tmp_path / "shown").read_text()
    assert process.returncode == 1 and "Traceback" not in shown and "crashed" not in shown
    books = samples.load(tmp_path / "runs" / run_name / "metrics.jsonl")[-1]
    # Four streams of work, and what was written into dead-letters itself.
    assert books["kind"] == "books" and books["balance"] == 0
    assert books["dead_letters"] == 5 * (EACH + 2 * AT_ONCE)
    assert shown.count("\n") < 3000, "what anybody writes into events does not flood the terminal"
    logs = "".join(log.read_text() for log in (tmp_path / "runs" / run_name / "logs").glob("*.log"))
    assert "Traceback" not in logs and len(logs) < 1_000_000
