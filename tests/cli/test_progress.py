"""Figures of a live run, from records with given times."""

from __future__ import annotations

import pytest

from vla_stream.cli.progress import Progress, duration
from vla_stream.cli.samples import Record


def simulator(time: float, env_steps: float, worker: str = "simulator-0") -> Record:
    return {
        "time": time,
        "worker": worker,
        "role": "simulator",
        "kind": "second",
        "env_steps": env_steps,
        "seconds": 1.0,
    }


def update(time: float, number: int, **metrics: float) -> Record:
    return {"time": time, "role": "trainer", "kind": "update", "update": float(number), **metrics}


def test_sampled_steps_are_summed_over_simulators_and_averaged_over_the_last_ten_seconds() -> None:
    progress = Progress(10)
    for second in range(1, 31):
        progress.add([simulator(second, 100), simulator(second, 50 if second > 10 else 5000, "simulator-1")])
    assert progress.sampled_per_s == pytest.approx(150)
    assert progress.env_steps == 30 * 100 + 10 * 5000 + 20 * 50


def test_a_young_run_is_not_averaged_over_time_that_it_has_not_lived() -> None:
    progress = Progress(10)
    progress.add([simulator(100, 300), simulator(101, 300)])
    assert progress.sampled_per_s == pytest.approx(300)


def test_trained_steps_and_time_to_go_follow_the_last_updates() -> None:
    progress = Progress(20)
    progress.add([update(number * 2.0, number, trained_env_steps=400) for number in range(1, 11)])
    assert progress.trained_per_s == pytest.approx(200)
    assert progress.eta_s == pytest.approx(20)
    progress.add([simulator(21.0, 1)])
    assert progress.eta_s == pytest.approx(19)


def test_batch_fill_weighs_samples_by_their_batches() -> None:
    progress = Progress(1)
    for batches, fill in ((30.0, 1.0), (10.0, 0.5)):
        progress.add([{"time": 5.0, "role": "generator", "kind": "second", "batches": batches, "fill": fill}])
    assert progress.batch_fill == pytest.approx(0.875)


def test_the_line_shows_what_is_known_and_nothing_else() -> None:
    progress = Progress(60)
    progress.workers = {"simulator": 2, "generator": 1, "trainer": 0}
    assert progress.line() == "update 0/60 · trainer starts (1 generator, 2 simulators)"
    progress.add([update(1.0, 1, success=0.25), update(2.0, 2, success=0.5, staleness=0.75, staleness_max=2)])
    progress.queue_depth = 3
    assert progress.line() == (
        "update 2/60 · success 50 % (first 25 %) · trained 0 · staleness 0.75 (max 2) · queue 3 · ETA 58s"
    )


def test_each_task_has_its_success_where_there_are_several() -> None:
    progress = Progress(60)
    progress.add([update(1.0, 1, success=0.25, **{"success.near": 0.4, "success.far": 0.1, "segments.far": 2})])
    assert progress.line().startswith("update 1/60 · success 25 % (first 25 %) · near 40 % · far 10 %")
    progress.add([update(2.0, 2, success=0.25, **{f"success.t{i}": i / 10 for i in (3, 9, 1, 8, 2, 0)})])
    assert progress.line().startswith("update 2/60 · success 25 % (first 25 %) · t3 30 % · t1 10 % · t2 20 % · t0 0 %")


def test_records_that_lack_numbers_or_hold_nonsense_do_no_harm() -> None:
    progress = Progress(5)
    progress.add([{"kind": "update"}, {"time": "soon"}, {"time": 1.0, "kind": "update", "success": float("nan")}])
    progress.add([{"time": 2.0, "role": "generator", "kind": "second", "fill": "full"}])
    assert progress.line() == "update 0/5"
    assert progress.batch_fill is None


def test_after_a_rollback_the_update_goes_back() -> None:
    progress = Progress(50)
    progress.add([update(1.0, 30), update(2.0, 21)])
    assert progress.update == 21


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0.4, "0s"), (59.6, "1m00s"), (185, "3m05s"), (7800, "2h10m")]
)
def test_durations_read_well(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
