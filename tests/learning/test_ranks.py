"""Several ranks make the update of one: the same segments give the same weights, and tell the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rank_group
import torch
from rank_group import BOTH, SHARED, cases, segments, train
from toy import Toy, make_learner, make_segment

from vla_stream import config
from vla_stream.errors import InputError
from vla_stream.learning.ranks import MOST_TEXT_BYTES, Replicas, Shards

CPU = torch.device("cpu")
TOLERANCE = 1e-5  # float64 all the way, but for the log-probs of samples


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    """This process is a group's only rank: it does all that several do, but for meeting others."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        yield


@functools.cache
def alone(name: str) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    return train((BOTH | SHARED)[name])


def compare(name: str, weights: dict[str, torch.Tensor], told: list[dict[str, Any]]) -> None:
    """With one rank's."""
    expected, expected_told = alone(name)
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(
            weights[key], tensor, rtol=0, atol=TOLERANCE, msg=lambda text, key=key: f"{key}: {text}"
        )
    for got, wanted in zip(told, expected_told, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", BOTH)
def test_a_group_of_one_rank_does_what_a_process_alone_does(group_of_one: None, name: str) -> None:
    compare(name, *train(BOTH[name], Replicas(CPU)))


@pytest.mark.parametrize("name", BOTH | SHARED)
def test_the_cases_are_not_trivial(name: str) -> None:
    weights, told = alone(name)
    policy = Toy().double()
    moved = {key: float((weights[key] - start).abs().max()) for key, start in policy.state_dict().items()}
    value = {key: moved.pop(key) for key in ("value.weight", "value.bias")}
    del moved["log_std"]  # not a part of what an imitation learns
    assert moved.pop("frozen") == 0 and min(moved.values()) > 5e-3
    assert (min(value.values()) > 5e-3) == config.Algorithm.model_validate((BOTH | SHARED)[name].algorithm).has_critic
    skipped = [update["skipped"] for update in told]
    assert skipped == [bool((BOTH | SHARED)[name].fault) and update in rank_group.FAULTY for update in range(len(told))]


def test_the_groups_of_one_rank_may_all_be_equal() -> None:
    """Then it has no sample of its own, and passes a row that counts for nothing, in step with the others."""
    counts = [make_learner(algorithm={"name": "grpo"}) for _ in range(4)]
    for learner, segment in zip(counts, segments(counts[0].algorithm, 0), strict=True):
        learner.add(segment)
    assert [learner.finish(0).samples > 0 for learner in counts] == [True, False, True, True]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 4])
def test_the_weights_after_five_updates_are_those_of_one_rank(tmp_path: Path, count: int) -> None:
    outcomes = rank_group.run("train", count, tmp_path, [], deadline_s=860)
    assert outcomes.keys() == cases(count).keys()
    for name, outcome in outcomes.items():
        weights = {key: torch.tensor(values, dtype=torch.float64) for key, values in outcome["weights"].items()}
        compare(name.partition(": ")[2], weights, outcome["told"])


def test_a_sentence_of_any_rank_is_everybodys(group_of_one: None) -> None:
    ranks = Replicas(CPU)
    assert ranks.first(None) is None and ranks.first("the loss is nan") == "the loss is nan"
    assert len((ranks.first("é" * MOST_TEXT_BYTES) or "").encode()) <= MOST_TEXT_BYTES + 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64, torch.float64, torch.bfloat16])
def test_tensors_of_every_kind_are_gathered_and_shared_as_they_are(group_of_one: None, dtype: torch.dtype) -> None:
    ranks = Replicas(CPU)
    tensors = [torch.arange(6).reshape(3, 2).to(dtype), torch.empty(0, 4, dtype=dtype)]
    ((first, second),) = ranks.gather(tensors)
    assert torch.equal(first, tensors[0]) and second.shape == (0, 4) and second.dtype == dtype
    state = {"matrix": tensors[0], "scalar": torch.tensor(3).to(dtype), "nothing": tensors[1]}
    shared = ranks.share(state, lambda name: None)
    assert shared.keys() == state.keys() and all(torch.equal(shared[name], state[name]) for name in state)


def test_a_parameter_that_no_rank_has_a_gradient_for_keeps_none(group_of_one: None) -> None:
    policy = Toy()
    policy.log_std.grad = torch.ones(1)
    Replicas(CPU).reduce([policy.log_std, policy.value.weight])
    assert policy.log_std.grad.item() == 1 and policy.value.weight.grad is None


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_scalar_parameter_cannot_be_sharded_and_is_named(group_of_one: None) -> None:
    policy = Toy()
    policy.log_std = torch.nn.Parameter(torch.tensor(0.0))
    with pytest.raises(InputError, match=r"parameter log_std is a scalar, which has no parts; make it a tensor of one"):
        Shards(CPU).prepare(policy)


class Halves(Toy):
    """In bfloat16 where it may be: its trunk."""

    low_precision = True

    def layers_to_shard(self) -> list[torch.nn.Module]:
        return [self.trunk]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_low_precision_policy_is_gathered_in_half_its_layers_and_keeps_its_log_probs(group_of_one: None) -> None:
    policy, whole = Halves(), Toy()
    seen: list[torch.dtype] = []
    policy.trunk.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    ranks = Shards(CPU)
    passes = ranks.prepare(policy)
    segment = make_segment(whole, 0)
    given = segment.observations[0], segment.actions[0], {}
    found, expected = passes.evaluate(*given), whole.evaluate(*given)
    assert seen == [torch.bfloat16] and found.logprobs.dtype == found.values.dtype == torch.float32
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0.02, atol=0.02)
    assert not torch.equal(found.logprobs, expected.logprobs)
    parameters = list(policy.parameters())
    gradients = ranks.gradients(found.logprobs.sum(), parameters[:1], again=False)
    assert all(parameter.dtype == torch.float32 for parameter in parameters)
    assert gradients[0] is not None and gradients[0].dtype == torch.float32
