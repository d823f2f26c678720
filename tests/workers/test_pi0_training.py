"""A tiny π0 goes through the whole pipeline on the tabletop, and all that it should train is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_run import Run

from vla_stream.learning import checkpoint
from vla_stream.policies.pi0 import Pi0
from workers import inline

TABLE: dict[str, Any] = {
    "environment": {"name": "tabletop", "max_steps": 8, "options": {"shaping": 1.0}},
    "trainer__minibatch_samples": 8,
    "trainer__epochs": 2,
    "flow__max_staleness": 0,
    "updates": 3,
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("options", "trainer"),
    [
        ({"train": "all"}, {}),
        ({"train": "expert", "noise": "learned"}, {"trainer__update": "streaming", "trainer__epochs": 1}),
        ({"train": "lora", "lora_rank": 4, "gradient_checkpointing": True}, {}),
    ],
    ids=["all", "expert, learned noise, streaming", "adapters"],
)
def test_a_tiny_pi0_trains_on_the_tabletop_until_version_3_acts(
    run: Run, options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    policy = {"name": "pi0", "chunk": 4, "options": options}
    config = run.start(**TABLE | {"policy": policy} | trainer)
    inline.run(config, run.url, tell=lambda _: None)

    entries: Any = run.client.xrange(run.keys.metrics)
    told = [fields for _, fields in entries if fields[b"kind"] == b"update"]
    assert [float(fields[b"version"]) for fields in told] == [2, 3, 4]
    assert all(float(fields[b"skipped"]) == 0 and float(fields[b"gradient_norm"]) > 0 for fields in told)
    # So the segments of the last update were made by version 3, and by nothing older.
    assert all(float(fields[b"staleness_max"]) == 0 for fields in told)
    assert all(float(fields[b"act_evaluate_difference"]) < 1e-3 for fields in told)
    assert run.flow.books().outcomes["trained"] == 6

    first, last = (checkpoint.load(config.run_dir / "checkpoints" / f"{update:06d}") for update in (0, 3))
    specification = run.flow.specification()
    assert specification is not None
    trained = Pi0(Pi0.Options(**options), specification, 4)
    names = {name for name, parameter in trained.named_parameters() if parameter.requires_grad}
    # A bias of the keys adds the same to all that a softmax compares: its gradient is nothing but rounding.
    felt = {name for name in names if not name.endswith("k_proj.bias")}
    for name in felt:
        # Adam's mean square of the gradients, and what it made of them.
        assert last.optimiser[f"{name}/exp_avg_sq"].any(), name
    assert felt <= {name for name in last.policy if not torch.equal(first.policy[name], last.policy[name])} <= names
