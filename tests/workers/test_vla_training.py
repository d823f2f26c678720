"""Tiny VLAs go through the whole pipeline on the tabletop, and all that they should train is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_run import Run

from vla_stream.learning import checkpoint
from vla_stream.plugins import POLICIES, load_class
from workers import inline

TABLE: dict[str, Any] = {
    "environment": {"name": "tabletop", "max_steps": 8, "options": {"shaping": 1.0}},
    "trainer__minibatch_samples": 8,
    "trainer__epochs": 2,
    "flow__max_staleness": 0,
    "updates": 3,
}


STREAMING = {"trainer__update": "streaming", "trainer__epochs": 1}


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("name", "options", "trainer"),
    [
        ("pi0", {"train": "all"}, {}),
        ("pi0", {"train": "expert", "noise": "learned"}, STREAMING),
        ("pi0", {"train": "lora", "lora_rank": 4, "gradient_checkpointing": True}, {}),
        ("openvla", {"train": "all"}, {}),
        ("openvla", {"lora_rank": 4}, STREAMING | {"algorithm__granularity": "token"}),
        ("openvla_oft", {"train": "all"}, STREAMING),
        ("openvla_oft", {"lora_rank": 4, "gradient_checkpointing": True}, {}),
        ("vlm", {"train": "all", "head": "binned"}, {}),
        ("vlm", {"lora_rank": 4, "family": "paligemma"}, STREAMING),
        ("vlm", {"train": "all", "family": "qwen2_5_vl", "image_size": 32}, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_a_tiny_vla_trains_on_the_tabletop_until_version_3_acts(
    run: Run, name: str, options: dict[str, Any], trainer: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    policy = {"name": name, "chunk": 4, "options": options}
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
    cls = load_class(POLICIES, name)
    trained = cls(cls.Options(**options), specification, 4)
    names = {place for place, parameter in trained.named_parameters() if parameter.requires_grad}
    # A bias of the keys adds the same to all that a softmax compares: its gradient is nothing but rounding.
    felt = {place for place in names if not place.endswith("k_proj.bias")}
    for place in felt:
        # Adam's mean square of the gradients, and what it made of them.
        assert last.optimiser[f"{place}/exp_avg_sq"].any(), place
    assert felt <= {place for place in last.policy if not torch.equal(first.policy[place], last.policy[place])} <= names
