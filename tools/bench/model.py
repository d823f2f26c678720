"""What a profile's throughput should be, by discrete-event simulation: `.venv/bin/python tools/bench/model.py`.

Nothing here is emulated or slept; it is arithmetic on the numbers of a config that uses the emulated environment and
policy (configs/profiles/). The same ablation is run for real by the pipeline benchmark, whose rows are held against
these. All times are in ms.

In lockstep all environments of a rollout device step together, so that a step takes the longest of all of them, and the
device then infers for all of them at once; the devices meet at the end of the rollout. Without lockstep each slot asks
on its own, and a free generator takes up to `max_batch_size` rows of what waits, at once.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from modes import ASYNC_ROLLOUT, ASYNC_TRAINING, FULL, STREAMING, SYNC, Mode

from vla_stream import config as settings
from vla_stream.batching import Backlog, Strategy, WorkConserving
from vla_stream.config import Config
from vla_stream.environments.emulated import Emulated as EmulatedEnvironment
from vla_stream.plugins import parse_options
from vla_stream.policies.emulated import Emulated as EmulatedPolicy

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "profiles"
DEVICES = 8
COLOCATED = "sync colocated"
TINY = 1e-6


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
        pipeline = _Pipeline(profile, mode, rules, training, max_staleness, random)
        commits = pipeline.run(updates)
        period = (commits[-1] - commits[warm_up - 1]) / (updates - warm_up)
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


@dataclass(slots=True)
class _Job:
    """Something for a device: a slot's request (`chunk` None), or a chunk of its simulator, of that length."""

    slot: int
    step: int
    chunk: float | None = None
    born: float = 0.0


class _Pipeline:
    """Slots, generators and a trainer without lockstep. A method named `_on_…` is an event."""

    def __init__(
        self,
        profile: Profile,
        mode: Mode,
        rules: list[Strategy],
        training: int,
        max_staleness: int,
        random: np.random.Generator,
    ) -> None:
        self._rules, rollout = rules, len(rules)
        self.profile, self.mode, self.training, self.random = profile, mode, training, random
        self.admitted = (1 + max_staleness) * profile.segments
        self.now = 0.0
        self.commits: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        # Simulators on devices share each with a generator of their own; others are served by any generator.
        shared: deque[_Job] = deque()
        self._queues = [deque() if profile.on_device else shared for _ in range(rollout)]
        self._busy = [False] * rollout
        self._loaded = [0] * rollout
        self._idle = deque(range(profile.slots))
        self._outstanding = self._published = self._trained = 0
        self._training = False
        self._alarm = 0.0  # the next look at batches that wait

    def run(self, updates: int) -> list[float]:
        """Times of the first `updates` commits."""
        self._grant()
        while len(self.commits) < updates:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self.commits

    def _after(self, delay: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + delay, self._number, event))

    def _grant(self) -> None:
        while self._idle and self._outstanding < self.admitted:
            slot = self._idle.popleft()
            self._outstanding += 1
            if self.profile.on_device:
                self._enqueue(_Job(slot, -1, self.profile.reset))
            else:
                self._after(self.profile.reset, lambda slot=slot: self._enqueue(_Job(slot, 0)))

    def _enqueue(self, job: _Job) -> None:
        job.born = self.now
        self._queues[job.slot % len(self._queues)].append(job)
        self._serve()

    def _serve(self) -> None:
        for device, queue in enumerate(self._queues):
            if self._busy[device] or not queue:
                continue
            if queue[0].chunk is not None:
                self._busy[device] = True
                job = queue.popleft()
                self._after(job.chunk, lambda device=device, job=job: self._on_simulated(device, job))
                continue
            jobs = self._batch(self._rules[device], queue)
            if not jobs:
                continue
            self._busy[device] = True
            took = self.profile.infer(self.profile.rows * len(jobs))
            if not self.mode.background and self._loaded[device] < len(self.commits):
                self._loaded[device] = len(self.commits)
                took += self.profile.load
            self._rules[device].served(self.profile.rows * len(jobs), took)
            self._after(took, lambda device=device, jobs=jobs: self._on_replies(device, jobs))

    def _batch(self, rule: Strategy, queue: deque[_Job]) -> list[_Job]:
        """What a free device infers now: none while its rule waits for more."""
        waiting = list(itertools.takewhile(lambda job: job.chunk is None, queue))
        share = min(self.profile.slots_per_batch, rule.takes(lambda: self._backlog(len(waiting)), 1, self.profile.rows))
        due = waiting[0].born + rule.wait_ms
        if len(waiting) < share and self.now < due - TINY:
            if not self.now < self._alarm <= due:
                self._alarm = due
                self._after(due - self.now, self._serve)
            return []
        return [queue.popleft() for _ in waiting[: int(share)]]

    def _backlog(self, waiting: int) -> Backlog:
        if self.profile.on_device:
            return Backlog(waiting - 1, 1, 1)
        return Backlog(waiting - 1, len(self._busy), self._busy.count(False))

    def _on_replies(self, device: int, jobs: list[_Job]) -> None:
        self._busy[device] = False
        for job in jobs:
            took = float(self.profile.chunk_time(self.random, self.profile.rows)[0])
            if self.profile.on_device:
                self._queues[device].append(_Job(job.slot, job.step, took))
            else:
                self._after(took, lambda job=job: self._on_chunk(job))
        self._serve()

    def _on_simulated(self, device: int, job: _Job) -> None:
        self._busy[device] = False
        self._on_chunk(job)
        self._serve()

    def _on_chunk(self, job: _Job) -> None:
        if job.step + 1 < self.profile.steps:
            self._enqueue(_Job(job.slot, job.step + 1))
            return
        self._published += 1
        self._idle.append(job.slot)
        self._grant()
        self._train()

    def _train(self) -> None:
        profile = self.profile
        count = 1 if self.mode.streaming else profile.segments
        if self._training or self._published < count:
            return
        self._training = True
        self._published -= count
        before, self._trained = self._trained, self._trained + count
        half = profile.segments / 2
        steps = int(self._trained // half - before // half)
        took = count * profile.rows * profile.steps * profile.sample / self.training + steps * profile.optimiser_step
        self._after(took, self._on_trained)

    def _on_trained(self) -> None:
        self._training = False
        if self._trained == self.profile.segments:
            self._trained = 0
            self._outstanding -= self.profile.segments
            self.commits.append(self.now)
            self._grant()
        self._train()


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
