"""`vla-stream redis start|stop`: a server of one's own that outlives this command."""

from __future__ import annotations

from pathlib import Path

import click

FOLDER = click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("runs/.redis"),
    show_default=True,
    help="Folder of its config, pid, url and log.",
)


@click.group()
def redis() -> None:
    """Start or stop a Redis server on this host's loopback, with a random password, that keeps nothing on disk."""


@redis.command()
@FOLDER
def start(folder: Path) -> None:
    """Start it (or find it running) and print the line that makes other commands use it."""
    from vla_stream.broker.server import start_detached

    click.echo(f"export VLA_STREAM_REDIS={start_detached(folder)}")
    click.echo(f"Redis runs; its url is in {folder}/redis.url; stop it with: vla-stream redis stop", err=True)


@redis.command()
@FOLDER
def stop(folder: Path) -> None:
    """Stop it; runs that use it lose what is not in a checkpoint."""
    from vla_stream.broker.server import stop_detached

    click.echo("Redis is stopped" if stop_detached(folder) else f"no server of {folder} was running", err=True)
