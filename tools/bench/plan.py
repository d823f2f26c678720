"""`vla-stream bench plan`: what `vla-stream plan` predicts for every placement of a profile, beside real runs of each.

The costs are measured at one placement, half of the devices for rollout, in one short run; options of the emulated
environment and policy are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml
from live import scratch_folder, with_own_devices
from model import CONFIGS, DEVICES, Profile, profile_names
from modes import FULL, overlay
from pipeline import Plan, Row, profile_file, take_turns
from report import number, output_folder, output_option, ratio, table

from vla_stream import config as settings
from vla_stream.cli import placement
from vla_stream.cli.costs import Costs, Placement, measured
from vla_stream.cli.plan import UPDATES, calibrate
from vla_stream.config import Config
from vla_stream.errors import InputError

FILE = "plan.json"


@click.command()
@click.option("--profile", "names", multiple=True, metavar="NAME", help="all (default), or some of configs/profiles.")
@click.option("--devices", type=click.IntRange(min=4), default=DEVICES, show_default=True, help="Emulated devices.")
@click.option("--fewest", type=click.IntRange(min=1), default=2, show_default=True, help="Devices of either kind.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Real runs of each placement."
)
@click.option("--updates", type=click.IntRange(min=1), default=4, show_default=True, help="Updates measured in each.")
@click.option("--warm-up", type=click.IntRange(min=1), default=2, show_default=True, help="Updates before them.")
@output_option("Folder of the JSON.")
def plan(
    names: tuple[str, ...], devices: int, fewest: int, repeats: int, updates: int, warm_up: int, output: Path
) -> None:
    """Every placement of some devices: predicted from one short run, and measured."""
    file = output_folder(output) / FILE
    every = [name for name in profile_names() if not on_device(profile_file(name))]
    wanted = every if not names or "all" in names else names
    plans = [predicted(name, devices, fewest) for name in wanted]
    rows = [row for plan in plans for row in plan.rows]
    about = {"updates": updates, "warm_up": warm_up, "repeats": repeats, "set": []}
    interrupted = take_turns(rows, plans, about, file)
    for plan in plans:
        click.echo(f"\n{plan.profile}\n{show(plan)}")
    click.echo(f"\n{file}")
    if interrupted:
        raise click.Abort


def on_device(file: Path) -> bool:
    """Simulators on the generators' devices: `plan` has no figures for these."""
    return Profile.of(settings.load([CONFIGS / "base.yaml", file])).on_device


def predicted(name: str, devices: int, fewest: int) -> Plan:
    """Rows of all placements with at least so many devices of either kind. Raises InputError, RunFailed."""
    file = profile_file(name)
    if on_device(file):
        raise InputError(f"--profile {name}: its simulators compute on the generators' devices, which plan cannot tell")
    files, half = [CONFIGS / "base.yaml", file], devices // 2
    base = settings.load(files)
    with scratch_folder() as scratch:
        config = _at(base, files, half, devices - half, scratch)
        costs = measured_costs(config)
    overs = {r: overlay(base, FULL, r, devices - r) for r in range(fewest, devices - fewest + 1)}
    rows = [
        Row(file.stem, f"{r}:{devices - r}", f"{r}:{devices - r}", files, over, rate(costs, config, r, devices - r))
        for r, over in overs.items()
    ]
    return Plan(file.stem, rows)


def _at(base: Config, files: Sequence[Path], rollout: int, training: int, scratch: Path) -> Config:
    over = scratch / "placement.yaml"
    sections: Mapping[str, Any] = overlay(base, FULL, rollout, training)
    over.write_text(yaml.safe_dump({name: with_own_devices(part, scratch) for name, part in sections.items()}))
    return settings.load([*files, over])


def measured_costs(config: Config) -> Costs:
    """By a short run."""
    tried, records = calibrate(config, UPDATES)
    return measured(records, tried)


def rate(costs: Costs, config: Config, rollout: int, training: int) -> float:
    """Environment steps per second, with this config's simulators and no limit of cores."""
    at = Placement(config.simulators.count, rollout, training)
    return placement.outlook(costs, config, at, float("inf")).steps_per_s


def show(plan: Plan) -> str:
    """The table of one profile, and what plan's choice gives of the best that was measured."""
    lines = [
        [
            row.name,
            number(row.predicted or 0.0),
            str(row.rate) if row.rate else "–",
            ratio(row.predicted or 0.0, row.rate.median if row.rate else None),
            f"{row.runs[-1].others:.2f}" if row.runs else "–",
        ]
        for row in plan.rows
    ]
    text = table(["rollout:training", "predicted", "measured", "predicted ÷ measured", "others"], lines)
    rates = {row.name: row.rate.median for row in plan.rows if row.rate}
    chosen = max(plan.rows, key=lambda row: row.predicted or 0.0).name
    if chosen in rates:
        best = max(rates, key=lambda name: rates[name])
        text += f"\nplan chooses {chosen}, measured best is {best}: {rates[chosen] / rates[best]:.3f} of it"
    return text
