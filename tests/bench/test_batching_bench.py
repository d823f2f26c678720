"""The batching benchmark: its sweep by the model, and its rows as configs of real runs."""

from __future__ import annotations

import json
from pathlib import Path

import batching
import click.testing
import pytest
from model import CONFIGS

from vla_stream import config as settings


@pytest.mark.parametrize(("profile", "rows"), [("libero-pi05", 19), ("maniskill", 4)])
def test_each_row_is_a_valid_config_of_its_size_and_wait(profile: str, rows: int, tmp_path: Path) -> None:
    plan = batching.sweep(batching.profile_file(profile), 4, ("policy.options.sample_ms=0",))
    assert len(plan.rows) == rows
    for row in plan.rows:
        over = tmp_path / "over.yaml"
        over.write_text(json.dumps(row.overlay))
        config = settings.load([CONFIGS / "base.yaml", CONFIGS / f"{profile}.yaml", over])
        generators, slot = config.generators, config.simulators.envs_per_slot
        assert generators.padded_sizes == list(range(slot, generators.max_batch_size, slot))
        if row.name == batching.AUTO:
            assert generators.batching == "auto"
        else:
            requests = generators.max_batch_size // slot
            assert (generators.batching, row.name) == (
                "deadline",
                f"{requests} × {slot} rows, {generators.max_wait_ms:g} ms",
            )


def test_the_model_alone_prints_a_table_in_which_the_best_fixed_row_is_one(tmp_path: Path) -> None:
    arguments = ["--profile", "metaworld", "--rollout", "3", "--free-trainer", "--rows", "auto"]
    arguments += ["--rows", "4 × 4 rows, 0 ms", "--rows", "1 × 4 rows, 0 ms", "--output", str(tmp_path)]
    result = click.testing.CliRunner().invoke(batching.batching, arguments, catch_exceptions=False)
    ratios = {line.split("  ")[0]: float(line.split()[-3]) for line in result.output.splitlines() if "3:5" in line}
    assert ratios["4 × 4 rows, 0 ms"] == 1.0 > ratios["1 × 4 rows, 0 ms"]
    assert ratios["auto"] > 0.95
