"""Evidence that asynchronous training learns as synchronous training does: the same seeds, several ways, intervals.

Every run starts from one warm start, consumes the same number of segments of the same length per update, and makes the
same number of updates; ways differ in what their lines in WAYS say, and in what follows from η. How old the data is
depends on how many segments are under way at once: a way with η has (1 + η)·B slots. Ways with η = 0 train in ticket
order, where no segment is staler than η; the others in the order of arrival, where some are.

    area      mean success over the environment steps of the run, 0 to 1
    start     success of the warm start, the same for all
    final     success of the last weights
    shuffled  the same when a colour drawn at random is named instead of the right one. The named cube is one of three,
              drawn independently of all that is seen: whoever does not listen has 1/3 at most
    to .8     wall minutes until success is .8, of the run alone

Success is that of checkpoints on fixed held-out seeds, without sampling: what training episodes tell comes the later
the older the data is, and would flatter or blame a way for that.

Differences are paired by seed; the interval is Student's, 95 %. Each run's figures are kept in tools/evidence.json, so
that the work can be spread over days; a run that is there is not repeated.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "bench"))

from report import machine, table, write_json  # noqa: E402

from vla_stream import evaluation, plugins  # noqa: E402
from vla_stream.cli import curve, samples  # noqa: E402
from vla_stream.config import load  # noqa: E402
from vla_stream.environments.protocol import EnvironmentBatch  # noqa: E402
from vla_stream.errors import RunFailed  # noqa: E402
from vla_stream.policies.protocol import Policy  # noqa: E402
from workers.models import make_policy  # noqa: E402
from workers.trainer import load_policy  # noqa: E402

QUICKSTART, GRPO = ROOT / "configs" / "quickstart.yaml", ROOT / "configs" / "grpo.yaml"
KEPT, PLOT = ROOT / "tools" / "evidence.json", ROOT / "tools" / "evidence.png"
SIMULATORS = 2
SEGMENTS = {"ppo": 8, "grpo": 24}  # B, each of 8 rows
UPDATES, BETWEEN = 20, 2  # of a run, and from one checkpoint to the next
HELD_OUT, ROWS = 100, 20  # seeds, and how many are played at once
COLOURS = ("red", "green", "blue")
# Student's t, two-sided 95 %, by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

# Way -> algorithm, η, what else is set. Waits of 20 ms per step, lognormal, are in both ways that are compared in time.
SLOW: Mapping[str, Any] = {"environment": {"options": {"step_delay_ms": {"mean": 20, "sigma": 0.5}}}}
WAYS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "ppo, sync": ("ppo", 0, {}),
    "ppo, η = 1": ("ppo", 1, {}),
    "ppo, η = 4": ("ppo", 4, {}),
    "ppo, η = 4, uncorrected": ("ppo", 4, {"algorithm": {"correction": "none"}}),
    "grpo, sync": ("grpo", 0, {}),
    "grpo, η = 1": ("grpo", 1, {}),
    "ppo, sync, slow": ("ppo", 0, SLOW),
    "ppo, η = 1, slow": ("ppo", 1, SLOW),
    "ppo, nothing to learn": ("ppo", 1, {"trainer": {"learning_rate": 0.0, "value_learning_rate": 0.0}}),
}
COMPARED = (
    ("ppo, η = 1", "ppo, sync"),
    ("ppo, η = 4", "ppo, sync"),
    ("ppo, η = 4, uncorrected", "ppo, sync"),
    ("ppo, η = 4, uncorrected", "ppo, η = 4"),
    ("grpo, η = 1", "grpo, sync"),
    ("ppo, η = 1, slow", "ppo, sync, slow"),
)


@click.command()
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), help="Only these ways; default: all.")
@click.option("--seeds", type=click.IntRange(1, 10), default=5, show_default=True, help="Seeds of each way.")
@click.option("--minutes", type=click.FloatRange(min=0), default=1e9, help="Begin no run after so many.")
@click.option("--show", is_flag=True, help="Run nothing; show what there is.")
def evidence(ways: tuple[str, ...], seeds: int, minutes: float, show: bool) -> None:
    """Run what is missing, seed after seed, and show all figures with their intervals."""
    began_s = time.monotonic()
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {"runs": {}}
    for seed in range(seeds):
        for way in ways or WAYS:
            if show or str(seed) in found["runs"].get(way, {}) or time.monotonic() - began_s > 60 * minutes:
                continue
            figures = run(way, seed)
            found["runs"].setdefault(way, {})[str(seed)] = figures
            write_json(KEPT, found)
            click.echo(f"{way}, seed {seed}: {line(figures)}", err=True)
    click.echo(summary(found["runs"]))
    if found["runs"]:
        draw(found["runs"], PLOT)
        click.echo(f"\n{KEPT}, {PLOT}")


def run(way: str, seed: int) -> dict[str, Any]:
    """One run's figures. Raises RunFailed."""
    folder = ROOT / "runs" / "evidence"
    folder.mkdir(parents=True, exist_ok=True)
    over = folder / "way.yaml"
    over.write_text(yaml.safe_dump(settings(way, seed, warm_start(folder))), encoding="utf-8")
    place = folder / "run"
    shutil.rmtree(place, ignore_errors=True)
    files = [QUICKSTART, *([GRPO] if WAYS[way][0] == "grpo" else []), over]
    vla_stream("run", *map(str, files), "--run", "run", folder=folder)
    found = figures(curve.trace(samples.load(place / "metrics.jsonl")), place / "checkpoints")
    shutil.rmtree(place)
    return {**found, "machine": machine()}


