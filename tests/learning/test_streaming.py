"""Streaming: a segment's gradient is computed when the segment comes, and all are divided once."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy import NO_ROWS, Failing, K, T, Toy, make_learner, make_segment, same, sampled, train, update, weights

from vla_stream.learning import checkpoint, objective
from vla_stream.learning.samples import Samples
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import RUNNING_MOMENTS, Learner, LearnerState, UpdateResult

RAW = {"normalise_advantages": False, "entropy_coefficient": 0.05}
UNCLIPPED = {"max_grad_norm": 1e9}


def streaming(policy: Toy | None = None, algorithm: dict[str, object] | None = None, **trainer: object) -> Learner:
    """By default four segments per update, in micro-batches of 7."""
    defaults = {"update": "streaming", "epochs": 1, "segments_per_update": 4, "minibatch_samples": 7}
    return make_learner(policy, algorithm, **defaults | trainer)


def ragged(ticket: int, held: int) -> Segment:
    """Off-policy, and the last `held` rows end in chunk step 0 after its first action: held from then on."""
    segment = make_segment(Toy(seed=1), ticket)
    rows = slice(K - held, K)
    segment.valid[1:, rows], segment.executed[0, rows, 1], segment.terminated[0, rows] = False, False, True
    return segment


# 20, 16, 12 and 8 samples, of ever fewer executed actions each: what divides the loss terms differs.
SEGMENTS = [ragged(ticket, held) for ticket, held in enumerate((0, 1, 2, 3))]


def gradients(learner: Learner) -> dict[str, Tensor]:
    """What the first optimiser step of a learner was made of: Adam's first moments, which begin at 0 (β₁ = .9)."""
    state = learner.state().optimiser
    return {name: tensor / (1 - 0.9) for name, tensor in state.items() if name.endswith("/exp_avg")}


def close(got: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> bool:
    """The error of each parameter's gradient is small beside that gradient."""
    assert got.keys() == expected.keys() and all(tensor.norm() > 1e-3 for tensor in expected.values())
    return all(float((got[name] - expected[name]).norm() / expected[name].norm()) < relative for name in got)


@pytest.mark.parametrize("granularity", ["action", "chunk", "token"])
@pytest.mark.parametrize("warming_up", [False, True])
def test_the_gradient_is_that_of_the_buffered_update_in_one_minibatch(granularity: str, warming_up: bool) -> None:
    algorithm = RAW | {"granularity": granularity}
    trainer: dict[str, Any] = UNCLIPPED | {"critic_warmup_updates": int(warming_up)}
    buffered = make_learner(
        Toy().double(), algorithm, epochs=1, segments_per_update=4, minibatch_samples=1000, **trainer
    )
    expected = update(buffered, SEGMENTS)
    learner = streaming(Toy().double(), algorithm, **trainer)
    got = update(learner, SEGMENTS)
    assert got.samples == expected.samples == 56 and got.metrics["optimiser_steps"] == 1
    assert learner.policy.state_dict()["log_std"].dtype == torch.float64
    assert close(gradients(learner), gradients(buffered), relative=1e-6)
    assert len(gradients(learner)) == (2 if warming_up else 7)
    assert got.metrics == pytest.approx(expected.metrics, rel=1e-6, abs=1e-9)


def test_neither_order_of_arrival_nor_size_of_the_parts_changes_the_gradient_beyond_rounding() -> None:
    results = []
    for order, part in itertools.product(((0, 1, 2, 3), (3, 1, 0, 2)), (3, 1000)):
        learner = streaming(Toy().double(), RAW, minibatch_samples=part, **UNCLIPPED)
        update(learner, [SEGMENTS[i] for i in order])
        results.append(gradients(learner))
    assert all(close(result, results[0], relative=1e-12) for result in results[1:])


def test_a_gradient_is_there_before_the_last_segment_is_and_no_weight_has_moved() -> None:
    policy = Toy()
    learner = streaming(policy, RAW)
    before = weights(learner)
    learner.add(SEGMENTS[0])
    evaluated = policy.rows_evaluated
    assert same(before, weights(learner))
    for segment in SEGMENTS[1:]:
        learner.add(segment)
    rest, policy.rows_evaluated = policy.rows_evaluated - evaluated, 0
    learner.finish(version=0)
    assert policy.rows_evaluated == 0, "nothing is left to compute"
    # Each sample once without gradients and once with; beside them what only bootstraps a return.
    assert evaluated == 2 * 20 + 3 + 2 and rest >= 2 * 36
    assert not same(before, weights(learner))


def test_each_share_in_order_of_arrival_makes_a_step_against_the_weights_that_the_update_started_with() -> None:
    order = [SEGMENTS[i] for i in (2, 0, 3, 1)]
    tight = RAW | {"clip": 0.02}
    learner = streaming(algorithm=tight, optimiser_steps=2)
    result = update(learner, order)
    assert result.metrics["optimiser_steps"] == 2 and result.metrics["clip_fraction"] > 0

    policy = Toy()
    samples = [sampled(learner, segment, policy) for segment in order]
    optimiser = torch.optim.Adam([p for group in policy.parameter_groups().values() for p in group], 1e-2, eps=1e-5)
    for share in (samples[:2], samples[2:]):
        batch = Samples.concatenate(share)
        terms, _ = objective.evaluate(policy, learner.algorithm, batch, batch.advantages, torch.device("cpu"), 0)
        optimiser.zero_grad()
        objective.mean(terms).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), learner.trainer.max_grad_norm)
        optimiser.step()
    for name, tensor in weights(learner).items():
        torch.testing.assert_close(tensor, policy.state_dict()[name], rtol=1e-4, atol=1e-5)

    other = streaming(algorithm=tight, optimiser_steps=2)
    update(other, SEGMENTS)
    assert not same(weights(learner), weights(other))


