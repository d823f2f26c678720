"""`vla-stream top`: what every worker and stream does right now, and what holds the run up."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import click

from vla_stream.cli.options import Target, connected, target_options

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from vla_stream.cli.pulse import Pulse

# Of each role: what its rate counts.
RATES = {
    "simulator": ("env_steps", "env-steps/s"),
    "generator": ("requests", "requests/s"),
    "trainer": ("segments", "segments/s"),
}


@click.command()
@target_options
@click.option("--every", type=click.FloatRange(min=0.2), default=1.0, show_default=True, help="Seconds between looks.")
@click.option("--once", is_flag=True, help="One look, without colours where the output is no terminal.")
def top(target: Target, every: float, once: bool) -> None:
    """Watch a run: where each worker's time goes, rates, queues, staleness, and the bottleneck in words.

    Ctrl-C ends it; the run goes on.
    """
    from rich.live import Live

    from vla_stream.cli.display import console_for_a_look
    from vla_stream.cli.status import look

    console = console_for_a_look()
    with connected(target.url) as client:
        first = _screen(*look(client, target.run))
        if once or not console.is_terminal:
            console.print(first)
            return
        with (
            contextlib.suppress(KeyboardInterrupt),
            Live(first, console=console, screen=True, auto_refresh=False) as live,
        ):
            while True:
                time.sleep(every)
                live.update(_screen(*look(client, target.run)), refresh=True)


def _screen(found: dict[str, Any], pulse: Pulse) -> Group:
    from rich.console import Group
    from rich.text import Text

    from vla_stream.cli.progress import count, decimal

    flow, updates = found["flow"], pulse.updates_per_s()
    about = Text()
    about.append(f"run {found['run']}", style="bold")
    about.append(f"  {flow['desired']}, update {flow['update']} of {found['updates']}, version {flow['version']}")
    about.append(f"  {count(pulse.rate('simulator', 'env_steps'))} env-steps/s sampled")
    if updates is not None:
        about.append(f", {count(pulse.trained_per_s())} trained, {decimal(updates)} updates/s")
    limit = Text(found["bottleneck"] or "not all roles have been heard of yet", style="yellow")
    batches = Text(
        f"batches: fill {_bars(pulse.histogram('fill'))}   age when sent, ms {_bars(pulse.histogram('age_ms'))}   "
        f"staleness of segments {_bars(pulse.histogram('staleness'))}",
        style="dim",
    )
    return Group(about, limit, Text(), _workers(found, pulse), Text(), _streams(found, pulse), Text(), batches)


def _workers(found: dict[str, Any], pulse: Pulse) -> Table:
    from rich.table import Table
    from rich.text import Text

    from vla_stream.cli.progress import count, decimal, share
    from vla_stream.cli.samples import number

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    names = ("worker", "host", "version", "work", "input", "held", "rate", "", "cores", "MB", "state")
    for name in names:
        table.add_column(name, justify="left" if name in ("worker", "host", "", "state") else "right")
    for worker in found["workers"]:
        metric, unit = RATES.get(worker["role"], ("", ""))
        last, shares = pulse.last(worker["id"]), worker["shares"] or {}
        done, seconds = number(last, metric), number(last, "seconds")
        rate = count(done / seconds) if done is not None and seconds else ""
        cells = [worker["id"], worker["host"], worker["version"] or ""]
        cells += [share(shares.get(name)) for name in ("work", "input", "output")]
        cells += [rate, unit if rate else "", decimal(number(last, "cpu")), count(number(last, "memory_mb"))]
        table.add_row(*(Text(str(cell)) for cell in (*cells, worker["state"])))
    return table


def _streams(found: dict[str, Any], pulse: Pulse) -> Table:
    from rich.table import Table

    from vla_stream.cli.progress import count

    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for name in ("stream", "entries", "oldest", "per second"):
        table.add_column(name, justify="left" if name == "stream" else "right")
    rates = {
        "obs-requests": pulse.rate("generator", "requests"),
        "trajectories": pulse.rate("trainer", "segments"),
    }
    for name, length in found["queues"].items():
        oldest = f"{found['oldest_s'][name]:.1f} s" if length else ""
        table.add_row(name, count(length), oldest, count(rates.get(name)))
    return table


def _bars(histogram: dict[str, float]) -> str:
    """`1 ▇ 2 ▂`: each bucket's upper bound and its share."""
    most = max(histogram.values(), default=0)
    marks = "▁▂▃▄▅▆▇█"
    shown = (f"{bound} {marks[round(number / most * (len(marks) - 1))]}" for bound, number in histogram.items() if most)
    return " ".join(shown) or "–"
