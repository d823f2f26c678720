"""Servers as a resource, on cases that can be computed by hand, and small simulations of what the table shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click.testing
import pytest
import scale
from scale import CHUNK_BYTES, Servers, Setup, Shape

from vla_stream.cli.main import call
from vla_stream.errors import InputError

BYTES_PER_MS = 1e6  # 1 GB/s


def servers(setup: Setup, pullers: int = 4) -> Servers:
    return Servers(setup, 1e6, segment_reads=3.0, pullers=pullers, bytes_per_ms=BYTES_PER_MS, way=10.0)


class Clock:
    """Calls what is due, one after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, Callable[[], None]]] = []

    def after(self, delay: float, event: Callable[[], None]) -> None:
        self.due.append((self.now + delay, event))

    def run(self) -> None:
        while self.due:
            self.due.sort(key=lambda item: item[0])
            self.now, event = self.due.pop(0)
            event()


def test_an_observation_is_written_and_read_and_waits_for_those_before_it() -> None:
    one = servers(Setup("", partitions=1))
    assert one.request(0.0, batch=0) == 5 + 2.0
    assert one.request(0.0, batch=1) == 5 + 4.0, "the second one waits for the first"
    assert one.segment(100.0, batch=0) == 1 + 3.0
    two = servers(Setup("", partitions=2))
    assert [two.request(0.0, batch) for batch in (0, 1, 2)] == [7.0, 7.0, 9.0], "each partition has its own server"
    assert servers(Setup("", partitions=0)).request(0.0, 0) == 5.0


def test_a_version_takes_what_observations_leave_of_the_server() -> None:
    clock, ready = Clock(), list[tuple[int, float]]()
    at = servers(Setup("", weights=5e6))
    at.version(0.0, 1, clock.after, lambda number: ready.append((number, clock.now)))
    assert at.request(0.0, 0) == 5 + 2 + 2 * 4 * CHUNK_BYTES / BYTES_PER_MS, "it waits for a chunk of each puller"
    clock.run()
    assert ready == [(1, 4 * 5 + 2.0)], "four pulls of 5 ms, and 2 ms for the observation meanwhile"
    assert at.request(clock.now, 0) == 5 + 2.0


def test_readers_that_fall_behind_go_on_with_the_newest_by_all_deltas_or_from_a_base() -> None:
    def run(setup: Setup) -> list[tuple[int, float]]:
        clock, ready = Clock(), list[tuple[int, float]]()
        at = servers(setup, pullers=1)
        for number in (1, 2, 3, 4):
            at.version(0.0, number, clock.after, lambda number: ready.append((number, clock.now)))
        clock.run()
        return ready

    full = Setup("", weights=50e6)
    assert run(full) == [(1, 50.0), (4, 100.0)]
    deltas = Setup("", weights=5e6, full=50e6)
    assert run(deltas) == [(1, 5.0), (4, 5.0 + 15.0)]
    assert run(replace(deltas, bases=3)) == [(1, 5.0), (4, 5.0 + 50.0 + 5.0)], "version 3 is a base"
    assert run(replace(deltas, background=True)) == [(1, 10.0), (4, 10.0 + 30.0)], "the upload takes its time, too"
    assert run(replace(deltas, partitions=5, spread=True)) == [(1, 1.0), (4, 1.0 + 3.0)]


@pytest.fixture(scope="module")
def shape() -> Shape:
    return scale.of_profile("libero-pi05")


def test_a_server_that_is_full_is_the_limit(shape: Shape) -> None:
    free = shape.rate(Setup("", partitions=0), 1.5)
    # Of a segment of three chunk steps: four observations written, four read by the trainer, three by generators.
    most = 1e9 * shape.stages.env_steps / (11 * shape.request_bytes)
    assert shape.rate(Setup(""), 0.5 * free / most) == pytest.approx(free / 2, rel=0.02)
    assert shape.rate(Setup(""), 4 * free / most) == pytest.approx(free, rel=0.01)


def test_sizes_that_are_no_multiple_of_its_parts_are_an_error(shape: Shape) -> None:
    assert shape.on(16).stages.segments == 2 * shape.stages.segments
    with pytest.raises(InputError, match="--gpus 9: libero-pi05 is made of 8 GPUs"):
        shape.on(9)
    with pytest.raises(InputError, match="compute on the generators' devices"):
        scale.of_profile("maniskill")


def test_the_table_says_from_where_on_the_next_row_is_needed() -> None:
    assert scale.ends_at([8, 16, 32], [1.0, 0.95, 0.7]) == "32"
    assert scale.ends_at([8, 16], [1.0, 0.9]) == "–"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_leaves_a_table_json_and_a_plot(tmp_path: Path) -> None:
    result = click.testing.CliRunner().invoke(
        scale.scale, ["--gpus", "8", "--gpus", "16", "--output", str(tmp_path)], catch_exceptions=False
    )
    rows = {row["name"]: row["efficiency"] for row in json.loads((tmp_path / "scale.json").read_text())["rows"]}
    assert rows["no transport"][0] == 1.0 and rows["full weights"][1] < 0.2
    assert "full at 44 GPUs" in result.output and "less than 0.9 from" in result.output
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_errors_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert call(["bench", "scale", "--gpus", "9", "--output", str(tmp_path)]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "--gpus 9" in said, said
