"""The solver: it finds what trying everything finds, and names the limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vla_stream.cli import placement
from vla_stream.cli.costs import Costs, Placement
from vla_stream.config import Config, load

CONFIG = """
environment: {name: emulated, max_steps: 30}
policy: {name: emulated, chunk: 10}
simulators: {count: 2, env_batches: 2, slots: 1, envs_per_slot: 3, segment: {steps: 3}}
generators: {count: 2, max_batch_size: 6, padded_sizes: [3], batching: work_conserving}
trainer: {segments_per_update: 16, minibatch_samples: 72, epochs: 1}
"""
NO_CPU = {"simulator": 0.0, "generator": 0.0, "trainer": 0.0, "environment": 0.0}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return load([file])


def costs(**changes: Any) -> Costs:
    rollout: dict[str, Any] = {"chunk": 130.0, "chunk_deviation": 10.0, "reset": 10.0, "resets": 1.0, "steps": 3.0}
    rollout |= {"env_steps": 90.0, "infer_batch": 3.0, "infer_row": 6.0, "way": 4.0, "swap": 1.0}
    trainer: dict[str, Any] = {
        "fit": 72.0,
        "read": 1.0,
        "a_pass": 0.0,
        "apart": True,
        "optimiser_step": 10.0,
        "optimiser_steps": 2,
    }
    trainer |= {"publish": 20.0, "devices": 2, "ranks": 1}
    others: dict[str, Any] = {"cpu_s": NO_CPU, "request_bytes": 1e5, "weights_bytes": 1e6}
    return Costs(**{**rollout, **trainer, **others, **changes})


def test_the_best_placement_is_that_of_trying_all(config: Config) -> None:
    at = costs()
    found = placement.best(at, config, devices=6, cores=100)
    simulators = placement.most_simulators(config)
    assert simulators == 16, "(1 + η) · B permits, two slots each"
    rates = {
        generators: placement.outlook(at, config, Placement(simulators, generators, 6 - generators), 100).steps_per_s
        for generators in range(1, 6)
    }
    assert found[0].placement.generators == max(rates, key=lambda generators: rates[generators])
    assert found[0].steps_per_s >= placement.NEARLY * max(rates.values())
    fewer = replace(found[0].placement, simulators=found[0].placement.simulators - 1)
    assert placement.outlook(at, config, fewer, 100).steps_per_s < placement.NEARLY * max(rates.values())


@pytest.mark.parametrize(
    ("changes", "at", "limit"),
    [
        ({"fit": 1000.0}, Placement(16, 4, 1), "training"),
        ({"infer_row": 40.0}, Placement(16, 1, 4), "generators"),
        ({"chunk": 2000.0}, Placement(2, 3, 3), "simulators"),
        ({"cpu_s": {**NO_CPU, "environment": 0.01}}, Placement(16, 3, 3), "cores"),
    ],
)
def test_the_limit_is_named_and_more_of_it_gives_more_than_more_of_anything_else(
    config: Config, changes: dict[str, Any], at: Placement, limit: str
) -> None:
    cost, cores = costs(**changes), 4
    seen = placement.outlook(cost, config, at, cores)
    assert seen.bottleneck == limit
    assert max(seen.loads.values()) <= 1.01, "no part does more than it can"
    gains = {name: more.steps_per_s for name, more in placement.one_more(cost, config, seen, cores)}
    named = {"training": "device to train", "generators": "generator", "simulators": "simulator", "cores": "core"}
    assert max(gains, key=lambda name: gains[name]) == named[limit]
    assert gains[named[limit]] > 1.1 * seen.steps_per_s


def test_cores_limit_what_they_compute(config: Config) -> None:
    cost = costs(cpu_s={**NO_CPU, "simulator": 0.002, "trainer": 0.002})
    assert placement.outlook(cost, config, Placement(16, 3, 3), 2.0).steps_per_s == pytest.approx(2 / 0.004)


def test_ranks_have_equal_parts_of_an_update(config: Config) -> None:
    ranks = costs(devices=2, ranks=2, fit=200.0)
    assert [n for n in range(1, 9) if placement.may_train(ranks, config, n)] == [1, 2, 4, 8]
    assert all(placement.may_train(costs(), config, n) for n in range(1, 9)), "one process with several devices may"
    found = placement.best(ranks, config, devices=5, cores=100)
    assert {one.placement.trainers for one in found} <= {1, 2, 4}
    seen = placement.outlook(ranks, config, Placement(16, 2, 2), 100)
    named = dict(placement.one_more(ranks, config, seen, 100))
    assert named["device to train, and others, so that 4 do"].placement.trainers == 4
