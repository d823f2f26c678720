"""`run --inline`: all roles in one thread, on the real environment and the real policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from live_run import Run, in_use

from vla_stream.broker.connection import Client
from vla_stream.config import Config
from vla_stream.learning import checkpoint
from vla_stream.learning.update import RUNNING_MOMENTS
from vla_stream.policies.protocol import Act
from vla_stream.streams.keys import Keys
from workers import history, inline

SMALL: dict[str, Any] = {
    "environment": {"name": "tabletop", "max_steps": 8, "options": {}},
    "policy": {"name": "tiny", "chunk": 4},
    "simulators__segment": "episode",
    "trainer__minibatch_samples": 8,
    "updates": 2,
}


def train(run: Run, name: str, **changes: Any) -> tuple[Config, dict[str, torch.Tensor]]:
    """A whole run under another name on the same server; its last weights."""
    other = Run(run.url, name, run.folder, run.client)
    config = other.start(**SMALL | changes)
    inline.run(config, run.url, tell=lambda _: None)
    return config, checkpoint.load(config.run_dir / "checkpoints" / f"{config.updates:06d}").policy


def updates_told(client: Client, keys: Keys) -> list[dict[str, float]]:
    entries: Any = client.xrange(keys.metrics)
    updates = [fields for _, fields in entries if fields[b"kind"] == b"update"]
    return [{n.decode(): float(v) for n, v in u.items() if n not in (b"worker", b"role", b"kind")} for u in updates]


def test_an_inline_run_makes_all_updates_its_books_balance_and_it_is_exactly_on_policy(run: Run) -> None:
    config, _ = train(run, run.name, flow__max_staleness=0)
    books = run.flow.books()
    assert books.balance == 0 and books.in_flight == 0
    assert books.outcomes["trained"] == config.updates * config.trainer.segments_per_update
    told = updates_told(run.client, run.keys)
    assert [entry["update"] for entry in told] == [1.0, 2.0]
    assert [entry["version"] for entry in told] == [2.0, 3.0]
    for entry in told:
        assert entry["first_behaviour_ratio_error"] < 1e-4 and entry["first_ratio_error"] < 1e-4
        assert entry["staleness_max"] == 0.0 and entry["skipped"] == 0.0
        assert all(np.isfinite(value) for value in entry.values())
    # Nobody is left, and nothing of the segments.
    left = {
        key.decode().removeprefix(f"vla:{{{run.name}}}:") for key in run.client.scan_iter(run.keys.everything_pattern)
    }
    assert not any(key.startswith(("worker:", "actions:", "blob:")) for key in left)
    assert run.client.xlen(run.keys.obs_requests) == run.client.xlen(run.keys.trajectories) == 0
    assert in_use(run.shm) == []


@pytest.mark.parametrize("segment", ["episode", {"steps": 3}], ids=["episodes", "steps"])
def test_two_identical_inline_runs_give_bit_identical_weights(run: Run, segment: object) -> None:
    changes = {"simulators__segment": segment, "flow__order": "ticket", "flow__max_staleness": 0}
    _, first = train(run, f"{run.name}-a", **changes)
    _, second = train(run, f"{run.name}-b", **changes)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    _, other = train(run, f"{run.name}-c", **changes, seed=6)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_in_ticket_order_every_update_has_each_tasks_part_and_the_run_is_repeated_bit_for_bit(run: Run) -> None:
    environment = {**SMALL["environment"], "tasks": {"near": {"weight": 2}, "far": {"options": {"shaping": 1.0}}}}
    changes = {
        "environment": environment,
        "simulators__env_batches": 2,
        "trainer__segments_per_update": 3,
        "flow__order": "ticket",
        "flow__max_staleness": 1,
    }
    config, first = train(run, run.name, **changes)
    assert history.trained_tickets(config.run_dir, 2) == [1, 2, 3, 4, 5, 6]
    told = updates_told(run.client, run.keys)
    assert [(entry["segments.near"], entry["segments.far"]) for entry in told] == [(2.0, 1.0)] * 2
    assert all(entry["staleness_max"] <= 1 for entry in told) and run.flow.books().balance == 0
    _, second = train(run, f"{run.name}-b", **changes)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_inline_run_in_streaming_is_repeated_bit_for_bit(run: Run) -> None:
    changes = {"trainer__update": "streaming", "trainer__optimiser_steps": 2, "flow__order": "ticket"}
    config, first = train(run, run.name, **changes)
    _, second = train(run, f"{run.name}-b", **changes)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [entry["optimiser_steps"] for entry in updates_told(run.client, run.keys)] == [2.0] * config.updates
    # The statistics that scale the advantages are the checkpoint's.
    saved = checkpoint.load(config.run_dir / "checkpoints" / f"{config.updates:06d}").optimiser
    assert saved[RUNNING_MOMENTS][0] > 0


def test_an_error_of_the_policy_reaches_the_caller_and_pdb(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from vla_stream.policies.tiny import Tiny

    def broken(*_: object) -> Act:
        raise ZeroDivisionError("here")

    monkeypatch.setattr(Tiny, "evaluate", broken)
    with pytest.raises(ZeroDivisionError, match="here"):
        train(run, run.name)
    books = run.flow.books()
    assert books.balance == 0
    assert not run.client.exists(run.keys.actions("simulator-0"))
