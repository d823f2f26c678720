"""`vla-stream simulators|generators|trainers`: workers of one role, attached to a live run from any host."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from vla_stream.cli.options import Target, connected, explained, server_may_live, target_options
from vla_stream.errors import InputError, RunFailed

if TYPE_CHECKING:
    from vla_stream.config import Config
    from vla_stream.environments.protocol import Specification
    from vla_stream.flow import FlowState
    from workers.supervisor import Supervisor

Command = TypeVar("Command", bound=Callable[..., Any])

LOOK_S = 0.5
STEP_S = 0.1
GONE_S = 15.0  # without the run, or without its socket: longer than a server's restart by its launcher
STILL_WAITING_S = 60.0


def pool_options(command: Command) -> Command:
    """-n, --device and --allow on top of the options of a target."""
    device_help = "Devices to spread them over, for example cuda:0,cuda:1; default: as the run's config says."
    decorated: Any = click.option("--device", "devices", metavar="LIST", default="", help=device_help)(command)
    allow_help = "A module that the run's config may name as module:Class; may be given several times."
    decorated = click.option("--allow", "allowed", metavar="MODULE", multiple=True, help=allow_help)(decorated)
    number = click.option(
        "-n", "count", type=click.IntRange(min=1), help="How many processes. Default: 1; trainers: the config's ranks."
    )
    return cast(Command, target_options(number(decorated)))


@click.command()
@pool_options
@click.option(
    "--environment",
    "other",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A config whose section `environment` these simulate, instead of the run's: another simulator, whose cameras, "
    "state and actions are alike.",
)
def simulators(target: Target, count: int | None, devices: str, allowed: tuple[str, ...], other: Path | None) -> None:
    """Attach simulators; their environments' shapes must be those of the run. Ctrl-C drains these only.

    Different simulators share a run's segments as they come: a faster one has more of them."""
    _attach("simulator", target, count, devices, allowed, other)


@click.command()
@pool_options
def generators(target: Target, count: int | None, devices: str, allowed: tuple[str, ...]) -> None:
    """Attach generators. Ctrl-C drains these only."""
    _attach("generator", target, count, devices, allowed)


@click.command()
@pool_options
def trainers(target: Target, count: int | None, devices: str, allowed: tuple[str, ...]) -> None:
    """Attach the trainer to a run that has none; it goes on from the newest checkpoint in the run's folder here.

    Several processes are the ranks of one trainer, which share the segments of each update.
    """
    _attach("trainer", target, count, devices, allowed)


def split_devices(text: str) -> list[str]:
    """`cuda:0,1` is cuda:0 and cuda:1. Raises InputError."""
    devices: list[str] = []
    for part in filter(None, (item.strip() for item in text.split(","))):
        if part.isdecimal():
            kind = devices[-1].partition(":")[0] if devices else ""
            if not kind:
                raise InputError(f"--device {text}: {part} names no kind of device, expected for example cuda:{part}")
            part = f"{kind}:{part}"
        devices.append(part)
    return devices


def _attach(
    role: str, target: Target, count: int | None, devices: str, allowed: tuple[str, ...], other: Path | None = None
) -> None:
    from vla_stream import config as settings
    from vla_stream import plugins
    from vla_stream.cli.signals import Signals
    from vla_stream.flow import Flow
    from vla_stream.streams.keys import Keys
    from workers.supervisor import Supervisor

    spread = split_devices(devices)
    with connected(target.url) as client:
        flow = Flow(client, Keys(target.run))
        config = flow.config()
        state, shm = flow.state(), flow.shm_folder()
        python = config.interpreters.get(role)
        if python is not None and str(python.absolute()) != sys.executable:
            # Not taken from there: what Redis holds is not to decide which program a host starts.
            click.echo(f"note: the run's own {role}s use {python}, these use {sys.executable}")
        if state is None or state.desired in ("draining", "stopped"):
            raise InputError(f"run {target.run}: is ending, expected one that goes on; nothing is attached")
        environment = {plugins.ALLOWED_VARIABLE: ",".join(allowed)}
        if other is not None:
            environment |= _other_environment(config, other, flow.specification(), allowed)
    number = count or (config.trainer.ranks if role == "trainer" else 1)
    if role == "trainer" and (problems := settings.rank_problems(config, number, devices)):
        raise InputError("\n".join(f"trainers -n {number}: {problem}" for problem in problems))
    with Signals() as signals, explained(target.url):
        supervisor = Supervisor(
            target.url,
            target.run,
            target.runs_dir,
            lease_s=config.flow.lease_s,
            shm=shm,
            environment=environment,
        )
        try:
            ids = supervisor.launch(role, number, spread)
            ranks = f" of {number} ranks" if number > len(ids) else ""
            click.echo(
                f"attached {', '.join(ids)}{ranks} to run {target.run}; logs in "
                f"{target.runs_dir / target.run / 'logs'}/"
            )
            click.echo("Ctrl-C drains them, a second one stops them at once")
            _watch(supervisor, target, lambda: signals.asked, config.flow.drain_deadline_s)
        finally:
            supervisor.close()
    if supervisor.failures:
        failed = InputError if role in supervisor.refused else RunFailed
        raise failed(f"{role}: {next(iter(supervisor.failures.values()))}")


