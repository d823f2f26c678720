"""`vla-stream bench rollout`: stragglers, waits of requests, and our own cost per request, without a trainer.

The benchmark takes the trainer's place (consumer.py); all else are processes under a supervisor, an embedded server
and real lanes. Requests, rows and ages are the generators' own count, chunk steps those of the segments published.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from consumer import Consumer
from live import ACCOUNT_S, LOOK_S, Interrupted, Window, figures, launched, step
from model import CONFIGS
from report import Spread, machine, number, output_folder, output_option, table, write_json

from vla_stream.cli import samples
from vla_stream.cli.launch import Launch
from vla_stream.cli.samples import METRICS_FILE, Record
from vla_stream.cli.signals import Signals
from vla_stream.errors import RunFailed
from vla_stream.streams import presence
from workers.supervisor import Supervisor

FILE = "rollout.json"
FILES = [CONFIGS / "base.yaml", CONFIGS / "libero-pi05.yaml"]
START_S = 180.0
WARM_UP_S = 2.0
GATHER_S = 0.01  # segments that come within it are taken together
STRAGGLERS, BATCHING, FREE = TESTS = ("stragglers", "batching", "free")
CLASSES = ("simulator", "environment_process", "generator", "redis")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One run's window. steps: chunk steps of the segments that each slot published in it; cpu_us: per request;
    in_time: share of requests sent at most 5 ms after the wait that the generator's rule allows; rows: per batch."""

    seconds: float
    load: float
    others: float
    steps: dict[str, int]
    requests_per_s: float
    in_time: float
    rows: float
    rows_highest: float
    cpu_us: dict[str, float]
    figures: dict[str, float]

    def pace(self, slow: int) -> float:
        """Chunk steps per second of a slot; the `slow` slowest are left out."""
        return statistics.mean(sorted(self.steps.values())[slow:]) / self.seconds


@dataclass(slots=True)
class Row:
    """One row of a test. asked: of it, in words; like: the same without a straggler."""

    test: str
    name: str
    overlay: dict[str, Any]
    asked: str = ""
    like: Row | None = None
    runs: list[Rollout] = field(default_factory=list)

    def share(self) -> Spread | str:
        """What the batches beside the straggler do of what all do without one, run by run."""
        if self.like is None or not self.like.runs:
            return "–"
        pairs = zip(self.runs, self.like.runs, strict=False)
        return Spread.of([run.pace(1) / other.pace(0) for run, other in pairs])


def all_rows() -> list[Row]:
    """Of all tests; a straggler's row comes after the one without."""
    rows: list[Row] = []
    for name, wait_ms, asked in (("own pace", 0.0, "≥ .97"), ("lockstep", 60_000.0, "")):
        generators = {"count": 1, "max_batch_size": 16, "max_wait_ms": wait_ms}
        over, slow = (_overlay(2, 8, 1, generators, step_ms=20, batch_ms=3, row_ms=1) for _ in range(2))
        slow["environment"]["options"]["stragglers"] = 1
        rows.append(Row(STRAGGLERS, name, over))
        rows.append(Row(STRAGGLERS, f"{name}, one straggler", slow, asked, rows[-1]))
    for name, batches, generators in (
        ("idle, no wait", 1, {"count": 1, "max_batch_size": 9, "max_wait_ms": 0.0}),
        ("idle, 20 ms", 1, {"count": 1, "max_batch_size": 9, "max_wait_ms": 20.0}),
        ("4 slots, 2 generators, 20 ms", 4, {"count": 2, "max_batch_size": 9, "max_wait_ms": 20.0}),
        ("16 slots, 1 generator, 5 ms", 16, {"count": 1, "max_batch_size": 8, "max_wait_ms": 5.0}),
    ):
        over = _overlay(1, batches, 3, generators, step_ms=10, batch_ms=2, row_ms=0.5)
        rows.append(Row(BATCHING, name, over, "" if batches == 16 else "≥ .95"))
    for name, batches, slots, rows_at_once, asked in (
        ("8 × 4 batches of a slot, 6 rows at once", 4, 1, 6, ""),
        ("8 × 1 batch of 8 slots, 24 rows at once", 1, 8, 24, "≥ 2,000"),
    ):
        generators = {"count": 4, "max_batch_size": rows_at_once, "max_wait_ms": 0.0}
        over = _overlay(8, batches, 3, generators, slots=slots)
        over["environment"]["max_steps"], over["simulators"]["segment"]["steps"] = 80, 16
        rows.append(Row(FREE, name, over, asked))
    return rows


