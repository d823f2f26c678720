"""What a profile's throughput should be, by arithmetic and simulation: `.venv/bin/python tools/bench/model.py`.

Nothing here is emulated or slept; it is arithmetic on the numbers of a config that uses the emulated environment and
policy (configs/profiles/). The same ablation is run for real by the pipeline benchmark, whose rows are held against
these. All times are in ms.

In lockstep all environments of a rollout device step together, so that a step takes the longest of all of them, and the
device then infers for all of them at once; the devices meet at the end of the rollout. Without lockstep each slot asks
on its own, and a free generator takes up to `max_batch_size` rows of what waits, at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from modes import ASYNC_ROLLOUT, ASYNC_TRAINING, FULL, STREAMING, SYNC, Mode

from vla_stream import config as settings
from vla_stream.batching import Strategy, WorkConserving
from vla_stream.config import Config
from vla_stream.environments.emulated import Emulated as EmulatedEnvironment
from vla_stream.model import Stages, simulate
from vla_stream.plugins import parse_options
from vla_stream.policies.emulated import Emulated as EmulatedPolicy

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "profiles"
DEVICES = 8
COLOCATED = "sync colocated"


@dataclass(frozen=True, slots=True)
class Profile:
    """The numbers of one config. slots: of the whole run; rows: environments per slot; steps: chunk steps per episode.

    on_device: the simulator computes on the rollout devices, each with an equal part of the environments.
    """

    slots: int
    rows: int
    steps: int
    chunk: int
    episodes: int
    step: float
    sigma: float
    step_row: float
    on_device: bool
    reset: float
    batch: float
    batch_row: float
    slots_per_batch: int
    sample: float
    optimiser_step: float
    load: float

    @classmethod
    def of(cls, config: Config) -> Profile:
        """Raises InputError for options that are not those of the emulated environment and policy."""
        e = parse_options(EmulatedEnvironment, config.environment.options, "environment.options")
        p = parse_options(EmulatedPolicy, config.policy.options, "policy.options")
        s = config.simulators
        return cls(
            slots=config.slots_in_all,
            rows=s.envs_per_slot,
            steps=config.chunk_steps_per_episode,
            chunk=config.policy.chunk,
            episodes=config.trainer.segments_per_update // config.slots_in_all,
            step=e.step_ms,
            sigma=e.step_sigma,
            step_row=e.row_ms,
            on_device=bool(e.devices),
            reset=e.reset_ms,
            batch=p.batch_ms,
            batch_row=p.row_ms,
            slots_per_batch=config.generators.max_batch_size // s.envs_per_slot,
            sample=p.sample_ms,
            optimiser_step=p.optimiser_step_ms,
            load=p.load_ms,
        )

    @property
    def environments(self) -> int:
        return self.slots * self.rows

    @property
    def segments(self) -> int:
        """B, per update: one episode of a slot each."""
        return self.slots * self.episodes

    @property
    def samples(self) -> int:
        """Chunk steps of one environment, per update."""
        return self.environments * self.steps * self.episodes

    @property
    def environment_steps(self) -> int:
        """Per update."""
        return self.samples * self.chunk

    def infer(self, rows: float) -> float:
        return self.batch + self.batch_row * rows

    def train(self, devices: int) -> float:
        """A whole update; two optimiser steps."""
        return self.samples * self.sample / devices + 2 * self.optimiser_step

    def chunk_time(self, random: np.random.Generator, rows: int, count: int = 1) -> np.ndarray:
        """f64[count]: Σ over the chunk's steps of the longest of `rows` environments' times."""
        spread = np.exp(self.sigma * random.standard_normal((count, self.chunk, rows)) - self.sigma**2 / 2)
        times: np.ndarray = (self.step * spread.max(axis=2) + self.step_row * rows).sum(axis=1)
        return times

    def stages(self, mode: Mode) -> Stages:
        """For the model of the pipeline, which has no lockstep: what the options say, and no cost besides."""
        training = self.rows * self.steps * self.sample
        return Stages(
            batches=self.slots,
            slots=1,
            rows=self.rows,
            steps=self.steps,
            env_steps=self.rows * self.steps * self.chunk,
            chunk=lambda random: float(self.chunk_time(random, self.rows)[0]),
            reset=self.reset,
            resets=1.0,
            infer_batch=self.batch,
            infer_row=self.batch_row,
            sizes=tuple(self.rows * slots for slots in range(1, self.slots_per_batch)),
            max_rows=self.rows * self.slots_per_batch,
            segments=self.segments,
            segment=training if mode.streaming else 0.0,
            fit=0.0 if mode.streaming else training,
            host=0.0,
            optimiser_step=self.optimiser_step,
            optimiser_steps=2,
            streaming=mode.streaming,
            swap=0.0 if mode.background else self.load,
            on_device=self.on_device,
        )

    def split(self, slots: int) -> Profile:
        """The same environments in another number of slots."""
        return replace(self, slots=slots, rows=self.environments // slots)


def throughput(
    profile: Profile,
    mode: Mode,
    rollout: int,
    training: int,
    *,
    max_staleness: int = 1,
    updates: int = 40,
    warm_up: int = 8,
    seed: int = 0,
    batching: Callable[[], Strategy] | None = None,
) -> float:
    """Environment steps per second of wall time, training included, after the first `warm_up` updates.

    batching: makes the rule of each generator; by default none waits, and each takes what fits."""
    random = np.random.default_rng(seed)
    if mode.lockstep:
        period = _lockstep(profile, mode, rollout, training, random, updates)
    else:
        rules = [batching() if batching else WorkConserving(1, 0.0) for _ in range(rollout)]
        stages, eta = profile.stages(mode), max_staleness
        found = simulate(stages, rules, training, max_staleness=eta, updates=updates, warm_up=warm_up, seed=seed)
        return found.steps_per_s
    return profile.environment_steps / period * 1000


def bound(profile: Profile, rollout: int, training: int) -> float:
    """No order of work on these devices can do more: trainer, rollout devices, or one slot's own steps in turn."""
    if profile.on_device:
        profile = profile.split(rollout)
    chunk_steps = profile.steps * profile.episodes
    a_chunk = float(profile.chunk_time(np.random.default_rng(0), profile.rows, 20_000).mean())
    requests = profile.slots * chunk_steps
    work = profile.samples * profile.batch_row + requests / profile.slots_per_batch * profile.batch
    if profile.on_device:
        work += requests * a_chunk + profile.slots * profile.episodes * profile.reset
    alone = chunk_steps * (a_chunk + profile.infer(profile.rows)) + profile.episodes * profile.reset
    return profile.environment_steps / max(profile.train(training), work / rollout, alone) * 1000


