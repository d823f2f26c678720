"""The config of each mode: valid for every profile, with the work and the devices that the model counts on."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from model import CONFIGS, Profile, load_profile
from modes import ASYNC_ROLLOUT, ASYNC_TRAINING, FULL, STREAMING, SYNC, Mode, overlay

from vla_stream import config as settings
from vla_stream.config import Config

PROFILES = ["libero-pi05", "libero-groot", "metaworld", "robocasa", "maniskill"]
MODES = {
    "sync colocated": (SYNC, 8, 8),
    "sync": (SYNC, 4, 4),
    "async training": (ASYNC_TRAINING, 4, 4),
    "async rollout": (ASYNC_ROLLOUT, 4, 4),
    "streaming": (STREAMING, 4, 4),
    "full": (FULL, 5, 3),
}


@pytest.fixture
def configured(tmp_path: Any) -> Any:
    def made(name: str, mode: Mode, rollout: int, training: int) -> Config:
        files = [CONFIGS / "base.yaml", CONFIGS / f"{name}.yaml"]
        over = tmp_path / "over.yaml"
        plain = overlay(settings.load(files), mode, rollout, training, colocated=rollout + training > 8)
        over.write_text(yaml.safe_dump(plain))
        return settings.load([*files, over])

    return made


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("row", MODES)
def test_every_mode_of_every_profile_is_a_valid_config_of_the_same_work(configured: Any, name: str, row: str) -> None:
    mode, rollout, training = MODES[row]
    config = configured(name, mode, rollout, training)
    trainer, simulators = config.trainer, config.simulators
    samples = trainer.segments_per_update * simulators.envs_per_slot * config.segment_steps
    assert samples * config.policy.chunk == pytest.approx(load_profile(name).environment_steps, rel=0.07)
    if mode.streaming:
        assert (trainer.update, trainer.epochs) == ("streaming", 1)
        assert trainer.optimiser_steps == (2 if trainer.segments_per_update % 2 == 0 else 1)
    else:
        assert trainer.update == "buffered" and trainer.minibatch_samples == -(-samples // 2)
    assert trainer.segments_per_update % config.slots_in_all == 0
    assert config.generators.count == len(set(config.policy.options["devices"])) == rollout
    assert len(set(config.policy.options["trainer_devices"])) == training
    devices = {*config.policy.options["devices"], *config.policy.options["trainer_devices"]}
    assert len(devices) == 8
    assert config.flow.max_staleness == int(row not in ("sync", "sync colocated"))


@pytest.mark.parametrize("name", PROFILES)
def test_in_lockstep_there_is_one_simulator_per_device_and_its_request_is_a_whole_batch(
    configured: Any, name: str
) -> None:
    config = configured(name, SYNC, 4, 4)
    simulators = config.simulators
    assert (simulators.count, simulators.env_batches, simulators.slots) == (4, 1, 1)
    assert simulators.envs_per_slot == config.generators.max_batch_size
    assert config.trainer.segments_per_update == 4


@pytest.mark.parametrize("mode", [ASYNC_ROLLOUT, FULL])
def test_simulators_on_cpus_keep_their_slots_without_lockstep(configured: Any, mode: Mode) -> None:
    config = configured("metaworld", mode, 3, 5)
    before = Profile.of(settings.load([CONFIGS / "base.yaml", CONFIGS / "metaworld.yaml"]))
    assert Profile.of(config) == before


def test_simulators_on_devices_are_split_in_two_where_only_that_gives_an_overlap(configured: Any) -> None:
    split, whole = configured("maniskill", ASYNC_ROLLOUT, 4, 4), configured("maniskill", FULL, 4, 4)
    assert (split.simulators.env_batches, whole.simulators.env_batches) == (2, 1)
    assert len(split.environment.options["devices"]) == 8 == 2 * len(whole.environment.options["devices"])