def _overlay(
    simulators: int,
    batches: int,
    rows: int,
    generators: Mapping[str, Any],
    step_ms: float = 0.0,
    slots: int = 1,
    **policy: float,
) -> dict[str, Any]:
    """Episodes and segments of two chunk steps of five steps; `slots` in each batch, of so many rows."""
    slots_in_all, free = simulators * batches * slots, dict.fromkeys(("batch_ms", "row_ms"), 0.0)
    return {
        "environment": {
            "max_steps": 10,
            "options": {"image_size": 224, "step_ms": step_ms, "reset_ms": step_ms, "stragglers": 0},
        },
        "policy": {"chunk": 5, "options": {"devices": ["0", "1", "2", "3"], "weights_mb": 0.0, **free, **policy}},
        "simulators": {
            "count": simulators,
            "env_batches": batches,
            "slots": slots,
            "envs_per_slot": rows,
            "segment": {"steps": 2},
        },
        "generators": {"padded_sizes": list(range(rows, generators["max_batch_size"], rows)), **generators},
        # With twice as many permits as this no slot ever waits for one.
        "trainer": {"segments_per_update": 2 * slots_in_all},
    }


@click.command()
@click.option("--test", "tests", multiple=True, type=click.Choice(TESTS), help="Only this; may be given several times.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Of each row, interleaved.")
@click.option("--seconds", type=click.FloatRange(min=3), default=12.0, show_default=True, help="Measured in each run.")
@output_option("Folder of the JSON.")
def rollout(tests: tuple[str, ...], repeats: int, seconds: float, output: Path) -> None:
    """What simulators and generators do while training costs nothing; stragglers, waits, and CPU per request."""
    rows, file = [row for row in all_rows() if not tests or row.test in tests], output_folder(output) / FILE
    about = {"machine": machine(), "repeats": repeats, "seconds": seconds}
    interrupted = False
    try:
        with Signals() as signals:
            for repeat, row in itertools.product(range(repeats), rows):
                run = measure(row.overlay, signals, seconds)
                row.runs.append(run)
                said = f"{number(run.requests_per_s)} requests/s; load {run.load:.1f}, others {run.others:.2f} cores"
                click.echo(f"{row.test} · {row.name} · run {repeat + 1}/{repeats}: {said}", err=True)
                write_json(file, {**about, "rows": [_plain(row) for row in rows]})
    except Interrupted:
        interrupted = True
    for test in TESTS:
        if shown := [row for row in rows if row.test == test and row.runs]:
            click.echo(f"\n{test}\n{show(test, shown)}")
    click.echo(
        f"load: of the machine; others: cores that other programs kept busy; see tools/bench/README.md\n\n{file}"
    )
    if interrupted:
        raise click.Abort


def _plain(row: Row) -> dict[str, Any]:
    return {"test": row.test, "name": row.name, "asked": row.asked, "runs": [asdict(run) for run in row.runs]}


def measure(overlay: Mapping[str, Any], signals: Signals, seconds: float) -> Rollout:
    """Run for so long, once all generators and slots, less stragglers, are under way. Raises Interrupted, RunFailed."""
    with launched(FILES, overlay, (), signals) as launch, contextlib.closing(Consumer(launch)) as consumer:
        config, window = launch.config, Window()
        shm, lease_s = launch.flow.shm_folder(), config.flow.lease_s
        launch.supervisor = Supervisor(launch.url, config.name, config.runs_dir, lease_s=lease_s, shm=shm)
        launch.supervisor.launch("generator", config.generators.count)
        launch.supervisor.launch("simulator", config.simulators.count)

        def until(there: Callable[[], Any], meanwhile: Callable[[], None], deadline_s: float) -> Any:
            end_s, next_look_s = time.monotonic() + deadline_s, 0.0
            while not (found := there()):
                if time.monotonic() > end_s:
                    raise RunFailed(f"bench rollout: not all slots are under way after {deadline_s:g} s")
                if time.monotonic() >= next_look_s:
                    next_look_s = time.monotonic() + LOOK_S
                    step(launch, signals)
                meanwhile()
            return found

        def consume() -> None:
            consumer.consume(int(LOOK_S * 1000))
            time.sleep(GATHER_S)

        def account() -> None:
            consume()
            if time.monotonic() >= window.ended_s + ACCOUNT_S:
                window.look()

        consumer.begin(until(launch.flow.specification, lambda: time.sleep(LOOK_S), START_S))
        slots = config.slots_in_all - overlay["environment"]["options"]["stragglers"]
        until(lambda: len({slot for _, slot, _ in consumer.published}) >= slots, consume, START_S)
        until(lambda: _generators(launch) == config.generators.count, consume, START_S)
        warm_s = time.monotonic() + WARM_UP_S
        until(lambda: time.monotonic() >= warm_s, consume, START_S)
        window.look()
        began_s = time.time()
        until(lambda: window.seconds >= seconds, account, seconds + START_S)
        ended_s = time.time()
        launch.read_metrics()
        books = launch.flow.books()
        if books.started != books.in_flight + books.outcomes["skipped"]:
            raise RunFailed(f"bench rollout: not all segments that were started were taken: {books}")
        # A sample covers the second before it.
        records = [r for r in samples.load(launch.run_dir / METRICS_FILE) if began_s + 1 < float(r["time"]) <= ended_s]
        steps = dict.fromkeys(sorted({slot for _, slot, _ in consumer.published}), 0)
        for born_ms, slot, count in consumer.published:
            steps[slot] += count * (began_s <= born_ms / 1000 < ended_s)
        return _evaluate(records, steps, window)


