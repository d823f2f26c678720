"""The learner: one update of a toy policy (linear, Gaussian) on hand-made segments."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import NO_ROWS, A, Failing, K, T, Toy, make_learner, make_segment, same, sampled, train, update, weights

from vla_stream.errors import InputError
from vla_stream.learning import checkpoint, losses
from vla_stream.learning.advantages import normalise
from vla_stream.learning.samples import Samples
from vla_stream.learning.update import LearnerState, UpdateResult
from vla_stream.policies.partly_trained import PartlyTrained


def test_seeded_toy_run_gives_the_pinned_losses_and_gets_better() -> None:
    learner = make_learner()
    first, last = train(learner), train(learner, updates=9)
    assert first.samples == last.samples == 60 and first.metrics["optimiser_steps"] == 12
    pinned = {"policy_loss": -0.000681, "value_loss": 0.532713, "entropy": 1.747009, "gradient_norm": 0.767627}
    assert {name: first.metrics[name] for name in pinned} == pytest.approx(pinned, abs=2e-6)
    # Ten updates of 12 steps let the rounding of another machine's kernels grow.
    pinned = {"policy_loss": 0.06226, "value_loss": 0.30128, "entropy": 0.87942, "gradient_norm": 1.17181}
    assert {name: last.metrics[name] for name in pinned} == pytest.approx(pinned, abs=1e-3)
    before, after = (make_segment(policy, ticket=1000).rewards.mean() for policy in (Toy(), learner.policy))
    assert before < -0.5 and after > -0.25, (before, after)


def test_samples_have_the_returns_of_a_slow_loop_and_nothing_else_is_evaluated() -> None:
    policy = Toy()
    segment = make_segment(policy, ticket=1)
    # Row 3 is one of an episode segment: truncated in chunk 1 with nothing reset, held afterwards.
    segment.truncated[1, 3], segment.valid[2:, 3], segment.rewards[2:, 3] = True, False, np.nan
    learner = make_learner(policy)
    assert segment.final is not None
    with torch.no_grad():
        values = torch.stack([policy._heads(observations)[1] for observations in segment.observations]).numpy()
        final = dict(zip([(2, 2), (4, 0)], policy._heads(segment.final)[1].tolist(), strict=True))
    policy.rows_evaluated = 0
    samples = sampled(learner, segment)
    # 17 valid chunk steps; 2 rows that close the segment and go on, and one held; the 2 rows of `final`.
    assert len(samples) == 17 and policy.rows_evaluated == 17 + 2 + 1 + 2

    gamma, lam = learner.algorithm.gamma, learner.algorithm.gae_lambda
    expected = []
    for t in range(T):
        for row in range(K):
            advantage, weight = 0.0, 1.0
            for s in range(t, T):
                following = final.get((s, row), values[s + 1, row] * (not segment.terminated[s, row]))
                advantage += weight * (segment.rewards[s, row] + gamma * following - values[s, row])
                weight *= gamma * lam
                if segment.terminated[s, row] or segment.truncated[s, row]:
                    break
            if segment.valid[t, row]:
                expected.append((values[t, row], advantage, advantage + values[t, row]))
    got = torch.stack([samples.values, samples.advantages, samples.returns], 1).numpy()
    np.testing.assert_allclose(got, np.array(expected), atol=1e-5)


def test_every_array_of_a_sample_stays_together() -> None:
    policy = Toy()
    segment = make_segment(policy, ticket=1)
    states = np.stack([observations.state for observations in segment.observations[:T]])
    segment = dataclasses.replace(segment, extras={"states": states}, versions=np.arange(T))
    segment.valid[3:, 0] = False
    samples = sampled(make_learner(policy), segment)
    np.testing.assert_array_equal(samples.extras["states"], samples.observations.gather().state)
    np.testing.assert_array_equal(samples.actions, segment.actions[segment.valid])
    np.testing.assert_array_equal(samples.versions, np.nonzero(segment.valid)[0])
    np.testing.assert_array_equal(samples.executed, segment.executed[segment.valid])
    np.testing.assert_allclose(samples.proximal, samples.behaviour, atol=1e-5)


def test_the_order_of_arrival_does_not_change_a_bit() -> None:
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        learner = make_learner()
        segments = [make_segment(learner.policy, ticket=ticket) for ticket in range(3)]
        update(learner, [segments[i] for i in order])
        results.append(weights(learner))
    assert same(*results)


def test_critic_warm_up_moves_the_value_head_only_and_then_ends() -> None:
    learner = make_learner(critic_warmup_updates=2)
    before = weights(learner)
    assert learner.warming_up
    result = train(learner, updates=2)
    after = weights(learner)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {"value.weight", "value.bias"}
    assert result.skipped is None and learner.updates_done == 2 and not learner.warming_up
    # No moments of the policy either: its first step must not be made of the critic's gradients.
    assert {key.split("/")[0] for key in learner.state().optimiser} == moved
    train(learner)
    assert not torch.equal(weights(learner)["action.weight"], after["action.weight"])


def test_frozen_parameters_stay_as_they_are() -> None:
    learner = make_learner()
    train(learner)
    assert torch.equal(weights(learner)["frozen"], torch.ones(3))


def test_learning_rate_0_changes_nothing() -> None:
    learner = make_learner(learning_rate=0.0, value_learning_rate=0.0)
    before = weights(learner)
    result = train(learner, updates=3)
    assert same(before, weights(learner))
    assert result.skipped is None and result.metrics["gradient_norm"] > 0


def test_each_group_has_its_own_learning_rate() -> None:
    learner = make_learner(learning_rate=0.0)
    before = weights(learner)
    train(learner)
    moved = {name for name, tensor in weights(learner).items() if not torch.equal(before[name], tensor)}
    assert moved == {"value.weight", "value.bias"}


@pytest.mark.parametrize(("name", "reason"), [("rewards", "return"), ("logprobs", "behaviour log-prob")])
def test_f46_a_segment_with_nan_is_named_and_nothing_is_trained(name: str, reason: str) -> None:
    learner = make_learner()
    train(learner)
    before = learner.state()
    segments = [make_segment(learner.policy, ticket=ticket) for ticket in (4, 5, 6)]
    getattr(segments[1], name)[0, 0] = np.nan
    result = update(learner, segments, version=1)
    assert result == UpdateResult(1, 60, f"a {reason} of segment 5 is not finite")
    after = learner.state()
    assert same(before.policy, after.policy) and same(before.optimiser, after.optimiser)
    assert after.updates_done == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("loss", "the loss is nan in epoch 2, optimiser step 6"),
        ("gradient", "the gradient's norm is nan in epoch 2, optimiser step 6"),
    ],
)
def test_f46_an_update_that_fails_half_way_leaves_weights_and_optimiser_as_they_were(fault: str, reason: str) -> None:
    # 12 optimiser steps in the first update, 5 good ones in the second.
    learner = make_learner(Failing(17, fault))
    train(learner)
    before = learner.state()
    result = train(learner)
    assert result == UpdateResult(1, 60, reason)
    after = learner.state()
    assert same(before.policy, after.policy) and same(before.optimiser, after.optimiser)
    assert after.updates_done == 2


def test_a_failed_first_update_leaves_no_moments_behind() -> None:
    learner = make_learner(Failing(3, "loss"))
    assert train(learner).skipped is not None
    assert not learner.state().optimiser


def test_segments_without_a_valid_chunk_step_are_nothing_to_learn_from() -> None:
    learner = make_learner()
    segment = make_segment(learner.policy, ticket=0)
    segment.valid[:] = False
    before = weights(learner)
    result = update(learner, [dataclasses.replace(segment, final=None, final_index=NO_ROWS)])
    assert result == UpdateResult(0, 0, "no valid chunk step in any segment")
    assert same(before, weights(learner))


def test_a_chunk_step_without_any_executed_action_is_named() -> None:
    learner = make_learner()
    segment = make_segment(learner.policy, ticket=8)
    segment.executed[2, 1] = False
    result = update(learner, [segment])
    assert result.skipped == "a valid chunk step of segment 8 has no executed action"


def test_segments_that_were_discarded_are_not_trained() -> None:
    results = []
    for forgotten in ([], [7, 8]):
        learner = make_learner()
        for ticket in forgotten:
            learner.add(make_segment(learner.policy, ticket))
        learner.discard()
        results.append((train(learner), weights(learner)))
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])


@pytest.mark.parametrize("granularity", ["action", "chunk", "token"])
def test_actions_that_were_not_executed_do_not_influence_the_weights(granularity: str) -> None:
    results = []
    for change in (0.0, 0.5):
        learner = make_learner(algorithm={"granularity": granularity})
        segment = make_segment(learner.policy, ticket=0)
        segment.actions[~segment.executed] += change
        segment.logprobs[~segment.executed] -= change
        update(learner, [segment])
        results.append(weights(learner))
    assert same(*results)


def test_granularities_train_differently() -> None:
    results = []
    for granularity in ("action", "chunk", "token"):
        learner = make_learner(algorithm={"granularity": granularity})
        train(learner)
        results.append(weights(learner)["action.weight"])
    assert not any(torch.equal(results[i], results[i - 1]) for i in range(3))


def test_the_first_minibatch_of_on_policy_data_has_ratio_1() -> None:
    metrics = train(make_learner(), updates=2).metrics
    assert metrics["first_ratio_error"] < 1e-4 and metrics["first_behaviour_ratio_error"] < 1e-4
    assert metrics["effective_sample_size"] == pytest.approx(1.0, abs=1e-6) and metrics["capped_fraction"] == 0.0
    assert metrics["act_evaluate_difference"] < 1e-5


def test_metrics_of_off_policy_data_are_those_of_their_definitions() -> None:
    learner = make_learner(learning_rate=0.0, value_learning_rate=0.0, minibatch_samples=1000)
    segments = [make_segment(Toy(seed=1), ticket=ticket) for ticket in range(3)]
    samples = Samples.concatenate([sampled(learner, segment) for segment in segments])
    metrics = update(learner, segments, version=5).metrics
    drift = (samples.proximal - samples.behaviour).sum(-1)[samples.executed].double()
    weight = drift.exp().clamp(max=learner.algorithm.behaviour_weight_cap)
    assert metrics["kl_behaviour"] == pytest.approx(float((drift.exp() - 1 - drift).mean()), rel=1e-5)
    assert metrics["first_behaviour_ratio_error"] == pytest.approx(float((drift.exp() - 1).abs().mean()), rel=1e-5)
    expected_size = float(weight.mean() ** 2 / weight.square().mean())
    assert metrics["effective_sample_size"] == pytest.approx(expected_size, rel=1e-5) and expected_size < 0.95
    assert metrics["capped_fraction"] == pytest.approx(float((drift > np.log(2.0)).double().mean()), rel=1e-5)
    unexplained = (samples.returns - samples.values).var() / samples.returns.var()
    assert metrics["explained_variance"] == pytest.approx(float(1 - unexplained), rel=1e-4)
    # The weights do not move: nothing is clipped against π_prox.
    assert metrics["kl_proximal"] == pytest.approx(0.0, abs=1e-6) and metrics["clip_fraction"] == 0.0
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert "act_evaluate_difference" not in metrics


def test_act_and_evaluate_are_compared_on_chunk_steps_of_this_version_only() -> None:
    learner = make_learner()
    segment = dataclasses.replace(make_segment(learner.policy, ticket=0), versions=np.array([2, 2, 3, 3, 3]))
    segment.logprobs[:2] -= 1.0
    segment.logprobs[2:] += 0.125
    result = update(learner, [segment], version=3)
    assert result.metrics["act_evaluate_difference"] == pytest.approx(0.25, abs=1e-5)


def test_a_batch_split_in_parts_gives_the_gradient_of_the_whole() -> None:
    policy = Toy().double()
    single = make_learner()
    samples = sampled(single, make_segment(Toy(), ticket=0))
    samples = dataclasses.replace(samples, advantages=normalise(samples.advantages))

    def sums(part: Samples) -> tuple[losses.Sum, losses.Sum]:
        observations = part.observations.gather()
        observations = dataclasses.replace(observations, state=observations.state.astype(np.float64))
        evaluation = policy.evaluate(observations, part.actions.astype(np.float64), part.extras)
        mask = losses.element_mask(part.executed, A, "action")
        new, proximal, behaviour = (
            losses.to_elements(values, part.executed, "action")
            for values in (evaluation.logprobs, part.proximal, part.behaviour)
        )
        advantages = losses.per_element(part.advantages, mask)
        clipped = losses.clipped_losses(new, proximal, advantages, mask, clip=0.2)
        weights = losses.behaviour_weights(proximal, behaviour, cap=2.0)
        return (
            losses.weighted_sum(clipped, mask, weights, torch.ones_like(weights)),
            losses.value_loss(evaluation.values, part.values, part.returns, clip=0.2, delta=10.0),
        )

    gradients = []
    for split in ([np.arange(20)], [np.arange(3), np.arange(3, 7), np.arange(7, 20)]):
        policy.zero_grad()
        terms = [sums(samples.take(index)) for index in split]
        elements = [sum(int(term[i].elements) for term in terms) for i in range(2)]
        for policy_term, value_term in terms:
            (policy_term.total / elements[0] + value_term.total / elements[1]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)
    assert gradients[0].norm() > 0.1


def test_a_learner_restored_from_disk_makes_the_identical_next_update(tmp_path: Path) -> None:
    learner = make_learner()
    train(learner, updates=2)
    state = learner.state()
    path = checkpoint.save(tmp_path, 2, 2, state.policy, state.optimiser, {"trained": 0, "skipped": 0})
    expected, expected_state = train(learner), learner.state()

    restored = make_learner(Toy(seed=5))
    loaded = checkpoint.load(path)
    restored.load_state(LearnerState(loaded.update, loaded.policy, loaded.optimiser))
    got, got_state = train(restored), restored.state()
    assert got == expected
    assert same(got_state.policy, expected_state.policy) and same(got_state.optimiser, expected_state.optimiser)


def test_a_state_is_a_copy_that_later_updates_leave_alone() -> None:
    learner = make_learner()
    train(learner)
    state = learner.state()
    copy = {name: tensor.clone() for name, tensor in (state.policy | state.optimiser).items()}
    train(learner)
    assert same(copy, state.policy | state.optimiser)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value.bias": torch.zeros(2)}, r"value\.bias holds \(2,\), expected \(1,\)"),
        ({"head.weight": torch.zeros(2)}, r"head\.weight holds \(2,\), expected nothing"),
    ],
)
def test_f45_the_checkpoint_of_another_policy_is_refused_before_anything_changes(
    change: dict[str, Tensor], message: str
) -> None:
    learner = make_learner()
    train(learner)
    before = learner.state()
    with pytest.raises(InputError, match=message):
        learner.load_state(dataclasses.replace(before, policy=before.policy | change, updates_done=9))
    strange = before.optimiser | {"head.weight/exp_avg": torch.zeros(2)}
    with pytest.raises(InputError, match=r"optimiser state of head\.weight"):
        learner.load_state(LearnerState(9, {n: t + 1 for n, t in before.policy.items()}, strange))
    after = learner.state()
    assert same(before.policy, after.policy) and after.updates_done == 1


class Adapted(Toy, PartlyTrained):
    """Its frozen parameter is its base."""

    def __init__(self, base: float) -> None:
        super().__init__()
        self.frozen.data.fill_(base)
        self.close_base()


def test_a_checkpoint_of_another_base_is_refused_before_anything_changes() -> None:
    theirs, learner = make_learner(Adapted(base=2.0)), make_learner(Adapted(base=1.0))
    train(theirs)
    before = learner.state()
    with pytest.raises(InputError, match=r"another base.*; use the same policy\.options\.checkpoint"):
        learner.load_state(theirs.state())
    assert same(before.policy, learner.state().policy) and learner.state().optimiser == {}
    assert learner.updates_done == 0
