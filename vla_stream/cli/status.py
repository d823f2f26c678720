"""`vla-stream status` and `events`: who is there, what flows, what happened."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from vla_stream.cli.options import Target, connected, target_options
from vla_stream.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from vla_stream.broker.connection import Client
    from vla_stream.broker.queue import Entry
    from vla_stream.cli.pulse import Pulse

BLOCK_MS = 1000


@click.command()
@target_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(target: Target, as_json: bool) -> None:
    """Show the run's state, its workers, its queues and its books."""
    with connected(target.url) as client:
        found, _ = look(client, target.run)
    if as_json:
        click.echo(json.dumps(found))
        return
    from vla_stream.cli.display import console_for_a_look

    flow, console = found["flow"], console_for_a_look()
    console.print(
        f"run {target.run}: {flow['desired']}, update {flow['update']} of {found['updates']}, "
        f"weights version {flow['version']}, trainer epoch {flow['epoch']}",
        markup=False,
    )
    reader = flow["remote_reader"]
    through = f", now through Redis: {reader} does not see /dev/shm of the run" if reader else ""
    console.print(f"lane     {flow['lane']}{through if flow['lane'] == 'auto' else ''}", markup=False)
    console.print(_workers_table(found["workers"]))
    queues = " · ".join(
        f"{name} {length}" + (f" (oldest {found['oldest_s'][name]:.1f} s)" if length else "")
        for name, length in found["queues"].items()
    )
    console.print(f"queues   {queues} · dead letters so far {found['dead_letters']}", markup=False)
    console.print(found["books"]["sentence"], markup=False)
    if found["evaluated"]:
        console.print(f"evaluated {found['evaluated']}", markup=False)
    if found["bottleneck"]:
        console.print(f"limit    {found['bottleneck']}", markup=False)


def look(client: Client, run: str) -> tuple[dict[str, Any], Pulse]:
    """Everything that `status` shows, as plain data, and the last seconds of the run.

    Raises InputError when there is no such run."""
    from vla_stream.broker.connection import ServerClock
    from vla_stream.broker.tail import oldest_age_s
    from vla_stream.cli.pulse import Pulse
    from vla_stream.cli.samples import recent
    from vla_stream.flow import Flow
    from vla_stream.streams import presence
    from vla_stream.streams.keys import Keys
    from vla_stream.streams.notices import dead_letters_in_all, one_line

    keys, clock = Keys(run), ServerClock(client)
    flow = Flow(client, keys)
    state = flow.state()
    if state is None:
        raise InputError(f"run {run}: not on this server; give the name and URL that `vla-stream run` shows")
    books, server_ms = flow.books(), clock.now_ms()
    pulse = Pulse()
    pulse.add(recent(client, keys, server_ms - 1000 * pulse.window_s))
    pulse.advance(server_ms / 1000)
    shares = pulse.shares()
    shown = ("desired", "update", "version", "epoch", "generation", "lane")
    now_ms = int(time.time() * 1000)
    streams = {"obs-requests": keys.obs_requests, "trajectories": keys.trajectories}
    found = {
        "run": run,
        "updates": flow.config().updates,
        "flow": {name: getattr(state, name) for name in shown} | {"remote_reader": one_line(state.remote_reader)},
        "workers": [
            {
                "id": item.id,
                "role": item.role,
                "host": item.host,
                "pid": item.pid,
                "device": item.device,
                "version": item.version,
                "state": item.state,
                "progress": item.progress,
                "shm": item.shm,
                "alive_s": max(0, now_ms - item.started_ms) // 1000 if item.started_ms else 0,
                "shares": asdict(shares[item.id]) if item.id in shares else None,
            }
            for item in presence.alive(client, keys)
        ],
        "bottleneck": pulse.bottleneck(),
        "evaluated": one_line(client.hget(keys.worker(presence.LAUNCHER), presence.EVALUATED) or b""),
        "queues": {name: int(client.xlen(stream)) for name, stream in streams.items()},
        "oldest_s": {name: oldest_age_s(client, stream, server_ms) for name, stream in streams.items()},
        "dead_letters": dead_letters_in_all(client, keys),
        "books": {
            "started": books.started,
            "in_flight": books.in_flight,
            "outcomes": dict(books.outcomes),
            "given_up": books.given_up,
            "balance": books.balance,
            "sentence": str(books),
        },
    }
    return found, pulse


def _workers_table(workers: list[dict[str, Any]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from vla_stream.cli.progress import duration, share

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    left = ("worker", "host", "device", "state")
    for name in ("worker", "host", "pid", "device", "version", "progress", "alive", "work", "input", "held", "state"):
        table.add_column(name, justify="left" if name in left else "right")
    for worker in workers:
        cells = [worker[name] for name in ("id", "host", "pid", "device")]
        cells += [worker["version"] or "", worker["progress"]]  # simulators have no weights
        shares = worker["shares"] or {}
        cells += [duration(worker["alive_s"]), *(share(shares.get(name)) for name in ("work", "input", "output"))]
        cells.append(worker["state"])
        table.add_row(*(Text(str(cell)) for cell in cells))
    return table


@click.command()
@target_options
@click.option("--follow", "-f", is_flag=True, help="Go on with new ones as they come.")
@click.option("--count", type=click.IntRange(min=1), default=50, show_default=True, help="Newest events to show first.")
def events(target: Target, follow: bool, count: int) -> None:
    """Show what happened in a run: workers started and lost, segments refused, checkpoints, …"""
    from vla_stream.broker.tail import Tail, newest_entries
    from vla_stream.streams.keys import Keys

    stream = Keys(target.run).events
    with connected(target.url, block_s=BLOCK_MS / 1000) as client:
        shown = newest_entries(client, stream, count)
        for entry in shown:
            click.echo(sentence(entry))
        tail = Tail(client, stream, shown[-1].id if shown else "0")
        while follow:
            for entry in tail.read(100, BLOCK_MS):
                click.echo(sentence(entry))


def sentence(entry: Entry) -> str:
    """`21:03:12 simulator-0 started: …`"""
    from vla_stream.streams.notices import one_line

    worker, kind, text = (one_line(entry.fields.get(name, b"")) for name in (b"worker", b"kind", b"text"))
    clock = time.strftime("%H:%M:%S", time.localtime(entry.born_ms / 1000))
    return f"{clock} {worker} {kind}: {text}"
