"""The model of the pipeline, on cases that can be computed by hand. Times are in ms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from vla_stream.batching import WorkConserving
from vla_stream.model import After, Stages, lognormal, simulate


def stages(**changes: Any) -> Stages:
    """One slot of two rows: two chunk steps of 100 ms, an inference of 6 + 2 · rows ms, a reset of 30 ms."""
    numbers: dict[str, Any] = {"batches": 1, "slots": 1, "rows": 2, "steps": 2.0, "env_steps": 20.0, "resets": 1.0}
    times: dict[str, Any] = {"chunk": lognormal(100, 0), "reset": 30.0, "infer_batch": 6.0, "infer_row": 2.0}
    batch: dict[str, Any] = {"sizes": (), "max_rows": 2, "segments": 1}
    trainer: dict[str, Any] = {"segment": 0.0, "fit": 0.0, "host": 0.0, "optimiser_step": 0.0, "optimiser_steps": 1}
    return Stages(**{**numbers, **times, **batch, **trainer, "streaming": False, **changes})


def period(of: Stages, *, generators: int = 1, trainers: int = 1, max_staleness: int = 1, **others: Any) -> float:
    """Between two updates."""
    rules = [WorkConserving(1, 0.0) for _ in range(generators)]
    found = simulate(of, rules, trainers, max_staleness=max_staleness, updates=24, warm_up=4, **others)
    return 1000 * of.segments * of.env_steps / found.steps_per_s


def test_a_slot_alone_goes_from_stage_to_stage() -> None:
    assert period(stages()) == pytest.approx(30 + 2 * (10 + 100))
    assert period(stages(way=8.0)) == pytest.approx(30 + 2 * (8 + 10 + 100))
    assert period(stages(resets=0.0, steps=3.0)) == pytest.approx(3 * 110)


def test_a_request_is_padded_to_the_size_that_the_device_infers() -> None:
    assert period(stages(sizes=(4,), max_rows=8)) == pytest.approx(30 + 2 * (6 + 2 * 4 + 100))


def test_the_slots_of_a_batch_go_together_after_the_last_reply() -> None:
    two = stages(slots=2, segments=2)
    assert period(two) == pytest.approx(30 + 2 * (10 + 10 + 100)), "one after the other, by one device"
    assert period(two, generators=2) == pytest.approx(30 + 2 * (10 + 100))
    # A free device takes what is there, and the first request of each chunk step finds it free.
    together = stages(slots=2, segments=2, sizes=(2,), max_rows=4, resets=0.0, steps=1.0)
    assert period(together) == pytest.approx(10 + 10 + 100)


def test_batches_never_wait_for_each_other() -> None:
    both = stages(batches=2, segments=2, resets=0.0)
    assert period(both, generators=2) == pytest.approx(2 * 110)


def test_without_staleness_training_and_rollout_take_turns_and_with_it_they_overlap() -> None:
    trained = stages(fit=50.0, optimiser_step=5.0, optimiser_steps=2, publish=20.0)
    assert period(trained, max_staleness=0) == pytest.approx(250 + 50 + 10 + 20)
    assert period(trained) == pytest.approx(250)
    slow = stages(fit=500.0, optimiser_step=5.0, optimiser_steps=2, publish=20.0)
    assert period(slow) == pytest.approx(500 + 10 + 20)
    assert period(slow, trainers=2) == pytest.approx(250 + 10 + 20), "an optimiser step is as long on two devices"


def test_in_streaming_a_segment_is_trained_when_it_arrives_and_the_next_while_one_is_published() -> None:
    many = stages(batches=4, segments=4, segment=100.0, streaming=True, optimiser_step=10.0, publish=30.0)
    assert period(many, generators=4) == pytest.approx(4 * 100 + 10), "publishing is hidden by the next segment"
    assert period(many, generators=4) == pytest.approx(many.train(1))
    late = stages(batches=4, segments=4, segment=100.0, streaming=True, publish=130.0)
    assert period(late, generators=4) == pytest.approx(3 * 100 + 130)
    assert period(late, generators=4) == pytest.approx(late.train(1))


def test_a_trainers_process_that_reads_slower_than_its_devices_train_is_the_limit() -> None:
    busy = stages(batches=4, segments=4, segment=100.0, host=90.0, streaming=True)
    assert period(busy, generators=4, trainers=1) == pytest.approx(400)
    assert period(busy, generators=4, trainers=4) == pytest.approx(360)


def test_new_weights_cost_each_generator_once() -> None:
    assert period(stages(resets=0.0, swap=7.0)) == pytest.approx(220 + 7)


@dataclass
class Slow:
    """Weights arrive after a while."""

    delay: float

    def request(self, now: float, batch: int) -> float:
        return 0.0

    def reply(self, now: float, batch: int) -> float:
        return 0.0

    def segment(self, now: float, batch: int) -> float:
        return 0.0

    def version(self, now: float, number: int, after: After, ready: Callable[[int], None]) -> None:
        after(self.delay, lambda: ready(number))


def test_inference_waits_for_weights_only_where_a_request_demands_them() -> None:
    alone = stages(resets=0.0, fit=50.0)
    assert period(alone, max_staleness=0, transport=Slow(40.0)) == pytest.approx(220 + 50 + 40)
    assert period(alone, max_staleness=1, transport=Slow(40.0)) == pytest.approx(220), "the older ones are new enough"


def test_shares_say_who_worked() -> None:
    of = stages(resets=0.0, fit=44.0)
    found = simulate(of, [WorkConserving(1, 0.0)], 1, max_staleness=1, updates=24, warm_up=4)
    assert (found.simulator, found.generator) == (pytest.approx(200 / 220), pytest.approx(20 / 220))
    assert found.trainer == pytest.approx(44 / 220, rel=0.1)


def test_drawn_times_have_their_mean_and_spread() -> None:
    draw, random = lognormal(100.0, 30.0), np.random.default_rng(0)
    drawn = np.array([draw(random) for _ in range(20_000)])
    assert drawn.min() > 0
    assert (drawn.mean(), drawn.std()) == (pytest.approx(100, rel=0.01), pytest.approx(30, rel=0.03))
    assert lognormal(100.0, 0.0)(random) == 100.0
