"""The evidence tool: its ways are valid configs that differ in what they claim to, and its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import evidence
import pytest
import yaml

from vla_stream import config as settings
from vla_stream.cli.curve import Curve


def load(way: str, tmp_path: Path, seed: int = 0) -> settings.Config:
    over = tmp_path / "way.yaml"
    over.write_text(yaml.safe_dump(evidence.settings(way, seed, tmp_path)))
    grpo = [evidence.GRPO] if evidence.WAYS[way][0] == "grpo" else []
    return settings.load([evidence.QUICKSTART, *grpo, over])


@pytest.mark.parametrize("way", evidence.WAYS)
def test_each_way_is_a_valid_config_with_as_many_slots_as_its_staleness_asks_for(way: str, tmp_path: Path) -> None:
    config = load(way, tmp_path)
    algorithm, eta, _ = evidence.WAYS[way]
    assert (config.algorithm.name, config.flow.max_staleness, config.seed) == (algorithm, eta, 1000)
    slots = config.simulators.count * config.simulators.env_batches * config.simulators.slots
    assert slots == (1 + eta) * config.trainer.segments_per_update
    assert config.updates % config.trainer.checkpoint_every == 0
    assert config.trainer.keep_checkpoints >= config.updates // config.trainer.checkpoint_every


def test_the_order_of_training_follows_from_the_staleness(tmp_path: Path) -> None:
    for way, (_, eta, _) in evidence.WAYS.items():
        assert load(way, tmp_path).flow.order == ("arrival" if eta else "ticket")


def test_compared_ways_do_the_same_work_per_update(tmp_path: Path) -> None:
    for pair in evidence.COMPARED:
        first, second = (load(way, tmp_path) for way in pair)
        assert first.trainer == second.trainer and first.environment == second.environment
        assert first.simulators.segment == second.simulators.segment
        assert first.simulators.envs_per_slot == second.simulators.envs_per_slot


def test_the_area_is_the_mean_over_environment_steps() -> None:
    assert evidence.area([0, 1, 4], [0.0, 1.0, 1.0]) == pytest.approx((0.5 + 3.0) / 4)


def test_paired_differences_have_students_interval() -> None:
    # Differences .1, .2, .3: mean .2, deviation .1, t of 2 degrees of freedom 4.303.
    mean, half = evidence.paired([0.6, 0.7, 0.8], [0.5, 0.5, 0.5]) or (0, 0)
    assert (mean, half) == (pytest.approx(0.2), pytest.approx(4.303 * 0.1 / 3**0.5))
    assert evidence.paired([0.5], [0.4]) is None


def run_of(final: float, to_80: float | None, curve: list[list[float]]) -> dict[str, Any]:
    others = {"shuffled": 0.3, "minutes": 2.0, "staleness": 1.0}
    return {"area": final / 2, "final": final, "to_80": to_80, "curve": curve, **others}


def test_the_tables_pair_runs_by_seed_and_the_plot_is_drawn(tmp_path: Path) -> None:
    curve = [[0, 0.0, 0.4], [1000, 1.0, 0.9]]
    runs = {
        "ppo, sync": {"0": run_of(0.8, 1.5, curve), "1": run_of(0.8, None, curve), "2": run_of(0.1, 0.1, curve)},
        "ppo, η = 1": {"1": run_of(0.9, 1.0, curve), "0": run_of(0.8, 1.0, curve)},
    }
    text = evidence.summary(runs)
    (row,) = (line for line in text.splitlines() if line.startswith("ppo, η = 1 − ppo, sync"))
    assert row.split()[-10:] == ["2", "+2.5", "±", "31.8", "+5.0", "±", "63.5", "2", "of", "2"]
    evidence.draw(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_figures_come_from_the_checkpoints_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = range(1, evidence.UPDATES + 1)
    path = Curve([{"staleness": 0.5} for _ in updates], [100.0 * u for u in updates], [0.1 * u for u in updates])
    loaded: list[str] = []
    monkeypatch.setattr(evidence, "load_policy", lambda _, place: loaded.append(place.name))
    # Success grows with the update that was loaded, and falls to a tenth when another colour is named.
    monkeypatch.setattr(evidence, "success", lambda *_: int(loaded[-1]) / 20 * (1.0 if _[-1] == 0 else 0.1))
    figures = evidence.figures(path, tmp_path)
    assert loaded == [f"{update:06d}" for update in range(0, 21, 2)]
    assert figures["area"] == pytest.approx(0.5) and figures["final"] == 1.0
    assert figures["shuffled"] == pytest.approx(0.4) and figures["to_80"] == pytest.approx(1.6)
    assert figures["curve"][1] == [200, 0.2, 0.1] and figures["staleness"] == 0.5
