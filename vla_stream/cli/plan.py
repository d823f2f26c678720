"""`vla-stream plan`: what the stages of a run take, measured, and the placement that is best for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import connected, find_target, run_options
from vla_stream.errors import InputError, RunFailed

if TYPE_CHECKING:
    from vla_stream.cli.costs import Costs
    from vla_stream.cli.placement import Outlook
    from vla_stream.cli.samples import Record
    from vla_stream.config import Config

UPDATES = 5  # of the calibration
NEWEST = 20  # updates of a run that are looked at
SHOWN = 6  # placements


@click.command()
@click.argument("configs", nargs=-1, metavar="[CONFIG...]", type=click.Path(path_type=Path))
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override, for example trainer.epochs=2.")
@run_options
@click.option("--devices", type=click.IntRange(min=2), help="To divide up. Default: as many as were measured.")
@click.option("--cores", type=click.FloatRange(min=0.1), help="For all processes together. Default: this host's.")
@click.option(
    "--updates", type=click.IntRange(min=4), default=UPDATES, show_default=True, help="Of the short run of CONFIG..."
)
def plan(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    run_name: str | None,
    redis_url: str | None,
    runs_dir: Path,
    devices: int | None,
    cores: float | None,
    updates: int,
) -> None:
    """Say how many simulators, generators and devices to train are best, what that gives, and what limits it.

    What the stages take comes from a short run of CONFIG... on this host, or, with --run, from the metrics of a run
    that lives or has ended.
    """
    from vla_stream import config as settings
    from vla_stream.cli import costs, placement

    if configs and run_name is not None:
        raise InputError("plan: CONFIG and --run were given, expected one of them: a config to try, or a run to read")
    if configs:
        config = settings.load(configs, overrides)
        tried, records = calibrate(config, updates)
    elif overrides:
        raise InputError("--set: a run has its config, expected it beside CONFIG; leave it out")
    else:
        config, records = of_run(run_name, redis_url, runs_dir)
        tried = config
    measured = costs.measured(records, tried)
    devices = devices or max(2, config.generators.count + measured.devices)
    cores = cores or float(os.cpu_count() or 1)
    for line in shown_costs(measured):
        click.echo(line)
    found = placement.best(measured, config, devices, cores)
    click.echo(f"\n{devices} devices, {cores:g} cores:")
    for line in shown_outlooks(found[:SHOWN]):
        click.echo(line)
    first = found[0]
    loads = ", ".join(f"{part} {load:.0%}" for part, load in first.loads.items())
    click.echo(f"\nBest: {first.placement}: {first.steps_per_s:,.0f} environment steps/s.")
    click.echo(f"The limit: {first.bottleneck} (at work: {loads}).")
    for name, more in placement.one_more(measured, config, first, cores):
        click.echo(
            f"One more {name}: {more.steps_per_s / first.steps_per_s - 1:+.1%}, the limit then: {more.bottleneck}"
        )


def of_run(run_name: str | None, redis_url: str | None, runs_dir: Path) -> tuple[Config, list[Record]]:
    """Config and newest records of a run: from its folder here, else from its server. Raises InputError."""
    from vla_stream import config as settings
    from vla_stream.cli.folder import CONFIG_FILE
    from vla_stream.cli.samples import METRICS_FILE, each, recent
    from vla_stream.flow import Flow
    from vla_stream.streams.keys import Keys

    folder = None if run_name is None else runs_dir / run_name
    if folder is not None and redis_url is None and (folder / METRICS_FILE).is_file():
        return settings.load([folder / CONFIG_FILE]), newest(list(each(folder / METRICS_FILE)))
    target = find_target(run_name, redis_url, runs_dir)
    if redis_url is None and (file := runs_dir / target.run / METRICS_FILE).is_file():
        return settings.load([runs_dir / target.run / CONFIG_FILE]), newest(list(each(file)))
    with connected(target.url) as client:
        keys = Keys(target.run)
        return Flow(client, keys).config(), newest(recent(client, keys, 0.0))


def newest(records: list[Record]) -> list[Record]:
    """Those of the last updates: costs change, as when a pool is attached. Inferences of the warm-up stay."""
    times = [float(record["time"]) for record in records if record.get("kind") == "update"]
    since = times[-NEWEST - 1] if len(times) > NEWEST else 0.0
    return [
        record for record in records if float(record.get("time", 0.0)) >= since or record.get("role") == "generator"
    ]


def calibrate(config: Config, updates: int) -> tuple[Config, list[Record]]:
    """A short run: its config, which is not streaming (cli/costs.py), and its records. Its folder stays if it fails.

    Raises RunFailed, InputError, click.Abort."""
    from vla_stream.cli.check import check_classes, check_files, check_policy
    from vla_stream.cli.folder import RunFolder
    from vla_stream.cli.launch import Launch, server_for
    from vla_stream.cli.run import prepare
    from vla_stream.cli.samples import METRICS_FILE, load
    from vla_stream.cli.signals import Signals
    from vla_stream.config import Tracking

    check_classes(config)
    check_policy(config)
    check_files(config)
    imitates = config.algorithm.imitation_coefficient > 0
    trainer = {"update": "buffered", "optimiser_steps": 1, "critic_warmup_updates": 0, "record_every": 0}
    trainer |= {"checkpoint_every": 1000, "ack": "update"}
    scratch: Path | None = Path(tempfile.mkdtemp(prefix="vla-stream-plan-"))
    changed = {
        "runs_dir": scratch,
        "updates": updates,
        "pretrain": config.pretrain if imitates else None,  # as good or bad, a policy takes its time
        "evaluation": config.evaluation.model_copy(update={"episodes": 0, "every": 0}),
        "trainer": config.trainer.model_copy(update=trainer),
        "allocation": None,
        "tracking": Tracking(),
    }
    folder = RunFolder.open(config.model_copy(update=changed), name=None, resume=False)
    try:
        with (
            Signals() as signals,
            server_for(None, folder.logs) as (url, server),
            Launch(folder.config, url, server, signals, Teller(), resume=False) as launch,
        ):
            click.echo(f"measuring: {updates} updates of {config.policy.name} on {config.environment.name}", err=True)
            prepare(launch)
            launch.launch_workers()
            if launch.drive() != "finished":
                raise click.Abort
            launch.read_metrics()
        records = load(folder.path / METRICS_FILE)
    except RunFailed:
        scratch = None  # its logs tell why
        raise
    finally:
        folder.close()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder.config, records


class Teller:
    """A display that says what goes wrong, and no more."""

    def tell(self, text: str, details: Sequence[str] = ()) -> None:
        for line in (text, *details):
            click.echo(line, err=True)

    def show(self, progress: object) -> None:
        """Nothing: it is short."""

    def close(self) -> None:
        """Nothing."""


def shown_costs(costs: Costs) -> list[str]:
    """In words, ms."""
    cpu = ", ".join(f"{role} {1000 * seconds:.2f}" for role, seconds in costs.cpu_s.items())
    return [
        f"a chunk step of a batch      {costs.chunk:.1f} ± {costs.chunk_deviation:.1f} ms; "
        f"a reset {costs.reset:.1f} ms, {costs.resets:.2f} per segment",
        f"an inference                 {costs.infer_batch:.2f} + {costs.infer_row:.2f} · rows ms",
        f"a request's way              {costs.way:.1f} ms beside that",
        f"training                     {costs.fit:.1f} ms per segment on one device, "
        f"{costs.optimiser_step:.1f} per optimiser step ({costs.optimiser_steps} per update); "
        f"{costs.read + costs.a_pass:.1f} per segment for its process; measured on {costs.devices}",
        f"weights                      {costs.publish:.1f} ms to publish {costs.weights_bytes / 1e6:.2f} MB, "
        f"{costs.swap:.1f} ms of each generator",
        f"a segment                    {costs.steps:.1f} chunk steps, {costs.env_steps:.0f} environment steps",
        f"CPU ms per environment step  {cpu}",
    ]


def shown_outlooks(outlooks: Sequence[Outlook]) -> list[str]:
    """A table."""
    lines = [f"{'simulators':>10}  {'generators':>10}  {'to train':>8}  {'environment steps/s':>19}  the limit"]
    for one in outlooks:
        at = one.placement
        lines.append(
            f"{at.simulators:10}  {at.generators:10}  {at.trainers:8}  {one.steps_per_s:19,.0f}  {one.bottleneck}"
        )
    return lines
