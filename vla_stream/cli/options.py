"""Options that commands share, and what they mean: which run, on which server. Imports nothing heavy by itself."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.broker.connection import Client

Command = TypeVar("Command", bound=Callable[..., Any])

URL_VARIABLE = "VLA_STREAM_REDIS"
URL_FILE = "redis.url"
URL_HELP = f"Server of the run: redis://, rediss:// or unix://. Else {URL_VARIABLE}, else runs/RUN/{URL_FILE}."


@dataclass(frozen=True, slots=True)
class Target:
    """A run on a server. runs_dir: the folder that holds this host's runs/<name>/."""

    run: str
    url: str
    runs_dir: Path


def run_options(command: Command) -> Command:
    """--run, --redis and --runs as they were given, as `run_name`, `redis_url` and `runs_dir`."""
    decorated: Any = command
    for option in (
        click.option(
            "--runs", "runs_dir", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of runs."
        ),
        click.option("--redis", "redis_url", metavar="URL", help=URL_HELP),
        click.option("--run", "run_name", metavar="NAME", help="Name of the run; default: the one that runs here."),
    ):
        decorated = option(decorated)
    return cast(Command, decorated)


def target_options(command: Command) -> Command:
    """The same, passed on as `target`."""

    @functools.wraps(command)
    def with_target(*args: Any, run_name: str | None, redis_url: str | None, runs_dir: Path, **others: Any) -> Any:
        target = find_target(run_name, redis_url, runs_dir)
        if not (redis_url or os.environ.get(URL_VARIABLE) or server_may_live(target.url)):
            raise InputError(
                f"run {target.run}: its server is gone, as after a kill -9 of its launcher; go on with: "
                f"vla-stream run CONFIG... --run {target.run} --resume"
            )
        return command(*args, target=target, **others)

    return cast(Command, run_options(cast(Any, with_target)))


def config_options(command: Command) -> Command:
    """CONFIG... and --set, as `configs` and `overrides`."""
    decorated: Any = click.option(
        "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override, for example trainer.epochs=2."
    )(command)
    path = click.Path(path_type=Path)
    return cast(Command, click.argument("configs", nargs=-1, required=True, metavar="CONFIG...", type=path)(decorated))


def find_run(run: str | None, runs_dir: Path) -> str:
    """The run's name, checked; if none was given, that of the one that is alive here. Raises InputError."""
    from vla_stream.config import EVALUATION, RUN_NAME

    if run is None:
        files = sorted(runs_dir.glob(f"*/{URL_FILE}"))
        living = [path for path in files if _may_live(path)]
        here = [path.parent.name for path in living or files]
        here = [name for name in here if EVALUATION not in name] or here
        if len(here) != 1:
            found = f"{', '.join(here)} run here" if here else f"no run in {runs_dir}/ is alive"
            raise InputError(f"--run: not given and {found}, expected exactly one; give --run NAME")
        run = here[0]
    if not re.fullmatch(RUN_NAME.removesuffix("$"), run):
        raise InputError(f"--run: {run!r} is no run's name, expected letters, digits, - and _, at most 64")
    return run


def _may_live(file: Path) -> bool:
    """What is another user's to read may."""
    try:
        return server_may_live(file.read_text(encoding="utf-8").strip())
    except OSError:
        return True


def find_target(run: str | None, url: str | None, runs_dir: Path) -> Target:
    """Fill in what was not said, from the environment and from runs/<name>/redis.url. Raises InputError."""
    url = url or os.environ.get(URL_VARIABLE) or None
    run = find_run(run, runs_dir)
    if url is None:
        file = runs_dir / run / URL_FILE
        try:
            url = file.read_text(encoding="utf-8").strip()
        except OSError as exc:
            raise InputError(
                f"run {run}: no server given, and {file} is not there (it is while `vla-stream run` lives); "
                f"give --redis URL or set {URL_VARIABLE}"
            ) from exc
    return Target(run, url, runs_dir)


def server_may_live(url: str) -> bool:
    """False where the socket is gone: an embedded server goes with its run, any other may come back at any time."""
    return not url.startswith("unix://") or Path(url.removeprefix("unix://").partition("?")[0]).exists()


def follow_launcher() -> None:
    """End with the launcher that started this command as a part of its work, however the launcher ends."""
    parent = os.environ.get("VLA_STREAM_PARENT", "")
    if parent.isdecimal():
        from workers.lifeline import die_with_parent

        die_with_parent(int(parent))


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    """Whatever Redis says in the body goes to the person in one line (InputError)."""
    from vla_stream.broker.complaints import explain
    from vla_stream.broker.connection import REDIS_ERRORS

    try:
        yield
    except REDIS_ERRORS as exc:
        raise explain(exc, url) from exc


@contextlib.contextmanager
def connected(url: str, *, name: str = "vla-stream-cli", block_s: float = 0.0) -> Iterator[Client]:
    """A checked connection; whatever Redis says goes to the person in one line (InputError)."""
    from vla_stream.broker.connection import check_server, connect

    client = connect(url, name=name, block_s=block_s)
    try:
        with explained(url):
            check_server(client)
            yield client
    finally:
        client.close()
