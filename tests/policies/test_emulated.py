"""The emulated policy: what it sleeps and where, on top of a real policy that is trained and published as any other."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vla_stream import config
from vla_stream.emulation import Devices
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import Learner
from vla_stream.plugins import POLICIES, load_class, parse_options
from vla_stream.policies.emulated import Emulated
from vla_stream.policies.protocol import Policy

SPECIFICATION = Specification({"front": (8, 8)}, state_dims=4, action_dims=2)
CHUNK = 3


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Emulated]:
    def made(**options: Any) -> Emulated:
        data = {"weights_mb": 0.01, "folder": str(tmp_path), **options}
        return Emulated(parse_options(Emulated, data, "policy.options"), SPECIFICATION, CHUNK)

    return made


def look(rows: int) -> Observations:
    state = np.random.default_rng(0).standard_normal((rows, 4)).astype(np.float32)
    return Observations({"front": np.zeros((rows, 8, 8, 3), np.uint8)}, state, ["emulate"] * rows)


def keys(rows: int) -> np.ndarray:
    return np.arange(rows, dtype=np.uint64)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    """(devices, ms) that policies would have slept."""
    slept: list[tuple[str, float]] = []

    def record(self: Devices, seconds: float, asked_s: float | None = None) -> None:
        slept.append(("".join(self.names), round(seconds * 1000, 6)))

    monkeypatch.setattr(Devices, "compute", record)
    return slept


def test_it_offers_the_protocol(make: Callable[..., Emulated]) -> None:
    assert load_class(POLICIES, "emulated") is Emulated
    assert isinstance(make(), Policy)


def test_inference_takes_a_plus_b_times_rows(make: Callable[..., Emulated], slept: list[tuple[str, float]]) -> None:
    policy = make(batch_ms=20.0, row_ms=10.0)
    policy.act(look(1), keys(1))
    policy.act(look(3), keys(3))
    assert slept == [("0", 30.0), ("0", 50.0)]


def test_what_is_really_computed_is_part_of_the_time(
    make: Callable[..., Emulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Devices, "compute", lambda self, seconds, asked_s: asked.append(asked_s))
    policy, before_s = make(), time.monotonic()
    policy.act(look(1), keys(1))
    policy.evaluate(look(1), np.zeros((1, CHUNK, 2), np.float32), {})
    policy.state_dict()
    assert before_s <= asked[0] <= asked[1] <= time.monotonic()
    assert policy._claim is not None


def test_inference_really_takes_its_time(make: Callable[..., Emulated]) -> None:
    policy, start_s = make(batch_ms=50.0), time.monotonic()
    policy.act(look(1), keys(1))
    assert time.monotonic() - start_s >= 0.05


def test_evaluate_gives_the_log_probs_and_values_of_act(make: Callable[..., Emulated]) -> None:
    policy, observations = make(), look(5)
    act = policy.act(observations, keys(5))
    evaluation = policy.evaluate(observations, act.actions, {})
    np.testing.assert_allclose(evaluation.logprobs.detach().numpy(), act.logprobs, atol=1e-5)
    np.testing.assert_allclose(evaluation.values.detach().numpy(), act.values, atol=1e-5)
    mode = policy.act(observations, None)
    assert not np.array_equal(mode.actions, act.actions)


def test_training_takes_its_time_with_gradients_only_and_is_shared_by_the_trainers_devices(
    make: Callable[..., Emulated], slept: list[tuple[str, float]]
) -> None:
    policy = make(sample_ms=20.0, trainer_devices=["4", "5", "6", "7"])
    observations, actions = look(12), np.zeros((12, CHUNK, 2), np.float32)
    with torch.no_grad():
        policy.evaluate(observations, actions, {})
    assert slept == []
    policy.evaluate(observations, actions, {})
    policy.state_dict()
    assert slept == [("4567", 60.0)]


def test_training_is_launched_and_who_reads_the_weights_waits(make: Callable[..., Emulated]) -> None:
    policy, actions = make(sample_ms=150.0), np.zeros((1, CHUNK, 2), np.float32)
    start_s = time.monotonic()
    for _ in range(2):
        policy.evaluate(look(1), actions, {})
    with torch.no_grad():
        policy.evaluate(look(1), actions, {})
    assert time.monotonic() - start_s < 0.15
    policy.state_dict()
    assert time.monotonic() - start_s >= 0.3


def test_an_optimiser_step_waits_for_the_gradients_and_not_for_itself(make: Callable[..., Emulated]) -> None:
    policy, start_s = make(sample_ms=100.0, optimiser_step_ms=200.0), time.monotonic()
    policy.evaluate(look(1), np.zeros((1, CHUNK, 2), np.float32), {})
    policy.after_optimiser_step()
    assert 0.1 <= time.monotonic() - start_s < 0.3
    policy.state_dict()
    assert time.monotonic() - start_s >= 0.3


def test_generators_take_one_device_each(make: Callable[..., Emulated], slept: list[tuple[str, float]]) -> None:
    options: dict[str, Any] = {"devices": ["0", "1"], "batch_ms": 30.0}
    policies = [make(**options) for _ in range(2)]
    for policy in policies:
        policy.act(look(1), keys(1))
    assert [device for device, _ in slept] == ["0", "1"]
    with pytest.raises(InputError, match="each of 0, 1 has its generator already"):
        make(**options).act(look(1), keys(1))


def test_loading_weights_takes_time_on_a_generator_that_does_not_do_it_in_the_background(
    make: Callable[..., Emulated], slept: list[tuple[str, float]]
) -> None:
    blocking, background = make(load_ms=40.0, load_in_background=False), make(load_ms=40.0, devices=["1"])
    for policy in (blocking, background):
        policy.load_state_dict(policy.state_dict())
        assert slept == []  # it has inferred nothing yet: a trainer, or a generator's very first weights
        policy.act(look(1), keys(1))
        slept.clear()
        policy.load_state_dict(policy.state_dict())
        assert slept == ([("0", 40.0)] if policy is blocking else [])
        slept.clear()


def test_the_weights_have_the_size_asked_for(make: Callable[..., Emulated]) -> None:
    state = make(weights_mb=2.0).state_dict()
    assert 2e6 <= sum(tensor.numel() * tensor.element_size() for tensor in state.values()) < 2.01e6


def test_a_real_update_takes_its_time_moves_the_policy_and_changes_a_share_of_the_ballast(
    make: Callable[..., Emulated], slept: list[tuple[str, float]]
) -> None:
    policy = make(sample_ms=5.0, optimiser_step_ms=20.0, changed_share=0.1)
    trainer = config.Trainer(segments_per_update=2, epochs=1, minibatch_samples=6, critic_warmup_updates=0)
    learner = Learner(policy, config.Algorithm(), trainer, seed=0)
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    for ticket in range(2):
        learner.add(_segment(policy, ticket))
    assert sum(milliseconds for _, milliseconds in slept) == 0, "a pass without gradients costs nothing"
    slept.clear()
    result = learner.finish(version=1)
    assert result.skipped is None and (result.samples, result.metrics["optimiser_steps"]) == (12, 2)
    after = policy.state_dict()
    assert slept == [("1", 30.0), ("1", 20.0)] * 2
    assert not torch.equal(after["mean.weight"], before["mean.weight"])
    changed = (after["ballast"].view(torch.int16) != before["ballast"].view(torch.int16)).double().mean()
    assert changed == pytest.approx(0.2, abs=0.01) and torch.isfinite(after["ballast"]).all()


def test_an_optimiser_of_something_else_costs_nothing_and_a_policy_that_is_gone_leaves_nothing_behind(
    make: Callable[..., Emulated], slept: list[tuple[str, float]]
) -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    gc.collect()
    hooks = len(_global_optimizer_post_hooks)
    policy = make(optimiser_step_ms=1000.0)
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other], lr=0.1).step()
    assert slept == [] and len(_global_optimizer_post_hooks) == hooks + 1
    del policy
    gc.collect()
    assert len(_global_optimizer_post_hooks) == hooks


def _segment(policy: Emulated, ticket: int) -> Segment:
    """Two chunk steps of three rows, all valid, with random rewards; all rows terminate at the end."""
    acts = [policy.act(look(3), keys(3)) for _ in range(2)]
    ones = np.ones((2, 3), dtype=bool)
    ends = np.array([[False] * 3, [True] * 3])
    return Segment(
        ticket=ticket,
        observations=(look(3),) * 3,
        final=None,
        final_index=np.empty((0, 2), dtype=np.int64),
        actions=np.stack([act.actions for act in acts]),
        logprobs=np.stack([act.logprobs for act in acts]),
        versions=np.ones(2, dtype=np.int64),
        extras={},
        executed=np.ones((2, 3, CHUNK), dtype=bool),
        valid=ones,
        rewards=np.random.default_rng(ticket).standard_normal((2, 3)).astype(np.float32),
        terminated=ends,
        truncated=np.zeros_like(ends),
        success=ends,
    )
