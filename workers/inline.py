"""`run --inline`: all roles in one thread of one process, through the same steps, for pdb and for parity tests."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import torch

from vla_stream.config import Config
from workers.environment_host import LocalHost
from workers.generator import Generator
from workers.models import make_policy, torch_device
from workers.simulator import Simulator, make_hosts
from workers.trainer import Trainer, make_learner
from workers.worker import Worker


def run(config: Config, url: str, tell: Callable[[str], None] = print) -> None:
    """Run to the last update. The flow of the run must exist (Flow.create); its server is at `url`."""
    torch.set_num_threads(1)

    def worker(role: str) -> Worker:
        made = Worker(role, f"{role}-0", secrets.token_hex(8), config.name, url)
        made.claim()
        made.traced = config.trace
        return made

    made = worker("simulator")
    simulator = Simulator(made, config, make_hosts(config, LocalHost, made.id))
    try:
        simulator.open()
        specification = simulator.batches[0].host.specification
        trainer_worker, generator_worker = worker("trainer"), worker("generator")
        learner = make_learner(config, specification, torch_device(config.trainer.device), tell)
        trainer = Trainer(trainer_worker, config, specification, learner)
        trainer.start()
        device = torch_device(config.generators.device)
        policy = make_policy(config, specification, device)
        generator = Generator(generator_worker, config, policy, generator_worker.connect)
        generator.collector.recover()
        while not trainer.done:
            for each in (simulator.worker, trainer_worker, generator_worker):
                each.beat()
            moved = simulator.step(simulator.replies.read(None))
            moved |= generator.step(None)
            moved |= trainer.step(None)
        trainer.close()
    finally:
        simulator.close()
    for each in (simulator.worker, trainer_worker, generator_worker):
        each.release()
