"""`vla-stream bench pipeline`: the ablation of each profile for real, beside what the model predicts.

Every figure of a row is measured in a run of its own, of all processes. Repeats are interleaved, so that what else the
machine does shows as a spread and not as a difference between rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from live import Interrupted, Measured, measure
from model import COLOCATED, CONFIGS, DEVICES, Prediction, Profile, predict, profile_names
from modes import overlay
from report import Spread, machine, number, output_folder, output_option, ratio, table, write_json

from vla_stream import config as settings
from vla_stream.cli.curve import BLUE, GREY, ORANGE
from vla_stream.cli.signals import Signals
from vla_stream.errors import InputError

REAL = "real"  # in place of a profile's name
QUICKSTART = CONFIGS.parent / "quickstart.yaml"
STEP_DELAY_MS = 20
REAL_ENVIRONMENTS, REAL_ROWS = 64, 8  # in all, and of those together in one request when they are free
SYNC_ROW, ASYNC_ROW = "sync lockstep", "async"
FILES = {"json": "pipeline.json", "plot": "pipeline.png"}


@dataclass(slots=True)
class Row:
    """One row of one profile: how it is run, what it should give, and what it gave."""

    profile: str
    name: str
    placement: str
    files: list[Path]
    overlay: Mapping[str, Any]
    predicted: float | None = None
    runs: list[Measured] = field(default_factory=list)

    @property
    def rate(self) -> Spread | None:
        return Spread.of([run.steps_per_s for run in self.runs]) if self.runs else None


@dataclass(slots=True)
class Plan:
    """The rows of one profile. bound: of any order of work on its devices; None where there is no model."""

    profile: str
    rows: list[Row]
    bound: float | None = None
    bound_placement: str = ""

    def median(self, name: str) -> float | None:
        """Measured, of the row of this name."""
        return next((row.rate.median for row in self.rows if row.name == name and row.rate), None)


@click.command()
@click.option(
    "--profile",
    "names",
    multiple=True,
    metavar="NAME",
    help="all (default), or some of configs/profiles, or YAML files like them.",
)
@click.option(
    "--real",
    is_flag=True,
    help="Real physics and a real model: tabletop, tiny, 20 ms per step. Alone unless --profile.",
)
@click.option(
    "--rows", "chosen", multiple=True, metavar="NAME", help="Only these rows, for example --rows sync --rows full."
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each row, interleaved."
)
@click.option(
    "--updates", type=click.IntRange(min=1), default=8, show_default=True, help="Updates measured in each run."
)
@click.option("--warm-up", type=click.IntRange(min=1), default=2, show_default=True, help="Updates before them.")
@click.option("--devices", type=click.IntRange(min=4), default=DEVICES, show_default=True, help="Emulated devices.")
@click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    multiple=True,
    help="Override in every profile, for example policy.options.sample_ms=4.",
)
@click.option("--trace", "traced", is_flag=True, help="And what every worker of a row's last run did, for Perfetto.")
@output_option("Folder of JSON and plot.")
def pipeline(
    names: tuple[str, ...],
    real: bool,
    chosen: tuple[str, ...],
    repeats: int,
    updates: int,
    warm_up: int,
    devices: int,
    overrides: tuple[str, ...],
    traced: bool,
    output: Path,
) -> None:
    """Environment steps per second of whole runs, training included, from lockstep to fully asynchronous.

    Devices are emulated (configs/profiles/), all else is real; beside each figure stands what the model predicts, what
    no order of work can exceed, and how busy the machine was. Ctrl-C ends the run at hand and shows what there is.
    """
    plans = [emulated_plan(profile_file(name), devices, overrides) for name in _names(names, real)]
    plans += [real_plan(overrides)] if real else []
    rows = select(plans, chosen)
    about = {"updates": updates, "warm_up": warm_up, "repeats": repeats, "set": list(overrides)}
    interrupted = take_turns(rows, plans, about, output_folder(output) / FILES["json"], traced=traced)
    for plan in plans:
        if any(row.runs for row in plan.rows):
            click.echo(f"\n{plan.profile}\n{show(plan)}")
    if any(row.runs for row in rows):
        draw(plans, output / FILES["plot"])
        click.echo(f"\n{output / FILES['json']}, {output / FILES['plot']}")
    if interrupted:
        raise click.Abort


def take_turns(
    rows: Sequence[Row], plans: Sequence[Plan], about: Mapping[str, Any], file: Path, *, traced: bool = False
) -> bool:
    """Every row once, then every row again, as often as `about` says; after each run all is in `file`, and beside it,
    where `traced`, a trace. Returns whether the person had enough of it."""
    about = {"machine": machine(), **about}
    with Signals() as signals:
        try:
            for row, number_of_run in interleaved(rows, about["repeats"]):
                run = measure(
                    row.files,
                    row.overlay,
                    about["set"],
                    signals,
                    updates=about["updates"],
                    warm_up=about["warm_up"],
                    trace=file.with_name(trace_name(row)) if traced else None,
                )
                row.runs.append(run)
                click.echo(
                    f"{row.profile} · {row.name} · run {number_of_run}/{about['repeats']}: {line(run)}", err=True
                )
                write_json(file, {**about, "profiles": [plain(plan) for plan in plans]})
        except Interrupted:
            return True
    return False


def trace_name(row: Row) -> str:
    """`trace-libero-pi05-full.json`"""
    words = re.findall(r"[a-z0-9=+-]+", f"trace {row.profile} {row.name}".lower().replace("η", "eta"))
    return "-".join(words) + ".json"


def _names(names: Sequence[str], real: bool) -> list[str]:
    if not names:
        return [] if real else profile_names()
    return [every for name in names for every in (profile_names() if name == "all" else [name])]


def profile_file(name: str) -> Path:
    """Of a profile's name or path. Raises InputError."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in profile_names():
        raise InputError(
            f"--profile {name}: no such profile, expected all, {', '.join(profile_names())}, or a YAML file"
        )
    return CONFIGS / f"{name}.yaml"


