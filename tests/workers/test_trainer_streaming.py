"""The trainer with `update: streaming`, step by step: training overlaps the rollout, and nothing is trained twice."""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from live_run import Run
from torch import Tensor
from trainer_bench import CPU, SPECIFICATION, Bench, K, Make, T

from vla_stream.environments.protocol import Observations
from vla_stream.learning import checkpoint
from vla_stream.learning.segments import Segment
from vla_stream.policies.protocol import Evaluation
from workers import trainer as trainer_module
from workers.trainer import Trainer, make_learner

STREAMING: dict[str, Any] = {"updates": 10, "trainer__update": "streaming"}
ROWS = T * K  # of one segment


class Watch:
    """What a trainer's learner is given, and how many rows it has evaluated with gradients."""

    def __init__(self, trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.added: list[Segment] = []
        self.rows = 0
        add, evaluate = trainer.learner.add, trainer.learner.policy.evaluate

        def watched_add(segment: Segment) -> None:
            self.added.append(segment)
            add(segment)

        def watched_evaluate(seen: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray]) -> Evaluation:
            self.rows += len(seen) * torch.is_grad_enabled()
            return evaluate(seen, actions, extras)

        monkeypatch.setattr(trainer.learner, "add", watched_add)
        monkeypatch.setattr(trainer.learner.policy, "evaluate", watched_evaluate)

    @property
    def tickets(self) -> list[int]:
        return [segment.ticket for segment in self.added]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.learner.policy.state_dict().items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def after_one_update_of(bench: Bench, segments: list[Segment]) -> dict[str, Tensor]:
    """The weights of a learner that has seen nothing but these, from the run's first weights."""
    learner = make_learner(bench.config, SPECIFICATION, CPU, print)
    first = checkpoint.load(bench.config.run_dir / "checkpoints" / "000000")
    learner.policy.load_state_dict(first.policy)
    for segment in segments:
        learner.add(segment)
    assert learner.finish(1).skipped is None
    return learner.state().policy


