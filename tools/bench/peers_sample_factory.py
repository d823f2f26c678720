"""Sample-factory's side of `vla-stream bench peers`; runs with the Python of tools/setup-sample-factory and needs
nothing of ours but pixels.py. Its arguments are sample-factory's own.

Prints one line per training step, so that its figure is made of the same as ours: how many environment steps were
trained, and when.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import gymnasium
from sample_factory.algo.runners.runner import AlgoObserver, Runner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

ENVIRONMENT = "pixels:Pixels-v0"


class Clock(AlgoObserver):
    """Tells of each training step when the runner learns of it."""

    def on_training_step(self, runner: Runner, training_iteration_since_resume: int) -> None:
        print(f"trained {sum(runner.env_steps.values())} environment steps at {time.time():.3f}", flush=True)


def make(full_env_name: str, cfg: Any, env_config: Any, render_mode: str | None = None) -> gymnasium.Env:
    """With the arguments that sample-factory gives. At the top, where its processes find it."""
    return gymnasium.make(full_env_name, disable_env_checker=True)


def main() -> int:
    register_env(ENVIRONMENT, make)
    arguments = [f"--env={ENVIRONMENT}", *sys.argv[1:]]
    parser, _ = parse_sf_args(arguments)
    _, runner = make_runner(parse_full_cfg(parser, arguments))
    runner.register_observer(Clock())
    return int(runner.init() or runner.run())


if __name__ == "__main__":
    sys.exit(main())
