"""Policies on pretrained networks in shards: layer by layer where they say so, with adapters, in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rank_group

KINDS = [
    ("tiny", {}, 1e-5),
    ("vlm", {"train": "all"}, 1e-4),
    ("vlm", {"lora_rank": 4, "gradient_checkpointing": True}, 1e-4),
    ("vlm", {"lora_rank": 4, "precision": "bfloat16"}, 0.05),
    ("pi0", {}, 1e-4),
    ("pi0", {"train": "all", "noise": "learned", "gradient_checkpointing": True}, 1e-4),
    ("pi0", {"precision": "bfloat16"}, 0.05),
    ("openvla", {"lora_rank": 4}, 1e-4),
    ("openvla", {"precision": "bfloat16"}, 0.05),
    ("openvla_oft", {"train": "all"}, 1e-4),
]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_policy_in_shards_has_the_gradients_of_a_whole_one(tmp_path: Path) -> None:
    kinds = {json.dumps([name, options]): tolerance for name, options, tolerance in KINDS}
    errors = rank_group.run("shard", 2, tmp_path, list(kinds), deadline_s=860)
    assert errors.keys() == kinds.keys()
    assert {kind: error for kind, error in errors.items() if error > kinds[kind]} == {}
