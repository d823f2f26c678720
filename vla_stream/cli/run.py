"""`vla-stream run`: train with all roles on this host, or, with --inline, in one thread for a debugger."""

from __future__ import annotations

import bdb
import os
import shlex
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vla_stream.cli.options import URL_VARIABLE, config_options, connected, explained
from vla_stream.errors import InputError, RunFailed

if TYPE_CHECKING:
    from vla_stream.cli.display import Display
    from vla_stream.cli.folder import RunFolder
    from vla_stream.cli.launch import Launch


@click.command()
@config_options
@click.option("--run", "name", metavar="NAME", help="Name of the run; default: the config's, with -2, -3 … if taken.")
@click.option("--redis", "url", metavar="URL", help=f"Server to use; else {URL_VARIABLE}, else one of our own.")
@click.option("--updates", type=click.IntRange(min=1), help="Updates after which the run is done.")
@click.option("--resume", is_flag=True, help="Go on from the newest checkpoint; without --run: of the newest run.")
@click.option("--inline", is_flag=True, help="One thread, one process: for breakpoints.")
@click.option("--plain", is_flag=True, help="Plain lines, also on a terminal.")
def run(
    configs: tuple[Path, ...],
    overrides: tuple[str, ...],
    name: str | None,
    url: str | None,
    updates: int | None,
    resume: bool,
    inline: bool,
    plain: bool,
) -> None:
    """Train as the files CONFIG... say (composed left to right), until the last update.

    Ctrl-C finishes the segments in flight and ends; a second one stops at once. Everything lands in runs/NAME/.
    """
    from vla_stream import config as settings
    from vla_stream import tasks
    from vla_stream.cli.check import check_classes, check_files, check_policy
    from vla_stream.cli.display import make_display
    from vla_stream.cli.folder import RunFolder

    config = settings.load(configs, [*overrides, *([f"updates={updates}"] if updates else [])])
    if config.held_out is not None:
        raise InputError("held_out is set, which only `vla-stream eval` does for its own workers; remove it")
    for key, python in (("simulators.python", config.simulators.python), ("policy.python", config.policy.python)):
        if inline and python is not None:
            raise InputError(
                f"--inline: {key} is {str(python)!r}, but one process has one interpreter; "
                f"leave out --inline, or install policy and simulator together and add --set {key}=null"
            )
    if inline and config.trainer.ranks > 1:
        raise InputError(
            f"--inline: trainer.ranks is {config.trainer.ranks}, but one process is one rank; leave out --inline, or "
            "add --set trainer.ranks=1"
        )
    if inline and (left_out := tasks.left_out(config, 1)):
        raise InputError(
            f"--inline: its one simulator has no environment batch for {', '.join(left_out)}; raise "
            "simulators.env_batches, since each batch plays one of environment.tasks"
        )
    check_classes(config)
    check_policy(config)
    if not resume:
        check_files(config)
    url = url or os.environ.get(URL_VARIABLE) or None
    if url is not None:
        with connected(url):
            pass  # Before a folder is made: a server that is not there should leave no trace.
    folder = RunFolder.open(config, name=name, resume=resume)
    display = make_display(plain=plain or inline)
    try:
        inline_notes = ["--inline: nothing is evaluated beside the run"] if inline and config.evaluation.every else []
        for note in [*folder.notes, *settings.notes(folder.config), *inline_notes]:
            display.tell(f"note: {note}")
        flags = [word for item in overrides for word in ("--set", item)]
        flags += ["--updates", str(updates)] if updates else []
        arguments = [*map(str, configs), *flags, "--run", folder.config.name, "--resume"]
        again = shlex.join([program(), "run", *arguments])
        # The URL may hold a password, which must not stand on a terminal.
        again += " and the same --redis" if url is not None else ""
        _session(folder, url, display, again, resume=resume, inline=inline)
    finally:
        display.close()
        folder.close()