def test_with_one_step_per_update_nothing_is_clipped_and_with_more_the_ratio_is_to_the_first_weights() -> None:
    one, more = (train(streaming(segments_per_update=3, optimiser_steps=steps)).metrics for steps in (1, 3))
    assert one["clip_fraction"] == 0.0 and one["kl_proximal"] < 1e-9
    assert more["kl_proximal"] > 1e-5 and more["first_ratio_error"] < 1e-5
    assert one["act_evaluate_difference"] < 1e-5 and more["act_evaluate_difference"] < 1e-5


def test_a_share_without_a_valid_chunk_step_makes_no_step() -> None:
    nothing = dataclasses.replace(make_segment(Toy(), 9), final=None, final_index=NO_ROWS)
    nothing.valid[:] = False
    learner = streaming(algorithm=RAW, segments_per_update=2, optimiser_steps=2)
    assert update(learner, [nothing, SEGMENTS[0]]).metrics["optimiser_steps"] == 1
    alone = streaming(algorithm=RAW, segments_per_update=1)
    update(alone, [SEGMENTS[0]])
    assert same(weights(learner), weights(alone))
    before = weights(learner)
    assert update(learner, [nothing, nothing]) == UpdateResult(1, 0, "no valid chunk step in any segment")
    assert same(before, weights(learner))


def test_it_learns_the_toy_task() -> None:
    learner = streaming(segments_per_update=3, optimiser_steps=3)
    train(learner, updates=30)
    before, after = (make_segment(policy, ticket=1000).rewards.mean() for policy in (Toy(), learner.policy))
    assert before < -0.5 and after > -0.3, (before, after)


# ---- advantages


