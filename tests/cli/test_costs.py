"""Stage costs from what workers counted: known costs come out again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from measured_run import CONFIG, run, update

from vla_stream.cli import costs
from vla_stream.cli.costs import Costs, Placement
from vla_stream.config import Config, load
from vla_stream.errors import InputError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return load([file])


def test_known_costs_come_out_again(config: Config) -> None:
    found = costs.measured(run(), config)
    expected = {
        **{"chunk": 120.0, "chunk_deviation": 20.0, "reset": 10.0, "resets": 1.0, "steps": 3.0, "env_steps": 90.0},
        **{"infer_batch": 3.0, "infer_row": 6.0, "swap": 2.0},
        # 1 to send, 3 between request and reply beside the generator's, half of a rounded ms, .5 to read and collate.
        "way": 1.0 + (40.0 - 37.0) + 0.5 + 0.5,
        **{"fit": 90.0 * 4, "read": 3.0, "a_pass": 2.0, "optimiser_step": 10.0, "publish": 30.0},
        **{"request_bytes": 500.0, "weights_bytes": 0.5e6},
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value), name
    assert (found.devices, found.ranks, found.optimiser_steps, found.apart) == (4, 1, 2, True)
    per_step = {"simulator": 0.12 / 600, "generator": 0.18 / 600, "trainer": 0.12 / 600, "environment": 0.06 / 600}
    assert found.cpu_s == pytest.approx(per_step)


def test_what_all_batches_of_one_size_do_not_tell_the_warm_up_does(config: Config) -> None:
    records = run()
    for record in records:
        if record.get("role") == "generator":
            several = float(record["time"]) < 97
            record["served"] = 0.0 if several else 10.0
            record |= {"inferences": 4.0, "inferred_rows": 18.0 if several else 24.0}
            record |= {"inferred_rows2": 90.0 if several else 144.0, "inferred_ms": 120.0 if several else 156.0}
            record["inferred_rows_ms"] = (2 * 3 * 21 + 2 * 6 * 39) if several else 4 * 6 * 39.0
    found = costs.measured(records, config)
    assert (found.infer_batch, found.infer_row) == (pytest.approx(3.0), pytest.approx(6.0))


def test_in_streaming_no_device_is_busier_than_all_of_the_time(config: Config) -> None:
    trainer = config.trainer.model_copy(update={"update": "streaming", "optimiser_steps": 2})
    streaming = config.model_copy(update={"trainer": trainer})
    records = [record for record in run() if record["kind"] != "update"]
    timed = {"fit_s": 0.16, "fit_samples": 9.0}  # of one segment
    updates = [update(number, **timed) for number in range(1, 6)]
    assert costs.measured([*records, *updates], streaming).fit == pytest.approx(160.0 * 4), "1.28 of 2 s"
    slower = [update(number, **{**timed, "fit_s": 0.3}) for number in range(1, 6)]
    assert costs.measured([*records, *slower], streaming).fit == pytest.approx((2000 - 2 * 10) / 8 * 4)


def test_stages_follow_the_placement_and_the_way_of_updating(config: Config) -> None:
    found = costs.measured(run(), config)
    at = found.stages(config, Placement(simulators=5, generators=2, trainers=3))
    assert (at.batches, at.slots, at.rows, at.segments, at.max_rows, at.sizes) == (20, 1, 3, 8, 6, (3,))
    assert (at.segment, at.fit, at.host) == (0.0, pytest.approx(360.0), pytest.approx(5.0))
    trainer = config.trainer.model_copy(update={"update": "streaming", "optimiser_steps": 4})
    streaming = config.model_copy(update={"trainer": trainer})
    at = found.stages(streaming, Placement(5, 2, 3))
    assert (at.segment, at.fit, at.optimiser_steps) == (pytest.approx(360.0), 0.0, 4)
    # On a CPU a process computes itself, one rank per device; rank 0 reads for all.
    alone = replace(found, apart=False, devices=1)
    assert alone.stages(streaming, Placement(5, 2, 3)).host == pytest.approx(3 + (2 + 360) / 3)


def test_too_little_of_a_run_is_an_error_that_says_what_is_missing(config: Config) -> None:
    short = [record for record in run() if float(record["time"]) < 105]
    with pytest.raises(InputError, match="2 updates, expected at least 4"):
        costs.measured(short, config)
    silent = [record for record in run() if record.get("role") != "generator"]
    with pytest.raises(InputError, match="no inferences between update 2 and the last"):
        costs.measured(silent, config)
    old = [{name: value for name, value in record.items() if name != "step_s"} for record in run()]
    with pytest.raises(InputError, match="updates tell no `step_s`"):
        costs.measured(old, config)


def test_costs_are_plain_data(config: Config) -> None:
    plain = costs.measured(run(), config).plain()
    assert Costs(**plain).plain() == plain
