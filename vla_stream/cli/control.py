"""`vla-stream stop`, `drain`, `pause`, `resume`: what the run is desired to do; its workers obey within a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import Target, connected, target_options
from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.flow import Desired


@click.command()
@target_options
def stop(target: Target) -> None:
    """End the run now. Segments in flight are given up; the newest checkpoint stays."""
    _desire(target, "stopped", "is told to stop")


@click.command()
@target_options
def drain(target: Target) -> None:
    """End the run after the segments in flight."""
    _desire(target, "draining", "is told to finish its segments and end")


@click.command()
@target_options
def pause(target: Target) -> None:
    """Start no new segments; segments in flight are finished and trained."""
    _desire(target, "paused", "is paused; go on with: vla-stream resume --run " + target.run)


@click.command()
@target_options
def resume(target: Target) -> None:
    """Go on after `pause`."""
    _desire(target, "running", "goes on")


def _desire(target: Target, desired: Desired, answer: str) -> None:
    from vla_stream.flow import Flow
    from vla_stream.streams.keys import Keys

    with connected(target.url) as client:
        flow = Flow(client, Keys(target.run))
        state = flow.state()
        if state is None:
            raise InputError(f"run {target.run}: not on this server; see `vla-stream status --run NAME --redis URL`")
        if state.desired == "stopped" and desired != "stopped":
            raise InputError(f"run {target.run}: already stopped; start it again with `vla-stream run … --resume`")
        flow.set_desired(desired, by="vla-stream " + {"running": "resume", "paused": "pause"}.get(desired, desired))
    click.echo(f"run {target.run} {answer}")
