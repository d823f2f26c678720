"""What tools/chaos does: a real run, random harm for some minutes, then the question what was lost uncounted.

Everything is random but seeded; what comes of it also depends on timing: a seed repeats the harm, not the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from vla_stream.broker.connection import REDIS_ERRORS, Client, connect
from vla_stream.cli.samples import load
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys

ROOT = Path(__file__).resolve().parent.parent
LEASE_S = 3
UPDATES_PER_MINUTE = 20  # an idle machine without harm does about 50
FINISH_S = 1800.0
EVERY_S = (4.0, 9.0)
KILLS_PER_MINUTE = 2  # of one role: a role that dies more often counts as failed, and the run ends (F42)
FREEZE_S = (1.0, 8.0)
GROWTH, GROWTH_MB = 1.1, 20.0  # of a role's median resident memory, from the first third to the last


@dataclass
class Harm:
    """What was done, and what was seen meanwhile."""

    done: dict[str, int] = field(default_factory=dict)
    memory_mb: list[dict[str, float]] = field(default_factory=list)

    def count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1
        click.echo(f"{time.strftime('%H:%M:%S')} {what}")


class Target:
    """The live run that is harmed."""

    def __init__(self, name: str, runs: Path, random_source: random.Random) -> None:
        self.keys, self.folder, self.random = Keys(name), runs / name, random_source
        self.sockets: set[Path] = set()
        self._frozen: dict[int, float] = {}
        self._kills: dict[str, list[float]] = {}

    def client(self) -> Client:
        url = (self.folder / "redis.url").read_text().strip()
        self.sockets.add(Path(url.removeprefix("unix://")))
        return connect(url, name="chaos", margin_s=2.0)

    def act(self, harm: Harm) -> None:
        """One random deed."""
        deeds: list[Callable[[Harm], None]] = [self._kill, self._kill, self._freeze, self._server]
        deeds += [self._poison, self._poison, self._damage]
        with contextlib.suppress(*REDIS_ERRORS, ProcessLookupError, FileNotFoundError):
            self.random.choice(deeds)(harm)

    def thaw(self, *, all_of_them: bool = False) -> None:
        """Let frozen processes go on whose time is over."""
        for pid, until_s in list(self._frozen.items()):
            if all_of_them or time.monotonic() > until_s:
                del self._frozen[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def memory(self) -> dict[str, float]:
        """Resident MB per worker and of the server."""
        found: dict[str, float] = {}
        with contextlib.suppress(*REDIS_ERRORS, FileNotFoundError), contextlib.closing(self.client()) as client:
            for worker in presence.alive(client, self.keys):
                found[worker.id] = _resident_mb(worker.pid)
            info: Any = client.info("memory")
            found["server"] = info["used_memory_rss"] / 1e6
        return found

    def _victim(self) -> presence.Presence:
        with contextlib.closing(self.client()) as client:
            return self.random.choice([w for w in presence.alive(client, self.keys) if w.role != "launcher"])

    def _kill(self, harm: Harm) -> None:
        victim = self._victim()
        recent = [when_s for when_s in self._kills.get(victim.role, []) if time.monotonic() - when_s < 60]
        if len(recent) >= KILLS_PER_MINUTE:
            return
        self._kills[victim.role] = [*recent, time.monotonic()]
        os.kill(victim.pid, signal.SIGKILL)
        harm.count(f"kill -9 {victim.role}")

    def _freeze(self, harm: Harm) -> None:
        victim = self._victim()
        os.kill(victim.pid, signal.SIGSTOP)
        self._frozen[victim.pid] = time.monotonic() + self.random.uniform(*FREEZE_S)
        harm.count(f"freeze {victim.role}")

    def _server(self, harm: Harm) -> None:
        with contextlib.closing(self.client()) as client:
            info: Any = client.info("server")
        pid = int(info["process_id"])
        if self.random.random() < 0.5:
            os.kill(pid, signal.SIGKILL)
            harm.count("kill -9 server")
        else:
            os.kill(pid, signal.SIGSTOP)
            self._frozen[pid] = time.monotonic() + self.random.uniform(*FREEZE_S)
            harm.count("freeze server")

    def _damage(self, harm: Harm) -> None:
        """What a person with redis-cli may do to a run by mistake."""
        with contextlib.closing(self.client()) as client:
            key, kind = self.random.choice(sorted(self.keys.types.items()))
            deed = self.random.choice(["FLUSHALL", "delete a stream", "overwrite a key"])
            if deed == "FLUSHALL":
                client.flushall()
            elif deed == "delete a stream":
                client.delete(self.random.choice([self.keys.obs_requests, self.keys.trajectories, self.keys.weights]))
            else:
                client.delete(key)
                if kind == "string":
                    client.rpush(key, "x")
                else:
                    client.set(key, "x")
        harm.count(deed)

    def _poison(self, harm: Harm) -> None:
        with contextlib.closing(self.client()) as client:
            streams = [
                self.keys.obs_requests,
                self.keys.trajectories,
                self.keys.weights,
                self.keys.actions("simulator-0"),
            ]
            stream = self.random.choice(streams)
            newest: Any = client.xrevrange(stream, count=1)
            fields: dict[Any, Any] = dict(newest[0][1]) if newest else {b"id": b"nobody", b"data": b"\x93"}
            name = self.random.choice(sorted(fields))
            raw = bytearray(fields[name] or b"\0")
            raw[self.random.randrange(len(raw))] ^= 1 << self.random.randrange(8)
            fields[name] = bytes(raw)
            client.xadd(stream, fields, nomkstream=True)
        harm.count(f"poison into {stream.rpartition('}:')[2].partition(':')[0]}")


def _resident_mb(pid: int) -> float:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return float(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1000
    return 0.0


@contextlib.contextmanager
def the_run(name: str, runs: Path, updates: int, settings: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    """`vla-stream run` of the quick start, with short leases, its words in runs/<name>.log."""
    fixed = [f"flow.lease_s={LEASE_S}", "evaluation.episodes=0", "trainer.checkpoint_every=5", f"runs_dir={runs}"]
    command = [sys.executable, "-m", "vla_stream.cli.main", "run", str(ROOT / "configs" / "quickstart.yaml")]
    command += ["--run", name, "--updates", str(updates)]
    for setting in (*fixed, *settings):
        command += ["--set", setting]
    runs.mkdir(parents=True, exist_ok=True)
    with (runs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def verdicts(name: str, folder: Path, updates: int, order: str, sockets: set[Path]) -> dict[str, bool]:
    """What must hold after the run; prints what was found."""
    records = load(folder / "metrics.jsonl")
    steps = [record for record in records if record.get("kind") == "update"]
    books: dict[str, Any] = next((r for r in reversed(records) if r.get("kind") == "books"), {})
    lineage: dict[int, list[str]] = {}
    for line in (folder / "updates.jsonl").read_text().splitlines():
        update = json.loads(line)
        # A later trainer repeats what was rolled back: from its first update on, the older lineage is gone.
        lineage = {number: used for number, used in lineage.items() if number < update["update"]}
        lineage[update["update"]] = update["segments"]
    tickets = [segment.partition(".")[0] for used in lineage.values() for segment in used]
    worst = max((float(record.get("staleness_max", 0)) for record in steps), default=0.0)
    above = sum(float(record.get("above_eta", 0)) for record in steps) / max(1, len(steps))
    limit = 1 if order == "ticket" else 4
    click.echo(f"books: {books}")
    click.echo(f"staleness: at most {worst:g}, {100 * above:.1f} % of the segments above η = 1")
    left = [str(path) for path in Path("/dev/shm").glob(f"vla-stream-*-{name}-*")]
    left += [str(path.parent) for path in sockets if path.parent.exists()]
    processes = [line for line in _command_lines() if re.search(rf"\b{name}\b", line) and "chaos.py" not in line]
    click.echo(f"left in /dev/shm and of sockets: {left or 'nothing'}; left processes: {processes or 'none'}")
    return {
        f"the run ended with update {updates}": max(lineage, default=0) == updates,
        "the books balance": books.get("balance") == 0,
        "no ticket was trained twice in the surviving lineage": len(tickets) == len(set(tickets)),
        f"no segment staler than {limit}": worst <= limit,
        "no file in /dev/shm, no socket, no process is left": not left and not processes,
    }


def _command_lines() -> Iterator[str]:
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield place.read_bytes().replace(b"\0", b" ").decode(errors="replace")


@click.command()
@click.option("--minutes", type=float, default=10.0, show_default=True, help="How long harm is done.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the harm.")
@click.option("--order", type=click.Choice(["arrival", "ticket"]), default="arrival", show_default=True)
@click.option("--runs", type=click.Path(path_type=Path), default=ROOT / "runs", help="Folder for the run.")
def main(minutes: float, seed: int, order: str, runs: Path) -> None:
    """Harm a live tabletop run at random, then check that it ended well and lost nothing uncounted."""
    name = f"chaos-{seed}-{os.getpid()}"
    updates = max(5, round(UPDATES_PER_MINUTE * minutes))
    source = random.Random(seed)
    target, harm = Target(name, runs.resolve(), source), Harm()
    with the_run(name, runs.resolve(), updates, (f"flow.order={order}", f"seed={seed}")) as process:
        while not (target.folder / "updates.jsonl").exists():
            if process.poll() is not None:
                raise click.ClickException(f"the run did not start; see {runs / name}.log")
            time.sleep(0.5)
        end_s = time.monotonic() + 60 * minutes
        while time.monotonic() < end_s and process.poll() is None:
            harm.memory_mb.append(target.memory())
            target.act(harm)
            next_s = time.monotonic() + source.uniform(*EVERY_S)
            while time.monotonic() < next_s and process.poll() is None:
                target.thaw()
                time.sleep(0.1)
        target.thaw(all_of_them=True)
        click.echo(f"{time.strftime('%H:%M:%S')} harm is over; waiting for update {updates}")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(FINISH_S)
        code = process.poll()
    click.echo(f"the run's exit code is {code}; done to it: {harm.done}")
    flat = True
    for role in ("server", "trainer-0", "generator-0", "simulator-0"):
        series = [sample[role] for sample in harm.memory_mb if sample.get(role)]
        if series:
            third = max(1, len(series) // 3)
            early, late = sorted(series[:third])[third // 2], sorted(series[-third:])[third // 2]
            flat &= late <= early * GROWTH + GROWTH_MB
            click.echo(f"memory of {role}: median {early:.0f} MB in the first third, {late:.0f} MB in the last")
    results = {"the run's exit code is 0": code == 0, **verdicts(name, target.folder, updates, order, target.sockets)}
    results["memory is flat"] = flat
    for what, holds in results.items():
        click.echo(f"{'ok  ' if holds else 'FAIL'} {what}")
    sys.exit(0 if all(results.values()) else 1)


if __name__ == "__main__":
    main()
