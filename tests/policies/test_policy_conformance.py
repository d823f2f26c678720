"""The suite that tells whether a policy keeps the protocol: all of ours do, and each kind of bug is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_policies
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vla_stream.environments.conformance import Report
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.plugins import POLICIES, load_class, parse_options
from vla_stream.policies import conformance
from vla_stream.policies.protocol import Act, Evaluation

TABLE = Specification({"front": (48, 48)}, state_dims=8, action_dims=3)
TWO_CAMERAS = Specification({"base": (64, 64), "hand": (17, 30)}, state_dims=11, action_dims=7)
CHUNK = 4

pytestmark = pytest.mark.timeout(180)  # transformers takes long to import where the disk or the machine is busy


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def checked(cls: Any, specification: Specification = TABLE, **options: Any) -> Report:
    parsed = parse_options(cls, options, "policy.options")
    return conformance.check_policy(lambda: cls(parsed, specification, CHUNK), specification, CHUNK)


@pytest.mark.parametrize("specification", [TABLE, TWO_CAMERAS], ids=["table", "two cameras"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny", {}),
        ("pi0", {}),
        ("pi0", {"train": "all", "noise": "learned"}),
        ("pi0", {"train": "lora", "lora_rank": 4, "gradient_checkpointing": True}),
        ("pi0", {"precision": "bfloat16"}),
        ("openvla", {"lora_rank": 4}),
        ("openvla", {"train": "all", "gradient_checkpointing": True}),
        ("openvla", {"precision": "bfloat16"}),
        ("openvla_oft", {"lora_rank": 4, "gradient_checkpointing": True}),
        ("openvla_oft", {"train": "all", "evaluation_temperature": 0.5}),
        ("openvla_oft", {"precision": "bfloat16"}),
        ("vlm", {"lora_rank": 4, "head": "binned", "gradient_checkpointing": True}),
        ("vlm", {"family": "paligemma", "train": "all", "evaluation_temperature": 0.5}),
        ("vlm", {"family": "qwen2_5_vl", "image_size": 32, "train": "all", "head": "binned"}),
        ("vlm", {"family": "qwen2_5_vl", "image_size": 32, "precision": "bfloat16"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_all_our_policies_keep_the_protocol(name: str, options: dict[str, Any], specification: Specification) -> None:
    report = checked(load_class(POLICIES, name), specification, **options)
    assert report.problems == {}
    assert any("log-probs of act and evaluate differ by" in note for note in report.notes)


def test_the_emulated_policy_keeps_it_and_so_does_the_one_of_the_tests(tmp_path: Path) -> None:
    folder = str(tmp_path)
    emulated = checked(load_class(POLICIES, "emulated"), weights_mb=0.1, devices=["0", "1"], folder=folder)
    assert emulated.problems == {}
    assert checked(fake_policies.Linear).problems == {}


class Healthy(fake_policies.Linear):
    """What the bugs are put into."""


class WrongDtype(Healthy):
    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        act = super().act(observations, noise_keys)
        return replace(act, actions=act.actions.astype(np.float64))


class FlatEntropy(Healthy):
    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        evaluation = super().evaluate(observations, actions, extras)
        return replace(evaluation, entropy=evaluation.entropy.mean())


class IgnoresKeys(Healthy):
    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        return super().act(observations, None)


class GlobalNoise(Healthy):
    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        if noise_keys is not None:
            noise_keys = torch.randint(2**40, (len(noise_keys),)).numpy().astype(np.uint64)
        return super().act(observations, noise_keys)


class SamplesItsMode(Healthy):
    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        rows = np.arange(len(observations), dtype=np.uint64)
        return super().act(observations, rows if noise_keys is None else noise_keys)


class StretchedLogProb(Healthy):
    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        evaluation = super().evaluate(observations, actions, extras)
        return replace(evaluation, logprobs=evaluation.logprobs * 1.001)


class BatchNormalised(Healthy):
    def _heads(self, observations: Observations) -> tuple[torch.distributions.Normal, Tensor]:
        normal, values = super()._heads(observations)
        return torch.distributions.Normal(normal.mean - normal.mean.mean(0), normal.stddev), values


class DetachedTrunk(Healthy):
    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        evaluation = super().evaluate(observations, actions, extras)
        return replace(evaluation, logprobs=evaluation.logprobs.detach(), values=evaluation.values)


class UnusedLayer(Healthy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unused = nn.Linear(2, 2)

    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        groups = super().parameter_groups()
        return {"policy": [*groups["policy"], *self.unused.parameters()], "value": groups["value"]}


class ForgottenLayer(Healthy):
    def parameter_groups(self) -> Mapping[str, list[nn.Parameter]]:
        groups = super().parameter_groups()
        return {"policy": groups["policy"][:-1], "value": groups["value"]}


class WritesToTheState(Healthy):
    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        observations.state[:] *= np.float32(0.99)
        return super().act(observations, noise_keys)


class OneBuffer(Healthy):
    buffer = np.zeros((8, CHUNK, 3), np.float32)

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        act = super().act(observations, noise_keys)
        if len(observations) < len(self.buffer):
            return act
        self.buffer[:] = act.actions
        return replace(act, actions=self.buffer)


class Dropout(Healthy):
    def _heads(self, observations: Observations) -> tuple[torch.distributions.Normal, Tensor]:
        normal, values = super()._heads(observations)
        return torch.distributions.Normal(normal.mean * (1 + 1e-5 * torch.rand(())), normal.stddev), values


class ForgetsAStatistic(Healthy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.scale = float(torch.rand(()))

    def _heads(self, observations: Observations) -> tuple[torch.distributions.Normal, Tensor]:
        normal, values = super()._heads(observations)
        return torch.distributions.Normal(normal.mean * self.scale, normal.stddev), values


class Tied(Healthy):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.head = self.action


class Raises(Healthy):
    def evaluate(self, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
        raise ZeroDivisionError("here")


@pytest.mark.parametrize(
    ("bug", "check", "told"),
    [
        (WrongDtype, "shapes", "actions are float64[8, 4, 3], expected float32[8, 4, 3]"),
        (FlatEntropy, "shapes", "entropy are [], expected [8, 4, 3]"),
        (Raises, "shapes", "ZeroDivisionError: here"),
        (IgnoresKeys, "noise_keys", "two keys give the same actions"),
        (GlobalNoise, "noise_keys", "the same keys give other actions"),
        (SamplesItsMode, "noise_keys", "without keys equal rows get different actions"),
        (StretchedLogProb, "logprobs", "log-probs of act and evaluate differ by"),
        (BatchNormalised, "batch_composition", "three rows alone get actions that differ by"),
        (DetachedTrunk, "gradients", "gets no gradient"),
        (UnusedLayer, "gradients", "unused.weight gets no gradient"),
        (ForgottenLayer, "gradients", "log_std requires a gradient but is in no parameter group"),
        (WritesToTheState, "inputs_kept", "the observations were written to"),
        (OneBuffer, "inputs_kept", "actions of an earlier act changed afterwards"),
        (Dropout, "inputs_kept", "evaluate differs from call to call"),
        (ForgetsAStatistic, "saving", "after saving and loading actions differ by"),
        (Tied, "saving", "action.weight and head.weight are two names of one tensor"),
    ],
)
def test_a_bug_of_each_kind_is_found_and_named(bug: type[Healthy], check: str, told: str) -> None:
    report = checked(bug)
    assert told in report.problems.get(check, "nothing"), report
    assert checked(Healthy).problems == {}


def test_low_precision_is_allowed_a_gap_per_chunk_and_not_more() -> None:
    class Rough(StretchedLogProb):
        low_precision = True

    class Wrong(Rough):
        def evaluate(self, *args: Any) -> Evaluation:
            evaluation = super().evaluate(*args)
            return replace(evaluation, logprobs=evaluation.logprobs + 0.1)

    assert checked(Rough).problems == {}
    assert "per chunk, expected at most 0.1" in checked(Wrong).problems["logprobs"]