def _lockstep(
    profile: Profile, mode: Mode, rollout: int, training: int, random: np.random.Generator, updates: int
) -> float:
    """Mean time of an update: the slowest device's rollout and the weights' way, with or without the training."""
    shares = [len(part) for part in np.array_split(np.arange(profile.environments), rollout)]
    chunk_steps = profile.steps * profile.episodes
    periods = []
    for _ in range(updates):
        rollouts = [
            profile.chunk_time(random, rows, chunk_steps).sum() + chunk_steps * profile.infer(rows) for rows in shares
        ]
        took = max(rollouts) + profile.episodes * profile.reset + profile.load
        train = profile.train(training)
        periods.append(max(took, train) if mode.overlap else took + train)
    return float(np.mean(periods))


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row of the ablation. mode: None for the bound, which no run has."""

    name: str
    rollout: int
    training: int
    steps_per_s: float
    mode: Mode | None = None
    max_staleness: int = 1

    @property
    def colocated(self) -> bool:
        """Training and rollout take turns on the same devices."""
        return self.name == COLOCATED


def predict(profile: Profile, devices: int = DEVICES) -> list[Prediction]:
    """The ablation of one profile. "full" is at its best placement, which the last rows keep."""
    half = devices // 2

    def at(name: str, mode: Mode, rollout: int, training: int, max_staleness: int = 1) -> Prediction:
        # Simulators on devices have one slot there, and two where slots alone would give an overlap.
        split = profile.split(rollout * (2 if mode.splits else 1)) if profile.on_device else profile
        rate = throughput(split, mode, rollout, training, max_staleness=max_staleness)
        return Prediction(name, rollout, training, rate, mode, max_staleness)

    full = max(
        (at("full", FULL, rollout, devices - rollout) for rollout in range(2, devices - 1)),
        key=lambda prediction: prediction.steps_per_s,
    )
    most = max(
        (bound(profile, rollout, devices - rollout), rollout, devices - rollout) for rollout in range(2, devices - 1)
    )
    return [
        at(COLOCATED, SYNC, devices, devices, 0),
        at("sync", SYNC, half, half, 0),
        at("+ async training", ASYNC_TRAINING, half, half),
        at("+ async rollout", ASYNC_ROLLOUT, half, half),
        at("+ streaming", STREAMING, half, half),
        full,
        at("full, η = 0", FULL, full.rollout, full.training, max_staleness=0),
        Prediction("bound", most[1], most[2], most[0]),
    ]


def profile_names() -> list[str]:
    """Of configs/profiles."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem != "base")


def load_profile(name: str) -> Profile:
    """A profile of configs/profiles by its name."""
    return Profile.of(settings.load([CONFIGS / "base.yaml", CONFIGS / f"{name}.yaml"]))


def main(names: list[str]) -> None:
    for name in names or profile_names():
        print(name)
        for row in predict(load_profile(name)):
            print(f"  {row.name:<18} {row.rollout}:{row.training}  {row.steps_per_s:6.0f} environment steps/s")


if __name__ == "__main__":
    main(sys.argv[1:])
