"""`vla-stream eval`: success of a checkpoint on fixed, held-out seeds, reproducible to the last episode."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vla_stream.cli.options import config_options, follow_launcher
from vla_stream.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from vla_stream.environments.protocol import Specification

MOST_INSTRUCTIONS = 50  # told apart on the terminal
ROWS = 16  # always the same, whatever the number of episodes: a seed then gives the same outcome every time


@click.command()
@config_options
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    required=True,
    help="A checkpoint folder, for example runs/demo/checkpoints/best; a run's folder: its newest one.",
)
@click.option("--episodes", type=click.IntRange(min=1), help="Seeds to play; default: evaluation.episodes, at least 1.")
@click.option("--seed", type=click.IntRange(min=0), help="First seed; default: evaluation.seed.")
@click.option(
    "--replace",
    metavar="WORD=WORD,...",
    help="Give the policy other words than the task's, for example red=green,green=blue,blue=red: "
    "if language decides, success falls.",
)
@click.option("--sample", is_flag=True, help="Sample actions as in training, by noise of the config's seed.")
@click.option(
    "--video",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for films (GIF) of a few successes and failures, named by their seeds.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object with the outcome of every seed.")
def evaluate(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    checkpoint: Path,
    episodes: int | None,
    seed: int | None,
    replace: str | None,
    sample: bool,
    video: Path | None,
    as_json: bool,
) -> None:
    """Play the policy of a checkpoint, one episode per seed, and print success with its interval, in all and per task
    or instruction. Equal seeds give equal numbers."""
    follow_launcher()
    override = word_replacement(replace) if replace else None
    from vla_stream import config as settings
    from vla_stream.cli.elsewhere import at_the_policy

    config = at_the_policy(settings.load(configs, overrides))
    import numpy as np
    import torch

    from vla_stream import evaluation, tasks
    from vla_stream.cli.films import Films
    from vla_stream.streams.notices import one_line
    from workers import environment_apart
    from workers.models import make_policy, torch_device
    from workers.trainer import load_policy

    torch.set_num_threads(1)
    place = find_checkpoint(checkpoint)
    films = None if video is None else Films(video)
    number = episodes or max(1, config.evaluation.episodes)
    first = config.evaluation.seed if seed is None else seed
    outcomes, policy, played = evaluation.Outcomes.blank(number), None, 0
    shapes: dict[str, Specification] = {}
    for task, index in tasks.dealt(config.environment, number).items():
        batch = environment_apart.make_batch(tasks.config_for(config, task), ROWS)
        try:
            tasks.check_shapes(shapes, task, batch.specification)
            if policy is None:
                with contextlib.redirect_stdout(sys.stderr):  # models print when they are made
                    policy = make_policy(config, batch.specification, torch_device(config.generators.device))
                load_policy(policy, place)

            def progress(done: int, _: int, before: int = played) -> None:
                click.echo(f"episode {before + done}/{number}", err=True)

            seeds = first + np.array(index, dtype=np.uint64)
            found = evaluation.evaluate(
                policy,
                batch,
                config.policy.chunk,
                seeds,
                override,
                progress,
                noise_seed=config.seed if sample else None,
                watcher=films,
            )
        finally:
            batch.close()
        outcomes.put(np.array(index), found)
        played += len(index)
    result: dict[str, Any] = {
        "checkpoint": str(place),
        "episodes": number,
        "seed": first,
        "sampled": sample,
        **rate(outcomes.success),
        "success_once": float(outcomes.success.mean()),
        "success_at_end": float(outcomes.success_at_end.mean()),
        "return": float(outcomes.returns.mean()),
        "steps": float(outcomes.steps.mean()),
    }
    if config.environment.tasks:
        parts = tasks.dealt(config.environment, number)
        result["tasks"] = {task: {"episodes": len(i), **rate(outcomes.success[list(i)])} for task, i in parts.items()}
    result["instructions"] = {}
    for sentence in sorted(set(outcomes.instructions)):
        success = outcomes.success[outcomes.instructions == sentence]
        result["instructions"][sentence] = {"episodes": len(success), **rate(success)}
    result["videos"] = [] if films is None else [str(file) for file in films.saved]
    if as_json:
        click.echo(json.dumps(result | {"successes": outcomes.success.astype(int).tolist()}))
        return
    click.echo(
        f"{place}: success {shown(result)}, at the end {int(outcomes.success_at_end.sum())}/{number}, "
        f"return {result['return']:.3f}, {result['steps']:.1f} steps per episode"
    )
    for task, figures in result.get("tasks", {}).items():
        click.echo(f"  {task}: success {shown(figures)}")
    told = list(result["instructions"].items())
    for sentence, figures in told[:MOST_INSTRUCTIONS] if len(told) > 1 else ():
        click.echo(f"  {one_line(sentence)}: success {shown(figures)}")
    for file in result["videos"]:
        click.echo(f"  film {file}")


def rate(success: np.ndarray) -> dict[str, float]:
    """Share of the successes bool[N], and its 95 % interval."""
    from vla_stream import evaluation

    low, high = evaluation.wilson_interval(int(success.sum()), len(success))
    return {"success": float(success.mean()), "low": low, "high": high}


def shown(figures: dict[str, Any]) -> str:
    """`12/20 = 0.600 (95 % 0.387 to 0.781)`"""
    successes = round(figures["success"] * figures["episodes"])
    interval = f"(95 % {figures['low']:.3f} to {figures['high']:.3f})"
    return f"{successes}/{figures['episodes']} = {figures['success']:.3f} {interval}"


def find_checkpoint(folder: Path) -> Path:
    """`folder` itself, or the newest complete checkpoint under it. Raises InputError."""
    from vla_stream.config import CHECKPOINTS
    from vla_stream.learning import checkpoint

    if (folder / checkpoint.META).exists():
        return folder
    for place in (folder, folder / CHECKPOINTS):
        found = checkpoint.newest_place(place)
        if found is not None:
            return found
    raise InputError(f"{folder}: holds no complete checkpoint, expected one, for example runs/demo/checkpoints/000040")


def word_replacement(text: str) -> Callable[[str], str]:
    """From `red=green,green=red` to a function that replaces all whole words at once. Raises InputError."""
    pairs = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if not pairs or len(pairs) != len(text.split(",")) or "" in pairs:
        raise InputError(f"--replace {text}: expected WORD=WORD,..., for example red=green,green=red")
    pattern = re.compile(rf"\b({'|'.join(re.escape(word) for word in pairs)})\b")
    return lambda sentence: pattern.sub(lambda match: pairs[match[0]], sentence)
