"""`vla-stream export`: a run's policy as a folder to keep, share, evaluate, or start another run from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vla_stream.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from vla_stream.config import Config
    from vla_stream.environments.protocol import Specification
    from vla_stream.learning.checkpoint import Checkpoint

CARD = "README.md"


@click.command()
@click.argument("output", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    required=True,
    help="A checkpoint folder, or a run's folder for its newest one.",
)
def export(output: Path, checkpoint: Path) -> None:
    """Write the policy of a checkpoint to DIR, which must not exist: weights without the optimiser, the run's config,
    and a model card.

    DIR is a checkpoint itself, for `eval --checkpoint` and `policy.init_from`. That of a VLA is also a whole model in
    its published layout, with adapters merged: for from_pretrained, and for policy.options.checkpoint.
    """
    import yaml

    from vla_stream.cli.elsewhere import at_the_policy
    from vla_stream.cli.evaluate import find_checkpoint
    from vla_stream.cli.finish import SUMMARY_FILE
    from vla_stream.cli.folder import CONFIG_FILE
    from vla_stream.learning import checkpoint as checkpoints

    place = find_checkpoint(checkpoint)
    run_dir = place.resolve().parents[1]
    if output.exists() or output.is_symlink():
        raise InputError(f"{output}: exists, expected a name that is free; choose another one")
    config = _config(run_dir / CONFIG_FILE)
    here = at_the_policy(config)
    found = checkpoints.load(place)
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        # Named by its update there; it gets the name that was asked for once it is whole.
        network = unfinished / "network"
        config, policy = _as_published(config, here, found, network, output)
        written = checkpoints.save(unfinished, found.update, found.version, policy, {}, found.meta)
        for file in network.iterdir() if network.is_dir() else ():
            file.rename(written / file.name)
        about = yaml.safe_dump(
            config.model_dump(mode="json") | {"runs_dir": "runs"}, sort_keys=False, allow_unicode=True
        )
        (written / CONFIG_FILE).write_text(about, encoding="utf-8")
        (written / CARD).write_text(_card(config, found, _read(run_dir / SUMMARY_FILE), output), encoding="utf-8")
        written.rename(output)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    parameters = sum(tensor.numel() for tensor in policy.values())
    click.echo(f"{output}: {config.policy.name} after update {found.update}, {parameters:,} numbers")
    click.echo(f"evaluate it with: vla-stream eval {output / CONFIG_FILE} --checkpoint {output}")


def _as_published(
    config: Config, here: Config, found: Checkpoint, folder: Path, output: Path
) -> tuple[Config, dict[str, Tensor]]:
    """A VLA in its published layout, in `folder`: the config of a policy that begins from it, in `output`, and its
    weights, since adapters begin anew there. Of other policies, both as they are.

    here: the config as it is seen from this interpreter. Raises InputError."""
    import torch

    from vla_stream import config as settings
    from vla_stream import plugins
    from workers.models import make_policy
    from workers.trainer import load_policy

    if not hasattr(plugins.load_class(plugins.POLICIES, here.policy.name), "write"):
        return config, found.policy
    if config.policy.options.get("checkpoint") is None:
        click.echo(f"{config.policy.name} without policy.options.checkpoint is a random network; it is exported alone")
        return config, found.policy
    specification, device = _specification(here, found), torch.device("cpu")
    policy: Any = make_policy(here, specification, device)
    load_policy(policy, found.path)
    folder.mkdir(parents=True)
    policy.write(folder)
    del policy  # it may fill half of the memory

    def beginning_from(place: Path, config: Config) -> Config:
        data = config.model_dump(mode="json")
        data["policy"]["options"] = {k: v for k, v in config.policy.options.items() if k != "statistics"}
        data["policy"]["options"]["checkpoint"] = str(place)
        return settings.validate(data, "export")

    made: Any = make_policy(beginning_from(folder, here), specification, device)
    return beginning_from(output, config), made.state_dict()


def _specification(config: Config, found: Checkpoint) -> Specification:
    """As the trainer noted it; of an older checkpoint, as the environment has it."""
    from vla_stream.streams.specification import specification_from_json
    from workers import environment_apart

    if "specification" in found.meta:
        return specification_from_json(str(found.meta["specification"]))
    return environment_apart.specification(config)


def _config(file: Path) -> Config:
    """Raises InputError."""
    from vla_stream import config as settings

    if not file.is_file():
        raise InputError(f"{file}: not there, expected the config of the checkpoint's run; give one in runs/NAME/")
    return settings.load([file])


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}  # the run has not ended
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _card(config: Config, found: Checkpoint, summary: dict[str, Any], output: Path) -> str:
    """What a stranger needs to know of these weights."""
    environment, algorithm, trainer = config.environment, config.algorithm, config.trainer
    options = "".join(f"\n  - `{name}`: {value}" for name, value in environment.options.items())
    start = config.policy.init_from or config.policy.options.get("checkpoint")
    parameters = sum(tensor.numel() for tensor in found.policy.values())
    lines = [
        f"# {config.policy.name} on {environment.name}",
        "",
        f"Weights of version {found.version}, after update {found.update} of the run `{config.name}` of vla-stream.",
        "",
        f"- Policy: `{config.policy.name}`, chunks of {config.policy.chunk} actions, {parameters:,} numbers here"
        + (f", begun from `{start}`" if start else ""),
        f"- Environment: `{environment.name}`, episodes of at most {environment.max_steps} steps{options}",
        f"- Training: {algorithm.name}, {trainer.update}, {trainer.segments_per_update} segments per update, staleness "
        f"of about {config.flow.max_staleness}, learning rate {trainer.learning_rate:g}, seed {config.seed}",
    ]
    for when in ("before", "after"):
        if result := summary.get(when):
            interval = f"95 % {result['low']:.3f} to {result['high']:.3f}"
            lines.append(
                f"- Success {when} that run: {result['success']:.3f} ({interval}) of {result['episodes']} held-out "
                f"seeds from {result['seed']} on, without sampling; its checkpoint {Path(result['checkpoint']).name}"
            )
    lines += [
        "",
        "Statistics of observations are in the weights; the whole config is in config.yaml.",
        *_published(config, output),
        "",
        f"    vla-stream eval {output.name}/config.yaml --checkpoint {output.name}",
        f"    vla-stream run {output.name}/config.yaml --set pretrain=null --set policy.init_from={output.name}",
        "",
    ]
    return "\n".join(lines)


def _published(config: Config, output: Path) -> list[str]:
    """What else a VLA's folder is, if it is."""
    if config.policy.options.get("checkpoint") != str(output):
        return []
    return [
        "",
        "It is also a whole model in its published layout, with adapters merged, in float32: give this folder to",
        f"from_pretrained, or as policy.options.checkpoint, as its config.yaml does ({output}; change it where the",
        "folder is moved). heads.safetensors holds what is beside the network, such as the value head.",
    ]
