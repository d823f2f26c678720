"""`vla-stream replay`: one recorded update, made once more from the same weights and segments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import click

from vla_stream.cli.folder import CONFIG_FILE
from vla_stream.errors import InputError, RunFailed

TOLERANCE = 1e-5  # relative: kernels of another machine round differently; on the same one nothing differs


@click.command()
@click.argument("run")
@click.argument("update", type=click.IntRange(min=1))
@click.option("--runs", "runs_dir", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of runs.")
def replay(run: str, update: int, runs_dir: Path) -> None:
    """Make UPDATE of RUN once more, and compare its loss and all else that it told with what was recorded.

    Updates are recorded where the config says so: --set trainer.record_every=N.
    """
    folder = runs_dir / run
    if not (folder / CONFIG_FILE).is_file():
        raise InputError(f"{folder}: holds no run, expected its {CONFIG_FILE}; give --runs DIR")
    from vla_stream import config as settings
    from vla_stream.cli.elsewhere import at_the_policy

    config = at_the_policy(settings.load([folder / CONFIG_FILE]))
    import torch

    from workers import records
    from workers.models import torch_device
    from workers.trainer import make_learner

    # The folder may have been moved since.
    config = config.model_copy(update={"name": run, "runs_dir": runs_dir})
    record = records.read(folder / records.RECORDS, update)
    torch.set_num_threads(config.trainer.threads)
    learner = make_learner(config, record.specification, torch_device(config.trainer.device), click.echo)
    learner.load_state(record.before)
    learner.version = record.version
    for segment in record.segments:
        learner.add(segment)
    result = learner.finish(record.version)
    staleness = [record.version - int(segment.versions.min()) for segment in record.segments]
    rows = [
        ("segments", len(record.staleness), len(staleness)),
        ("staleness", _mean(record.staleness), _mean(staleness)),
        *((name, value, result.metrics.get(name, math.nan)) for name, value in record.metrics.items()),
    ]
    rows += [(name, math.nan, value) for name, value in result.metrics.items() if name not in record.metrics]
    width = max(len(name) for name, _, _ in rows)
    click.echo(f"{'update ' + str(update):{width}}  {'recorded':>16}  {'replayed':>16}  difference")
    for name, before, after in rows:
        click.echo(f"{name:{width}}  {before:16.9g}  {after:16.9g}  {after - before:10.2g}")
    if result.skipped != record.skipped:
        raise RunFailed(f"update {update}: skipped was {record.skipped!r}, is {result.skipped!r}")
    apart = [name for name, before, after in rows if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=1e-9)]
    if apart:
        raise RunFailed(f"update {update}: {', '.join(apart)} differ by more than {TOLERANCE:g} of their size")
    same = all(before == after for _, before, after in rows)
    click.echo("bit for bit the same" if same else f"the same within {TOLERANCE:g}")


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
