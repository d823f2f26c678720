"""`vla-stream stop`, `drain`, `pause`, `resume`, `lane`, `scale`: what the run shall do; it obeys within a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import Target, connected, target_options
from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.broker.connection import Client
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


@click.command()
@click.argument("lane", metavar="auto|inline|shm|redis")
@target_options
def lane(target: Target, lane: str) -> None:
    """Change the way of observations, for all segments that are begun from now on."""
    from vla_stream.flow import LANES, Flow
    from vla_stream.streams import presence
    from vla_stream.streams.keys import Keys

    wanted = next((name for name in LANES if name == lane), None)
    if wanted is None:
        raise InputError(f"lane {lane!r}: unknown, expected one of {', '.join(LANES)}")
    with connected(target.url) as client:
        flow = Flow(client, Keys(target.run))
        apart = [worker for worker in presence.alive(client, flow.keys) if worker.shm == "no"]
        if wanted == "shm" and apart:
            raise InputError(
                f"lane shm: {apart[0].id} on {apart[0].host} does not see /dev/shm of run {target.run}, expected all "
                "workers to; end it first, or choose auto"
            )
        reader = next((worker.id for worker in apart if worker.role in presence.READERS), "")
        flow.set_lane(wanted, by="vla-stream lane", remote_reader=reader)
    through = f", which is through Redis for {reader}" if reader and wanted == "auto" else ""
    click.echo(f"run {target.run}: segments begun from now on have lane {wanted}{through}")


@click.command()
@click.argument("counts", metavar="ROLE=N...", nargs=-1, required=True)
@target_options
def scale(target: Target, counts: tuple[str, ...]) -> None:
    """Change how many simulators or generators `run` has on its host: scale generators=3 simulators=8.

    Those that are too many finish their segments first. Attached pools stay as they are.
    """
    from vla_stream import tasks
    from vla_stream.flow import MOST_WORKERS, SCALABLE, Flow
    from vla_stream.streams.keys import Keys

    wanted: dict[str, int] = {}
    roles = " or ".join(f"{role}s=N" for role in SCALABLE)
    for text in counts:
        name, _, digits = text.partition("=")
        role = name.removesuffix("s")
        if role not in SCALABLE:
            raise InputError(f"scale {text!r}: unknown, expected {roles}")
        if not (digits.isascii() and digits.isdecimal() and 1 <= int(digits[:9]) <= MOST_WORKERS):
            raise InputError(f"scale {text!r}: expected a number from 1 to {MOST_WORKERS}; `pause` stops all of a run")
        wanted[role] = int(digits[:9])
    with connected(target.url) as client:
        flow = Flow(client, Keys(target.run))
        if "simulator" in wanted and (missing := tasks.left_out(flow.config(), wanted["simulator"])):
            raise InputError(
                f"scale simulators={wanted['simulator']}: leaves no environment batch for {', '.join(missing)}, and "
                "the run would wait for its segments; give more"
            )
        for role, number in wanted.items():
            flow.set_scale(role, number, by="vla-stream scale")
    shown = ", ".join(f"{number} {role}{'' if number == 1 else 's'}" for role, number in wanted.items())
    click.echo(f"run {target.run}: its launcher is told to have {shown}")


def desire(client: Client, run: str, desired: Desired, by: str) -> None:
    """Set what the run shall do; `by` is told to its workers. Raises InputError: no such run, or one that ended."""
    from vla_stream.flow import Flow
    from vla_stream.streams.keys import Keys

    flow = Flow(client, Keys(run))
    state = flow.state()
    if state is None:
        raise InputError(f"run {run}: not on this server; see `vla-stream status --run NAME --redis URL`")
    if state.desired == "stopped" and desired != "stopped":
        raise InputError(f"run {run}: already stopped; start it again with `vla-stream run … --resume`")
    flow.set_desired(desired, by=by)


def _desire(target: Target, desired: Desired, answer: str) -> None:
    command = {"running": "resume", "paused": "pause", "draining": "drain", "stopped": "stop"}[desired]
    with connected(target.url) as client:
        desire(client, target.run, desired, by=f"vla-stream {command}")
    click.echo(f"run {target.run} {answer}")
