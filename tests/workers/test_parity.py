"""The distributed run gives what the one-process mode gives (DESIGN §6): real processes, real physics, real policy."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from live_run import Run

from vla_stream.config import Config
from vla_stream.learning import checkpoint
from workers import inline
from workers.supervisor import Notice, Supervisor

DEADLINE_S = 50.0

STRICT: dict[str, Any] = {
    "updates": 3,
    "environment": {"name": "tabletop", "max_steps": 12, "options": {}},
    "policy": {"name": "tiny", "chunk": 4},
    "simulators": {"count": 2, "slots": 2, "envs_per_slot": 2, "segment": "episode"},
    # Rounding depends on the size of a batch, so there is one size: a slot's rows.
    "generators": {"max_batch_size": 2, "max_wait_ms": 2.0},
    "trainer": {"segments_per_update": 6, "epochs": 2, "minibatch_samples": 16, "critic_warmup_updates": 1},
    "flow": {"max_staleness": 0, "order": "ticket", "lease_s": 5.0},
}


def distributed(config: Config, url: str, generators: int) -> list[Notice]:
    """The whole run in processes of its own; returns what the supervisor told."""
    supervisor = Supervisor(url, config.name, config.runs_dir, lease_s=config.flow.lease_s)
    told: list[Notice] = []
    try:
        for role, count in (("trainer", 1), ("generator", generators), ("simulator", config.simulators.count)):
            supervisor.launch(role, count)
        deadline_s = time.monotonic() + DEADLINE_S
        while "trainer-0" not in supervisor.finished:
            assert time.monotonic() < deadline_s, told
            told += supervisor.step()
            time.sleep(0.02)
    finally:
        supervisor.close()
    return told


def weights(config: Config) -> dict[str, torch.Tensor]:
    return checkpoint.load(config.run_dir / "checkpoints" / f"{config.updates:06d}").policy


@pytest.mark.parametrize(
    ("generators", "trainer"),
    [(1, {}), (2, {}), (2, {"update": "streaming", "epochs": 1, "optimiser_steps": 3})],
    ids=["one generator", "two generators", "streaming"],
)
def test_a_strict_distributed_run_ends_with_the_weights_of_the_one_process_mode(
    run: Run, generators: int, trainer: dict[str, Any]
) -> None:
    strict = STRICT | {"trainer": STRICT["trainer"] | trainer}
    config = run.start(**strict)
    told = distributed(config, run.url, generators)
    assert {notice.kind for notice in told} <= {"ended"}, told
    books = run.flow.books()
    assert books.balance == 0 and books.outcomes["trained"] == 18
    assert books.outcomes["refused"] == books.outcomes["poisoned"] == books.outcomes["expired"] == 0

    alone = Run(run.url, f"{run.name}-inline", run.folder, run.client).start(**strict)
    inline.run(alone, run.url, tell=lambda _: None)
    ours, theirs = weights(config), weights(alone)
    assert ours.keys() == theirs.keys()
    difference = max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
    assert difference < 1e-5
    first = checkpoint.load(config.run_dir / "checkpoints" / "000000").policy
    assert max(float((ours[name].double() - first[name].double()).abs().max()) for name in ours) > 1e-4, "it learned"
