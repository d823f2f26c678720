"""After the last update: evaluation of the first and the last checkpoint, the curve, and the words for the person."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vla_stream.cli import beside, samples
from vla_stream.cli import curve as curves
from vla_stream.cli.folder import CONFIG_FILE, LOGS
from vla_stream.cli.helper import Helper, wait_for
from vla_stream.cli.progress import count, duration
from vla_stream.config import CHECKPOINTS, Config
from vla_stream.errors import InputError, RunFailed
from vla_stream.evaluation import mcnemar
from vla_stream.learning import checkpoint

CURVE_FILE, SUMMARY_FILE = "curve.png", "summary.json"


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The folder that `--resume` goes on from: damaged ones do not count."""
    with contextlib.suppress(InputError):
        return checkpoint.newest_place(run_dir / CHECKPOINTS)
    return None


def newest_update(run_dir: Path) -> int:
    """The update that `--resume` goes on from."""
    newest = newest_checkpoint(run_dir)
    return 0 if newest is None else int(newest.name)


def evaluate_ends(config: Config, idle: Callable[[], bool], tell: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Play checkpoint 0 and the newest on the same held-out seeds, as a run of its own; what was evaluated beside the
    run is not played again.

    Returns what `vla-stream eval --json` says, under `before` and `after`; empty without episodes or checkpoints.
    Raises Interrupted, or RunFailed (InputError for bad input).
    """
    run_dir = config.run_dir
    newest = newest_checkpoint(run_dir) if config.evaluation.episodes else None
    if newest is None:
        return {}
    ends = {"after": newest}
    first = checkpoint.places(run_dir / CHECKPOINTS)[0]
    if int(first.name) == 0 and first != newest:
        ends["before"] = first
    known = {when: checkpoint.evaluation(place) for when, place in ends.items()}
    results = {when: found for when, found in known.items() if found is not None and beside.is_of(config, found)}
    missing = {when: place for when, place in ends.items() if when not in results}
    if missing:
        results |= _evaluate(config, missing, idle, tell)
    now_s = time.time()
    records: list[dict[str, object]] = [
        {
            "time": now_s,
            "kind": "evaluation",
            "when": when,
            "update": int(place.name),
            **{name: value for name, value in results[when].items() if name not in beside.NOT_FLAT},
        }
        for when, place in ends.items()
    ]
    samples.append(run_dir / samples.METRICS_FILE, records)
    return results


def _evaluate(
    config: Config, ends: dict[str, Path], idle: Callable[[], bool], tell: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    run_dir = config.run_dir
    names = " and ".join(str(int(folder.name)) for folder in sorted(ends.values()))
    tell(f"evaluating update {names} on {config.evaluation.episodes} held-out seeds")
    log, output = run_dir / LOGS / "eval.log", run_dir / LOGS / "eval.json"
    arguments = ["eval", str(run_dir / CONFIG_FILE), "--json"]
    for folder in ends.values():
        arguments += ["--checkpoint", str(folder)]
    wait_for([Helper("evaluation", arguments, output, log)], idle, tell)
    try:
        found = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        results = dict(zip(ends, found, strict=True))
    except ValueError as exc:
        raise RunFailed(f"evaluation: its output is not one JSON object per checkpoint; see {log}") from exc
    for when, result in results.items():
        beside.keep(config, ends[when], result, tell)
    return results


def draw_curve(config: Config) -> curves.Curve:
    """runs/<name>/curve.png from what metrics.jsonl holds so far; no file without an update."""
    curve = curves.trace(samples.load(config.run_dir / samples.METRICS_FILE))
    if curve.updates:
        title = f"{config.name}: {config.policy.name} on {config.environment.name}"
        with contextlib.suppress(OSError):  # a full disk (F47); what was told about the metrics says so
            curves.draw(curve, config.run_dir / CURVE_FILE, title)
    return curve


def summarise(config: Config, results: dict[str, dict[str, Any]], session_s: float) -> list[str]:
    """Draw the curve, write summary.json, and return the closing lines."""
    run_dir = config.run_dir
    records = samples.load(run_dir / samples.METRICS_FILE)
    curve = draw_curve(config)
    sampled = sum(samples.number(record, "env_steps") or 0.0 for record in records if record.get("role") == "simulator")
    trained = curve.env_steps[-1] if curve.env_steps else 0.0
    seconds = 60 * curve.minutes[-1] if curve.minutes else 0.0
    updates = int(samples.number(curve.updates[-1], "update") or 0) if curve.updates else 0
    summary: dict[str, Any] = {
        "run": config.name,
        "updates": updates,
        "env_steps_trained": trained,
        "env_steps_sampled": sampled,
        "training_s": seconds,
        "session_s": session_s,
        "env_steps_per_s": trained / seconds if seconds else None,
    }
    lines = []
    for when, result in results.items():
        told = ("success", "low", "high", "episodes", "seed", "checkpoint", "tasks")
        summary[when] = {name: result[name] for name in told if name in result}
    if "before" in results and "after" in results:
        before, after = (np.array(results[when]["successes"], dtype=bool) for when in ("before", "after"))
        summary["mcnemar_p"] = mcnemar(before, after)
        lines.append(
            f"success {_rate(results['before'])} → {_rate(results['after'])} on {len(after)} held-out seeds, "
            f"McNemar p = {summary['mcnemar_p']:.2g}"
        )
    elif "after" in results:
        lines.append(f"success {_rate(results['after'])} on {results['after']['episodes']} held-out seeds")
    before_of, after_of = (results.get(when, {}).get("tasks", {}) for when in ("before", "after"))
    for task, figures in after_of.items():
        first = f"{_rate(before_of[task])} → " if task in before_of else ""
        lines.append(f"  {task}: {first}{_rate(figures)} on {figures['episodes']} of them")
    rate = f": {count(trained / seconds)} per second" if seconds else ""
    lines.append(
        f"{updates} updates from {count(trained)} environment steps in {duration(seconds)}{rate} "
        f"(session {duration(session_s)})"
    )
    newest = newest_checkpoint(run_dir)
    if newest is not None:
        lines.append(f"policy   {_shown(newest)}")
    best = checkpoint.marked(run_dir / CHECKPOINTS, checkpoint.BEST)
    if best is not None:
        by = "evaluation" if config.evaluation.every else "training success"
        lines.append(f"best     {_shown(run_dir / CHECKPOINTS / checkpoint.BEST)}, {best} by {by}")
    if (run_dir / CURVE_FILE).exists():
        lines.append(f"curve    {_shown(run_dir / CURVE_FILE)}")
    lines.append(f"metrics  {_shown(run_dir / samples.METRICS_FILE)}")
    try:
        (run_dir / SUMMARY_FILE).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    except OSError as exc:
        lines.append(f"{_shown(run_dir / SUMMARY_FILE)}: not written ({exc.strerror})")
    return lines


def _rate(result: dict[str, Any]) -> str:
    return f"{result['success']:.3f} ({result['low']:.2f} to {result['high']:.2f})"


def _shown(path: Path) -> str:
    """Relative to where the person is, if it is below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
