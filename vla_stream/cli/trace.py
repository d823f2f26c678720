"""`vla-stream trace`: what every worker did, moment by moment, as a file for Perfetto or Chrome."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import Target, connected, find_target, run_options
from vla_stream.errors import InputError, RunFailed

if TYPE_CHECKING:
    from vla_stream.cli.timeline import Timeline

SECONDS = 5.0
AFTER_S = 1.5  # a worker that was heard of so long after the end has told what ended then
PATIENCE_S = 4.0  # for workers in a long step: what they did is not heard of before they have done it
READ_AT_ONCE, BLOCK_MS = 200, 200


@click.command()
@click.argument("out", metavar="OUT.json", type=click.Path(path_type=Path, dir_okay=False))
@run_options
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.1, max=600),
    help=f"Of a live run: from now on, {SECONDS:g} by default. Of a finished one: its last so many; default: all.",
)
def trace(out: Path, run_name: str | None, redis_url: str | None, runs_dir: Path, seconds: float | None) -> None:
    """Write what every worker of a run did into OUT.json: environments' steps and resets, inference, updates, waiting.

    Open the file in Perfetto (ui.perfetto.dev) or chrome://tracing. A finished run has a trace when it ran with
    `trace: true` in its config.
    """
    from vla_stream.cli.timeline import TRACE_FILE

    try:
        found, begin_us, end_us = live(find_target(run_name, redis_url, runs_dir), seconds or SECONDS)
    except InputError as exc:
        if run_name is None or not (runs_dir / run_name).is_dir():
            raise
        file = runs_dir / run_name / TRACE_FILE
        if not file.exists():
            raise InputError(f"{exc}; a finished run has a trace only if it ran with --set trace=true") from exc
        found, begin_us, end_us = finished(file, seconds)
    save(out, found, begin_us, end_us)
    shares = found.shares(begin_us, end_us)
    click.echo(f"{out}: {(end_us - begin_us) / 1e6:.1f} s of {len(shares)} workers")
    for worker, share in shares.items():
        held = f", held back {share.output:.0%}" if share.output else ""
        click.echo(f"  {worker}: at work {share.work:.0%}, waits for input {share.input:.0%}{held}")
    if found.dropped:
        click.echo(
            f"  {found.dropped} spans are missing: workers had more than they keep between two seconds", err=True
        )


def save(out: Path, found: Timeline, begin_us: int, end_us: int) -> None:
    """The spans between two times as a file for Perfetto."""
    out.write_text(json.dumps(found.chrome(begin_us, end_us), separators=(",", ":")) + "\n", encoding="utf-8")


def live(target: Target, seconds: float) -> tuple[Timeline, int, int]:
    """What the workers do in the next seconds, and when that was. Raises InputError, RunFailed."""
    from vla_stream.broker.connection import ServerClock
    from vla_stream.broker.tail import Tail
    from vla_stream.cli.pulse import ROLES
    from vla_stream.cli.samples import decode
    from vla_stream.cli.timeline import Timeline
    from vla_stream.flow import Flow
    from vla_stream.streams import presence
    from vla_stream.streams.keys import Keys

    found, heard_ms = Timeline(), dict[str, float]()
    with connected(target.url, block_s=BLOCK_MS / 1000) as client:
        keys, clock = Keys(target.run), ServerClock(client)
        tail = Tail(client, keys.trace, "$")
        begin_ms = Flow(client, keys).ask_for_trace(seconds + PATIENCE_S)
        end_ms = begin_ms + int(1000 * seconds)
        missing: list[presence.Presence] = []
        while True:
            for entry in tail.read(READ_AT_ONCE, BLOCK_MS):
                record = decode(entry)
                found.add([record])
                heard_ms[str(record.get("worker"))] = entry.born_ms
            now_ms = clock.now_ms()
            if now_ms > end_ms:
                there = [worker for worker in presence.alive(client, keys) if worker.role in ROLES]
                missing = [worker for worker in there if heard_ms.get(worker.id, 0) < end_ms + 1000 * AFTER_S]
                if not missing or now_ms > end_ms + 1000 * PATIENCE_S:
                    break
    if not found.workers:
        raise RunFailed(f"run {target.run}: no worker said anything for {seconds:g} s; see `vla-stream status`")
    for worker in missing:
        click.echo(f"{worker.id} ({worker.state}) has not told all: trace for longer than one of its steps", err=True)
    return found, 1000 * begin_ms, 1000 * end_ms


def finished(file: Path, seconds: float | None) -> tuple[Timeline, int, int]:
    """What a run left in its folder, and when that was. Raises InputError."""
    from vla_stream.cli.samples import load
    from vla_stream.cli.timeline import Timeline

    found = Timeline()
    found.add(load(file))
    if not found.workers:
        raise InputError(f"{file}: holds no spans, expected those of a run that made some updates")
    begin_us, end_us = found.bounds_us
    return found, begin_us if seconds is None else max(begin_us, end_us - int(1e6 * seconds)), end_us
