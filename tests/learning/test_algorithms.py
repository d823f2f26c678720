"""The algorithms, put together: each option counts, each loss is that of its equation, buffered and streaming agree."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import (
    A,
    K,
    T,
    Toy,
    make_demonstrations,
    make_episodes,
    make_learner,
    make_segment,
    same,
    sampled,
    train,
    update,
    weights,
)

from vla_stream.algorithm import OPTIONS, Algorithm
from vla_stream.environments.protocol import Observations
from vla_stream.learning import losses, objective
from vla_stream.learning.advantages import gae, normalise
from vla_stream.learning.samples import Samples
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import Learner
from vla_stream.learning.vtrace import vtrace

ALGORITHMS = sorted(OPTIONS)
WITHOUT_CRITIC = ("grpo", "rloo", "rft")
ACTOR = Toy(seed=1)  # of other weights than the learner's


def episodes(ticket: int, **changes: Any) -> Segment:
    """Off-policy, made by weights one version older than the toy learners' here, which have version 3."""
    return make_episodes(ACTOR, ticket, **{"version": 2} | changes)


GROUPS = [episodes(0), episodes(1, lengths=(3, T, 2, T), successes=(2,)), episodes(2, lengths=(T, 1, T, 4))]


def learner_of(
    name: str,
    mode: str = "buffered",
    options: dict[str, Any] | None = None,
    policy: Toy | None = None,
    **trainer: Any,
) -> Learner:
    """Three segments per update; streaming: in three steps."""
    modes = {
        "buffered": {"epochs": 2, "minibatch_samples": 25},
        "streaming": {"update": "streaming", "epochs": 1, "optimiser_steps": 3, "minibatch_samples": 7},
    }
    algorithm = {"name": name, "entropy_coefficient": 0.0} | (options or {})
    return make_learner(policy or Toy(), algorithm, Toy(seed=2), **modes[mode] | trainer)


# ---- options

# Values that differ from the defaults, or from those in BASE.
OTHER: dict[str, Any] = {
    "correction": "none",
    "proximal": "interpolated",
    "behaviour_weight_cap": 0.5,
    "behaviour_weight_above_cap": "mask",
    "clip": 0.02,
    "dual_clip": 1.05,
    "granularity": "chunk",
    "max_kl": 1e-3,
    "entropy_coefficient": 0.3,
    "entropy_decay": {"to": 0.0, "at_update": 2},
    "reference_kl_coefficient": 0.5,
    "imitation_coefficient": 0.5,
    "gamma": 0.5,
    "gae_lambda": 0.5,
    "vtrace_lambda": 0.5,
    "vtrace_rho_cap": 0.5,
    "vtrace_gradient_rho_cap": 0.5,
    "value_coefficient": 3.0,
    "value_clip": 0.01,
    "huber_delta": 0.1,
    "normalise_advantages": False,
    "group_std": False,
    "length": "max",
}
BASE: dict[str, Any] = {"entropy_coefficient": 0.1, "behaviour_weight_cap": 1.5, "value_coefficient": 1.0}


def after_two_updates(name: str, mode: str, options: dict[str, Any]) -> dict[str, Tensor]:
    learner = learner_of(name, mode, options)
    for _ in range(2):
        assert update(learner, GROUPS, version=3).skipped is None
    return weights(learner)


