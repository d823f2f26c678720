"""A run whose simulators and generators are the test: it publishes the segments that a trainer takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fakes import Line
from live_run import Run

from vla_stream.broker.lanes import ShmLane, segment_name
from vla_stream.config import Config
from vla_stream.environments.protocol import Observations
from vla_stream.flow import LastSeen, Permit
from vla_stream.learning.segments import Segment
from vla_stream.policies.protocol import Policy
from vla_stream.streams.observations import pack_observations
from vla_stream.streams.trajectories import Episode, Trajectory
from vla_stream.streams.weights import WeightsManifest
from workers.models import make_policy
from workers.trainer import Trainer, make_learner

T, K, H, A = 3, 2, 2, 2
CPU = torch.device("cpu")
SPECIFICATION = Line(1, 1, Line.Options()).specification


def observe(seed: int) -> Observations:
    return Line(K, 12, Line.Options()).reset(np.ones(K, dtype=bool), np.arange(K, dtype=np.uint64) + seed)


class Bench:
    """A run whose simulators and generators are the test."""

    def __init__(self, run: Run, config: Config) -> None:
        self.run, self.config, self.client = run, config, run.client
        self.policy: Policy = make_policy(config, SPECIFICATION, CPU)
        self.lane = ShmLane(run.shm)

    def trainer(self) -> Trainer:
        """A trainer that has started; one more takes over, as a restarted process does."""
        for worker in self.run.workers:
            worker.release()
        learner = make_learner(self.config, SPECIFICATION, CPU, print)
        made = Trainer(self.run.worker("trainer"), self.config, SPECIFICATION, learner)
        made.start()
        return made

    def permits(self, count: int) -> list[Permit]:
        granted = self.run.flow.grant(count, 30.0)
        assert not isinstance(granted, str) and len(granted) == count, granted
        return granted

    def publish(
        self,
        permit: Permit,
        version: int = 1,
        *,
        actions: tuple[int, int] = (H, A),
        shm: bool = False,
        success: bool = True,
    ) -> None:
        """A segment that the first weights made."""
        observations = [observe(100 * permit.ticket + step) for step in range(T + 1)]
        keys = np.arange(K, dtype=np.uint64)
        acts = [self.policy.act(seen, keys + np.uint64(10 * t)) for t, seen in enumerate(observations[:T])]
        shape = (T, K, *actions)
        segment = Segment(
            ticket=permit.ticket,
            observations=(),
            final=None,
            final_index=np.zeros((0, 2), dtype=np.int64),
            actions=np.resize(np.stack([act.actions for act in acts]), shape),
            logprobs=np.resize(np.stack([act.logprobs for act in acts]), shape),
            executed=np.ones((T, K, actions[0]), dtype=bool),
            valid=np.ones((T, K), dtype=bool),
            rewards=np.random.default_rng(permit.ticket).standard_normal((T, K)).astype(np.float32),
            terminated=np.zeros((T, K), dtype=bool),
            truncated=np.zeros((T, K), dtype=bool),
            success=np.zeros((T, K), dtype=bool),
            versions=np.full(T, version),
        )
        payloads: list[bytes | str] = [pack_observations(seen) for seen in observations]
        if shm:
            name = segment_name(permit.ticket, permit.attempt)
            payloads = [self.lane.write(name, i, data) for i, data in enumerate(payloads) if isinstance(data, bytes)]
            self.lane.release(name)
        identity = f"simulator-0/9f2c11ab/0.0/{permit.member}"
        episodes = (Episode(version, success, success, 1.0, 5),)
        trajectory = Trajectory(identity, permit.attempt, segment, tuple(payloads), None, episodes)
        assert self.run.flow.publish(permit.member, trajectory.to_fields()) == "added"

    def feed(self, count: int = 2, version: int = 1, **options: Any) -> list[Permit]:
        permits = self.permits(count)
        for permit in permits:
            self.publish(permit, version, **options)
        return permits

    def seen(self) -> LastSeen:
        """What a launcher remembers of the run."""
        state = self.run.flow.state()
        assert state is not None
        return LastSeen(state, self.run.flow.books())

    def lose_everything(self, seen: LastSeen) -> str:
        """What a flush and the launcher's answer to it leave; returns the new generation."""
        self.client.delete(*self.client.scan_iter(match=self.run.keys.everything_pattern))
        assert self.run.flow.create(self.config, seen)
        return self.seen().state.generation

    def waiting(self) -> int:
        return int(self.client.xlen(self.run.keys.trajectories))

    def weights(self) -> WeightsManifest:
        entries: Any = self.client.xrevrange(self.run.keys.weights, count=1)
        return WeightsManifest.from_fields(entries[0][1])

    def samples(self) -> list[dict[str, float]]:
        """What the trainer told about its updates."""
        entries: Any = self.client.xrange(self.run.keys.metrics)
        return [
            {name.decode(): float(value) for name, value in fields.items() if name not in (b"worker", b"role", b"kind")}
            for _, fields in entries
            if fields[b"kind"] == b"update"
        ]

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.config.run_dir / "checkpoints").iterdir())


Make = Callable[..., Bench]
