"""`vla-stream check`: everything about a config that can be known without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import config_options
from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.config import Config


@click.command()
@config_options
def check(configs: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Validate the files CONFIG... (composed left to right) and print the resolved config, with notes.

    Also loads the environment's and the policy's class, checks their options, and looks for the files they name.
    """
    import yaml

    from vla_stream import config as settings
    from vla_stream import plugins

    config = settings.load(configs, overrides)
    check_classes(config)
    check_files(config)
    policy = plugins.load_class(plugins.POLICIES, config.policy.name)
    plugins.parse_options(policy, config.policy.options, "policy.options")
    click.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
    click.echo(f"\n{summary(config)}")
    for note in settings.notes(config):
        click.echo(f"note: {note}")
    click.echo("the config is valid")


def check_classes(config: Config) -> None:
    """Classes that the config names, and the environment's options, where this host needs them. The policy's are left
    to its workers: reading them may import torch. Raises InputError."""
    from vla_stream import plugins

    if config.generators.count > 0:
        plugins.load_class(plugins.BATCHING, config.generators.batching)

    if config.simulators.count > 0:
        environment = plugins.load_class(plugins.ENVIRONMENTS, config.environment.name)
        plugins.parse_options(environment, config.environment.options, "environment.options")


def check_files(config: Config) -> None:
    """What a run starts from must be there. Raises InputError."""
    start = config.policy.init_from
    if start is not None and not start.is_dir():
        raise InputError(
            f"policy.init_from is {str(start)!r}, no such folder; give a checkpoint, for example "
            "runs/demo/checkpoints/000040"
        )
    demos = config.pretrain.demos if config.pretrain else None
    if demos is not None and not demos.is_file():
        raise InputError(f"pretrain.demos is {str(demos)!r}, no such file; make it with vla-stream demos")


def summary(config: Config) -> str:
    """What a run of this config is made of, in two sentences."""
    s, g = config.simulators, config.generators
    rows = s.count * s.env_batches * s.slots * s.envs_per_slot
    samples = config.trainer.segments_per_update * s.envs_per_slot * config.segment_steps
    return (
        f"{s.count} simulators with {rows} environments in {config.slots_in_all} slots, {g.count} generators, "
        f"1 trainer.\n"
        f"Each of {config.updates} updates takes {config.trainer.segments_per_update} segments: up to {samples} chunk "
        f"steps, {samples * config.policy.chunk} environment steps of {config.environment.name}."
    )
