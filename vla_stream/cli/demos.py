"""`vla-stream demos`: the environment's expert, recorded for the warm start. Needs the simulator, not the policy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import config_options, follow_launcher
from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.environments.protocol import Specification

ROWS = 16  # environments that demonstrate side by side; what is recorded does not depend on it


@click.command()
@config_options
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("demos.safetensors"),
    show_default=True,
)
def demos(configs: tuple[Path, ...], overrides: tuple[str, ...], output: Path) -> None:
    """Record demonstrations, as the section `pretrain` of CONFIG... says, into one file.

    `run` does this by itself; a file of your own goes into pretrain.demos.
    """
    follow_launcher()
    from vla_stream import config as settings
    from vla_stream import tasks
    from vla_stream.learning import cloning
    from workers import environment_apart

    config = settings.load(configs, overrides)
    if config.pretrain is None:
        raise InputError("pretrain: the config has no such section, expected one that says how many; add pretrain: {}")

    if config.pretrain.data is not None:
        raise InputError(
            f"pretrain.data is {str(config.pretrain.data.path)!r}, which is imitated as it is; nothing is to be "
            "recorded: remove it, or leave out vla-stream demos"
        )

    def progress(stage: str, done: int, of: int) -> None:
        if done == of or done % max(1, of // 10) < ROWS:
            click.echo(f"{stage} {done}/{of}", err=True)

    p, chunk = config.pretrain, config.policy.chunk
    episodes, looks = tasks.dealt(config.environment, p.episodes), tasks.dealt(config.environment, p.grounding_scenes)
    demonstrations, all_scenes = [], []
    shapes: dict[str, Specification] = {}
    for place, task in enumerate(dict.fromkeys([*episodes, *looks])):
        seed = (p.seed + place) % (settings.MAX_SEED + 1)  # tasks that are alike do not show the same twice
        number, scenes_wanted = len(episodes.get(task, ())), len(looks.get(task, ()))
        rows = min(ROWS, max(number, scenes_wanted))
        batch = environment_apart.make_batch(tasks.config_for(config, task), rows)
        try:
            tasks.check_shapes(shapes, task, batch.specification)
            if number:
                demonstrations.append(
                    cloning.collect_demonstrations(batch, number, p.action_noise, chunk, seed, progress)
                )
            if scenes_wanted:
                all_scenes.append(cloning.collect_scenes(batch, scenes_wanted, seed, progress))
        finally:
            batch.close()
    recorded = cloning.Demonstrations.concatenate(demonstrations)
    scenes = cloning.Scenes.concatenate(all_scenes) if all_scenes else None
    cloning.save_demonstrations(output, recorded, scenes, config.environment.name)
    click.echo(
        f"{recorded.episodes} demonstrations, {recorded.successes} of them successful, {len(recorded)} samples"
        + (f", {len(scenes)} scenes" if scenes is not None else "")
        + f": {output}"
    )
