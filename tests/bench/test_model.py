"""The discrete-event model of the pipeline: the figures that the profiles were made for, and limits that must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import model
import pytest

from vla_stream.batching import Auto, Deadline, Strategy

# Environment steps per second that another implementation of the same model gave for these profiles.
ROWS = ("sync colocated", "sync", "+ async training", "+ async rollout", "+ streaming", "full", "full, η = 0", "bound")
EXPECTED: dict[str, tuple[float | None, ...]] = {
    "libero-pi05": (2866, 1876, 3022, 4945, None, 4945, 4108, 4945),
    "libero-groot": (2739, 1779, 2330, 3723, None, 4707, 3975, 4783),
    "metaworld": (1472, 940, 1373, 2944, None, 2997, 2291, 2997),
    "robocasa": (1419, 1003, 1456, None, None, 2926, 2041, 3010),
    "maniskill": (3301, 2279, 3890, 2418, None, 4143, None, None),
}


@cache
def predictions(name: str) -> list[model.Prediction]:
    return model.predict(model.load_profile(name))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_profile_gives_the_figures_it_was_made_for(name: str) -> None:
    rows = {row.name: row.steps_per_s for row in predictions(name)}
    assert tuple(rows) == ROWS
    for row, expected in zip(ROWS, EXPECTED[name], strict=True):
        if expected is not None:
            assert rows[row] == pytest.approx(expected, rel=0.015), row


def test_the_best_placements_are_those_of_the_profiles() -> None:
    placements = {}
    for name in EXPECTED:
        (full,) = [row for row in predictions(name) if row.name == "full"]
        placements[name] = (full.rollout, full.training)
    assert placements == {
        "libero-pi05": (4, 4),
        "libero-groot": (5, 3),
        "metaworld": (3, 5),
        "robocasa": (4, 4),
        "maniskill": (5, 3),
    }


def test_a_trainer_twice_as_fast_makes_the_rollout_the_limit() -> None:
    profile = model.load_profile("libero-pi05")
    faster = replace(profile, sample=profile.sample / 2)
    assert model.throughput(faster, model.FULL, 4, 4) == pytest.approx(5833, rel=0.01)


@pytest.mark.parametrize("name", EXPECTED)
def test_nothing_beats_its_bound(name: str) -> None:
    profile = model.load_profile(name)
    for rollout in (3, 4, 5):
        split = profile.split(rollout) if profile.on_device else profile
        rate = model.throughput(split, model.FULL, rollout, 8 - rollout, updates=20)
        assert rate <= 1.005 * model.bound(profile, rollout, 8 - rollout)


def test_without_waiting_the_rate_is_that_of_one_slot() -> None:
    """Two chunk steps of 100 ms, inferences of 10 ms and a reset of 30 ms in turn, a trainer that costs nothing."""
    numbers: dict[str, Any] = {"slots": 1, "rows": 2, "steps": 2, "chunk": 5, "episodes": 1, "slots_per_batch": 1}
    times: dict[str, Any] = {"step": 20.0, "sigma": 0.0, "step_row": 0.0, "reset": 30.0, "batch": 6.0, "batch_row": 2.0}
    free: dict[str, Any] = {"sample": 0.0, "optimiser_step": 0.0, "load": 0.0, "on_device": False}
    profile = model.Profile(**numbers, **times, **free)
    expected = 20 / (30 + 2 * (100 + 10)) * 1000
    assert model.throughput(profile, model.FULL, 1, 1) == pytest.approx(expected)
    assert model.bound(profile, 1, 1) == pytest.approx(expected)
    assert model.throughput(profile, model.SYNC, 1, 1) == pytest.approx(expected)


def test_trainer_time_adds_up_in_lockstep_and_hides_behind_the_rollout_with_async_training() -> None:
    numbers: dict[str, Any] = {"slots": 1, "rows": 2, "steps": 2, "chunk": 5, "episodes": 1, "slots_per_batch": 1}
    times: dict[str, Any] = {"step": 20.0, "sigma": 0.0, "step_row": 0.0, "reset": 30.0, "batch": 6.0, "batch_row": 2.0}
    costs: dict[str, Any] = {"sample": 25.0, "optimiser_step": 5.0, "load": 40.0, "on_device": False}
    profile = model.Profile(**numbers, **times, **costs)  # rollout 250 ms, training 110 ms
    assert model.throughput(profile, model.SYNC, 1, 1) == pytest.approx(20 / (250 + 110 + 40) * 1000)
    assert model.throughput(profile, model.ASYNC_TRAINING, 1, 1) == pytest.approx(20 / (250 + 40) * 1000)


@pytest.mark.parametrize(("name", "rollout"), [("libero-pi05", 4), ("libero-pi05", 2), ("metaworld", 3)])
def test_auto_batching_is_near_the_best_fixed_size_and_wait_although_these_differ(name: str, rollout: int) -> None:
    profile = replace(model.load_profile(name), sample=0.0)  # the rollout is the limit

    def rate(size: int, batching: Callable[[], Strategy]) -> float:
        sized = replace(profile, slots_per_batch=size)
        return model.throughput(sized, model.FULL, rollout, 1, updates=16, batching=batching)

    fixed = {(size, wait): rate(size, lambda: Deadline(1, wait)) for size in (1, 2, 4, 8) for wait in (0, 5)}  # noqa: B023
    assert min(fixed.values()) < 0.92 * max(fixed.values()), "there is something to tune"
    assert rate(1000, lambda: Auto(1, 0)) >= 0.95 * max(fixed.values())