def _generators(launch: Launch) -> int:
    """Those that serve: one that still loads is busy, and with the others' work."""
    there = presence.alive(launch.client, launch.keys)
    return sum(worker.role == "generator" and worker.state == "running" for worker in there)


def _evaluate(records: Sequence[Record], steps: dict[str, int], window: Window) -> Rollout:
    said = [r for r in records if r.get("role") == "generator" and r.get("kind") == "second"]

    def total(name: str, worker: str | None = None) -> float:
        return sum(samples.number(r, name) or 0.0 for r in said if worker in (None, r["worker"]))

    if not total("requests"):
        raise RunFailed("bench rollout: no generator told of a request in the time measured; give more --seconds")
    rate = sum(total("requests", name) / total("seconds", name) for name in {str(r["worker"]) for r in said})
    return Rollout(
        seconds=window.seconds,
        load=window.load,
        others=window.others,
        steps=steps,
        requests_per_s=rate,
        in_time=1 - total("overdue") / total("requests"),
        rows=total("rows") / total("batches"),
        rows_highest=max(samples.number(record, "rows_highest") or 0.0 for record in said),
        cpu_us={role: 1e6 * spent / (rate * window.seconds) for role, spent in window.cpu_s.items()},
        figures=figures(records),
    )


def show(test: str, rows: Sequence[Row]) -> str:
    """The table of one test."""
    columns = {**COLUMNS[test], **BUSY}
    return table(["row", *columns], [[row.name, *(str(of(row)) for of in columns.values())] for row in rows])


def _each(of: Callable[[Rollout], float]) -> Callable[[Row], Spread]:
    return lambda row: Spread.of([of(run) for run in row.runs])


def _cpu(*roles: str) -> Callable[[Row], Spread]:
    return _each(lambda run: sum(run.cpu_us.get(role, 0.0) for role in roles))


# What stands under a heading, of a row; pace: of all batches but the straggler; in time: see Rollout.
COLUMNS: Mapping[str, Mapping[str, Callable[[Row], object]]] = {
    STRAGGLERS: {
        "chunk steps/s per batch": lambda row: _each(lambda run: run.pace(row.like is not None))(row),
        "slowest batch": _each(lambda run: min(run.steps.values()) / run.seconds),
        "÷ no straggler": Row.share,
        "asked": lambda row: row.asked,
    },
    BATCHING: {
        "requests/s": _each(lambda run: run.requests_per_s),
        "age at send ms": _each(lambda run: run.figures["age at send ms"]),
        "in time": _each(lambda run: run.in_time),
        "asked": lambda row: row.asked,
        "rows": _each(lambda run: run.rows),
        "highest": _each(lambda run: run.rows_highest),
        "allowed": lambda row: row.overlay["generators"]["max_batch_size"],
        "device busy": _each(lambda run: run.figures.get("generator busy", 0.0)),
    },
    FREE: {
        "requests/s": _each(lambda run: run.requests_per_s),
        "asked": lambda row: row.asked,
        "CPU µs each": _cpu(*CLASSES),
        **{role.partition("_")[0]: _cpu(role) for role in (*CLASSES, "bench")},
    },
}
BUSY: Mapping[str, Callable[[Row], object]] = {
    "load": _each(lambda run: run.load),
    "others": _each(lambda run: run.others),
}
