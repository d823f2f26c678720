"""What leases, permits, digests and metrics cost: their share of each worker's CPU time in a run of the quick start.

    .venv/bin/python tools/bench/overhead.py --seconds 40

py-spy looks at every thread of every worker a hundred times a second while the run trains. Counted are the samples in
which a thread computes; a sample belongs to a kind when one of the kind's functions is in its stack.
"""

from __future__ import annotations

import collections
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from vla_stream.broker.connection import connect
from vla_stream.errors import RunFailed, VlaStreamError
from vla_stream.flow import Flow
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys

ROOT = Path(__file__).resolve().parents[2]
RUN = "overhead"
LIMIT = 0.10
START_S = 240.0
SPY = (str(Path(sys.executable).with_name("py-spy")), "record", "--rate", "100", "--format", "raw", "--nonblocking")
# Function and file, as py-spy names a frame.
KINDS: Mapping[str, frozenset[tuple[str, str]]] = {
    "leases": frozenset({("renew", "queue.py"), ("take_over", "queue.py"), ("renew", "replies.py")}),
    "permits": frozenset(
        (name, "flow.py")
        for name in ("grant", "renew", "abort", "register", "published_as", "refuse_all", "miss", "ready_in_order")
    ),
    "digests": frozenset({("digest_of", "codec.py"), ("_digest", "codec.py")}),
    "metrics": frozenset(
        {("emit", "worker.py"), ("_send_spans", "worker.py"), ("account", "simulator.py")}
        | {(name, "metrics.py") for name in ("count", "mean", "highest", "gauge", "bucket", "spend", "busy", "note")}
        | {("sample", "metrics.py"), ("spans", "metrics.py")}
    ),
}


def shares(raw: str) -> dict[str, float]:
    """From py-spy's raw format, `frame;frame;… count` per line: each kind's share of all samples, and `samples`."""
    counts: collections.Counter[str] = collections.Counter()
    for line in raw.splitlines():
        stack, _, number = line.rpartition(" ")
        # A frame reads `Class.name (path/file.py:line)`.
        parts = [frame.partition(" (") for frame in stack.split(";")]
        functions = {(name.rpartition(".")[2], place.rpartition(":")[0].rpartition("/")[2]) for name, _, place in parts}
        counts["samples"] += int(number)
        for kind, wanted in KINDS.items():
            counts[kind] += int(number) * bool(functions & wanted)
    total = counts["samples"]
    return {kind: counts[kind] / total if total else 0.0 for kind in KINDS} | {"samples": float(total)}


@contextlib.contextmanager
def live_run(folder: Path) -> Iterator[list[presence.Presence]]:
    """The workers of a quick start that has made three updates. Raises RunFailed."""
    command = [sys.executable, "-m", "vla_stream.cli.main", "run", str(ROOT / "configs" / "quickstart.yaml")]
    command += ["--run", RUN, "--updates", "100000", "--set", "evaluation.episodes=0", "--set", f"runs_dir={folder}"]
    command += ["--set", "pretrain=null"]  # what the policy can does not matter, and it begins sooner
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT) as process:
        try:
            deadline_s = time.monotonic() + START_S
            url, updates = folder / RUN / "redis.url", folder / RUN / "updates.jsonl"
            while not updates.exists() or updates.read_bytes().count(b"\n") < 3:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RunFailed(f"the run made no updates; its last words: {(folder / 'log').read_text()[-500:]}")
                time.sleep(0.5)
            with contextlib.closing(connect(url.read_text().strip(), name="overhead")) as client:
                found = presence.alive(client, Flow(client, Keys(RUN)).keys)
            yield [worker for worker in found if worker.role != "launcher"]
        finally:
            process.terminate()


def look(workers: list[presence.Presence], seconds: float, folder: Path) -> dict[str, dict[str, float]]:
    """The shares of each worker, all looked at meanwhile. Raises RunFailed where py-spy may not look."""
    files = {worker.id: folder / f"{worker.id}.raw" for worker in workers}
    spies = {
        worker.id: subprocess.Popen(
            [*SPY, "--pid", str(worker.pid), "--duration", f"{seconds:.0f}", "--output", str(files[worker.id])],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for worker in workers
    }
    found = {}
    for worker_id, spy in spies.items():
        _, said = spy.communicate(timeout=3 * seconds + 120)
        if spy.returncode != 0:
            raise RunFailed(f"{worker_id}: py-spy could not look ({said.decode().strip()[-200:]}); run it as root")
        found[worker_id] = shares(files[worker_id].read_text())
    return found


@click.command()
@click.option("--seconds", type=float, default=40.0, show_default=True, help="How long the live run is looked at.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(seconds: float, as_json: bool) -> None:
    """Print the share of each worker's CPU time that leases, permits, digests, metrics take; exit code 1 above 10 %."""
    with tempfile.TemporaryDirectory(prefix="vla-stream-overhead-") as name:
        folder = Path(name)
        try:
            with live_run(folder) as workers:
                found = look(workers, seconds, folder)
        except VlaStreamError as exc:
            raise click.ClickException(str(exc)) from exc
    sums = {worker: sum(row[kind] for kind in KINDS) for worker, row in found.items()}
    if as_json:
        click.echo(json.dumps({worker: row | {"sum": sums[worker]} for worker, row in found.items()}, indent=1))
    else:
        click.echo(f"{'worker':<14}{'samples':>9}" + "".join(f"{kind:>9}" for kind in (*KINDS, "sum")))
        for worker, row in found.items():
            cells = [*(row[kind] for kind in KINDS), sums[worker]]
            click.echo(f"{worker:<14}{row['samples']:>9.0f}" + "".join(f"{100 * cell:>7.1f} %" for cell in cells))
    sys.exit(1 if max(sums.values()) > LIMIT else 0)


if __name__ == "__main__":
    main()