def _other_environment(
    config: Config, file: Path, expected: Specification | None, allowed: tuple[str, ...]
) -> dict[str, str]:
    """What tells workers of another simulator, which was made here once: it is known to fit. Raises InputError."""
    from vla_stream import config as settings
    from vla_stream import plugins, tasks
    from workers import environment_apart
    from workers.simulator import ENVIRONMENT_VARIABLE

    changed = settings.with_environment(config, file)
    # Here, not in the run's simulators.python: these are to run here.
    changed = changed.model_copy(update={"simulators": changed.simulators.model_copy(update={"python": None})})
    environment = changed.environment
    tasks.check_same_tickets(config.environment, environment)
    tasks.check_whole_batch(changed, environment_apart.ask(changed).whole_batch)
    for task in tasks.names(environment):
        found = environment_apart.specification(changed, task)
        if expected is not None and found != expected:
            raise InputError(
                f"{file}: {environment.name} has other shapes than run {config.name} ({found}, expected {expected}); "
                "give it the same cameras, state and actions by its options"
            )
    # Whoever names a module in a file of their own allows it.
    module = environment.name.rpartition(":")[0]
    return {
        ENVIRONMENT_VARIABLE: environment.model_dump_json(),
        plugins.ALLOWED_VARIABLE: ",".join([*allowed, *filter(None, [module])]),
    }


def _watch(supervisor: Supervisor, target: Target, asked: Callable[[], int], drain_deadline_s: float) -> None:
    """Until the person, the run's end, or failed workers end it."""
    end = _RunsEnd(supervisor, target)
    while supervisor.children:
        for notice in supervisor.step():
            click.echo(f"{time.strftime('%H:%M:%S')} {notice.text}")
            for line in notice.details:
                click.echo(f"    {line}")
        if asked() >= 2:
            supervisor.stop()
        elif not supervisor.draining:
            reason = "draining: segments in flight are finished" if asked() else end.reason()
            if reason is not None:
                click.echo(reason)
                supervisor.drain(drain_deadline_s)
        time.sleep(STEP_S)


class _RunsEnd:
    """Whether the run that a pool serves is over."""

    def __init__(self, supervisor: Supervisor, target: Target) -> None:
        self._supervisor, self._target = supervisor, target
        self._next_look_s = 0.0
        self._gone_since_s: float | None = None
        self._next_word_s = time.monotonic() + STILL_WAITING_S

    def reason(self) -> str | None:
        """The sentence to end with, or None while the run goes on or may come back."""
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return None
        self._next_look_s = now_s + LOOK_S
        state, reachable = self._supervisor.flow_state()
        if state is not None:
            self._gone_since_s = None
            self._next_word_s = now_s + STILL_WAITING_S
            return _ending(self._target.run, state)
        self._gone_since_s = self._gone_since_s or now_s
        if now_s - self._gone_since_s > GONE_S and (reachable or not server_may_live(self._target.url)):
            return f"run {self._target.run} is gone from its server; its workers end"
        if now_s > self._next_word_s:
            self._next_word_s = now_s + STILL_WAITING_S
            click.echo("still waiting for the server; Ctrl-C ends these workers")
        return None


def _ending(run: str, state: FlowState) -> str | None:
    return f"run {run} is {state.desired}; its workers end" if state.desired in ("draining", "stopped") else None
