"""The configs in configs/: all of them are valid, and what no other test runs is run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from simulator_interpreters import interpreter

from vla_stream.cli.check import check
from vla_stream.config import load
from vla_stream.plugins import ENVIRONMENTS, load_class, parse_options
from vla_stream.plugins import POLICIES as PLUGIN_POLICIES

CONFIGS = Path(__file__).parents[2] / "configs"


def checked(*paths: Path, overrides: tuple[str, ...] = ()) -> str:
    """What `vla-stream check` says about a valid config, without asking an interpreter that may not be there."""
    if load(paths, overrides).simulators.python is not None:
        overrides = (*overrides, "simulators.count=0")
    arguments = [*map(str, paths), *(part for override in overrides for part in ("--set", override))]
    done = CliRunner().invoke(check, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


# These go on top of an environment's.
POLICIES = [CONFIGS / f"{name}.yaml" for name in ("pi0", "openvla", "openvla-oft", "vlm")]
POLICIES_APART = [CONFIGS / f"{name}.yaml" for name in ("smolvla", "pi05")]  # in an environment that they name
GRPO = CONFIGS / "grpo.yaml"  # on top of the quick start, whose critic it does without


APART = ("libero", "metaworld")  # their simulators are in environments of their own, which they name
NEED_MORE = (*APART, "maniskill")  # than the base's packages, which `check` looks for
ALONE = sorted({*CONFIGS.glob("*.yaml")} - {*POLICIES, *POLICIES_APART, GRPO})


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[getattr(pytest.mark, path.stem)] if path.stem in NEED_MORE else [])
        for path in ALONE
    ],
)
def test_every_config_is_valid_alone_and_under_every_policy(path: Path) -> None:
    assert checked(path).endswith("the config is valid\n")
    for policy in POLICIES:
        said = checked(path, policy)
        assert f"name: {policy.stem.replace('-', '_')}\n" in said and said.endswith("the config is valid\n")


@pytest.mark.parametrize("name", APART)
def test_options_of_simulators_with_an_interpreter_of_their_own_are_known_here_too(name: str) -> None:
    environment = load([CONFIGS / f"{name}.yaml"]).environment
    parse_options(load_class(ENVIRONMENTS, environment.name), environment.options, "environment.options")


@pytest.mark.parametrize("path", POLICIES_APART, ids=lambda path: path.stem)
def test_options_of_policies_with_an_interpreter_of_their_own_are_known_here_too(path: Path) -> None:
    for below in ALONE:
        policy = load([below, path]).policy
        assert policy.name == path.stem and str(policy.python) == ".venvs/lerobot/bin/python"
        parse_options(load_class(PLUGIN_POLICIES, policy.name), policy.options, "policy.options")


@pytest.mark.lerobot
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smolvla_in_its_own_interpreter_learns_from_simulators_of_this_one_until_version_3_acts(tmp_path: Path) -> None:
    smaller = (
        "simulators.count=1",
        "simulators.slots=2",
        "simulators.envs_per_slot=2",
        "simulators.segment={steps: 2}",
    )
    smaller += ("generators.max_batch_size=4", "generators.padded_sizes=[]", "trainer.segments_per_update=2")
    exactly = ("flow.max_staleness=0", "trainer.critic_warmup_updates=0", "policy.options.precision=float32")
    python = f"policy.python={interpreter('lerobot')}"
    paths = [CONFIGS / "quickstart.yaml", CONFIGS / "smolvla.yaml"]
    records = run(tmp_path, *paths, updates=3, overrides=(*smaller, *exactly, python, "evaluation.episodes=2"))
    updates = [record for record in records if record["kind"] == "update"]
    assert [record["version"] for record in updates] == [2, 3, 4]
    assert all(record["gradient_norm"] > 0 and not record["skipped"] for record in updates)
    # So the segments of the last update were made by version 3, and by nothing older.
    assert all(record["staleness_max"] == 0 and record["act_evaluate_difference"] < 1e-3 for record in updates)
    assert [record["episodes"] for record in records if record["kind"] == "evaluation"] == [2, 2]
    (books,) = [record for record in records if record["kind"] == "books"]
    assert books["balance"] == 0 and books["trained"] == 6


@pytest.mark.libero
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_libero_in_its_own_interpreter_trains_a_tiny_pi0_of_this_one_until_version_3_acts(tmp_path: Path) -> None:
    smaller = ("environment.max_steps=20", "policy.chunk=5", "simulators.segment={steps: 2}", "generators.threads=1")
    smaller += ("simulators.envs_per_slot=1", "trainer.segments_per_update=2", "trainer.critic_warmup_updates=0")
    exactly = ("flow.max_staleness=0", "evaluation.episodes=0", "policy.options.precision=float32")
    python = f"simulators.python={interpreter('libero')}"
    paths = [CONFIGS / "libero.yaml", CONFIGS / "pi0.yaml"]
    records = run(tmp_path, *paths, updates=3, overrides=(*smaller, *exactly, python))
    updates = [record for record in records if record["kind"] == "update"]
    assert [record["version"] for record in updates] == [2, 3, 4]
    assert all(record["gradient_norm"] > 0 and not record["skipped"] for record in updates)
    # So the segments of the last update were made by version 3, and by nothing older.
    assert all(record["staleness_max"] == 0 and record["act_evaluate_difference"] < 1e-3 for record in updates)
    (books,) = [record for record in records if record["kind"] == "books"]
    assert books["balance"] == 0 and books["trained"] == 6


@pytest.mark.metaworld
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_metaworld_in_its_own_interpreter_is_demonstrated_trained_and_evaluated(tmp_path: Path) -> None:
    smaller = ("simulators.envs_per_slot=1", "trainer.segments_per_update=2", "trainer.critic_warmup_updates=0")
    smaller += ("pretrain.episodes=1", "pretrain.steps=20", "evaluation.episodes=1", "environment.max_steps=50")
    smaller += ("environment.options={tasks: [coffee-button-v3], camera_size: 32}",)
    python = f"simulators.python={interpreter('metaworld')}"
    records = run(tmp_path, CONFIGS / "metaworld.yaml", updates=2, overrides=(*smaller, python))
    assert [record["update"] for record in records if record["kind"] == "update"] == [1, 2]
    assert [record["episodes"] for record in records if record["kind"] == "evaluation"] == [1, 1]
    (books,) = [record for record in records if record["kind"] == "books"]
    assert books["balance"] == 0 and books["trained"] == 4


@pytest.mark.parametrize(
    "between", [[], *([policy] for policy in POLICIES)], ids=["alone", *(policy.stem for policy in POLICIES)]
)
def test_another_algorithm_goes_on_top_of_the_quick_start_with_any_policy(between: list[Path]) -> None:
    assert checked(CONFIGS / "quickstart.yaml", *between, GRPO).endswith("the config is valid\n")


def test_grpo_takes_the_settings_of_a_critic_away_from_the_trainer_of_other_configs_too(tmp_path: Path) -> None:
    other = tmp_path / "critic.yaml"
    other.write_text("trainer: {critic_warmup_updates: 5, value_learning_rate: 1.0e-4}\n")
    assert checked(CONFIGS / "quickstart.yaml", other, GRPO).endswith("the config is valid\n")


@pytest.mark.parametrize("name", ["libero-pi05", "libero-groot", "metaworld", "robocasa", "maniskill"])
def test_every_profile_is_valid_on_top_of_their_base(name: str) -> None:
    said = checked(CONFIGS / "profiles" / "base.yaml", CONFIGS / "profiles" / f"{name}.yaml")
    # Two optimiser steps per update, of whole segments, and one generator per rollout device.
    config = load([CONFIGS / "profiles" / "base.yaml", CONFIGS / "profiles" / f"{name}.yaml"])
    samples = config.trainer.segments_per_update * config.simulators.envs_per_slot * config.segment_steps
    assert samples == 2 * config.trainer.minibatch_samples
    assert config.segment_steps == config.chunk_steps_per_episode
    assert len(config.policy.options.get("devices", "0123")) == config.generators.count
    assert "of emulated" in said


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_gymnasium_environment_runs_through_all_roles(tmp_path: Path) -> None:
    records = run(tmp_path, CONFIGS / "gymnasium.yaml", updates=2, overrides=("evaluation.episodes=2",))
    assert [record["update"] for record in records if record["kind"] == "update"] == [1, 2]
    (books,) = [record for record in records if record["kind"] == "books"]
    assert books["balance"] == 0 and books["trained"] == 16


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_profile_runs_for_real_and_takes_the_time_of_its_devices(tmp_path: Path) -> None:
    smaller = ("simulators.count=2", "simulators.env_batches=2", "generators.count=2", "trainer.minibatch_samples=72")
    settings = (*smaller, "trainer.segments_per_update=16", f"policy.options.folder={tmp_path}/devices")
    paths = [CONFIGS / "profiles" / f"{name}.yaml" for name in ("base", "libero-pi05")]
    records = run(tmp_path, *paths, updates=3, overrides=settings)
    updates = [record for record in records if record["kind"] == "update"]
    assert [record["samples"] for record in updates] == [144] * 3
    # 144 samples of 7.97 ms on four devices, and two optimiser steps of 17.7 ms.
    assert all(0.322 <= record["update_s"] < 3 for record in updates)
    (books,) = [record for record in records if record["kind"] == "books"]
    assert books["balance"] == 0 and books["trained"] == 48


def run(folder: Path, *paths: Path, updates: int, overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    """What a run of all roles wrote into metrics.jsonl."""
    command = [sys.executable, "-m", "vla_stream.cli.main", "run", *map(str, paths), "--run", "all"]
    command += ["--updates", str(updates), *(part for override in overrides for part in ("--set", override))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "runs" / "all" / "metrics.jsonl").read_text().splitlines()]
