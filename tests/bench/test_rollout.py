"""The benchmark without a trainer: small real runs of its tests, and the straggler's isolation at full size."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import live
import pytest
import rollout
from report import Spread
from rollout import BATCHING, FREE, STRAGGLERS, Rollout, Row

from vla_stream.cli.signals import Signals

SECONDS = 3.0


@pytest.fixture
def signals() -> Iterator[Signals]:
    with Signals() as taken_over:
        yield taken_over


def row(test: str, name: str = "", **simulators: Any) -> Row:
    """One of the rows, of other simulators and with small images."""
    found = next(row for row in rollout.all_rows() if row.test == test and row.name.startswith(name))
    over = copy.deepcopy(found.overlay)
    over["simulators"] |= simulators
    over["environment"]["options"]["image_size"] = 32
    return replace(found, overlay=over)


def measure(chosen: Row, signals: Signals) -> Rollout:
    before = set(live.cpu_by_process(os.getpid()))
    run = rollout.measure(chosen.overlay, signals, SECONDS)
    assert not {role for pid, (role, _) in live.cpu_by_process(os.getpid()).items() if pid not in before} - {"other"}
    chosen.runs.append(run)
    return run


@pytest.mark.timeout(120)
def test_a_straggler_among_four_batches_is_the_only_slow_one(signals: Signals) -> None:
    chosen = row(STRAGGLERS, "own pace, one straggler", count=1, env_batches=4)
    run = measure(chosen, signals)
    slowest, *others = sorted(run.steps.values())
    assert len(others) == 3 and 4 * slowest < others[0]
    assert run.pace(1) == pytest.approx(sum(others) / 3 / run.seconds)
    assert "own pace, one straggler" in rollout.show(STRAGGLERS, [chosen])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_in_lockstep_all_wait_for_the_straggler(signals: Signals) -> None:
    chosen = row(STRAGGLERS, "lockstep, one straggler", count=1, env_batches=4)
    chosen.overlay["generators"] |= {"max_batch_size": 4, "padded_sizes": []}
    chosen.overlay["environment"]["options"]["straggler_factor"] = 5
    run = measure(chosen, signals)
    assert len(run.steps) == 4 and max(run.steps.values()) - min(run.steps.values()) <= 2 * 2, "one segment or two"
    assert run.rows == run.rows_highest == 4


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_batches_keep_to_their_size_and_what_was_sent_late_is_counted(signals: Signals) -> None:
    chosen = row(BATCHING, "16 slots", env_batches=6)
    run = measure(chosen, signals)
    assert run.rows_highest in (3, 6), "requests of three rows, at most eight"
    assert 3 <= run.rows <= 6 and 0 <= run.in_time <= 1
    assert run.requests_per_s > 0 and run.figures["age at send ms"] > 0
    assert "16 slots" in rollout.show(BATCHING, [chosen])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_without_device_time_each_class_of_processes_has_its_cpu_per_request(signals: Signals) -> None:
    chosen = row(FREE, count=2, env_batches=2)
    chosen.overlay["generators"]["count"] = 1
    run = measure(chosen, signals)
    # Requests by the generators' count, chunk steps by the segments: one request makes one chunk step.
    assert sum(run.steps.values()) / run.seconds == pytest.approx(run.requests_per_s, rel=0.5)
    assert all(run.cpu_us[role] > 0 for role in rollout.CLASSES)
    assert "requests/s" in rollout.show(FREE, [chosen])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_batch_of_sixteen_that_is_twenty_times_slower_stops_the_others_in_lockstep_only(signals: Signals) -> None:
    rows = [row for row in rollout.all_rows() if row.test == STRAGGLERS]
    for each in rows:
        each.runs.append(rollout.measure(each.overlay, signals, 10.0))
    _, own, _, lockstep = (row.share() for row in rows)
    # On an idle machine the benchmark asks for .97.
    assert isinstance(own, Spread) and own.median >= 0.8, rollout.show(STRAGGLERS, rows)
    assert isinstance(lockstep, Spread) and lockstep.median < 0.3, rollout.show(STRAGGLERS, rows)
