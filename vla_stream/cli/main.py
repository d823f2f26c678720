"""The command `vla-stream`: a table of commands, loaded only when called, and the one place where errors become words.

Exit codes: 0 done, 1 a failed or interrupted run, 2 bad input (config, flag, file, URL), 130 Ctrl-C elsewhere.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

import click

from vla_stream.errors import InputError, VlaStreamError

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a command lives, and its sentence for the list of commands: that list must not import anything."""

    module: str
    attribute: str
    sentence: str


COMMANDS: Mapping[str, Entry] = {
    "run": Entry("run", "run", "Train: all roles on this host, supervised, with live progress."),
    "simulators": Entry("pools", "simulators", "Attach simulators to a live run, on any host, at any time."),
    "generators": Entry("pools", "generators", "Attach generators to a live run, on any host, at any time."),
    "trainers": Entry("pools", "trainers", "Attach a trainer to a live run that has none."),
    "status": Entry("status", "status", "Show workers, flow, queues and books of a run."),
    "top": Entry("top", "top", "Watch workers, streams and what holds the run up, live."),
    "events": Entry("status", "events", "Show what happened in a run, one sentence each."),
    "inspect": Entry("inspect", "inspect", "Show entries of a stream readably, and their camera images."),
    "dashboard": Entry("dashboard.command", "dashboard", "Serve a web page that shows a run live."),
    "trace": Entry("trace", "trace", "Write what every worker does, moment by moment, for Perfetto."),
    "stop": Entry("control", "stop", "End a run now; segments in flight are given up."),
    "drain": Entry("control", "drain", "End a run after the segments in flight."),
    "pause": Entry("control", "pause", "Start no new segments until `resume`."),
    "resume": Entry("control", "resume", "Go on after `pause`."),
    "lane": Entry("control", "lane", "Change the way of observations: /dev/shm, Redis, inline."),
    "scale": Entry("control", "scale", "Change how many simulators or generators a run has."),
    "demos": Entry("demos", "demos", "Record demonstrations of the environment's expert for the warm start."),
    "eval": Entry("evaluate", "evaluate", "Success of a checkpoint on fixed seeds, with its interval."),
    "export": Entry("export", "export", "A checkpoint as a folder to share: weights, config, model card."),
    "replay": Entry("replay", "replay", "Make a recorded update once more and compare what it gave."),
    "check": Entry("check", "check", "Validate a config and show what a run would do."),
    "plan": Entry("plan", "plan", "Find the best placement on some devices, by measured costs."),
    "bench": Entry("bench", "bench", "Measure throughput and transport on this machine."),
    "redis": Entry("server", "redis", "Start or stop a Redis server of your own."),
}


class LazyGroup(click.Group):
    """Imports a command's module when that command is called, so that --help costs nothing."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(import_module(f"vla_stream.cli.{entry.module}"), entry.attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1)
        if args[0] not in COMMANDS and near:
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.sentence) for name, entry in COMMANDS.items()])


def show_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(f"vla-stream {version('vla-stream')}")
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=show_version, help="Show it.")
def cli() -> None:
    """Fully asynchronous RL post-training of vision-language-action robot policies over Redis streams.

    Start with: vla-stream run configs/quickstart.yaml
    """


def call(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code; errors for people are printed, one line per problem."""
    try:
        result = cli.main(arguments, prog_name="vla-stream", standalone_mode=False)
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except VlaStreamError as exc:
        for line in str(exc).splitlines() or [type(exc).__name__]:
            click.echo(f"Error: {line}", err=True)
        return EXIT_BAD_INPUT if isinstance(exc, InputError) else EXIT_FAILED
    except BrokenPipeError:
        # The reader (head, less) is gone: nobody wants the rest, nor a traceback from the interpreter's last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as exc:
        # A full disk, a folder that somebody removed: the system's own words, and no traceback.
        click.echo(f"Error: {exc.filename or 'the system'}: {exc.strerror or exc}", err=True)
        return EXIT_FAILED
    return result if isinstance(result, int) else 0


def main() -> None:
    # As `python -m` does for the workers: a person's own module:Class is looked for in the folder they start in.
    sys.path.insert(0, os.getcwd())
    sys.exit(call())


if __name__ == "__main__":
    main()
