"""`vla-stream bench batching`: `batching: auto` beside fixed batch sizes and waits, on each profile, model and real.

The model alone (`--repeats 0`) takes minutes and shows what there is to tune; real runs of all rows take hours: choose
a profile and rows there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import click
from model import CONFIGS, DEVICES, Profile, predict, profile_names, throughput
from modes import FULL, overlay
from pipeline import Plan, Row, profile_file, select, take_turns
from report import number, output_folder, output_option, ratio, table

from vla_stream import config as settings
from vla_stream.batching import Auto, Deadline, Strategy

AUTO = "auto"
REQUESTS = (1, 2, 3, 4, 6, 8)  # in a batch at most
WAITS_MS = (0, 5, 20)
MODEL_UPDATES = 24
FILE = "batching.json"


@click.command()
@click.option("--profile", "names", multiple=True, metavar="NAME", help="all (default), or some of configs/profiles.")
@click.option("--rows", "chosen", multiple=True, metavar="NAME", help="Only these rows, for example --rows auto.")
@click.option("--rollout", type=int, help=f"Of {DEVICES} devices. Default: the best placement by the model.")
@click.option(
    "--free-trainer", is_flag=True, help="Training takes no time: the rollout is the limit, and batching matters most."
)
@click.option("--repeats", type=click.IntRange(min=0), default=0, show_default=True, help="Real runs of each row.")
@click.option("--updates", type=click.IntRange(min=1), default=8, show_default=True, help="Updates measured in each.")
@click.option("--warm-up", type=click.IntRange(min=1), default=2, show_default=True, help="Updates before them.")
@output_option("Folder of the JSON.")
def batching(
    names: tuple[str, ...],
    chosen: tuple[str, ...],
    rollout: int | None,
    free_trainer: bool,
    repeats: int,
    updates: int,
    warm_up: int,
    output: Path,
) -> None:
    """A sweep of fixed batch sizes and waits, and `batching: auto`, which is told neither."""
    wanted = profile_names() if not names or "all" in names else names
    free = ("policy.options.sample_ms=0", "policy.options.optimiser_step_ms=0") if free_trainer else ()
    plans = [sweep(profile_file(name), rollout, free) for name in wanted]
    rows = select(plans, chosen)
    file = output_folder(output) / FILE
    about = {"updates": updates, "warm_up": warm_up, "repeats": repeats, "set": list(free)}
    interrupted = take_turns(rows, plans, about, file)
    for plan in plans:
        click.echo(f"\n{plan.profile}\n{show(plan)}")
    if repeats:
        click.echo(f"\n{file}")
    if interrupted:
        raise click.Abort


def sweep(file: Path, rollout: int | None, overrides: Sequence[str]) -> Plan:
    """Every row of a profile, and what the model says of it."""
    files = [CONFIGS / "base.yaml", file]
    config = settings.load(files, overrides)
    if rollout is None:
        rollout = next(row for row in predict(Profile.of(settings.load(files))) if row.name == "full").rollout
    training = DEVICES - rollout
    profile = Profile.of(config)
    if profile.on_device:
        profile = profile.split(rollout)
    common = overlay(config, FULL, rollout, training)
    slot = common.get("simulators", {}).get("envs_per_slot", config.simulators.envs_per_slot)
    # Where a generator has one slot of its own there is nothing to put together.
    sizes = (1,) if profile.on_device else REQUESTS
    rules: list[tuple[str, int, dict[str, object], Callable[[], Strategy]]] = [
        (f"{size} × {slot} rows, {wait} ms", size, {"max_wait_ms": wait}, lambda wait=wait: Deadline(1, wait))
        for size in sizes
        for wait in WAITS_MS
    ]
    rules.append((AUTO, max(sizes), {"batching": AUTO}, lambda: Auto(1, 0.0)))
    rows = []
    for name, size, generators, rule in rules:
        sized = replace(profile, slots_per_batch=size)
        rate = throughput(sized, FULL, rollout, training, updates=MODEL_UPDATES, batching=rule)
        batch = {"max_batch_size": size * slot, "padded_sizes": [slot * n for n in range(1, size)]}
        over = {**common, "generators": {**common["generators"], **batch, **generators}}
        rows.append(Row(file.stem, name, f"{rollout}:{training}", files, over, rate))
    return Plan(file.stem, rows)


def show(plan: Plan) -> str:
    """The table of one profile; ratios are to the best fixed row of each kind."""
    fixed = [row for row in plan.rows if row.name != AUTO]
    best = max((row.predicted or 0.0 for row in fixed), default=0.0)
    best_measured = max((row.rate.median for row in fixed if row.rate), default=0.0)
    lines = [
        [
            row.name,
            row.placement,
            number(row.predicted or 0.0),
            ratio(row.predicted or 0.0, best),
            str(row.rate) if row.rate else "–",
            ratio(row.rate.median, best_measured) if row.rate else "–",
        ]
        for row in plan.rows
    ]
    return table(["row", "devices", "model", "÷ best", "measured", "÷ best"], lines)