@pytest.mark.parametrize("mode", ["buffered", "streaming"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_that_an_algorithm_uses_changes_what_is_learnt(name: str, mode: str) -> None:
    base = {option: value for option, value in BASE.items() if option in OPTIONS[name]}
    reference = after_two_updates(name, mode, base)
    for option in sorted(OPTIONS[name] - {"name"}):
        other = "own" if (name, option) == ("rloo", "length") else OTHER[option]
        assert not same(reference, after_two_updates(name, mode, base | {option: other})), option


def test_no_option_is_left_out_of_that_test_and_each_has_an_algorithm() -> None:
    assert {*OTHER, "name"} == set(Algorithm.model_fields) == set.union(*OPTIONS.values())


@pytest.mark.parametrize("name", ALGORITHMS)
def test_options_that_an_algorithm_does_not_use_change_nothing(name: str) -> None:
    unused = {option: value for option, value in OTHER.items() if option not in OPTIONS[name]}
    assert same(after_two_updates(name, "buffered", {}), after_two_updates(name, "buffered", unused))


@pytest.mark.parametrize(
    ("switch", "unused"),
    [
        ({"correction": "tis"}, ("clip", "dual_clip", "proximal")),
        ({"correction": "none"}, ("behaviour_weight_cap", "behaviour_weight_above_cap", "proximal")),
        ({"entropy_coefficient": 0.0}, ("entropy_decay",)),
    ],
)
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_options_that_another_option_switches_off_are_known_as_unused(
    name: str, switch: dict[str, Any], unused: tuple[str, ...]
) -> None:
    algorithm = Algorithm.model_validate({"name": name} | switch)
    assert not set(unused) & algorithm.used
    expected = after_two_updates(name, "buffered", switch)
    for option in unused:
        changed = {option: OTHER[option]} | switch
        if (option, switch.get("correction")) == ("proximal", "none"):
            continue  # it is refused in the config; here it would take effect
        assert same(expected, after_two_updates(name, "buffered", changed)), option


# ---- the losses, by their equations


def one_pass(
    learner: Learner, segments: list[Segment], version: int = 3, policy: Toy | None = None
) -> tuple[Tensor, dict[str, Tensor], Samples]:
    """Loss and sums of all samples before the first optimiser step, or under a policy that has moved since."""
    samples = Samples.concatenate([sampled(learner, segment) for segment in segments])
    advantages = samples.advantages
    if learner.algorithm.has_critic:
        advantages = normalise(advantages)
    terms, sums = objective.evaluate(
        policy or learner.policy, learner.algorithm, samples, advantages, torch.device("cpu"), version
    )
    return objective.mean(terms), sums, samples


def log_probs(policy: Toy, segment: Segment) -> np.ndarray:
    """log π [T, k, H], summed over action dims."""
    rows = [
        policy.evaluate(segment.observations[t], segment.actions[t], {}).logprobs.detach().sum(-1).numpy()
        for t in range(segment.steps)
    ]
    return np.stack(rows)


@pytest.mark.parametrize(("group_std", "length"), [(True, None), (False, None), (True, "max"), (False, "own")])
def test_grpo_is_the_mean_over_rows_of_differing_groups(group_std: bool, length: str | None) -> None:
    """L = mean over rows of 1/T_i Σ −w·min(r·A, clip(r)·A), with r = 1 before the first step."""
    learner = learner_of("grpo", options={"group_std": group_std, "length": length})
    total, rows = 0.0, 0
    for segment in GROUPS:
        new, behaviour = log_probs(Toy(), segment), segment.logprobs.sum(-1)
        returns = np.array([float(segment.success[:, row].any()) for row in range(K)])
        std = math.sqrt(sum((returns - returns.mean()) ** 2) / (K - 1)) + 1e-6 if group_std else 1.0
        lengths = segment.executed.sum((0, 2))
        for row in range(K):
            divisor = lengths[row] if (length or ("own" if group_std else "max")) == "own" else max(lengths)
            for t, h in np.argwhere(segment.executed[:, row]):
                weight = min(math.exp(new[t, row, h] - behaviour[t, row, h]), 2.0)
                total -= weight * (returns[row] - returns.mean()) / std / divisor
            rows += 1
    loss, _, _ = one_pass(learner, GROUPS)
    assert float(loss.detach()) == pytest.approx(total / rows, rel=1e-5)


def test_rloo_weighs_every_action_alike() -> None:
    learner = learner_of("rloo")
    total, rows = 0.0, 0
    for segment in GROUPS:
        new, behaviour = log_probs(Toy(), segment), segment.logprobs.sum(-1)
        returns = np.array([float(segment.success[:, row].any()) for row in range(K)])
        longest = max(segment.executed.sum((0, 2)))
        for row in range(K):
            advantage = returns[row] - (returns.sum() - returns[row]) / (K - 1)
            for t, h in np.argwhere(segment.executed[:, row]):
                total -= min(math.exp(new[t, row, h] - behaviour[t, row, h]), 2.0) * advantage / longest
        rows += K
    loss, _, _ = one_pass(learner, GROUPS)
    assert float(loss.detach()) == pytest.approx(total / rows, rel=1e-5)


def test_a_group_of_equal_returns_counts_as_a_segment_and_adds_nothing_to_sums_or_divisors() -> None:
    for mode in ("buffered", "streaming"):
        results = []
        for equal in ([], [episodes(7, successes=()), episodes(8, successes=(0, 1, 2, 3))]):
            count = 3 + len(equal)
            steps = {"optimiser_steps": 1} if mode == "streaming" else {}
            learner = learner_of("grpo", mode, segments_per_update=count, **steps)
            result = update(learner, [*GROUPS, *equal], version=3)
            results.append((weights(learner), result.metrics))
        (expected, before), (got, after) = results
        assert same(expected, got)
        assert (before["equal_groups"], after["equal_groups"]) == (0.0, 2 / 5)
        assert {**before, "equal_groups": 0.4} == pytest.approx(after)


@pytest.mark.parametrize("mode", ["buffered", "streaming"])
@pytest.mark.parametrize(("name", "reason"), [("grpo", "all groups have equal returns"), ("rft", "no row succeeded")])
def test_an_update_with_nothing_to_learn_from_changes_nothing_and_is_no_fault(
    name: str, reason: str, mode: str
) -> None:
    learner = learner_of(name, mode)
    before = weights(learner)
    result = update(learner, [episodes(ticket, successes=()) for ticket in range(3)])
    assert (result.samples, result.skipped, result.harmless) == (0, reason, True)
    assert same(before, weights(learner)) and learner.updates_done == 1
    bad = episodes(4)
    bad.rewards[0, 0] = np.nan
    if name == "grpo":
        result = update(learner, [bad, *GROUPS[1:]])
        assert (result.skipped, result.harmless) == ("a return of segment 4 is not finite", False)
        assert same(before, weights(learner))


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_nothing_after_a_rows_first_success_is_trained_where_the_environment_goes_on(name: str) -> None:
    segment = episodes(0)
    results = []
    for garbage in (0.0, 5.0):
        goes_on = dataclasses.replace(
            segment,
            terminated=np.zeros_like(segment.terminated),
            valid=np.ones_like(segment.valid),
            executed=np.where(segment.valid[..., None], segment.executed, True),
            rewards=np.nan_to_num(segment.rewards) + np.float32(garbage) * ~segment.valid,
            actions=segment.actions + np.float32(garbage) * ~segment.valid[..., None, None],
        )
        learner = learner_of(name, segments_per_update=1)
        samples = sampled(learner, goes_on)
        assert len(samples) == (2 + 4 if name == "rft" else 2 + T + 4 + T)
        update(learner, [goes_on], version=3)
        results.append(weights(learner))
    assert same(*results)


def test_rft_imitates_the_executed_actions_of_rows_that_succeeded() -> None:
    learner = learner_of("rft", learning_rate=0.0, minibatch_samples=1000, epochs=1)
    result = update(learner, GROUPS, version=3)
    policy, total, count = Toy(), 0.0, 0
    for segment in GROUPS:
        for row in np.flatnonzero(segment.success.any(0)):
            for t in np.flatnonzero(segment.valid[:, row]):
                mean = policy._heads(segment.observations[t].take([row]))[0].mean.detach().numpy()[0]
                for h in np.flatnonzero(segment.executed[t, row]):
                    error = np.abs(mean[h] - segment.actions[t, row, h])
                    total += np.where(error < 1, 0.5 * error**2, error - 0.5).sum() / A
                    count += 1
    assert result.metrics["imitation_loss"] == pytest.approx(total / count, rel=1e-5)
    assert result.samples == sum(int(s.valid[:, s.success.any(0)].sum()) for s in GROUPS)
    assert "policy_loss" not in result.metrics and "value_loss" not in result.metrics

    before = result.metrics["imitation_loss"]
    learner = learner_of("rft")
    for _ in range(5):
        result = update(learner, GROUPS, version=3)
    assert result.metrics["imitation_loss"] < 0.9 * before


def test_appo_trains_the_value_towards_vtrace_and_weighs_its_advantages() -> None:
    segments = [make_segment(ACTOR, ticket) for ticket in range(3)]
    options = {"vtrace_rho_cap": 0.9, "vtrace_gradient_rho_cap": 0.8}
    learner = learner_of("appo", options=options)
    loss, sums, samples = one_pass(learner, segments)
    policy, returns, gains, weighted = Toy(), [], [], []
    for segment in segments:
        assert segment.final is not None
        with torch.no_grad():
            values = torch.stack([policy._heads(seen)[1] for seen in segment.observations])
            final = policy._heads(segment.final)[1]
        successors = values[1:].clone()
        successors[segment.final_index[:, 0], segment.final_index[:, 1]] = final
        drift = np.where(segment.executed, log_probs(policy, segment) - segment.logprobs.sum(-1), 0.0).sum(-1)
        flags = (torch.from_numpy(array) for array in (segment.terminated, segment.truncated, segment.valid))
        rewards, algorithm = torch.from_numpy(segment.rewards), learner.algorithm
        traced = vtrace(
            torch.from_numpy(drift), rewards, values[:-1], successors, *flags, algorithm.gamma,
            algorithm.vtrace_lambda, 0.9, 0.8,
        )  # fmt: skip
        returns.append((traced.errors + values[:-1]).flatten())
        gains.append(traced.gains.flatten())
        weighted.append((traced.weights[..., None] * torch.from_numpy(segment.executed)).flatten(0, 1))
    torch.testing.assert_close(samples.returns, torch.cat(returns), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(samples.advantages, torch.cat(gains), rtol=1e-4, atol=1e-5)
    expected = -(torch.cat(weighted) * normalise(torch.cat(gains))[:, None]).sum() / torch.cat(weighted).gt(0).sum()
    assert float(sums["policy_loss"] / sums["shares"]) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
    value = losses.value_loss(samples.values, samples.values, samples.returns, 0.2, 10.0)
    assert float(loss.detach()) == pytest.approx(float(expected + 0.5 * value.total / value.elements), rel=1e-4)


def test_appo_on_policy_with_open_caps_is_ppo_with_one_step_targets() -> None:
    segments = [make_segment(Toy(), ticket) for ticket in range(3)]
    appo = learner_of("appo", options={"vtrace_lambda": 0.9})
    ppo = learner_of("ppo", options={"gae_lambda": 0.9})
    for segment in segments:
        torch.testing.assert_close(sampled(appo, segment).returns, sampled(ppo, segment).returns, rtol=1e-4, atol=1e-4)


def test_truncated_importance_sampling_has_the_gradient_of_its_equation() -> None:
    """Its weight is that of the weights as they are, also after some steps of the update."""
    learner = learner_of("ppo", options={"correction": "tis", "behaviour_weight_cap": 1.2, "value_coefficient": 0.0})
    moved = Toy()
    with torch.no_grad():
        moved.action.bias += 0.3
    loss, _, samples = one_pass(learner, GROUPS, policy=moved)
    got = torch.autograd.grad(loss, moved.log_std)[0]
    evaluation = moved.evaluate(samples.observations.gather(), samples.actions, {})
    new, old = evaluation.logprobs.sum(-1), samples.behaviour.sum(-1)
    weight = torch.minimum((new - old).exp(), torch.tensor(1.2)).detach()
    advantages = normalise(samples.advantages)[:, None]
    expected = -(weight * advantages * new)[samples.executed].mean()
    torch.testing.assert_close(got, torch.autograd.grad(expected, moved.log_std)[0], rtol=1e-4, atol=1e-6)


def test_without_correction_old_data_weighs_as_if_it_were_new() -> None:
    plain = learner_of("ppo", options={"correction": "none", "value_coefficient": 0.0})
    _, sums, samples = one_pass(plain, GROUPS)
    # r = 1 and w = 1: the mean of the advantages over executed actions.
    expected = -normalise(samples.advantages)[:, None].expand_as(samples.executed)[samples.executed].mean()
    assert float(sums["policy_loss"] / sums["shares"]) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_the_interpolated_proximal_policy_follows_the_versions(name: str) -> None:
    """Data of the version before: half-way between μ and π_θ. So r = √(π ÷ μ) and w = √(π ÷ μ) before any step."""
    learner = learner_of(name, options={"proximal": "interpolated", "clip": 1e3, "behaviour_weight_cap": 1e3})
    _, sums, samples = one_pass(learner, GROUPS)
    advantages = normalise(samples.advantages) if name == "ppo" else samples.advantages
    evaluation = Toy().evaluate(samples.observations.gather(), samples.actions, {})
    ratio = (evaluation.logprobs.sum(-1) - samples.behaviour.sum(-1)).exp().detach()
    terms = -ratio * advantages[:, None] * samples.weights[:, None]
    shares = samples.shares[:, None].expand_as(ratio)[samples.executed].sum()
    expected = terms[samples.executed].sum() / shares
    assert float(sums["policy_loss"] / sums["shares"]) == pytest.approx(float(expected), rel=1e-4)
    # Data of these weights: π_prox = μ, and w = 1.
    own = [dataclasses.replace(segment, versions=np.full(T, 3)) for segment in GROUPS]
    _, sums, _ = one_pass(learner, own)
    assert float(sums["importance"] / sums["elements"]) == pytest.approx(1.0, abs=1e-6)
    assert float(sums["importance_squared"] / sums["elements"]) == pytest.approx(1.0, abs=1e-6)


def test_where_neither_values_nor_a_proximal_policy_are_needed_nothing_is_evaluated_twice() -> None:
    samples = sum(int(segment.valid.sum()) for segment in GROUPS)
    for options, passes in (({"proximal": "interpolated"}, 1), ({}, 2)):
        policy = Toy()
        learner = make_learner(policy, {"name": "grpo"} | options, epochs=1)
        result = update(learner, GROUPS, version=3)
        assert policy.rows_evaluated == passes * samples
        assert ("act_evaluate_difference" in result.metrics) is False
        own = [dataclasses.replace(segment, versions=np.full(T, 3)) for segment in GROUPS]
        assert ("act_evaluate_difference" in update(learner, own, version=3).metrics) is (passes == 2)


def test_the_kl_to_the_reference_is_part_of_the_loss_and_the_reference_stays() -> None:
    plain, pulled = (learner_of("grpo", options={"reference_kl_coefficient": value}) for value in (0.0, 0.7))
    without, _, _ = one_pass(plain, GROUPS)
    reference = Toy(seed=2)
    samples = Samples.concatenate([sampled(pulled, segment, reference=reference) for segment in GROUPS])
    terms, sums = objective.evaluate(
        pulled.policy, pulled.algorithm, samples, samples.advantages, torch.device("cpu"), 3
    )
    evaluation = Toy().evaluate(samples.observations.gather(), samples.actions, {})
    distance = (samples.reference - evaluation.logprobs).sum(-1).detach()
    torch.testing.assert_close(
        samples.reference, reference.evaluate(samples.observations.gather(), samples.actions, {}).logprobs.detach()
    )
    k3 = distance.exp() - 1 - distance
    shares = samples.shares[:, None].expand_as(k3)
    expected = (shares * k3)[samples.executed].sum() / shares[samples.executed].sum()
    assert float(objective.mean(terms).detach() - without.detach()) == pytest.approx(0.7 * float(expected), rel=1e-4)
    assert float(sums["kl_reference"] / sums["elements"]) == pytest.approx(float(k3[samples.executed].mean()), rel=1e-4)

    assert pulled.reference is not None
    before = {name: tensor.clone() for name, tensor in pulled.reference.state_dict().items()}
    assert "kl_reference" in update(pulled, GROUPS, version=3).metrics
    assert same(before, pulled.reference.state_dict())


# ---- buffered and streaming


@pytest.mark.parametrize("granularity", ["action", "chunk", "token"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_streaming_has_the_gradient_of_one_buffered_minibatch(name: str, granularity: str) -> None:
    options: dict[str, Any] = {"entropy_coefficient": 0.05, "normalise_advantages": False, "granularity": granularity}
    options |= {"reference_kl_coefficient": 0.1, "imitation_coefficient": 0.2}
    gradients = []
    for trainer in (
        {"epochs": 1, "minibatch_samples": 1000},
        {"update": "streaming", "epochs": 1, "minibatch_samples": 1000},
    ):
        learner = make_learner(Toy(), {"name": name} | options, Toy(seed=2), max_grad_norm=1e9, **trainer)
        result = update(learner, [GROUPS[i] for i in (2, 0, 1)], version=3)
        assert result.metrics["optimiser_steps"] == 1
        state = learner.state().optimiser
        gradients.append({key: tensor for key, tensor in state.items() if key.endswith("/exp_avg")})
    assert gradients[0].keys() == gradients[1].keys()
    assert ("value.weight/exp_avg" in gradients[0]) is (name not in WITHOUT_CRITIC)
    for key, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["appo", "ppo"])
def test_algorithms_with_a_critic_learn_the_toy_task(name: str) -> None:
    learner = make_learner(algorithm={"name": name})
    train(learner, updates=12)
    before, after = (make_segment(policy, ticket=1000).rewards.mean() for policy in (Toy(), learner.policy))
    assert before < -0.5 and after > -0.3, (before, after)


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
def test_algorithms_without_a_critic_learn_to_succeed(name: str) -> None:
    """A row succeeds where the first action dim of its first action is positive."""

    def success(segment: Segment) -> Segment:
        won = segment.actions[0, :, 0, 0] > 0
        rewards, flags = segment.rewards.copy(), np.zeros_like(segment.success)
        rewards[0], flags[0] = won, won
        return dataclasses.replace(
            segment, rewards=rewards, success=flags, terminated=flags, truncated=~flags, final=None,
            final_index=np.zeros((0, 2), dtype=np.int64),
        )  # fmt: skip

    def rate(policy: Toy) -> float:
        made = [success(make_episodes(policy, ticket, (1,) * 8, ())) for ticket in range(500, 530)]
        return float(np.mean([segment.success[0] for segment in made]))

    learner = make_learner(Toy(), {"name": name}, segments_per_update=4)
    before = rate(Toy())
    for number in range(15):
        update(learner, [success(make_episodes(learner.policy, 4 * number + i, (1,) * 8, ())) for i in range(4)])
    assert rate(learner.policy) > min(before + 0.25, 0.95), (before, rate(learner.policy))


# ---- schedules, early stop, imitation


def test_learning_rates_fall_linearly_and_stay_where_they_end() -> None:
    moved = []
    learner = make_learner(learning_rate_decay={"to": 0.0, "at_update": 2})
    for number in range(4):
        before = weights(learner)
        train(learner)
        rates = [group["lr"] for group in learner._optimiser.param_groups]
        assert rates == pytest.approx([1e-2 * max(0.0, 1 - number / 2)] * 2)
        moved.append(not same(before, weights(learner)))
    assert moved == [True, True, False, False]


def test_the_entropy_bonus_falls_linearly() -> None:
    algorithm = Algorithm.model_validate({"entropy_coefficient": 0.2, "entropy_decay": {"to": 0.25, "at_update": 4}})
    got = [algorithm.at(update).entropy_coefficient for update in (0, 1, 2, 4, 9)]
    assert got == pytest.approx([0.2, 0.1625, 0.125, 0.05, 0.05])
    decaying = {"entropy_coefficient": 0.2, "entropy_decay": {"to": 0.0, "at_update": 1}}
    learner, other = learner_of("ppo", options=decaying), learner_of("ppo", options={"entropy_coefficient": 0.2})
    first = [update(one, GROUPS, version=3) for one in (learner, other)]
    assert first[0] == first[1] and same(weights(learner), weights(other))
    none = learner_of("ppo")
    none.load_state(learner.state())
    assert update(learner, GROUPS, version=3) == update(none, GROUPS, version=3)
    assert same(weights(learner), weights(none))


@pytest.mark.parametrize("mode", ["buffered", "streaming"])
def test_an_update_ends_before_the_step_whose_samples_are_too_far(mode: str) -> None:
    whole = update(learner_of("ppo", mode), GROUPS, version=3)
    learner = learner_of("ppo", mode, {"max_kl": 1e-9})
    result = update(learner, GROUPS, version=3)
    # The first step is made, since its samples are where the update began; those of the second are too far.
    assert whole.metrics["optimiser_steps"] == (4 if mode == "buffered" else 3)
    assert result.metrics["optimiser_steps"] == 1 and result.skipped is None
    assert same(weights(learner), stepped_once(mode))
    far = learner_of("ppo", mode, {"max_kl": 1e9})
    assert update(far, GROUPS, version=3) == whole


def stepped_once(mode: str) -> dict[str, Tensor]:
    """The weights after the first optimiser step of an update."""
    learner = learner_of("ppo", mode)
    found: list[dict[str, Tensor]] = []
    step = learner._step

    def watched(place: str) -> float:
        norm = step(place)
        found.append(weights(learner))
        return norm

    learner._step = watched  # type: ignore[method-assign]
    update(learner, GROUPS, version=3)
    return found[0]


@pytest.mark.parametrize("mode", ["buffered", "streaming"])
def test_demonstrations_add_their_gradient_once_per_optimiser_step(mode: str) -> None:
    trainer = {"epochs": 1, "optimiser_steps": 1, "minibatch_samples": 1000, "max_grad_norm": 1e9}
    gradients = []
    for coefficient in (0.0, 0.4):
        learner = learner_of("ppo", mode, {"imitation_coefficient": coefficient}, **trainer)
        result = update(learner, GROUPS, version=3)
        gradients.append(learner.state().optimiser)
    policy, known = Toy(), make_demonstrations()
    loss = policy.imitation_loss(known.observations, known.actions, known.valid)
    assert result.metrics["demonstration_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    loss.backward()
    for name in ("trunk.weight", "action.weight", "action.bias"):
        parameter = policy.get_parameter(name)
        assert parameter.grad is not None
        added = (gradients[1][f"{name}/exp_avg"] - gradients[0][f"{name}/exp_avg"]) / (1 - 0.9)
        torch.testing.assert_close(added, 0.4 * parameter.grad, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(gradients[1]["value.weight/exp_avg"], gradients[0]["value.weight/exp_avg"])


def test_each_optimiser_step_imitates_other_demonstrations_and_a_critics_warm_up_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    learner = learner_of("ppo", options={"imitation_coefficient": 0.4}, critic_warmup_updates=1)
    seen: list[float] = []
    real = learner.policy.imitation_loss

    def imitation_loss(observations: Any, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        seen.append(float(observations.state.sum()))
        return real(observations, actions, valid)

    monkeypatch.setattr(learner.policy, "imitation_loss", imitation_loss)
    assert "demonstration_loss" not in update(learner, GROUPS, version=3).metrics and not seen
    steps = update(learner, GROUPS, version=3).metrics["optimiser_steps"]
    assert len(seen) == len(set(seen)) == steps == 4


class Drawing(Toy):
    """Its imitation loss is that of noisy labels."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def imitation_loss(self, observations: Observations, actions: np.ndarray, valid: np.ndarray) -> Tensor:
        noise = torch.randn(actions.shape)
        self.drawn.append(float(noise.flatten()[0]))
        return super().imitation_loss(observations, actions + noise.numpy(), valid)


@pytest.mark.parametrize("mode", ["buffered", "streaming"])
@pytest.mark.parametrize("options", [{"name": "rft"}, {"name": "ppo", "imitation_coefficient": 0.4}], ids=str)
def test_what_an_imitation_loss_draws_is_the_same_again_and_new_in_each_step(
    options: dict[str, Any], mode: str
) -> None:
    results = []
    for seed in (1, 2):
        learner = learner_of(options["name"], mode, options, policy=Drawing())
        torch.manual_seed(seed)
        expected = torch.random.get_rng_state()
        for _ in range(2):
            update(learner, GROUPS, version=3)
        assert torch.equal(torch.random.get_rng_state(), expected), "and what others draw is left alone"
        assert isinstance(learner.policy, Drawing)
        drawn = learner.policy.drawn
        assert len(drawn) == len(set(drawn)) >= 4
        results.append(weights(learner))
    assert same(*results)


def test_algorithms_without_a_critic_leave_the_value_head_alone_and_have_no_warm_up() -> None:
    for name in WITHOUT_CRITIC:
        learner = learner_of(name, critic_warmup_updates=3)
        before = weights(learner)
        update(learner, GROUPS, version=3)
        moved = {key for key, tensor in weights(learner).items() if not torch.equal(tensor, before[key])}
        assert not learner.warming_up and "value.weight" not in moved and "action.weight" in moved


def test_gae_is_what_ppo_is_credited_with() -> None:
    segment = make_segment(ACTOR, 0)
    learner = learner_of("ppo")
    with torch.no_grad():
        values = torch.stack([Toy()._heads(seen)[1] for seen in segment.observations])
        assert segment.final is not None
        final = Toy()._heads(segment.final)[1]
    successors = values[1:].clone()
    successors[segment.final_index[:, 0], segment.final_index[:, 1]] = final
    flags = (torch.from_numpy(array) for array in (segment.terminated, segment.truncated, segment.valid))
    expected = gae(torch.from_numpy(segment.rewards), values[:-1], successors, *flags, 0.97, 0.95)
    torch.testing.assert_close(sampled(learner, segment).advantages, expected.flatten(), rtol=1e-4, atol=1e-5)