def emulated_plan(file: Path, devices: int, overrides: Sequence[str]) -> Plan:
    """The ablation of a profile."""
    files = [CONFIGS / "base.yaml", file]
    config = settings.load(files, overrides)
    profile = Profile.of(config)
    if profile.environments < devices:
        few = profile.environments
        raise InputError(f"--devices {devices}: profile {file.stem} has {few} environments, expected one per device")
    predictions = predict(profile, devices)
    rows = [
        Row(file.stem, row.name, _placement(row), files, _overlay(config, row), row.steps_per_s)
        for row in predictions
        if row.mode is not None
    ]
    bound = next(row for row in predictions if row.mode is None)
    return Plan(file.stem, rows, bound.steps_per_s, _placement(bound))


def _placement(row: Prediction) -> str:
    return f"{row.rollout}:{row.training}"


def _overlay(config: settings.Config, row: Prediction) -> dict[str, Any]:
    assert row.mode is not None
    over = overlay(config, row.mode, row.rollout, row.training, colocated=row.colocated)
    over["flow"] = {**over["flow"], "max_staleness": row.max_staleness}
    return over


def real_plan(overrides: Sequence[str]) -> Plan:
    """The quick start's physics, model and samples per update, with slower steps, four times its environments and
    without its warm start. In lockstep all environments wait for one inference, and training for the rollout."""
    common: dict[str, Any] = {
        "name": "bench-real",
        "environment": {"options": {"step_delay_ms": STEP_DELAY_MS}},
        "pretrain": None,
        "evaluation": {"episodes": 0},
    }
    config = settings.load([QUICKSTART], overrides)
    count = config.simulators.count
    batches = REAL_ENVIRONMENTS // (count * REAL_ROWS)
    trainer = {"checkpoint_every": 1000}
    # The batch is sent when all rows are in it; the long wait is never waited for.
    lockstep = {
        **common,
        "simulators": {"env_batches": 1, "envs_per_slot": batches * REAL_ROWS},
        "generators": {"max_batch_size": REAL_ENVIRONMENTS, "max_wait_ms": 1000.0, "padded_sizes": []},
        "trainer": {**trainer, "segments_per_update": count},
        "flow": {"max_staleness": 0},
    }
    free = {
        **common,
        "simulators": {"env_batches": batches, "envs_per_slot": REAL_ROWS},
        "generators": {"max_batch_size": 16, "max_wait_ms": 0.0, "padded_sizes": [REAL_ROWS]},
        "trainer": {**trainer, "segments_per_update": count * batches},
        "flow": {"max_staleness": 1},
    }
    rows = ((SYNC_ROW, lockstep), (ASYNC_ROW, free))
    return Plan(REAL, [Row(REAL, name, "cpu", [QUICKSTART], over) for name, over in rows])


def select(plans: Sequence[Plan], chosen: Sequence[str]) -> list[Row]:
    """The rows of these names, or all; the others are dropped from the plans. Raises InputError."""
    known = list(dict.fromkeys(row.name for plan in plans for row in plan.rows))
    for name in chosen:
        if name not in known:
            raise InputError(f"--rows {name}: no such row, expected one of: {', '.join(known)}")
    for plan in plans:
        plan.rows = [row for row in plan.rows if not chosen or row.name in chosen]
    return [row for plan in plans for row in plan.rows]


