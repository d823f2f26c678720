"""`vla-stream bench`: the programs of tools/bench/ as commands. A clone of the repository has them, a wheel has not."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import click

from vla_stream.errors import InputError

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "bench"

# Each a module of FOLDER, with a command of the same name in it.
BENCHMARKS: Mapping[str, str] = {
    "pipeline": "Throughput from lockstep to fully asynchronous, beside model and bound.",
    "batching": "Automatic batching beside a sweep of fixed sizes and waits.",
    "plan": "What `plan` predicts for every placement of a profile, beside real runs.",
    "rollout": "Stragglers, waits of requests, and our own cost per request, without a trainer.",
    "scale": "8 to 256 GPUs by the model: servers, partitions, weights.",
    "broker": "Round trips and bytes per second of each lane, beside raw limits.",
    "weights": "A generator's stall per version and the bytes of a delta, beside a blocking reload.",
    "metrics": "What workers' metrics cost, in one run with and without them.",
    "peers": "Environment steps per second beside sample-factory, training included.",
}


class Benchmarks(click.Group):
    """Imports a benchmark when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHMARKS:
            return None
        if not (FOLDER / f"{cmd_name}.py").is_file():
            raise InputError(
                f"bench {cmd_name}: {FOLDER} is not there, expected the benchmarks of a clone of the repository; "
                "run it from a clone that tools/setup has set up"
            )
        # They are programs beside the library, and import one another by their bare names.
        if str(FOLDER) not in sys.path:
            sys.path.insert(0, str(FOLDER))
        command: click.Command = getattr(import_module(cmd_name), cmd_name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(BENCHMARKS.items()))


@click.group(cls=Benchmarks)
def bench() -> None:
    """Measure on this machine, side by side in one run; each prints a table and writes JSON and a plot."""
