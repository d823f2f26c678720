"""`vla-stream check`: everything about a config that can be known without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import config_options
from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.config import Config
    from vla_stream.pretrain import Data


@click.command()
@config_options
@click.option(
    "--conformance/--no-conformance",
    default=None,
    help="Make the environment and the policy, and try whether they keep the protocols. Default: only a module:Class.",
)
def check(configs: tuple[Path, ...], overrides: tuple[str, ...], conformance: bool | None) -> None:
    """Validate the files CONFIG... (composed left to right) and print the resolved config, with notes.

    Also loads the environment's and the policy's class, checks their options, looks for the files they name, and tries
    out classes of one's own.
    """
    import yaml

    from vla_stream import config as settings
    from workers import policy_apart

    config = settings.load(configs, overrides)
    check_classes(config)
    check_files(config)
    policy_apart.look(config)
    click.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
    click.echo(f"\n{summary(config)}")
    for note in settings.notes(config):
        click.echo(f"note: {note}")
    names = config.environment.name, config.policy.name
    if conformance or (conformance is None and any(":" in name for name in names)):
        try_out(config, everything=conformance is True)
    click.echo("the config is valid")


def try_out(config: Config, *, everything: bool) -> None:
    """Whether the environment and the policy keep their protocols, in words; of those that the project brings, too,
    with `everything`. Raises InputError, one line per problem."""
    from vla_stream.environments.conformance import Report
    from workers import environment_apart, policy_apart

    environment, problems = config.environment, list[str]()

    def tell(name: str, report: Report) -> None:
        problems.extend(f"{name}: {check}: {problem}" for check, problem in report.problems.items())
        for note in report.notes:
            click.echo(f"{name}: {note}")
        if not report.problems:
            click.echo(f"{name}: keeps the protocol")

    if everything or ":" in environment.name:
        for name, report in environment_apart.ask(config, "try").reports.items():
            tell(f"environment {environment.name}" + (f", task {name}" if name else ""), report)
    if everything or ":" in config.policy.name:
        shapes = environment_apart.specification(config)
        tell(f"policy {config.policy.name}", policy_apart.try_out(config, shapes))
    if problems:
        raise InputError("\n".join(problems))


def check_classes(config: Config) -> None:
    """Classes that the config names, the environment's options, and the interpreter of simulators, where this host
    needs them. The policy's are for `check_policy`: reading them may import torch. Raises InputError."""
    from vla_stream import plugins, tasks
    from vla_stream.cli.trackers import check_installed

    check_installed(config)
    if config.generators.count > 0:
        plugins.load_class(plugins.BATCHING, config.generators.batching)

    if config.simulators.count > 0 or config.simulators.python is not None:  # `scale` may start some later
        from workers import environment_apart

        tasks.check_whole_batch(config, environment_apart.ask(config).whole_batch)


def check_policy(config: Config) -> None:
    """The policy's interpreter, and its files: they must be there, and whole. Raises InputError."""
    # Pays for torch. Without a file or another interpreter its workers are early enough.
    if config.policy.python is not None or config.policy.options.get("checkpoint") is not None:
        from workers import policy_apart

        policy_apart.look(config)


def check_files(config: Config) -> None:
    """What a run starts from, beside the policy's own files, must be there. Raises InputError."""
    start = config.policy.init_from
    if start is not None and not start.is_dir():
        raise InputError(
            f"policy.init_from is {str(start)!r}, no such folder; give a checkpoint, for example "
            "runs/demo/checkpoints/000040"
        )
    demos = config.pretrain.demos if config.pretrain else None
    if demos is not None and not demos.is_file():
        raise InputError(f"pretrain.demos is {str(demos)!r}, no such file; make it with vla-stream demos")
    if config.pretrain is not None and config.pretrain.data is not None:
        _check_data(config, config.pretrain.data)


def _check_data(config: Config, data: Data) -> None:
    """Whether `pretrain.data` is what the environment shows and takes, which is made for that where this host has it.
    Raises InputError."""
    from vla_stream.learning import recordings
    from workers import environment_apart

    if config.simulators.count == 0 and config.simulators.python is None:
        recordings.open_source(data).close()  # others bring the environment, and the trainer looks at the rest
        return
    recordings.open_recordings(config, environment_apart.specification(config)).close()


def summary(config: Config) -> str:
    """What a run of this config is made of, in a few sentences."""
    from vla_stream import tasks

    s, g = config.simulators, config.generators
    rows = s.count * s.env_batches * s.slots * s.envs_per_slot
    samples = config.trainer.segments_per_update * s.envs_per_slot * config.segment_steps
    count = config.trainer.ranks
    ranks = f" of {count} ranks ({config.trainer.parallel})" if count > 1 else ""
    parts = ", ".join(f"{100 * part:.3g} % are {name}" for name, part in tasks.shares(config.environment).items())
    return (
        f"{s.count} simulators with {rows} environments in {config.slots_in_all} slots, {g.count} generators, "
        f"1 trainer{ranks}.\n"
        f"Each of {config.updates} updates takes {config.trainer.segments_per_update} segments: up to {samples} chunk "
        f"steps, {samples * config.policy.chunk} environment steps of {config.environment.name}."
        + (f"\nOf the segments {parts}." if config.environment.tasks else "")
    )