def program() -> str:
    """This command as the person can call it again from here: `vla-stream` is on PATH only in an active environment."""
    called = Path(sys.argv[0])
    if called.name != "vla-stream" or shutil.which("vla-stream") == str(called.absolute()):
        return "vla-stream"
    return os.path.relpath(called)


def _session(folder: RunFolder, url: str | None, display: Display, again: str, *, resume: bool, inline: bool) -> None:
    from vla_stream.cli import finish
    from vla_stream.cli.helper import Interrupted
    from vla_stream.cli.launch import Launch, server_for
    from vla_stream.cli.signals import Signals

    config, run_dir = folder.config, folder.path
    began_s = time.monotonic()
    with Signals() as signals, server_for(url, folder.logs) as (where, server):
        with explained(where), Launch(config, where, server, signals, display, resume=resume) as launch:
            folder.write_url(where)
            display.tell(
                f"run {config.name}: {config.updates} updates, {config.policy.name} on {config.environment.name}"
            )
            launch.metrics.write([{"time": time.time(), "kind": "start"}])
            try:
                if resume and finish.newest_update(run_dir) >= config.updates:
                    display.tell(f"all {config.updates} updates are done already; --updates N goes on to update N")
                else:
                    prepare(launch)
                    _train(launch, inline=inline)
            except Interrupted:
                update = finish.newest_update(run_dir)
                raise RunFailed(f"interrupted, checkpoint {update} of {config.updates}; go on with: {again}") from None
            finally:
                launch.close_books()
                display.close()
                finish.draw_curve(config)
        results = {}
        try:
            results = finish.evaluate_ends(config, lambda: signals.asked > 0, display.tell)
        except Interrupted:
            display.tell(f"evaluation left out; evaluate with: vla-stream eval … --checkpoint {run_dir}")
        except (RunFailed, InputError) as exc:
            display.tell(f"training is done, but its evaluation failed: {exc}")
    for line in finish.summarise(config, results, time.monotonic() - began_s):
        click.echo(line)


def prepare(launch: Launch) -> None:
    """Demonstrations, if this run warm-starts and has none."""
    from vla_stream.cli.folder import CONFIG_FILE
    from vla_stream.cli.helper import Helper, wait_for
    from vla_stream.config import CHECKPOINTS, DEMONSTRATIONS
    from vla_stream.learning.checkpoint import places

    pretrain, run_dir = launch.config.pretrain, launch.run_dir
    file = run_dir / DEMONSTRATIONS
    if pretrain is None or not pretrain.records or file.exists() or places(run_dir / CHECKPOINTS):
        return
    launch.progress.phase = f"recording {pretrain.episodes} demonstrations"
    logs = run_dir / "logs"
    arguments = ["demos", str(run_dir / CONFIG_FILE), "--output", str(file)]
    helper = Helper("demonstrations", arguments, logs / "demos.out", logs / "demos.log")
    wait_for([helper], launch.idle, launch.display.tell)
    launch.progress.phase = ""
    launch.display.tell((logs / "demos.out").read_text(encoding="utf-8").strip())


def _train(launch: Launch, *, inline: bool) -> None:
    from vla_stream.cli.helper import Interrupted

    if inline:
        _train_inline(launch)
        return
    launch.launch_workers()
    ending = launch.drive()
    if ending != "finished":
        raise Interrupted


def _train_inline(launch: Launch) -> None:
    """All roles in this very thread. Another one prints a line per update, so it is silent while a breakpoint holds."""
    from vla_stream.cli.helper import Interrupted
    from workers import inline

    done = threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            before = launch.progress.update
            launch.read_metrics()
            if launch.progress.update != before:
                launch.display.tell(launch.progress.line())

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        with launch.signals.raised():
            inline.run(launch.config, launch.url, launch.display.tell)
    except (KeyboardInterrupt, bdb.BdbQuit):
        raise Interrupted from None
    finally:
        done.set()
        watcher.join(5.0)