def test_a_segment_is_trained_as_soon_as_it_comes_and_the_update_is_made_with_the_last(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING)
    trainer = bench.trainer()
    watch, before = Watch(trainer, monkeypatch), weights(trainer)
    first, second, third = bench.permits(3)
    bench.publish(second)
    assert not trainer.step(None)
    assert watch.rows == ROWS and same(before, weights(trainer)), "its gradient is there, no weight has moved"
    trainer.recover()
    assert not trainer.step(None) and watch.rows == ROWS, "and it is not trained again"
    bench.publish(third)
    bench.publish(first)
    assert trainer.step(None)
    assert watch.tickets == [2, 3, 1] and bench.waiting() == 1, "the next update has begun before the commit"
    assert same(weights(trainer), after_one_update_of(bench, watch.added[:2])) and not same(before, weights(trainer))
    assert run.flow.books().outcomes["trained"] == 2 and run.flow.books().balance == 0
    (sample,) = bench.samples()
    assert sample["optimiser_steps"] == 1 and sample["first_behaviour_ratio_error"] < 1e-5
    assert not trainer.step(None) and watch.rows == 3 * ROWS and watch.tickets == [2, 3, 1]
    lines = (bench.config.run_dir / "updates.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["segments"] == [second.member, third.member]


def test_updates_name_their_segments_in_the_order_they_were_trained_in(make: Make) -> None:
    bench = make(**STREAMING)
    trainer = bench.trainer()
    for permit in bench.permits(2)[::-1]:
        bench.publish(permit)
    assert trainer.step(None)
    (line,) = (bench.config.run_dir / "updates.jsonl").read_text().splitlines()
    assert json.loads(line)["segments"] == ["2.1", "1.1"]


@pytest.mark.parametrize("steps", [1, 2])
def test_when_the_server_loses_the_run_what_was_half_trained_is_forgotten(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    bench = make(**STREAMING, trainer__optimiser_steps=steps)
    trainer = bench.trainer()
    watch, before = Watch(trainer, monkeypatch), weights(trainer)
    bench.feed(1)
    assert not trainer.step(None)
    assert watch.rows == ROWS and same(before, weights(trainer)) is (steps == 1)
    bench.lose_everything(bench.seen())
    trainer.start_anew()
    assert same(before, weights(trainer))
    run.client.hset(run.keys.flow, "hold_until_ms", 0)
    bench.feed(2, version=trainer.version)
    assert trainer.step(None) and trainer.update == 1
    assert same(weights(trainer), after_one_update_of(bench, watch.added[1:]))
    books = run.flow.books()
    assert (books.outcomes["trained"], books.outcomes["lost_with_server"], books.balance) == (2, 1, 0)


def test_what_is_begun_before_a_commit_that_the_server_does_not_take_is_forgotten(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING)
    trainer = bench.trainer()
    bench.feed(3)
    watch = Watch(trainer, monkeypatch)
    monkeypatch.setattr(trainer.flow, "commit", lambda *_, **__: "missing")
    assert trainer.step(None) and watch.tickets == [1, 2, 3] and len(trainer._added) == 1
    after = weights(trainer)
    monkeypatch.undo()
    bench.lose_everything(bench.seen())
    trainer.start_anew()
    assert trainer.update == 1 and trainer._added == {} and same(after, weights(trainer))
    books = run.flow.books()
    assert (books.outcomes["lost_with_server"], books.balance) == (3, 0)


def test_a_segment_that_cannot_be_begun_does_not_cost_the_update_before_it(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING)
    trainer = bench.trainer()
    bench.feed(3)
    add, tickets = trainer.learner.add, list[int]()

    def no_room(segment: Segment) -> None:
        tickets.append(segment.ticket)
        if len(tickets) == 3:
            raise RuntimeError("no room on the device")
        add(segment)

    monkeypatch.setattr(trainer.learner, "add", no_room)
    assert trainer.step(None) and tickets == [1, 2, 3]
    assert run.flow.books().outcomes["trained"] == 2 and list(trainer._held) == ["3.1"]
    bench.feed(1, version=2)
    assert trainer.step(None) and tickets == [1, 2, 3, 3, 4]


def test_times_of_updates_do_not_overlap(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(**STREAMING, flow__max_staleness=3)
    trainer = bench.trainer()
    add = trainer.learner.add
    monkeypatch.setattr(trainer.learner, "add", lambda segment: (time.sleep(0.1), add(segment)))
    bench.feed(7)
    began_s = time.monotonic()
    for _ in range(3):
        assert trainer.step(None)
    samples = bench.samples()
    assert all(sample["wait_s"] >= 0 and sample["update_s"] >= 0.1 for sample in samples)
    assert sum(sample["wait_s"] + sample["update_s"] for sample in samples) <= time.monotonic() - began_s


def test_an_update_with_a_checkpoint_begins_nothing_that_it_would_forget(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING, trainer__checkpoint_every=1)
    trainer = bench.trainer()
    watch = Watch(trainer, monkeypatch)
    bench.feed(3)
    assert trainer.step(None) and watch.tickets == [1, 2]


def test_what_is_too_stale_is_not_begun_before_a_commit(make: Make, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(**STREAMING, flow__max_staleness=1, flow__stale_limit=1)
    bench.trainer()
    bench.feed(3, version=1)
    trainer = bench.trainer()  # its take-over is version 2
    watch = Watch(trainer, monkeypatch)
    assert trainer.step(None) and watch.tickets == [1, 2] and run.flow.books().outcomes["refused"] == 0
    assert not trainer.step(None) and watch.tickets == [1, 2] and run.flow.books().outcomes["refused"] == 1


def test_what_a_dead_trainer_had_half_trained_is_trained_once_by_its_successor(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING)
    dead = bench.trainer()
    bench.feed(1)
    assert not dead.step(None)
    trainer = bench.trainer()
    watch = Watch(trainer, monkeypatch)
    assert not trainer.step(None) and watch.tickets == [1]
    bench.feed(1, version=trainer.version)
    assert trainer.step(None)
    assert same(weights(trainer), after_one_update_of(bench, watch.added)) and watch.tickets == [1, 2]
    assert run.flow.books().outcomes["trained"] == 2 and run.flow.books().balance == 0


def test_a_segment_too_stale_for_a_successor_is_refused_before_it_is_trained(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING, flow__max_staleness=0, flow__stale_limit=0)
    dead = bench.trainer()
    bench.feed(1)
    assert not dead.step(None)
    trainer = bench.trainer()
    watch = Watch(trainer, monkeypatch)
    assert not trainer.step(None)
    assert watch.added == [] and run.flow.books().outcomes["refused"] == 1


def test_segments_beyond_those_of_the_next_update_wait_for_its_weights(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING, trainer__ack="checkpoint", trainer__checkpoint_every=2)
    dead = bench.trainer()
    bench.feed(2)
    assert dead.step(None)
    bench.feed(2, version=2)
    dead._collect(None)
    # Two segments kept for a checkpoint and two that were only taken: all four are given back at once.
    trainer = bench.trainer()
    watch = Watch(trainer, monkeypatch)
    assert trainer.update == 0 and len(trainer._held) == 4
    assert trainer.step(None) and watch.tickets == [1, 2, 3], "one of the next update's, with its weights"
    assert same(weights(trainer), after_one_update_of(bench, watch.added[:2]))
    assert trainer.step(None) and watch.tickets == [1, 2, 3, 4]
    books = run.flow.books()
    assert (books.outcomes["trained"], books.outcomes["rolled_back"], books.balance) == (4, 0, 0)


def test_in_ticket_order_a_segment_is_trained_once_none_can_come_before_it(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING, flow__order="ticket")
    trainer = bench.trainer()
    watch = Watch(trainer, monkeypatch)
    first, second, third = bench.permits(3)
    bench.publish(third)
    assert not trainer.step(None) and watch.tickets == []
    bench.publish(first)
    assert not trainer.step(None) and watch.tickets == [1] and watch.rows == ROWS
    bench.publish(second)
    assert trainer.step(None) and watch.tickets == [1, 2]
    assert same(weights(trainer), after_one_update_of(bench, watch.added))


def test_a_trainer_that_ends_in_mid_update_leaves_the_checkpoint_of_its_last_version(make: Make) -> None:
    bench = make(**STREAMING, trainer__optimiser_steps=2, trainer__checkpoint_every=100)
    trainer = bench.trainer()
    bench.feed(2)
    assert trainer.step(None)
    published = weights(trainer)
    bench.feed(1, version=2)
    assert not trainer.step(None) and not same(published, weights(trainer)), "the first share's step was made"
    trainer.close()
    saved = checkpoint.load(bench.config.run_dir / "checkpoints" / "000001")
    assert same(saved.policy, published)
    again = bench.trainer()
    bench.feed(1, version=2)
    assert again.update == 1 and again.step(None) and again.update == 2


def test_a_checkpoint_that_is_made_up_for_in_mid_update_holds_its_own_update_only(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(**STREAMING, trainer__optimiser_steps=2, trainer__ack="checkpoint", trainer__checkpoint_every=1)
    trainer = bench.trainer()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer_module, "RETRY_CHECKPOINT_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        bench.feed(2)
        assert trainer.step(None)
        published = weights(trainer)
        bench.feed(1, version=2)
        assert not trainer.step(None) and not same(published, weights(trainer))
    watch = Watch(trainer, monkeypatch)
    assert not trainer.step(None) and bench.checkpoints() == ["000000", "000001"]
    assert same(checkpoint.load(bench.config.run_dir / "checkpoints" / "000001").policy, published)
    assert watch.tickets == [3], "what was half trained is begun again"
    bench.feed(1, version=2)
    assert trainer.step(None) and watch.tickets == [3, 4]
    assert run.flow.books().outcomes["trained"] == 4 and run.flow.books().balance == 0


def test_f46_a_skipped_update_publishes_the_weights_as_they_were(make: Make, run: Run) -> None:
    bench = make(
        **STREAMING,
        policy={"name": "fake_policies:Linear", "chunk": 2, "options": {"loss": "nan"}},
        trainer__optimiser_steps=2,
    )
    trainer = bench.trainer()
    before = bench.weights()
    bench.feed(2)
    assert trainer.step(None)
    after = bench.weights()
    assert (after.version, after.update, after.digest) == (2, 1, before.digest)
    assert run.flow.books().outcomes["skipped"] == 2 and run.flow.books().balance == 0