def test_advantages_are_scaled_by_earlier_updates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Tensor] = []
    real = objective.evaluate

    def evaluate(policy: Any, algorithm: Any, samples: Samples, advantages: Tensor, *rest: Any) -> Any:
        used.append(advantages)
        return real(policy, algorithm, samples, advantages, *rest)

    monkeypatch.setattr(objective, "evaluate", evaluate)
    learner = streaming(segments_per_update=2)
    raw = []
    for number in range(2):
        segments = [SEGMENTS[2 * number], SEGMENTS[2 * number + 1]]
        raw.append(torch.cat([sampled(learner, segment).advantages for segment in segments]))
        used.clear()
        update(learner, segments)
        mean, std = (0.0, 1.0) if number == 0 else (raw[0].double().mean(), raw[0].double().std(correction=0))
        torch.testing.assert_close(torch.cat(used).double(), (raw[-1].double() - mean) / std, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(torch.cat(used), raw[1], atol=0.01)


def test_a_learner_restored_from_disk_goes_on_with_its_running_moments(tmp_path: Path) -> None:
    learner = streaming(segments_per_update=3)
    train(learner, updates=2)
    state = learner.state()
    path = checkpoint.save(tmp_path, 2, 2, state.policy, state.optimiser, {"trained": 0, "skipped": 0})
    expected, expected_state = train(learner), learner.state()

    loaded = checkpoint.load(path)
    moments = loaded.optimiser.pop(RUNNING_MOMENTS)
    for extra, equal in (({RUNNING_MOMENTS: moments}, True), ({}, False)):
        restored = streaming(Toy(seed=5), segments_per_update=3)
        restored.load_state(LearnerState(loaded.update, loaded.policy, loaded.optimiser | extra))
        got, got_state = train(restored), restored.state()
        assert (got == expected) is equal
        assert same(got_state.policy, expected_state.policy) is equal
        assert same(got_state.optimiser, expected_state.optimiser) is equal


def test_the_checkpoint_of_a_buffered_run_can_be_gone_on_with_in_streaming_and_back() -> None:
    buffered, learner = make_learner(), streaming(segments_per_update=3)
    train(buffered)
    learner.load_state(buffered.state())
    train(learner)
    buffered.load_state(learner.state())
    assert train(buffered).skipped is None and buffered.updates_done == 3


# ---- what fails


@pytest.mark.parametrize("steps", [1, 2])
def test_a_segment_with_nan_is_named_and_the_whole_update_changes_nothing(steps: int) -> None:
    learner = streaming(optimiser_steps=steps)
    update(learner, SEGMENTS)
    before = learner.state()
    bad = make_segment(Toy(), 7)
    bad.rewards[0, 0] = np.nan
    result = update(learner, [*SEGMENTS[:2], bad, SEGMENTS[3]])
    assert result == UpdateResult(1, 64, "a return of segment 7 is not finite")
    after = learner.state()
    assert same(before.policy, after.policy) and same(before.optimiser, after.optimiser)
    assert after.updates_done == 2 and update(learner, SEGMENTS).skipped is None


@pytest.mark.parametrize(
    ("steps", "fault", "reason"),
    [
        (1, "loss", "the loss is nan in segment 3"),
        (2, "loss", "the loss is nan in segment 3"),
        (1, "gradient", "the gradient's norm is nan in optimiser step 1"),
        (2, "gradient", "the gradient's norm is nan in optimiser step 2"),
        (4, "gradient", "the gradient's norm is nan in optimiser step 4"),
    ],
)
def test_an_update_that_fails_at_its_last_segment_leaves_weights_and_optimiser_as_they_were(
    steps: int, fault: str, reason: str
) -> None:
    # Four good passes in the first update, three in the second.
    learner = streaming(Failing(7, fault), optimiser_steps=steps, minibatch_samples=1000)
    assert update(learner, SEGMENTS).skipped is None
    before = learner.state()
    assert update(learner, SEGMENTS) == UpdateResult(1, 56, reason)
    after = learner.state()
    assert same(before.policy, after.policy) and same(before.optimiser, after.optimiser)


@pytest.mark.parametrize("steps", [1, 2])
def test_what_was_discarded_leaves_nothing_behind(steps: int) -> None:
    learner, other = streaming(optimiser_steps=steps), streaming(optimiser_steps=steps)
    before = learner.state()
    for segment in SEGMENTS[:3]:
        learner.add(segment)
    assert same(before.policy, weights(learner)) is (steps == 1), "the first share's step was made"
    learner.discard()
    after = learner.state()
    assert same(before.policy, after.policy) and same(before.optimiser, after.optimiser)
    again = [ragged(ticket, held=1) for ticket in range(10, 14)]
    assert update(learner, again) == update(other, again)
    assert same(weights(learner), weights(other))


def test_samples_and_actions_per_sample_are_as_ragged_as_the_tests_need() -> None:
    counts = [(int(s.valid.sum()), int(s.executed[s.valid].sum())) for s in SEGMENTS]
    assert [samples for samples, _ in counts] == [20, 16, 12, 8] and T == 5
    assert len({round(actions / samples, 3) for samples, actions in counts}) == 4
