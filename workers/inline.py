"""`--inline`: all roles in one thread of one process, through the same steps, for pdb and for parity tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch

from vla_stream.config import Config
from vla_stream.environments.protocol import Specification
from workers.environment_host import LocalHost
from workers.generator import Generator
from workers.models import make_policy, torch_device
from workers.simulator import Simulator, make_hosts
from workers.trainer import Trainer, make_learner
from workers.worker import Worker


class Actors:
    """A simulator and a generator, stepped by this thread. The flow of the run must exist (Flow.create)."""

    def __init__(self, config: Config, url: str) -> None:
        torch.set_num_threads(1)
        self.config, self.url = config, url
        self.workers: list[Worker] = []
        worker = self.worker("simulator")
        self._simulator = Simulator(worker, config, make_hosts(config, LocalHost, worker.id))
        self._generator: Generator | None = None

    def worker(self, role: str) -> Worker:
        """One more role of this thread; `step` beats for it."""
        made = Worker(role, f"{role}-0", secrets.token_hex(8), self.config.name, self.url)
        made.claim()
        made.traced = self.config.trace
        self.workers.append(made)
        return made

    def open(self) -> Specification:
        """Announce the shapes, which the others wait for."""
        self._simulator.open()
        return self._simulator.batches[0].host.specification

    def make_generator(self) -> None:
        """Its policy: after a learner's, which may refuse what it is given."""
        worker, device = self.worker("generator"), torch_device(self.config.generators.device)
        policy = make_policy(self.config, self._simulator.batches[0].host.specification, device)
        self._generator = Generator(worker, self.config, policy, worker.connect)
        self._generator.collector.recover()

    def step(self) -> bool:
        """Each role once; True when anything moved."""
        assert self._generator is not None
        for each in self.workers:
            each.beat()
        moved = self._simulator.step(self._simulator.replies.read(None))
        return self._generator.step(None) or moved

    def close(self) -> None:
        """Give permits and names back."""
        self._simulator.close()
        for each in self.workers:
            each.release()


def run(config: Config, url: str, tell: Callable[[str], None] = print) -> None:
    """Train to the last update; the run's server is at `url`."""
    actors = Actors(config, url)
    try:
        specification = actors.open()
        learner = make_learner(config, specification, torch_device(config.trainer.device), tell)
        trainer = Trainer(actors.worker("trainer"), config, specification, learner)
        trainer.start()
        actors.make_generator()
        while not trainer.done:
            actors.step()
            trainer.step(None)
        trainer.close()
    finally:
        actors.close()