def settings(way: str, seed: int, start: Path) -> dict[str, Any]:
    """What a way's runs have on top of their config files."""
    algorithm, eta, others = WAYS[way]
    count = SEGMENTS[algorithm]
    over: dict[str, Any] = {
        "seed": 1000 + seed,
        "runs_dir": str(ROOT / "runs" / "evidence"),
        "updates": UPDATES,
        "policy": {"init_from": str(start)},
        "pretrain": None,
        "evaluation": {"episodes": 0},
        "simulators": {"slots": (1 + eta) * count // SIMULATORS},
        "generators": {"max_batch_size": 64, "padded_sizes": [8, 16, 32]},
        "trainer": {"segments_per_update": count, "checkpoint_every": BETWEEN, "keep_checkpoints": UPDATES},
        "flow": {"max_staleness": eta, "order": "arrival" if eta else "ticket"},
    }
    for section, values in others.items():
        over[section] = {**over.get(section, {}), **values}
    return over


def warm_start(folder: Path) -> Path:
    """The quick start's, made once."""
    start = folder / "start" / "checkpoints" / "000000"
    if not (start / "meta.json").is_file():
        shutil.rmtree(folder / "start", ignore_errors=True)
        few = ["--updates", "1", "--set", "evaluation.episodes=0", "--set", f"runs_dir={folder}"]
        vla_stream("run", str(QUICKSTART), "--run", "start", *few, folder=folder)
    return start


def vla_stream(*arguments: str, folder: Path) -> str:
    """What a command prints. Raises RunFailed with its last words."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "vla_stream.cli.main", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"vla-stream {arguments[0]}: {' '.join((done.stdout + done.stderr).split()[-60:])}")
    return done.stdout


def figures(path: curve.Curve, checkpoints: Path) -> dict[str, Any]:
    """Of a run's curve and checkpoints: see the top of this file. `curve`: [environment steps, minutes, success]."""
    torch.set_num_threads(1)
    config = load([QUICKSTART])
    batch = plugins.make_batch(config.environment, ROWS)
    policy = make_policy(config, batch.specification, torch.device("cpu"))
    points = []
    for update in range(0, UPDATES + 1, BETWEEN):
        load_policy(policy, checkpoints / f"{update:06d}")
        at = (path.env_steps[update - 1], path.minutes[update - 1]) if update else (0.0, 0.0)
        points.append([*at, success(policy, batch, config.policy.chunk, 0)])
    shuffled = [points[-1][2], *(success(policy, batch, config.policy.chunk, turn) for turn in (1, 2))]
    batch.close()
    return {
        "area": area([steps for steps, _, _ in points], [value for _, _, value in points]),
        "final": points[-1][2],
        "shuffled": statistics.mean(shuffled),
        "to_80": next((minutes for _, minutes, value in points if value >= 0.8), None),
        "minutes": path.minutes[-1],
        "env_steps": path.env_steps[-1],
        "staleness": statistics.mean(path.series("staleness", path.env_steps)[1]),
        "curve": [[round(steps), round(minutes, 3), value] for steps, minutes, value in points],
    }


def success(policy: Policy, batch: EnvironmentBatch, chunk: int, turn: int) -> float:
    """Of mode actions on the held-out seeds; each colour is named as the one `turn` places on."""
    names = {colour: COLOURS[(place + turn) % len(COLOURS)] for place, colour in enumerate(COLOURS)}

    def named(sentence: str) -> str:
        return " ".join(names.get(word, word) for word in sentence.split())

    first = load([QUICKSTART]).evaluation.seed
    outcomes = evaluation.evaluate(policy, batch, chunk, range(first, first + HELD_OUT), named)
    return float(outcomes.success.mean())


def area(x: Sequence[float], y: Sequence[float]) -> float:
    """Mean of y over x, by trapezoids."""
    pairs = list(zip(x, y, strict=True))
    total = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(pairs))
    return total / (x[-1] - x[0])


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Mean of first − second, and half of its 95 % interval; None for less than two pairs."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if len(differences) < 2:
        return None
    half = T95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    return statistics.mean(differences), half


