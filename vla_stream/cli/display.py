"""How `vla-stream run` shows itself: a live bar with figures on a terminal, plain lines where there is none."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from vla_stream.cli.progress import Progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_COLUMNS = 250
PLAIN_LINE_S = 5.0
LIMIT_S = 30.0
GONE = contextlib.suppress(OSError)  # a terminal or pipe whose other end is gone: a run does not end with it
QUIET_LINE_S = 30.0  # a plain line comes at least this often, also when nothing moved


class Display(Protocol):
    """Where a run shows itself."""

    def tell(self, text: str, details: Sequence[str] = ()) -> None:
        """One sentence that stays, and the log lines that show its cause."""

    def show(self, progress: Progress) -> None:
        """The figures of now; called often."""

    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""


def console_for_a_look() -> Console:
    """For output that ends at once: into a pipe or file it has lines as long as they are."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_COLUMNS
    return console


def make_display(*, plain: bool = False) -> Display:
    return PlainDisplay() if plain or not sys.stdout.isatty() else LiveDisplay()


class PlainDisplay:
    """Lines only, at most one in 5 s unless something is told."""

    def __init__(self) -> None:
        self._next_s = self._quiet_until_s = self._limit_from_s = 0.0
        self._shown = self._limit = ""

    def tell(self, text: str, details: Sequence[str] = ()) -> None:
        with GONE:
            print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
            for line in details:
                print(f"    {line}", flush=True)

    def show(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        state = f"{progress.update} {progress.trainer_state} {progress.workers}"
        if state == self._shown and now_s < self._quiet_until_s:
            return
        self._next_s, self._quiet_until_s, self._shown = now_s + PLAIN_LINE_S, now_s + QUIET_LINE_S, state
        self.tell(progress.line())
        # Its figures change all the time; who is the limit is news.
        limit = progress.pulse.bottleneck() if progress.last else ""
        if limit and limit.split(" ", 2)[:2] != self._limit.split(" ", 2)[:2] and now_s >= self._limit_from_s:
            self._limit, self._limit_from_s = limit, now_s + LIMIT_S
            self.tell(f"limit: {limit}")

    def close(self) -> None:
        pass


class LiveDisplay:
    """A bar to the last update and a table of figures, redrawn in place; what is told scrolls by above."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._started = False
        self._began_s = time.monotonic()
        self._next_s = 0.0

    def tell(self, text: str, details: Sequence[str] = ()) -> None:
        from rich.text import Text

        with GONE:
            self._console.print(Text.assemble((time.strftime("%H:%M:%S "), "dim"), text))
            for line in details:
                self._console.print(Text(f"    {line}", style="dim"))

    def show(self, progress: Progress) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + 0.25
        with GONE:
            if not self._started:
                self._started = True
                self._live.start()
            self._live.update(self._table(progress, now_s - self._began_s), refresh=True)

    def close(self) -> None:
        if self._started:
            self._started = False
            with GONE:
                self._live.stop()

    def _table(self, progress: Progress, elapsed_s: float) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        from vla_stream.cli.progress import duration

        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(f"update {progress.update}/{progress.target_updates}", style="bold"),
            ProgressBar(total=progress.target_updates, completed=progress.update, width=40),
            Text(duration(elapsed_s), style="dim"),
        )
        figures = Text()
        for label, value in progress.parts():
            figures.append(f"{label} ", style="dim")
            figures.append(f"{value}   ", style="bold" if label == "success" else "")
        table = Table.grid()
        table.add_row(bar)
        if progress.last and (limit := progress.pulse.bottleneck()):
            figures.append(f"\n{limit}", style="dim")
        table.add_row(figures if progress.last else Text(progress.waiting(), style="dim").append("   ").append(figures))
        return table
