"""The meter: what it counted since the last sample, and that nothing is counted twice or lost between threads."""

from __future__ import annotations

import threading

import pytest

from vla_stream import metrics
from vla_stream.metrics import SHORTEST_SPAN_S, SPANS_KEPT, Meter, Span


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(metrics, "time", made)
    return made


def test_counters_start_anew_with_every_sample(clock: Clock) -> None:
    meter = Meter()
    meter.count("requests")
    meter.count("rows", 8)
    meter.count("rows", 4)
    clock.now_s += 2.0
    assert meter.sample() == {"seconds": 2.0, "requests": 1, "rows": 12}
    clock.now_s += 1.0
    assert meter.sample() == {"seconds": 1.0}


def test_means_are_over_the_observations_since_the_last_sample(clock: Clock) -> None:
    meter = Meter()
    for value in (1.0, 2.0, 6.0):
        meter.mean("fill", value)
    assert meter.sample()["fill"] == 3.0
    meter.mean("fill", 10.0)
    assert meter.sample()["fill"] == 10.0
    assert "fill" not in meter.sample()


def test_the_highest_observation_is_that_since_the_last_sample(clock: Clock) -> None:
    meter = Meter()
    for value in (-2.0, -1.0, -3.0):
        meter.highest("rows_highest", value)
    assert meter.sample()["rows_highest"] == -1.0
    meter.highest("rows_highest", -5.0)
    assert meter.sample()["rows_highest"] == -5.0
    assert "rows_highest" not in meter.sample()


def test_a_gauge_stays_until_it_is_set_again(clock: Clock) -> None:
    meter = Meter()
    meter.gauge("version", 3)
    assert meter.sample()["version"] == meter.sample()["version"] == 3
    meter.gauge("version", 4)
    assert meter.sample()["version"] == 4


def test_busy_is_the_share_of_the_wall_time_spent_in_a_stage(clock: Clock) -> None:
    meter = Meter()
    for spent_s, idle_s in ((0.5, 0.5), (1.0, 2.0)):
        with meter.busy("infer"):
            clock.now_s += spent_s
        clock.now_s += idle_s
    assert meter.sample() == {"seconds": 4.0, "busy.infer": 0.375}


def test_a_stage_that_raises_was_busy_too(clock: Clock) -> None:
    meter = Meter()
    with pytest.raises(RuntimeError), meter.busy("infer"):
        clock.now_s += 1.0
        raise RuntimeError
    assert meter.sample()["busy.infer"] == 1.0


def test_a_stage_that_began_before_the_last_sample_is_never_busier_than_the_clock(clock: Clock) -> None:
    meter = Meter()
    with meter.busy("infer"):
        clock.now_s += 5.0
        meter.sample()
        clock.now_s += 1.0
    assert meter.sample()["busy.infer"] == 1.0


def test_busy_time_is_kept_as_spans_of_its_thread_until_they_are_asked_for(clock: Clock) -> None:
    meter = Meter()
    with meter.busy("infer"):
        clock.now_s += 1.0
    thread = threading.Thread(target=lambda: meter.note(Span("batch 0", "step", 5.0, 6.0, {"stepping": 1.0})))
    thread.start()
    thread.join()
    with meter.busy("moment"):
        clock.now_s += SHORTEST_SPAN_S / 2
    spans = [Span("MainThread", "infer", 1000.0, 1001.0), Span("batch 0", "step", 5.0, 6.0, {"stepping": 1.0})]
    assert meter.spans() == (spans, 0)
    assert meter.spans() == ([], 0)


def test_of_too_many_spans_the_newest_are_kept_and_the_others_counted(clock: Clock) -> None:
    meter = Meter()
    for number in range(SPANS_KEPT + 7):
        meter.note(Span("main", "infer", float(number), number + 0.5))
    spans, dropped = meter.spans()
    assert (len(spans), dropped, spans[0].start_s) == (SPANS_KEPT, 7, 7.0)


def test_two_samples_at_one_instant_do_not_divide_by_zero(clock: Clock) -> None:
    meter = Meter()
    with meter.busy("infer"):
        pass
    assert meter.sample()["busy.infer"] == 0.0


def test_counts_of_several_threads_add_up_over_all_samples() -> None:
    meter = Meter()
    each = 20_000

    def work() -> None:
        for _ in range(each):
            meter.count("rows")
            meter.mean("fill", 1.0)

    threads = [threading.Thread(target=work) for _ in range(3)]
    samples = []
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        samples.append(meter.sample())
    samples.append(meter.sample())
    assert sum(sample.get("rows", 0.0) for sample in samples) == 3 * each
    assert {sample.get("fill", 1.0) for sample in samples} == {1.0}
