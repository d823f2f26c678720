"""`vla-stream bench broker`: round trips of one 150 KB observation and its actions, by each lane and beside limits."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from contenders import IMAGE_BYTES, LANES, Contender, Library, Pickle, Raw, Ray, why_no_ray
from live import Interrupted, cpu_by_process, machine_busy_s, scratch_folder
from report import Spread, machine, number, output_folder, output_option, ratio, table, write_json

from vla_stream.broker.lanes import SHM_ROOT
from vla_stream.broker.server import EmbeddedServer
from vla_stream.cli.curve import BLUE, GREY, ORANGE
from vla_stream.cli.signals import Signals
from vla_stream.errors import InputError, RunFailed

RAW, PICKLE, RAY = "raw limit", "pickle in XADD", "ray"
NAMES = (RAW, *LANES, PICKLE, RAY)
SILENT_S = 20.0
FILES = {"json": "broker.json", "plot": "broker.png"}


@dataclass(slots=True)
class Row:
    """One contender at one depth. per_s: round trips per second, one figure per repeat."""

    name: str
    depth: int
    per_s: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    cpu_s: float = 0.0  # of both ends and the server, over all repeats
    trips: int = 0  # in that time
    missing: str = ""


@click.command()
@click.option("--contender", "chosen", multiple=True, type=click.Choice(NAMES), help="Only these; default: all.")
@click.option(
    "--depth",
    "depths",
    multiple=True,
    type=click.IntRange(1, 1024),
    default=(1, 64),
    show_default=True,
    help="Observations on their way at a time.",
)
@click.option(
    "--seconds", type=click.FloatRange(min=0.05), default=1.0, show_default=True, help="Length of each measurement."
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Measurements of each row, interleaved."
)
@output_option("Folder of JSON and plot.")
def broker(chosen: tuple[str, ...], depths: tuple[int, ...], seconds: float, repeats: int, output: Path) -> None:
    """Round trips observation → actions between two processes of this host, and bytes per second.

    The raw limit is a reference over a socket and two copies of the image; the others do all that a run does with a
    message: headers, digests, at-least-once delivery, acknowledgement.
    """
    names = [name for name in NAMES if not chosen or name in chosen]
    folder = output_folder(output)
    rows = [Row(name, depth) for depth in dict.fromkeys(depths) for name in names]
    about = {"machine": machine(), "image_bytes": IMAGE_BYTES, "seconds": seconds, "repeats": repeats}
    with Signals() as signals:
        try:
            measure_all(rows, seconds, repeats, lambda: signals.asked > 0)
        except Interrupted:
            raise click.Abort from None
    write_json(folder / FILES["json"], {**about, "rows": [plain(row) for row in rows]})
    click.echo(show(rows))
    draw(rows, folder / FILES["plot"])
    click.echo(f"\n{folder / FILES['json']}, {folder / FILES['plot']}")


def measure_all(rows: Sequence[Row], seconds: float, repeats: int, asked: Callable[[], bool]) -> None:
    """Fill the rows in. Both ends of all contenders live throughout, so that their turns are all that differs."""
    depth = max(row.depth for row in rows)
    run = f"bench-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        scratch = stack.enter_context(scratch_folder())
        shm = SHM_ROOT / f"vla-stream-{os.getuid()}-{run}"
        try:
            shm.mkdir(mode=0o700)
        except OSError as exc:
            raise InputError(f"{shm}: cannot be made ({exc.strerror}); this benchmark needs a /dev/shm") from exc
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        url = stack.enter_context(EmbeddedServer.start(scratch)).url
        makers: Mapping[str, Callable[[], Contender]] = {
            RAW: lambda: Raw(shm, depth),
            **{lane: (lambda lane=lane: Library(lane, url, f"{run}-{lane}", shm, depth)) for lane in LANES},
            PICKLE: lambda: Pickle(url, run, depth),
            RAY: lambda: Ray(depth),
        }
        contenders: dict[str, Contender] = {}
        for row in rows:
            if row.name == RAY and (reason := why_no_ray()):
                row.missing = reason
            elif row.name not in contenders:
                contenders[row.name] = made = makers[row.name]()
                stack.callback(made.close)
                drive(made, 1, 0.05, asked)  # its server has started, and both ends are warm
        for _ in range(repeats):
            for row in rows:
                if not row.missing:
                    before_s, busy_s, cpu_s = time.monotonic(), machine_busy_s(), our_cpu_s()
                    per_s, trips = drive(contenders[row.name], row.depth, seconds, asked)
                    row.per_s.append(per_s)
                    row.trips += trips
                    row.cpu_s += our_cpu_s() - cpu_s
                    row.busy.append((machine_busy_s() - busy_s) / (time.monotonic() - before_s))
                    row.loads.append(os.getloadavg()[0])


def drive(contender: Contender, depth: int, seconds: float, asked: Callable[[], bool]) -> tuple[float, int]:
    """Round trips per second, and in all, with `depth` observations on their way. Raises Interrupted, RunFailed."""
    contender.send(range(depth))
    waiting, done = depth, 0
    start_s: float | None = None
    heard_s = time.monotonic()
    while True:
        slots = contender.receive()
        now_s = time.monotonic()
        if asked():
            raise Interrupted
        if not slots and now_s > heard_s + SILENT_S:
            raise RunFailed(f"broker: no answer for {SILENT_S:g} s, expected one at once; its server may have died")
        heard_s = now_s if slots else heard_s
        if start_s is None:
            start_s = now_s  # the first answer: what it took is not counted, nor is it
        elif now_s < start_s + seconds:
            done += len(slots)
        else:
            waiting -= len(slots)
            if not waiting:
                return done / seconds, done + depth
            continue
        contender.send(slots)


def our_cpu_s() -> float:
    """CPU seconds of this process and of all that it started."""
    return sum(seconds for _, seconds in cpu_by_process(os.getpid()).values())


def show(rows: Sequence[Row]) -> str:
    """The table. Ratios are of medians."""
    medians = {(row.name, row.depth): Spread.of(row.per_s).median for row in rows if row.per_s}
    raw = medians.get((RAW, 1))
    header = [
        "way",
        "depth",
        "round trips/s",
        "MB/s",
        "µs each",
        "CPU µs each",
        "÷ raw, depth 1",
        "÷ pickle",
        "÷ ray",
        "load",
        "cores busy",
    ]
    lines = []
    for row in rows:
        if not row.per_s:
            lines.append([row.name, str(row.depth), row.missing or "–", *[""] * (len(header) - 3)])
            continue
        rate = medians[row.name, row.depth]
        lines.append(
            [
                row.name,
                str(row.depth),
                str(Spread.of(row.per_s)),
                number(rate * IMAGE_BYTES / 1e6),
                number(1e6 / rate) if rate else "–",
                number(1e6 * row.cpu_s / row.trips) if row.trips else "–",
                ratio(rate, raw),
                ratio(rate, medians.get((PICKLE, row.depth))),
                ratio(rate, medians.get((RAY, row.depth))),
                f"{Spread.of(row.loads).median:.1f}",
                f"{Spread.of(row.busy).median:.2f}",
            ]
        )
    return (
        f"{table(header, lines)}\nround trips/s: median (range); cores busy: of the machine, with all that runs on it"
    )


def plain(row: Row) -> dict[str, Any]:
    """For JSON."""
    return {
        "name": row.name,
        "depth": row.depth,
        "round_trips_per_s": row.per_s,
        "load": row.loads,
        "cores_busy": row.busy,
        "cpu_s": row.cpu_s,
        "round_trips": row.trips,
        "missing": row.missing,
    }


def draw(rows: Sequence[Row], file: Path) -> None:
    """One panel per depth, a bar per way."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    depths = list(dict.fromkeys(row.depth for row in rows))
    raw = next((Spread.of(row.per_s).median for row in rows if row.name == RAW and row.depth == 1 and row.per_s), None)
    figure, panels = pyplot.subplots(1, len(depths), figsize=(1 + 3.4 * len(depths), 3.4), squeeze=False, sharey=True)
    for depth, panel in zip(depths, panels[0], strict=True):
        measured = [(row.name, Spread.of(row.per_s)) for row in rows if row.depth == depth and row.per_s]
        spread = [[s.median - s.low for _, s in measured], [s.high - s.median for _, s in measured]]
        colours = [BLUE if name in LANES else ORANGE for name, _ in measured]
        panel.bar([name for name, _ in measured], [s.median for _, s in measured], yerr=spread, color=colours)
        if raw:
            panel.axhline(raw, color=GREY, linestyle="--", linewidth=1)
        panel.set_title(f"{depth} on their way", fontsize=9)
        panel.tick_params(axis="x", rotation=45, labelsize=8)
    panels[0][0].set_ylabel("round trips/s (dashed: raw limit, depth 1)", fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
