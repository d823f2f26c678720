"""Fixtures of the workers' tests: a run on the shared server, and processes that find tests/fakes.py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import Run
from trainer_bench import Bench, Make

from vla_stream.broker.connection import Client

TESTS = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def fakes_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """In child processes too; in this one pytest's `pythonpath` does it."""
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def run(redis_url: str, run_name: str, tmp_path: Path, client: Client) -> Iterator[Run]:
    with contextlib.closing(Run(redis_url, run_name, tmp_path, client)) as made:
        yield made


@pytest.fixture
def make(run: Run) -> Make:
    return lambda **changes: Bench(run, run.start(**changes))
