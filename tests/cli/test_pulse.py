"""What a run does right now, from records with given times."""

from __future__ import annotations

import re

import pytest

from vla_stream.cli.pulse import Pulse, Shares
from vla_stream.cli.samples import Record


def second(time: float, worker: str, **metrics: float) -> Record:
    role = worker.rpartition("-")[0]
    named = {name.replace("busy_", "busy."): value for name, value in metrics.items()}
    return {"time": time, "worker": worker, "role": role, "kind": "second", "seconds": 1.0, **named}


def update(time: float, number: int, **metrics: float) -> Record:
    return {"time": time, "worker": "trainer-0", "role": "trainer", "kind": "update", "update": number, **metrics}


def run(simulator: tuple[float, float, float], generator: tuple[float, float], trainer: tuple[float, float]) -> Pulse:
    """Of ten seconds: (stepping, asked, held), (infer, waiting), (add, waiting)."""
    pulse = Pulse()
    for time in range(10):
        stepping, asked, held = simulator
        pulse.add(
            [
                second(time, "simulator-0", busy_stepping=stepping, busy_asked=asked, busy_held=held),
                second(time, "generator-0", busy_infer=generator[0], busy_waiting=generator[1]),
                second(time, "trainer-0", busy_add=trainer[0], busy_waiting=trainer[1]),
            ]
        )
    return pulse


def test_a_rate_is_of_all_workers_of_the_role_over_the_window() -> None:
    pulse = Pulse()
    for time in range(1, 31):
        old = 5000 if time <= 20 else 50
        pulse.add([second(time, "simulator-0", env_steps=100), second(time, "simulator-1", env_steps=old)])
    pulse.add([second(30, "generator-0", env_steps=7)])
    assert pulse.rate("simulator", "env_steps") == pytest.approx(150)
    pulse.advance(100.0)
    assert pulse.rate("simulator", "env_steps") == 0.0


def test_a_young_run_is_not_averaged_over_time_that_it_has_not_lived() -> None:
    pulse = Pulse()
    pulse.add([second(100, "simulator-0", env_steps=300), second(101, "simulator-0", env_steps=300)])
    assert pulse.rate("simulator", "env_steps") == pytest.approx(300)


def test_shares_are_weighed_by_the_time_that_a_record_covers() -> None:
    pulse = Pulse()
    pulse.add(
        [{**second(1, "generator-0", busy_infer=1.0), "seconds": 3.0}, second(2, "generator-0", busy_waiting=1.0)]
    )
    assert pulse.shares() == {"generator-0": Shares(work=0.75, input=0.25, output=0.0)}


def test_a_worker_that_says_nothing_for_long_is_as_it_was_last() -> None:
    pulse = Pulse()
    pulse.add([{**second(1, "trainer-0", busy_update=0.9), "seconds": 60.0}, second(40, "generator-0", busy_infer=0.2)])
    assert pulse.shares()["trainer-0"] == Shares(work=0.9, input=0.0, output=0.0)
    assert pulse.last("trainer-0")["seconds"] == 60.0
    assert pulse.rate("trainer", "segments") == 0.0


def test_updates_per_second_and_trained_steps_follow_the_last_updates() -> None:
    pulse = Pulse()
    assert pulse.updates_per_s() is None
    pulse.add([update(number * 2.0, number, trained_env_steps=400) for number in range(1, 31)])
    assert pulse.updates_per_s() == pytest.approx(0.5)
    assert pulse.trained_per_s() == pytest.approx(200)


def test_a_histogram_sums_its_buckets_in_the_order_of_their_bounds() -> None:
    pulse = Pulse()
    pulse.add([second(1, "generator-0", **{"age_ms[10]": 1, "age_ms[inf]": 2, "age_ms[2]": 3, "fill[1]": 9})])
    pulse.add([second(2, "generator-1", **{"age_ms[2]": 4})])
    assert pulse.histogram("age_ms") == {"2": 7, "10": 1, "inf": 2}
    assert list(pulse.histogram("age_ms")) == ["2", "10", "inf"]
    pulse.add([update(3, 1, **{"staleness[0]": 5.0}), update(4, 2, **{"staleness[1]": 3.0})])
    assert pulse.histogram("staleness") == {"0": 5, "1": 3}


@pytest.mark.parametrize(
    ("simulator", "generator", "trainer", "words"),
    [
        ((0.2, 0.1, 0.7), (0.3, 0.6), (0.95, 0.02), "the trainer is the limit: at work 95 % of the time"),
        ((0.2, 0.7, 0.1), (0.93, 0.02), (0.5, 0.5), "generators are the limit: .* wait 70 % of it .*: add generators"),
        ((0.9, 0.1, 0.0), (0.3, 0.62), (0.4, 0.6), "generators wait 62 % of the time for requests: add simulators"),
        ((0.3, 0.1, 0.6), (0.3, 0.7), (0.5, 0.5), "simulators are held back 60 % .* raise flow.max_staleness"),
        ((0.3, 0.4, 0.2), (0.4, 0.4), (0.3, 0.5), "no role is the limit .*simulators 30 %, generators 40 %, trainers"),
    ],
)
def test_the_bottleneck_is_said_in_words(
    simulator: tuple[float, float, float], generator: tuple[float, float], trainer: tuple[float, float], words: str
) -> None:
    assert re.match(words, run(simulator, generator, trainer).bottleneck())


def test_thousands_of_names_and_hours_without_an_update_cost_little() -> None:
    pulse = Pulse()
    pulse.add([second(time, "generator-0", busy_infer=0.5) for time in range(5000)])
    assert len(pulse._seconds) == 10
    pulse.add([second(5000, f"simulator-{number}") for number in range(10_050)])
    assert len(pulse.shares()) == 1000 and pulse.bottleneck() == ""


def test_without_a_role_there_is_no_bottleneck_to_name() -> None:
    pulse = Pulse()
    pulse.add([second(1, "simulator-0", busy_stepping=1.0), second(1, "generator-0", busy_infer=1.0)])
    assert pulse.bottleneck() == ""


def test_records_of_strangers_do_no_harm() -> None:
    pulse = Pulse()
    pulse.add([{"time": "soon"}, {"time": 1.0, "role": "simulator"}, {"time": 1.0, "role": "king", "worker": "x"}])
    pulse.add(
        [{"time": 2.0, "role": "generator", "busy.infer": "all", "age_ms[2]": "many", "seconds": -1.0, "worker": "g"}]
    )
    assert pulse.shares()["g"] == Shares(0.0, 0.0, 0.0)
    assert pulse.bottleneck() == "" and pulse.histogram("age_ms") == {"2": 0}


def test_a_simulator_that_left_is_forgotten_and_a_trainer_in_a_long_update_is_not() -> None:
    pulse = Pulse()
    pulse.add([second(0, "trainer-0", busy_update=1.0), second(0, "simulator-7", busy_asked=1.0)])
    for time in range(1, 100):
        pulse.add([second(time, "simulator-0", busy_stepping=0.9), second(time, "generator-0", busy_infer=0.5)])
    assert set(pulse.shares()) == {"simulator-0", "generator-0", "trainer-0"}
    assert pulse.role_shares()["simulator"].work == pytest.approx(0.9)
