"""The learning curve of a run as one PNG, from its metrics.jsonl. matplotlib is imported when a curve is drawn."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_stream.cli.progress import BY_TASK
from vla_stream.cli.samples import Record, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREY = "#2f6db3", "#d9822b", "#8a8f98"
RATE_BIN_S = 5.0
TASKS_DRAWN = 8
TRAINED_UPDATES = 5  # over which the rate of trained steps is averaged


@dataclass(slots=True)
class Curve:
    """One row per update of the lineage that survived; steps and minutes add up over all sessions of the run."""

    updates: list[Record] = field(default_factory=list)
    env_steps: list[float] = field(default_factory=list)
    minutes: list[float] = field(default_factory=list)
    rates: list[tuple[float, float]] = field(default_factory=list)  # (minutes, env-steps/s sampled)
    evaluations: dict[float, Record] = field(default_factory=dict)  # by update; inf: of the last

    def series(self, name: str, x: Sequence[float]) -> tuple[list[float], list[float]]:
        """x and y of a metric where it is there."""
        pairs = [(at, number(record, name)) for at, record in zip(x, self.updates, strict=True)]
        return [at for at, value in pairs if value is not None], [value for _, value in pairs if value is not None]


def trace(records: Sequence[Record]) -> Curve:
    """Records in their order, as a curve. Its clock runs from the first environment step of each session to its last
    record: neither the warm start counts nor the time between two sessions."""
    curve = Curve()
    began_s: float | None = None
    before_s = now_s = 0.0
    bins: dict[int, float] = {}
    for record in records:
        time_s = number(record, "time")
        if time_s is None:
            continue
        if record.get("kind") == "start":
            before_s, began_s, now_s = before_s + now_s, None, 0.0
        if began_s is None and (record.get("kind") == "update" or number(record, "env_steps")):
            began_s = time_s - (number(record, "seconds") or 0.0)
        if began_s is not None and record.get("kind") in ("second", "update"):
            now_s = max(now_s, time_s - began_s)
        elapsed_s = before_s + now_s
        if record.get("kind") == "update":
            _add_update(curve, record, elapsed_s / 60)
        elif record.get("kind") == "evaluation":
            update = number(record, "update")
            if update is None:
                update = 0.0 if record.get("when") == "before" else math.inf
            curve.evaluations[update] = record
        elif record.get("role") == "simulator":
            place = int(elapsed_s / RATE_BIN_S)
            bins[place] = bins.get(place, 0.0) + (number(record, "env_steps") or 0.0)
    # The last bin is not full.
    curve.rates = [((place + 0.5) * RATE_BIN_S / 60, steps / RATE_BIN_S) for place, steps in sorted(bins.items())[:-1]]
    return curve


def draw(curve: Curve, file: Path, title: str) -> None:
    """Success over environment steps and over wall time, and what explains it: throughput, staleness, KL, losses."""
    # Its cache must be writable, and its hint about a missing one is nobody's business here.
    os.environ.setdefault("MPLBACKEND", "Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), dpi=110, layout="constrained")
    axes: Any = figure.subplots(2, 3)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    thousands = [steps / 1000 for steps in curve.env_steps]
    _success(axes[0][0], curve, thousands, "trained environment steps, thousands")
    factor, unit = _clock(curve)
    _success(axes[0][1], curve, [factor * at for at in curve.minutes], f"wall time, {unit}")
    _rates(axes[0][2], curve)
    updates = [number(record, "update") or 0.0 for record in curve.updates]
    _lines(axes[1][0], curve, updates, {"staleness": "mean", "staleness_max": "max"}, "staleness, versions")
    _lines(
        axes[1][1], curve, updates, {"kl_behaviour": "KL to behaviour", "clip_fraction": "clip fraction"}, "KL, clip"
    )
    _lines(axes[1][2], curve, updates, {"policy_loss": "policy", "value_loss": "value"}, "loss")
    partial = file.with_name(file.name + ".partial")
    figure.savefig(partial, format="png")
    partial.replace(file)


def _add_update(curve: Curve, record: Record, minutes: float) -> None:
    update = number(record, "update")
    # A trainer that went back to its checkpoint repeats updates: the lost ones leave the curve.
    while curve.updates and update is not None and (number(curve.updates[-1], "update") or 0.0) >= update:
        for rows in (curve.updates, curve.env_steps, curve.minutes):
            rows.pop()
    steps = number(record, "trained_env_steps") or 0.0
    curve.env_steps.append((curve.env_steps[-1] if curve.env_steps else 0.0) + steps)
    curve.updates.append(record)
    curve.minutes.append(minutes)


def _clock(curve: Curve) -> tuple[float, str]:
    """Seconds for a short run, minutes for others: (factor, label)."""
    short = not curve.minutes or curve.minutes[-1] < 3
    return (60.0, "seconds") if short else (1.0, "minutes")


def _success(axis: Axes, curve: Curve, x: Sequence[float], label: str) -> None:
    at, values = curve.series("success", x)
    axis.plot(at, values, color=BLUE, linewidth=1.8, label="training, sampled actions")
    by_task = sorted({name for record in curve.updates for name in record if name.startswith(BY_TASK)})
    for name in by_task if len(by_task) <= TASKS_DRAWN else ():
        axis.plot(*curve.series(name, x), linewidth=1.0, label=name.removeprefix(BY_TASK))
    places = {0.0: 0.0, math.inf: x[-1] if x else 0.0}
    places |= {number(record, "update") or 0.0: place for place, record in zip(x, curve.updates, strict=True)}
    labelled = False
    for update, record in sorted(curve.evaluations.items()):
        rate, low, high = (number(record, name) for name in ("success", "low", "high"))
        if rate is None or low is None or high is None or update not in places:
            continue
        axis.errorbar(
            [places[update]],
            [rate],
            yerr=[[max(0.0, rate - low)], [max(0.0, high - rate)]],
            fmt="o",
            color=ORANGE,
            capsize=4,
            label=None if labelled else "evaluation, mode actions, 95 %",
        )
        labelled = True
    axis.set(ylim=(-0.02, 1.02), xlabel=label, ylabel="success")
    _finish(axis)


def _rates(axis: Axes, curve: Curve) -> None:
    factor, unit = _clock(curve)
    axis.plot([factor * at for at, _ in curve.rates], [rate for _, rate in curve.rates], color=BLUE, label="sampled")
    at, trained = [], []
    for end in range(1, len(curve.minutes)):
        start = max(0, end - TRAINED_UPDATES)
        seconds = 60 * (curve.minutes[end] - curve.minutes[start])
        if seconds > 0:
            at.append(factor * curve.minutes[end])
            trained.append((curve.env_steps[end] - curve.env_steps[start]) / seconds)
    axis.plot(at, trained, color=ORANGE, label="trained")
    axis.set(xlabel=f"wall time, {unit}", ylabel="environment steps per second", ylim=(0, None))
    _finish(axis)


def _lines(axis: Axes, curve: Curve, x: Sequence[float], names: dict[str, str], label: str) -> None:
    for (name, shown), colour in zip(names.items(), (BLUE, ORANGE), strict=False):
        axis.plot(*curve.series(name, x), color=colour, linewidth=1.4, label=shown)
    axis.set(xlabel="update", ylabel=label)
    _finish(axis)


def _finish(axis: Axes) -> None:
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(frameon=False, fontsize=8)
