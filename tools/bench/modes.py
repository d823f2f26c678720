"""The rows of the ablation: what each mode switches on, and the config that makes a profile run in it.

A mode is nothing but config; all of them go through the same code:

    lockstep        one simulator with one slot of all its environments beside each rollout device: they step together,
                    one inference serves all of them, and a rollout is one segment per device
    no overlap      max_staleness 0: the segments of an update are outstanding until its commit, so nobody gets a permit
                    for the next rollout before the training is over
    no background   generators load weights between two inferences, for as long as the profile says
    streaming       the trainer's own switch: each segment is trained when it arrives
    colocated       the trainer's devices are the generators'
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vla_stream.config import Config


@dataclass(frozen=True, slots=True)
class Mode:
    """What is switched on. lockstep: of the rollout; overlap: training goes on beside the next rollout; streaming:
    segments are trained as they arrive; background: loading weights costs a generator no time."""

    lockstep: bool
    overlap: bool
    streaming: bool
    background: bool

    @property
    def splits(self) -> bool:
        """Simulators on devices get two slots each, which may overlap, unless everything else does already."""
        return not (self.lockstep or self.background)


SYNC = Mode(lockstep=True, overlap=False, streaming=False, background=False)
ASYNC_TRAINING = replace(SYNC, overlap=True)
ASYNC_ROLLOUT = replace(ASYNC_TRAINING, lockstep=False)
STREAMING = replace(ASYNC_ROLLOUT, streaming=True)
FULL = Mode(lockstep=False, overlap=True, streaming=True, background=True)


def overlay(config: Config, mode: Mode, rollout: int, training: int, *, colocated: bool = False) -> dict[str, Any]:
    """What to merge over a profile's config (configs/profiles/), as plain data, for so many devices of either kind."""
    devices = [str(device) for device in range(rollout)]
    first = 0 if colocated else rollout
    settings: dict[str, Any] = {
        "generators": {"count": rollout},
        "policy": {
            "options": {
                "devices": devices,
                "trainer_devices": [str(first + device) for device in range(training)],
                "load_in_background": mode.background,
            }
        },
        "flow": {"max_staleness": int(mode.overlap)},
    }
    s = config.simulators
    environments = config.slots_in_all * s.envs_per_slot
    episodes = config.trainer.segments_per_update // config.slots_in_all
    on_device = bool(config.environment.options.get("devices"))
    if on_device:
        settings["environment"] = {"options": {"devices": devices}}
    if not (mode.lockstep or on_device):
        return settings | {"trainer": _update(mode, config.trainer.segments_per_update)}
    batches = 2 if on_device and mode.splits else 1
    rows = -(-environments // (rollout * batches))
    steps = config.chunk_steps_per_episode * (episodes if mode.lockstep else 1)
    segments = rollout * batches * (1 if mode.lockstep else episodes)
    if on_device and batches > 1:
        settings["environment"]["options"]["devices"] = devices * batches  # one per environment batch
    settings["simulators"] = {
        "count": rollout,
        "env_batches": batches,
        "slots": 1,
        "envs_per_slot": rows,
        "segment": {"steps": steps},
    }
    settings["generators"]["max_batch_size"] = rows
    settings["trainer"] = {
        "segments_per_update": segments,
        "minibatch_samples": -(-segments * rows * steps // 2),
        **_update(mode, segments),
    }
    return settings


def _update(mode: Mode, segments: int) -> dict[str, Any]:
    """Two optimiser steps per update, as without streaming, where its segments have two equal halves."""
    return {"update": "streaming", "optimiser_steps": 1 + (segments % 2 == 0)} if mode.streaming else {}