def line(figures: Mapping[str, Any]) -> str:
    to_80 = "never" if figures["to_80"] is None else f"after {figures['to_80']:.2f} min"
    return (
        f"area {figures['area']:.3f}, final {figures['final']:.2f}, shuffled {figures['shuffled']:.2f}, "
        f".8 {to_80} of {figures['minutes']:.2f}, staleness {figures['staleness']:.2f}"
    )


Runs = Mapping[str, Mapping[str, Mapping[str, Any]]]


def summary(runs: Runs) -> str:
    """Two tables: every way, and the differences."""
    rows = []
    for way in (way for way in WAYS if way in runs):
        of = list(runs[way].values())
        reached = [figures["to_80"] for figures in of if figures["to_80"] is not None]
        rows.append(
            [
                way,
                str(len(of)),
                f"{statistics.mean(figures['curve'][0][2] for figures in of):.3f}",
                f"{statistics.mean(figures['area'] for figures in of):.3f}",
                f"{statistics.mean(figures['final'] for figures in of):.3f}",
                f"{min(f['final'] for f in of):.2f}…{max(f['final'] for f in of):.2f}",
                f"{statistics.mean(f['shuffled'] for f in of):.3f}",
                f"{statistics.mean(f['staleness'] for f in of):.2f}",
                f"{statistics.median(reached):.2f} ({len(reached)})" if reached else "–",
                f"{statistics.mean(figures['minutes'] for figures in of):.2f}",
            ]
        )
    text = table(
        ["way", "runs", "start", "area", "final", "range", "shuffled", "staleness", "min to .8 (runs)", "minutes"], rows
    )
    differences = [comparison(runs, first, second) for first, second in COMPARED if first in runs and second in runs]
    header = ["difference", "pairs", "area, points", "final, points", "sooner at .8"]
    return f"{text}\n\n{table(header, differences)}"


def comparison(runs: Runs, first: str, second: str) -> list[str]:
    """One row: first minus second, in points of success."""
    seeds = sorted(runs[first].keys() & runs[second].keys())
    cells = []
    for figure in ("area", "final"):
        difference = paired(*([runs[way][seed][figure] for seed in seeds] for way in (first, second)))
        cells.append("–" if difference is None else f"{100 * difference[0]:+.1f} ± {100 * difference[1]:.1f}")
    times = [(runs[first][seed]["to_80"], runs[second][seed]["to_80"]) for seed in seeds]
    sooner = sum(a is not None and (b is None or a < b) for a, b in times)
    return [f"{first} − {second}", str(len(seeds)), *cells, f"{sooner} of {len(times)}"]


def draw(runs: Runs, file: Path) -> None:
    """Success over environment steps, one panel per algorithm and speed, one colour per way: thin lines are seeds, the
    thick one is their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {"PPO": ("ppo, sync", "ppo, η"), "GRPO": ("grpo",), "PPO, slow steps": ()}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(13, 3.8), sharey=True, layout="constrained")
    for axis, (title, starts) in zip(axes, panels.items(), strict=True):
        slow = title.endswith("slow steps")
        ways = [way for way in WAYS if way in runs and (way.endswith("slow") if slow else way.startswith(starts))]
        for colour, way in enumerate(way for way in ways if slow or not way.endswith("slow")):
            seeds = [list(zip(*figures["curve"], strict=True)) for figures in runs[way].values()]
            for at, _, success in seeds:
                axis.plot([steps / 1000 for steps in at], success, color=f"C{colour}", linewidth=0.6, alpha=0.45)
            mean = [[statistics.mean(each) for each in zip(*(of[i] for of in seeds), strict=True)] for i in (0, 2)]
            axis.plot([steps / 1000 for steps in mean[0]], mean[1], color=f"C{colour}", linewidth=2, label=way)
        axis.set(title=title, xlabel="trained environment steps, thousands", ylim=(0, 1))
        axis.grid(alpha=0.25)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7, loc="lower right")
    axes[0].set_ylabel("success on held-out seeds")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    evidence()