def interleaved(rows: Sequence[Row], repeats: int) -> Iterator[tuple[Row, int]]:
    """Every row once, then every row again."""
    for repeat in range(repeats):
        for row in rows:
            yield row, repeat + 1


def line(run: Measured) -> str:
    cpu = ", ".join(f"{role} {seconds:.1f}" for role, seconds in run.cpu_s.items() if seconds >= 0.05)
    return (
        f"{number(run.steps_per_s)} environment steps/s over {run.seconds:.1f} s; load {run.load:.1f}, others keep "
        f"{run.others:.2f} cores busy; CPU seconds in {run.cpu_window_s:.1f} s: {cpu}"
    )


def show(plan: Plan) -> str:
    """The table of one profile."""
    colocated, sync = plan.median(COLOCATED), plan.median("sync") or plan.median(SYNC_ROW)
    header = [
        "row",
        "devices",
        "measured",
        "model",
        "÷ model",
        "÷ sync coloc.",
        "÷ sync",
        "÷ bound",
        "load",
        "others",
        "CPU",
    ]
    lines = []
    for row in plan.rows:
        if row.rate is None:
            continue
        rate = row.rate.median
        cores = sum(sum(run.cpu_s.values()) / run.cpu_window_s for run in row.runs) / len(row.runs)
        lines.append(
            [
                row.name,
                row.placement,
                str(row.rate),
                number(row.predicted) if row.predicted else "–",
                ratio(rate, row.predicted),
                ratio(rate, colocated),
                ratio(rate, sync),
                ratio(rate, plan.bound),
                f"{Spread.of([run.load for run in row.runs]).median:.1f}",
                f"{Spread.of([run.others for run in row.runs]).median:.2f}",
                f"{cores:.2f}",
            ]
        )
    if plan.bound:
        lines.append(["bound", plan.bound_placement, "", number(plan.bound), "", "", "", "", "", "", ""])
    notes = (
        "measured: median (range) of environment steps/s; others, CPU: cores kept busy by other programs, by the run"
    )
    roles = sorted({role for row in plan.rows for run in row.runs for role in run.cpu_s})
    cpu = [[row.name, *(_cpu_share(row, role) for role in roles)] for row in plan.rows if row.runs]
    return f"{table(header, lines)}\n{notes}\n\n{table(['CPU s per 1000 steps', *roles], cpu)}"


def _cpu_share(row: Row, role: str) -> str:
    """CPU seconds of a role per 1000 environment steps, so that rows can be compared."""
    spent = [run.cpu_s.get(role, 0.0) / (run.steps_per_s * run.cpu_window_s) * 1000 for run in row.runs]
    return f"{Spread.of(spent).median:.3f}"


def plain(plan: Plan) -> dict[str, Any]:
    """For JSON."""
    return {
        "profile": plan.profile,
        "bound": plan.bound,
        "rows": [
            {
                "name": row.name,
                "devices": row.placement,
                "predicted": row.predicted,
                "runs": [run.plain() for run in row.runs],
            }
            for row in plan.rows
        ],
    }


def draw(plans: Sequence[Plan], file: Path) -> None:
    """One panel per profile: bars of the medians with their range, marks of the model, a line for the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [plan for plan in plans if any(row.runs for row in plan.rows)]
    figure, panels = pyplot.subplots(1, len(shown), figsize=(1.5 + 3.2 * len(shown), 3.6), squeeze=False)
    for plan, panel in zip(shown, panels[0], strict=True):
        rows = [row for row in plan.rows if row.rate is not None]
        rates = [row.rate for row in rows if row.rate is not None]
        at = range(len(rows))
        medians = [rate.median for rate in rates]
        spread = [[rate.median - rate.low for rate in rates], [rate.high - rate.median for rate in rates]]
        panel.bar(at, medians, yerr=spread, color=BLUE, ecolor="black", width=0.65, label="measured")
        marks = [(place, row.predicted) for place, row in zip(at, rows, strict=True) if row.predicted]
        if marks:
            panel.plot(*zip(*marks, strict=True), "_", color=ORANGE, markersize=16, markeredgewidth=2.5, label="model")
        if plan.bound:
            panel.axhline(plan.bound, color=GREY, linestyle="--", linewidth=1, label="bound")
        panel.set_xticks(
            list(at), [f"{row.name}\n{row.placement}" for row in rows], rotation=45, ha="right", fontsize=7
        )
        panel.set_title(plan.profile, fontsize=9)
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel("environment steps/s")
    panels[0][0].legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
