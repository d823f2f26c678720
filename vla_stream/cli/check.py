"""`vla-stream check`: everything about a config that can be known without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import config_options

if TYPE_CHECKING:
    from vla_stream.config import Config


@click.command()
@config_options
def check(configs: tuple[Path, ...], overrides: tuple[str, ...]) -> None:
    """Validate the files CONFIG... (composed left to right) and print the resolved config, with notes.

    Also loads the environment's and the policy's class and checks their options.
    """
    import yaml

    from vla_stream import config as settings
    from vla_stream import plugins

    config = settings.load(configs, overrides)
    for group, name, options, subject in (
        (plugins.ENVIRONMENTS, config.environment.name, config.environment.options, "environment.options"),
        (plugins.POLICIES, config.policy.name, config.policy.options, "policy.options"),
    ):
        plugins.parse_options(plugins.load_class(group, name), options, subject)
    click.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
    click.echo(f"\n{summary(config)}")
    for note in settings.notes(config):
        click.echo(f"note: {note}")
    click.echo("the config is valid")


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
