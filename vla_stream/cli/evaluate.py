"""`vla-stream eval`: success of a checkpoint on fixed, held-out seeds, reproducible to the last episode."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from vla_stream.cli.options import URL_VARIABLE, config_options, follow_launcher
from vla_stream.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from vla_stream.config import Config
    from vla_stream.evaluation import Outcomes
    from workers.evaluator import Evaluator

MOST_INSTRUCTIONS = 50  # told apart on the terminal
STDIN = Path("-")


@click.command()
@config_options
@click.option(
    "--checkpoint",
    "checkpoints",
    type=click.Path(path_type=Path),
    required=True,
    multiple=True,
    help="A checkpoint folder, for example runs/demo/checkpoints/best; a run's folder: its newest one. May be given "
    "several times; -: those that standard input names, one per line, as they come.",
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
@click.option("--json", "as_json", is_flag=True, help="One JSON object per checkpoint, with the outcome of every seed.")
@click.option("--redis", "url", metavar="URL", help=f"Server to use; else {URL_VARIABLE}, else one of our own.")
@click.option("--inline", is_flag=True, help="One thread, one process: for breakpoints.")
@click.option("--beside", is_flag=True, help="With as few workers as evaluation.simulators and .generators say.")
def evaluate(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    checkpoints: tuple[Path, ...],
    episodes: int | None,
    seed: int | None,
    replace: str | None,
    sample: bool,
    video: Path | None,
    as_json: bool,
    url: str | None,
    inline: bool,
    beside: bool,
) -> None:
    """Play the policy of a checkpoint, one episode per seed, and print success with its interval, in all and per task
    or instruction. Equal seeds give equal numbers, whatever the number of workers.

    It is a run of its own, NAME.eval, with as many simulators and generators as the config says.
    """
    follow_launcher()
    results = click.get_current_context().with_resource(apart()) if as_json else None
    words = word_replacement(replace) if replace else {}

    from vla_stream import config as settings
    from vla_stream.cli import films, held_out
    from vla_stream.cli.check import check_policy
    from workers import environment_apart

    config = settings.load(configs, overrides)
    check_policy(config)
    for key, python in (("simulators.python", config.simulators.python), ("policy.python", config.policy.python)):
        if inline and python is not None:
            raise InputError(f"--inline: {key} is {str(python)!r}, but one process has one interpreter")
    given = [find_checkpoint(place) for place in checkpoints if place != STDIN]
    if video is not None:
        films.make_folder(video)
    played = held_out.config_for(
        config,
        whole_batch=environment_apart.ask(config).whole_batch,
        episodes=episodes or max(1, config.evaluation.episodes),
        seed=config.evaluation.seed if seed is None else seed,
        sample=sample,
        replace=words,
        beside=beside,
    )

    def take(place: Path, evaluator: Evaluator) -> None:
        result = summary(played, place, evaluator.outcomes)
        if video is not None:
            shot = films.shoot(
                video, played, evaluator.outcomes, evaluator.actions, lambda text: click.echo(text, err=True)
            )
            result["videos"] = [str(file) for file in shot]
        if as_json:
            result["successes"] = evaluator.outcomes.success.astype(int).tolist()
            click.echo(json.dumps(result), file=results)
        else:
            show(place, result, evaluator.outcomes)

    def refuse(place: Path, error: InputError) -> None:
        if place in given:
            raise error
        click.echo(json.dumps({"checkpoint": str(place), "error": str(error)}), file=results)

    places = held_out.Places(given)
    if STDIN in checkpoints:
        places.follow(iter(sys.stdin.readline, ""))
    held_out.play(played, url or os.environ.get(URL_VARIABLE) or None, places, take, refuse, inline=inline)


@contextlib.contextmanager
def apart() -> Iterator[IO[str]]:
    """Where results go; all else on stdout goes to stderr, since simulators and models print when they are imported."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield results
        finally:
            sys.stdout.flush()
            os.dup2(results.fileno(), 1)


def summary(played: Config, place: Path, outcomes: Outcomes) -> dict[str, Any]:
    """All figures of one checkpoint. played: the config of the evaluation's run."""
    from vla_stream import tasks

    assert played.held_out is not None
    number = played.evaluation.episodes
    result: dict[str, Any] = {
        "checkpoint": str(place),
        "episodes": number,
        "seed": played.evaluation.seed,
        "sampled": played.held_out.sample,
        **rate(outcomes.success),
        "success_once": float(outcomes.success.mean()),
        "success_at_end": float(outcomes.success_at_end.mean()),
        "return": float(outcomes.returns.mean()),
        "steps": float(outcomes.steps.mean()),
    }
    if played.environment.tasks:
        parts = tasks.dealt(played.environment, number)
        result["tasks"] = {task: {"episodes": len(i), **rate(outcomes.success[list(i)])} for task, i in parts.items()}
    result["instructions"] = {}
    for sentence in sorted(set(outcomes.instructions)):
        success = outcomes.success[outcomes.instructions == sentence]
        result["instructions"][sentence] = {"episodes": len(success), **rate(success)}
    result["videos"] = []
    return result


def show(place: Path, result: dict[str, Any], outcomes: Outcomes) -> None:
    """For people."""
    from vla_stream.streams.notices import one_line

    click.echo(
        f"{place}: success {shown(result)}, at the end {int(outcomes.success_at_end.sum())}/{result['episodes']}, "
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


def word_replacement(text: str) -> dict[str, str]:
    """`red=green,green=red` as a mapping. Raises InputError."""
    pairs = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if not pairs or len(pairs) != len(text.split(",")) or "" in pairs:
        raise InputError(f"--replace {text}: expected WORD=WORD,..., for example red=green,green=red")
    return pairs
