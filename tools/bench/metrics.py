"""What metrics cost: one live run of the quick start in which they rest for some updates, count for some, in turn.

    .venv/bin/python tools/bench/metrics.py --pairs 8

Nothing is learned (learning rate 0), so that all updates are equal work. All metrics of workers rest but the record of
each update, by which this measures; the first updates after each change are left out. CPU is that of all processes of
the run, launcher and server included, and holds on a busy machine too.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from live import LAST_RECORD_S, LOOK_S, Interrupted, Window, launched, step
from report import machine, number, output_folder, output_option, table, write_json
from resting import FILE

from vla_stream.cli import samples
from vla_stream.cli.launch import Launch
from vla_stream.cli.samples import METRICS_FILE, Record
from vla_stream.cli.signals import Signals
from vla_stream.errors import RunFailed, VlaStreamError
from workers.supervisor import Supervisor

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"
OVERRIDES = ("pretrain=null", "trainer.learning_rate=0", "trainer.value_learning_rate=0", "updates=1000000")
WARM_UP, LEFT_OUT = 6, 3  # updates: at the start, and after each change, which a trainer hears of between two
LIMIT = 0.02


@dataclass(frozen=True, slots=True)
class Block:
    """Updates first + 1 to last, all with metrics or all without. cpu_s: of all processes meanwhile."""

    counting: bool
    first: int
    last: int
    cpu_s: float
    load: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Of what a figure is without metrics: how much worse it is with them; mean over the pairs, and the half width of
    its 95 % interval (normal)."""

    mean: float
    half: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Cost:
        """ratios: pair by pair, above 1 where metrics cost something."""
        logs = [math.log(ratio) for ratio in ratios]
        half = 1.96 * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        return cls(math.expm1(statistics.fmean(logs)), half)

    def __str__(self) -> str:
        return f"{100 * self.mean:+.2f} % ± {100 * self.half:.2f}"


def rates(blocks: Sequence[Block], records: Sequence[Record]) -> list[tuple[float, float]]:
    """Environment steps per second, and CPU milliseconds per thousand of them, of each block."""
    updates = {int(samples.number(r, "update") or 0): r for r in records if r.get("kind") == "update"}
    found = []
    for block in blocks:
        counted = [updates[number] for number in range(block.first + 1, block.last + 1)]
        steps = sum(samples.number(record, "trained_env_steps") or 0.0 for record in counted)
        seconds = float(counted[-1]["time"]) - float(updates[block.first]["time"])
        found.append((steps / seconds, 1e6 * block.cpu_s / steps))
    return found


def costs(blocks: Sequence[Block], found: Sequence[tuple[float, float]]) -> tuple[Cost, Cost]:
    """Of throughput, and of CPU, by the pairs of neighbouring blocks."""
    speed, cpu = [], []
    for start in range(0, len(blocks) - 1, 2):
        pair = sorted(
            zip(blocks[start : start + 2], found[start : start + 2], strict=True), key=lambda b: b[0].counting
        )
        (_, (fast, little)), (_, (slow, much)) = pair
        speed.append(fast / slow)
        cpu.append(much / little)
    return Cost.of(speed), Cost.of(cpu)


def measure(launch: Launch, signals: Signals, pairs: int, updates: int) -> list[Block]:
    """Blocks of so many updates: with, without, without, with, with, … Raises RunFailed, Interrupted."""
    config, switch = launch.config, launch.run_dir / "resting"
    launch.supervisor = Supervisor(
        launch.url,
        config.name,
        config.runs_dir,
        lease_s=config.flow.lease_s,
        shm=launch.flow.shm_folder(),
        environment={FILE: str(switch)},
        command=lambda *of: [sys.executable, str(Path(__file__).with_name("resting.py")), *of],
    )
    for role, count in (("trainer", 1), ("generator", config.generators.count), ("simulator", config.simulators.count)):
        launch.supervisor.launch(role, count)
    until(launch, signals, WARM_UP)
    blocks = []
    for index in range(2 * pairs):
        counting = index % 4 in (0, 3)
        if counting:
            switch.unlink(missing_ok=True)
        else:
            switch.touch()
        window = Window()
        first = until(launch, signals, until(launch, signals, 0) + LEFT_OUT)
        window.look()
        last = until(launch, signals, first + updates)
        window.look()
        blocks.append(Block(counting, first, last, sum(window.cpu_s.values()), window.load))
        said = "with" if counting else "without"
        click.echo(f"{index + 1}/{2 * pairs} {said}: updates {first + 1} to {last}, load {window.load:.1f}", err=True)
    deadline_s = time.monotonic() + LAST_RECORD_S
    while (samples.number(launch.progress.last, "update") or 0) < blocks[-1].last:
        if time.monotonic() > deadline_s:
            raise RunFailed(f"update {blocks[-1].last} is committed, but its record did not come")
        time.sleep(LOOK_S)
        launch.read_metrics()
    return blocks


def until(launch: Launch, signals: Signals, update: int) -> int:
    """The update that the run has reached, once that is `update` or later."""
    while True:
        state = step(launch, signals)
        if state is not None and state.update >= update:
            return state.update
        time.sleep(LOOK_S)


@click.command()
@click.option("--pairs", type=click.IntRange(min=2), default=8, show_default=True, help="Of blocks, with and without.")
@click.option("--updates", type=click.IntRange(min=1), default=8, show_default=True, help="Counted in each block.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override of configs/quickstart.yaml.")
@output_option("Folder of the JSON.")
def metrics(pairs: int, updates: int, overrides: tuple[str, ...], output: Path) -> None:
    """What workers' metrics cost the quick start, in throughput and CPU; exit code 1 where they cost 2 % of CPU."""
    file = output_folder(output) / "metrics.json"
    try:
        with Signals() as signals, launched([CONFIG], {}, [*OVERRIDES, *overrides], signals) as launch:
            blocks = measure(launch, signals, pairs, updates)
            found = rates(blocks, samples.load(launch.run_dir / METRICS_FILE))
    except Interrupted:
        raise click.Abort from None
    except VlaStreamError as exc:
        raise click.ClickException(str(exc)) from exc
    speed, cpu = costs(blocks, found)
    click.echo(table(["", "with", "without", "metrics cost"], [*_lines(blocks, found, speed, cpu)]))
    about: dict[str, Any] = {"machine": machine(), "throughput": asdict(speed), "cpu": asdict(cpu)}
    write_json(file, {**about, "blocks": [asdict(b) | {"rates": r} for b, r in zip(blocks, found, strict=True)]})
    click.echo(f"\nload {statistics.fmean(block.load for block in blocks):.1f}; {file}")
    sys.exit(1 if cpu.mean > LIMIT else 0)


def _lines(
    blocks: Sequence[Block], found: Sequence[tuple[float, float]], speed: Cost, cpu: Cost
) -> Sequence[Sequence[str]]:
    def median(counting: bool, figure: int) -> str:
        values = [rate[figure] for block, rate in zip(blocks, found, strict=True) if block.counting == counting]
        return number(statistics.median(values))

    names = ("env steps/s", speed), ("CPU ms per 1,000 steps", cpu)
    return [[name, median(True, i), median(False, i), str(cost)] for i, (name, cost) in enumerate(names)]


if __name__ == "__main__":
    metrics()
