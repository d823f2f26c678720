"""What the benchmarks print and write: a table, JSON beside it, and figures of repeated runs."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from vla_stream.errors import InputError

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        text = number(self.median)
        return text if self.low == self.high else f"{text} ({number(self.low)}…{number(self.high)})"


def number(value: float) -> str:
    """Three digits at least, and none after the point where there are four before it."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def ratio(value: float, to: float | None) -> str:
    return f"{value / to:.3f}" if to else "–"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need; the first to the left, figures to the right."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def machine() -> dict[str, Any]:
    """Where and when: figures mean nothing without it."""
    return {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def output_option(text: str) -> Callable[[Command], Command]:
    """--output of a benchmark's command, with `text` as its help."""
    return click.option(
        "--output", type=click.Path(path_type=Path), default=Path("runs/bench"), show_default=True, help=text
    )


def output_folder(folder: Path) -> Path:
    """Made now: a benchmark of an hour must not find at its end that it cannot write. Raises InputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise InputError(f"--output {folder}: cannot be made ({exc.strerror}); give a folder of yours") from exc
    if not os.access(folder, os.W_OK):
        raise InputError(f"--output {folder}: cannot be written to; give a folder of yours")
    return folder


def write_json(file: Path, data: Mapping[str, Any]) -> None:
    unfinished = file.with_suffix(".json.part")
    unfinished.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    unfinished.replace(file)
