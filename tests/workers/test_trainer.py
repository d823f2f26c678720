"""The trainer, step by step, with segments that the test publishes."""

from __future__ import annotations

import errno
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from live_run import Run, in_use
from trainer_bench import A, H, K, Make, T

from vla_stream import tasks
from vla_stream.broker.connection import UNREACHABLE
from vla_stream.broker.scripts import Script
from vla_stream.errors import Expired, Hopeless, InputError
from vla_stream.flow import Permit
from vla_stream.learning import checkpoint
from workers import trainer as trainer_module
from workers.history import trained_tickets

original_save = checkpoint.save


def test_a_trainer_starts_with_weights_as_version_1_and_a_first_checkpoint(make: Make, run: Run) -> None:
    bench = make()
    assert run.flow.grant(1, 1.0) == "no weights"
    trainer = bench.trainer()
    state = run.flow.state()
    assert state is not None and (state.update, state.version, state.epoch) == (0, 1, 1)
    manifest = bench.weights()
    assert (manifest.version, manifest.update, manifest.epoch) == (1, 0, 1)
    assert run.client.pttl(run.keys.weight_chunk(1, 1, 0)) == -1, "committed weights do not expire"
    assert bench.checkpoints() == ["000000"] and not trainer.done


def test_f47_a_trainer_that_finds_no_checkpoint_whole_among_those_there_does_not_begin_anew(make: Make) -> None:
    bench = make()
    bench.trainer()
    (bench.config.run_dir / "checkpoints" / "000000" / "policy.safetensors").write_bytes(b"x")
    with pytest.raises(
        InputError, match=r"none of its 1 checkpoints can be read, expected one; .*000000.policy.safetensors: damaged"
    ):
        bench.trainer()
    assert bench.checkpoints() == ["000000"]


def test_an_update_commits_publishes_weights_and_removes_its_segments_and_their_files(make: Make, run: Run) -> None:
    bench = make()
    trainer = bench.trainer()
    first = bench.weights()
    assert not trainer.step(None)
    bench.feed(1, shm=True)
    assert not trainer.step(None), "one of two segments is not enough"
    bench.feed(2, shm=True)
    assert len(in_use(run.shm)) == 3
    assert trainer.step(None)
    manifest = bench.weights()
    assert (manifest.version, manifest.update, manifest.epoch) == (2, 1, 1) and manifest.digest != first.digest
    assert 0 < run.client.pttl(run.keys.weight_chunk(1, 1, 0)) <= 60_000, "generators may still be reading it"
    assert bench.waiting() == 1 and [name.partition("-")[0] for name in in_use(run.shm)] == ["3.1"]
    books = run.flow.books()
    assert books.outcomes["trained"] == 2 and books.in_flight == 1 and books.balance == 0
    (sample,) = bench.samples()
    assert (sample["update"], sample["version"], sample["trained_env_steps"]) == (1, 2, 2 * T * K * H)
    assert sample["staleness"] == sample["staleness_max"] == sample["above_eta"] == sample["skipped"] == 0
    assert sample["first_behaviour_ratio_error"] < 1e-5


def test_the_last_update_leaves_a_checkpoint_and_the_trainer_is_done(make: Make) -> None:
    bench = make(updates=2, trainer__checkpoint_every=100)
    trainer = bench.trainer()
    for version in (1, 2):
        bench.feed(version=version)
        assert trainer.step(None)
    assert trainer.done and not trainer.step(None)
    assert bench.checkpoints() == ["000000", "000002"]


def test_the_best_checkpoint_is_kept_by_what_its_training_episodes_surely_reached(make: Make) -> None:
    bench = make(updates=9, trainer__checkpoint_every=1, trainer__keep_checkpoints=1, flow__max_staleness=0)
    trainer = bench.trainer()
    best = bench.config.run_dir / "checkpoints" / "best"
    marked = []
    for success in (True,) * 5 + (False,) * 4:
        bench.feed(version=trainer.version, success=success)
        assert trainer.step(None)
        marked.append(checkpoint.load(best).update if best.exists() else None)
    # Each start version's episodes count once they have settled; later failures displace nothing.
    first = next(update for update in marked if update is not None)
    assert marked[-1] == max(update for update in marked if update is not None) > first
    assert marked[-1] < 9 and marked == sorted(marked, key=lambda update: update or 0)
    assert {path.name for path in best.parent.iterdir()} == {"000000", f"{marked[-1]:06d}", "000009", "best"}


def test_where_evaluations_choose_the_best_checkpoint_the_trainer_keeps_it_and_chooses_none(make: Make) -> None:
    evaluation = {"every": 1, "episodes": 10}
    bench = make(updates=6, trainer__checkpoint_every=1, trainer__keep_checkpoints=1, evaluation=evaluation)
    trainer, folder = bench.trainer(), bench.config.run_dir / "checkpoints"
    for update in range(1, 7):
        bench.feed(version=trainer.version)
        assert trainer.step(None)
        assert checkpoint.marked(folder, checkpoint.BEST) == (None if update < 4 else "000002")
        if update == 2:
            checkpoint.mark(folder, checkpoint.EVALUATED, 2)  # as the launcher does while it is played
        if update == 3:
            checkpoint.mark(folder, checkpoint.BEST, 2)
            checkpoint.mark(folder, checkpoint.EVALUATED, 3)
    assert {path.name for path in checkpoint.places(folder)} == {"000000", "000002", "000003", "000006"}


def test_segments_above_the_stale_limit_are_refused_and_their_tickets_given_out_again(make: Make, run: Run) -> None:
    bench = make(flow__stale_limit=1, flow__max_staleness=1, updates=10)
    trainer = bench.trainer()
    for _ in range(2):
        bench.feed()
        assert trainer.step(None)
    assert bench.samples()[-1]["staleness"] == 1 and trainer.version == 3
    (permit, _) = bench.feed(shm=True)
    assert not trainer.step(None)
    assert run.flow.books().outcomes["refused"] == 2 and run.flow.books().balance == 0
    assert bench.waiting() == 0 and in_use(run.shm) == []
    assert f"segment {permit.member}: its staleness is 2, at most 1 is trained" in str(run.events())
    assert bench.permits(1) == [Permit(permit.ticket, 2, 2)]


def test_stragglers_above_eta_are_trained_and_counted(make: Make) -> None:
    bench = make(flow__max_staleness=0, flow__stale_limit=2)
    trainer = bench.trainer()
    bench.feed()
    assert trainer.step(None)
    bench.feed()
    assert trainer.step(None)
    assert bench.samples()[-1]["above_eta"] == 1.0


def test_f27_poison_is_a_dead_letter_and_the_update_goes_on_without_it(make: Make, run: Run) -> None:
    bench = make()
    trainer = bench.trainer()
    run.client.xadd(run.keys.trajectories, {"what": "is this"})
    run.client.xadd(run.keys.trajectories, {"ticket": "\u00b2.1", "data": "x"})
    (damaged,) = bench.permits(1)
    run.flow.publish(damaged.member, {b"ticket": damaged.member.encode(), b"data": b"x"})
    bench.feed(2)
    while bench.waiting() > 0:
        trainer.step(None)
    assert trainer.update == 1
    books = run.flow.books()
    assert books.outcomes["poisoned"] == 1 and books.outcomes["trained"] == 2 and books.balance == 0
    assert run.client.xlen(run.keys.dead_letters) == 3
    assert bench.permits(1)[0].member == f"{damaged.ticket}.2"


def test_f17_a_segment_that_was_trimmed_while_it_was_pending_is_counted_and_given_out_again(
    make: Make, run: Run
) -> None:
    bench = make()
    trainer = bench.trainer()
    (permit,) = bench.feed(1)
    run.client.xreadgroup("trainers", "trainer-0", {run.keys.trajectories: ">"})
    run.client.xtrim(run.keys.trajectories, maxlen=0, approximate=False)
    trainer.recover()
    pending: Any = run.client.xpending(run.keys.trajectories, "trainers")
    assert pending["pending"] == 0 and run.client.xlen(run.keys.dead_letters) == 1
    assert run.flow.books().outcomes["poisoned"] == 1 and run.flow.books().balance == 0
    assert bench.permits(1)[0].member == f"{permit.ticket}.2"


@pytest.mark.parametrize("actions", [(H + 1, A), (H, A + 1)])
def test_f45_a_segment_of_another_action_shape_is_poison_not_the_trainers_end(
    make: Make, run: Run, actions: tuple[int, int]
) -> None:
    bench = make()
    trainer = bench.trainer()
    bench.feed(1, actions=actions)
    bench.feed(1)
    assert not trainer.step(None)
    assert run.flow.books().outcomes["poisoned"] == 1 and run.flow.books().balance == 0


def test_f28_a_segment_whose_bytes_are_gone_is_refused(make: Make, run: Run) -> None:
    bench = make()
    trainer = bench.trainer()
    bench.feed(2, shm=True)
    for path in run.shm.iterdir():
        path.unlink()
    assert not trainer.step(None)
    assert run.flow.books().outcomes["refused"] == 2 and bench.waiting() == 0


def test_a_restarted_trainer_resumes_from_its_checkpoint_and_rolls_the_rest_back(make: Make, run: Run) -> None:
    bench = make(updates=10, trainer__checkpoint_every=2)
    trainer = bench.trainer()
    for _ in range(3):
        bench.feed(version=trainer.version)
        assert trainer.step(None)
    bench.feed(version=trainer.version)
    trainer._collect(None)
    assert len(trainer._held) == 2, "taken, then the process dies"
    saved = checkpoint.load(bench.config.run_dir / "checkpoints" / "000002")

    again = bench.trainer()
    assert (again.update, again.version, again.epoch) == (2, 5, 2)
    state = run.flow.state()
    assert state is not None and (state.update, state.version, state.first_version, state.epoch) == (2, 5, 5, 2)
    policy = again.learner.state().policy
    assert all(torch.equal(policy[name], saved.policy[name]) for name in saved.policy)
    books = run.flow.books()
    assert books.outcomes["trained"] == 4 and books.outcomes["rolled_back"] == 2 and books.balance == 0
    assert ("rolled back", "1 updates after checkpoint 2 are repeated with new segments") in run.events()
    assert 0 < run.client.pttl(run.keys.weight_chunk(4, 1, 0)) <= 60_000, "the old lineage's weights may go"
    # What the dead one had taken is trained by its successor.
    assert again.step(None) and again.update == 3
    assert run.flow.books().in_flight == 0 and run.flow.books().balance == 0


def test_f54_a_zombie_trainer_is_fenced_off_and_changes_nothing(make: Make, run: Run) -> None:
    bench = make()
    zombie = bench.trainer()
    bench.feed()
    bench.trainer()
    digest = bench.weights().digest
    with pytest.raises(Expired, match="was replaced by a newer one; its update 1 is void"):
        for _ in range(3):
            zombie.step(None)
    state = run.flow.state()
    assert state is not None and (state.update, state.version, state.epoch) == (0, 2, 2)
    assert bench.weights().digest == digest and run.flow.books().outcomes["trained"] == 0
    assert run.flow.books().in_flight == 2


def test_f19_a_trainer_whose_commit_a_failover_lost_is_fenced_and_its_successor_goes_on(make: Make, run: Run) -> None:
    bench = make(updates=10, trainer__checkpoint_every=1)
    trainer = bench.trainer()
    bench.feed()
    # Where a replica stands that lags: the segments are there, the update that consumes them is not.
    everything = list(run.client.scan_iter(match=run.keys.everything_pattern))
    behind: dict[bytes, Any] = {key: run.client.dump(key) for key in everything}
    assert trainer.step(None)
    lost = bench.weights()
    run.client.delete(*run.client.scan_iter(match=run.keys.everything_pattern))
    for key, state in behind.items():
        run.client.restore(key, 0, state)
    trainer.recover()
    assert not trainer.step(None) and bench.waiting() == 0, "what it trained on before is dropped"
    bench.feed()
    with pytest.raises(Expired, match="its update 2 is void"):
        for _ in range(3):
            trainer.step(None)

    again = bench.trainer()
    assert (again.update, again.epoch) == (1, 2) and again.version > lost.version
    assert again.step(None) and again.update == 2
    assert run.flow.books().in_flight == 0 and run.flow.books().balance == 0
    bench.feed(version=again.version)
    assert again.step(None) and run.flow.books().balance == 0


def test_in_ticket_order_the_lowest_tickets_are_trained_and_a_missing_one_is_waited_for(make: Make, run: Run) -> None:
    bench = make(flow__order="ticket")
    trainer = bench.trainer()
    first, second, third, fourth = bench.permits(4)
    bench.publish(third)
    bench.publish(second)
    for _ in range(3):
        assert not trainer.step(None)
    bench.publish(fourth)
    assert not trainer.step(None)
    bench.publish(first)
    assert trainer.step(None)
    assert run.flow.live_members() == {third.member, fourth.member}
    assert trainer.step(None) and trainer.update == 2
    assert [sample["staleness"] for sample in bench.samples()] == [0, 1]


def test_f51_segments_are_trained_in_the_order_in_which_they_came(make: Make, run: Run) -> None:
    bench = make(updates=10)
    trainer = bench.trainer()
    first, second, third, fourth = bench.permits(4)
    for permit in (third, first, fourth, second):
        bench.publish(permit)
    assert trainer.step(None)
    assert run.flow.live_members() == {fourth.member, second.member}
    assert trainer.step(None)
    assert run.flow.live_members() == set()


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_trainer_reads_as_far_ahead_as_told_while_it_trains(make: Make, run: Run, ahead: int) -> None:
    bench = make(updates=3, flow__max_staleness=2, trainer__prefetch_segments=ahead)
    trainer = bench.trainer()
    fed = [permit.member for permit in bench.feed(6)]
    for update in range(3):
        assert trainer.step(None)
        done = 2 * (update + 1)
        assert list(trainer._held) == fed[done : done + ahead]
        assert run.flow.books().balance == 0
    lines = (bench.config.run_dir / "updates.jsonl").read_text().splitlines()
    assert [json.loads(line)["segments"] for line in lines] == [fed[0:2], fed[2:4], fed[4:6]]


def test_in_ticket_order_a_ticket_that_was_refunded_is_waited_for_too(make: Make, run: Run) -> None:
    bench = make(flow__order="ticket")
    trainer = bench.trainer()
    first, second, third = bench.permits(3)
    bench.publish(second)
    bench.publish(third)
    run.flow.abort([first.member])
    assert not trainer.step(None)
    (again,) = bench.permits(1)
    assert again.member == "1.2"
    bench.publish(again)
    assert trainer.step(None)
    assert run.flow.live_members() == {third.member}


def test_in_ticket_order_a_take_over_makes_no_segment_staler_than_eta(make: Make, run: Run) -> None:
    bench = make(flow__order="ticket", updates=10)
    bench.trainer()
    permits = bench.permits(4)
    for permit in permits[:2]:
        bench.publish(permit, version=1)
    # Versions 2 and 3 are those of take-overs, without an update: what version 1 made is then staler than η = 1.
    bench.trainer()
    trainer = bench.trainer()
    for permit in permits[2:]:
        bench.publish(permit, version=3)
    assert not trainer.step(None)
    assert run.flow.books().outcomes["refused"] == 2 and run.flow.books().balance == 0
    again = bench.permits(2)
    assert [permit.member for permit in again] == ["1.2", "2.2"]
    for permit in again:
        bench.publish(permit, version=3)
    assert trainer.step(None) and trainer.step(None)
    assert [sample["staleness_max"] for sample in bench.samples()] == [0, 1]


def test_with_ack_checkpoint_a_crash_costs_no_segment(make: Make, run: Run) -> None:
    bench = make(updates=10, trainer__ack="checkpoint", trainer__checkpoint_every=2)
    trainer = bench.trainer()
    for _ in range(2):
        bench.feed(version=trainer.version)
        assert trainer.step(None)
    assert bench.waiting() == 0 and run.flow.live_members() == set(), "the checkpoint of update 2 holds them"
    third = bench.feed(version=trainer.version, shm=True)
    assert trainer.step(None) and trainer.update == 3
    assert bench.waiting() == 2 and run.flow.live_members() == {permit.member for permit in third}
    assert len(in_use(run.shm)) == 2, "their observations stay too"
    trainer.recover()
    assert not trainer.step(None), "they are pending still, and not trained twice"
    assert isinstance(run.flow.grant(2, 30.0), list) and run.flow.grant(1, 30.0) == "full", "they are outstanding"

    again = bench.trainer()
    assert again.update == 2
    assert ("rolled back", "1 updates after checkpoint 2 are repeated with the segments kept for it") in run.events()
    assert again.step(None) and again.update == 3
    lines = (bench.config.run_dir / "updates.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["segments"] == json.loads(lines[-2])["segments"] == [p.member for p in third]
    books = run.flow.books()
    assert (books.outcomes["trained"], books.outcomes["rolled_back"], books.balance) == (6, 0, 0)
    again.close()
    assert bench.waiting() == 0 and in_use(run.shm) == []


def test_with_ack_checkpoint_a_crash_between_checkpoint_and_release_trains_nothing_twice(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(updates=10, trainer__ack="checkpoint", trainer__checkpoint_every=1)
    trainer = bench.trainer()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer.flow, "release", die)
    bench.feed()
    with pytest.raises(KeyboardInterrupt):
        trainer.step(None)
    assert bench.waiting() == 2 and bench.checkpoints() == ["000000", "000001"]
    again = bench.trainer()
    assert again.update == 1 and bench.waiting() == 0
    assert not again.step(None)
    assert run.flow.books().outcomes["trained"] == 2 and run.flow.books().balance == 0


def test_with_ack_checkpoint_a_full_disk_is_waited_for(make: Make, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make(updates=10, trainer__ack="checkpoint", trainer__checkpoint_every=1)
    trainer = bench.trainer()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    monkeypatch.setattr(trainer_module, "RETRY_CHECKPOINT_S", 0.0)
    bench.feed()
    assert trainer.step(None)
    assert not trainer.step(None) and bench.waiting() == 2
    assert run.events()[-1][1].endswith("tried again until it works, and its segments are kept")
    monkeypatch.setattr(checkpoint, "save", original_save)
    trainer.step(None)
    assert bench.waiting() == 0 and bench.checkpoints() == ["000000", "000001"]


def test_no_version_names_two_weights_although_server_and_checkpoint_remember_older_ones(make: Make, run: Run) -> None:
    bench = make(updates=10, trainer__checkpoint_every=5)
    trainer = bench.trainer()
    seen = bench.seen()
    for _ in range(3):
        bench.feed(version=trainer.version)
        assert trainer.step(None)
    assert trainer.version == 4
    # The launcher was frozen for these three updates, the server loses everything, and the trainer dies with it.
    bench.lose_everything(seen)
    again = bench.trainer()
    assert (again.update, again.version) == (0, 5)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_trained_segment_that_a_simulator_registers_anew_after_a_flush_is_not_trained_again(
    make: Make, run: Run, restarted: bool
) -> None:
    bench = make(updates=10, trainer__checkpoint_every=1)
    trainer = bench.trainer()
    permits = bench.feed()
    assert trainer.step(None)
    generation = bench.lose_everything(bench.seen())
    # Its simulator was frozen: it never heard that its segment was added, nor that it was trained.
    assert run.flow.register(generation, [permits[0].member], 30.0) == 1
    bench.publish(permits[0])
    if restarted:
        trainer = bench.trainer()
    else:
        trainer.start_anew()
    for _ in range(3):
        assert not trainer.step(None)
    assert bench.waiting() == 0 and "its ticket was trained before" in str(run.events())
    books = run.flow.books()
    assert (books.outcomes["refused"], books.outcomes["trained"], books.balance) == (0, 2, 0)
    run.client.hset(run.keys.flow, "hold_until_ms", 0)
    assert all(permit.ticket > permits[-1].ticket for permit in bench.permits(4)), "nor is its number given out again"


def test_a_run_that_is_resumed_on_a_new_server_is_given_no_ticket_that_it_was_trained_on(make: Make, run: Run) -> None:
    bench = make(updates=10, trainer__checkpoint_every=1)
    trainer = bench.trainer()
    trained = bench.feed()
    assert trainer.step(None)
    run.client.delete(*run.client.scan_iter(match=run.keys.everything_pattern))
    assert run.flow.create(bench.config)
    again = bench.trainer()
    permits = bench.feed(version=again.version)
    assert min(permits, key=lambda permit: permit.ticket).ticket == 1 + max(permit.ticket for permit in trained)
    assert again.step(None) and again.update == 2
    assert run.flow.books().outcomes["lost_with_server"] == 0 and run.flow.books().balance == 0


def test_the_tickets_of_a_lineage_are_those_of_the_last_trainer_that_made_each_update(tmp_path: Path) -> None:
    file = tmp_path / "updates.jsonl"
    assert trained_tickets(tmp_path, 9) == []
    lines = [(1, "1.1"), (2, "2.1"), (3, "3.1"), (2, "4.2"), (3, "5.1"), (4, "6.1")]
    text = [json.dumps({"update": number, "segments": [member]}) for number, member in lines]
    absurd = ['{"update": 1e999, "segments": []}', f'{{"update": 3, "segments": ["{10**30}.1"]}}', 9999 * "["]
    file.write_text("\n".join([*text[:3], "{", "7", '{"update": 3}', *absurd, *text[3:]]) + "\n" + text[0][:9])
    assert trained_tickets(tmp_path, 3) == [1, 4, 5]


def test_a_last_version_that_nobody_can_count_on_from_is_ignored_and_told(make: Make, run: Run) -> None:
    bench = make()
    bench.config.run_dir.mkdir(parents=True, exist_ok=True)
    (bench.config.run_dir / "last_version").write_text(30 * "9")
    assert bench.trainer().version == 1
    assert [permit.min_version for permit in bench.permits(1)] == [1]
    assert [text for kind, text in run.events() if kind == "version"] == [
        f"{bench.config.run_dir / 'last_version'}: holds {30 * '9'}, expected at most 1000000000000; ignored"
    ]


def test_f21_segments_that_were_taken_before_somebody_removed_their_stream_are_trained_and_not_made_again(
    make: Make, run: Run
) -> None:
    bench = make(updates=10, flow__lease_s=0.01)
    trainer = bench.trainer()
    (first,) = bench.feed(count=1)
    assert not trainer.step(None)
    run.client.delete(run.keys.trajectories)
    for _ in range(3):
        assert not trainer.step(None)
        time.sleep(0.02)  # MISS is asked once per lease
    (second,) = bench.permits(1)
    assert second.ticket > first.ticket
    bench.publish(second)
    assert trainer.step(None) or trainer.step(None)
    books = run.flow.books()
    assert (books.outcomes["trained"], books.outcomes["poisoned"], books.balance) == (2, 0, 0)


def test_a_run_all_of_whose_segments_are_unusable_ends_and_says_why(make: Make, run: Run) -> None:
    bench = make(updates=10, flow__max_staleness=3)
    trainer = bench.trainer()
    with pytest.raises(Hopeless, match=r"8 segments in a row could not be used, last: .*expected \[2, 2\]"):
        for _ in range(8):
            bench.feed(count=1, actions=(H + 1, A))
            trainer.step(None)
    assert run.flow.books().outcomes["poisoned"] == 8 and run.flow.books().balance == 0


def test_f46_a_skipped_update_still_publishes_a_version_and_after_some_in_a_row_the_run_fails(
    make: Make, run: Run
) -> None:
    bench = make(
        updates=10,
        policy={"name": "fake_policies:Linear", "chunk": H, "options": {"loss": "nan"}},
        trainer__max_skipped_in_a_row=2,
    )
    trainer = bench.trainer()
    before = bench.weights()
    members = ", ".join(permit.member for permit in bench.feed())
    assert trainer.step(None)
    after = bench.weights()
    assert (after.version, after.update, after.digest) == (2, 1, before.digest)
    assert run.flow.books().outcomes["skipped"] == 2 and run.flow.books().balance == 0
    assert bench.samples()[0]["skipped"] == 1.0
    (sentence,) = [text for kind, text in run.events() if kind == "skipped"]
    assert "nan" in sentence and sentence.endswith(f"segments {members}")
    bench.feed()
    with pytest.raises(Hopeless, match=r"2 updates in a row were skipped.*checkpoint 0 is the last good one"):
        trainer.step(None)


def test_f47_a_checkpoint_that_cannot_be_written_does_not_end_the_run(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(trainer__checkpoint_every=1)
    trainer = bench.trainer()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    bench.feed()
    assert trainer.step(None) and trainer.update == 1
    assert bench.checkpoints() == ["000000"]
    assert next(text for kind, text in run.events() if kind == "checkpoint").endswith(
        "not written (No space left on device); the run goes on without"
    )
    monkeypatch.undo()
    bench.feed()
    assert trainer.step(None) and bench.checkpoints() == ["000000", "000002"]


def test_f47_old_checkpoints_that_cannot_be_removed_are_told_and_hold_no_segment_back(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(trainer__checkpoint_every=1, trainer__ack="checkpoint")
    trainer = bench.trainer()

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(checkpoint, "prune", busy)
    bench.feed()
    assert trainer.step(None) and bench.checkpoints() == ["000000", "000001"]
    assert bench.waiting() == 0, "the checkpoint holds what they taught"
    assert [text for kind, text in run.events() if kind == "checkpoint"] == [
        f"{trainer.folder}: old ones not removed (Device or resource busy); remove them"
    ]


def test_f02_a_lost_reply_to_the_commit_neither_repeats_nor_loses_the_update(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    trainer = bench.trainer()
    real, left = trainer.flow.scripts.call, [1]

    def call(script: Script, *arguments: Any) -> Any:
        answer = real(script, *arguments)
        if script.name == "commit" and left[0]:
            left[0] -= 1
            raise UNREACHABLE[0]("injected")
        return answer

    monkeypatch.setattr(trainer.flow.scripts, "call", call)
    bench.feed()
    assert trainer.step(None) and left == [0]
    assert (trainer.update, trainer.version) == (1, 2) and run.client.xlen(run.keys.weights) == 2
    assert run.flow.books().outcomes["trained"] == 2 and run.flow.books().balance == 0


def test_f47_a_trainer_killed_in_the_midst_of_a_checkpoint_is_resumed_from_the_one_before(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(updates=10, trainer__checkpoint_every=1)
    trainer = bench.trainer()
    bench.feed()
    assert trainer.step(None)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    # All is written and nothing is in place yet; a killed process cleans up nothing.
    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    bench.feed(version=2)
    with pytest.raises(Killed):
        trainer.step(None)
    monkeypatch.undo()
    assert len(bench.checkpoints()) == 3 and (trainer.update, trainer.version) == (2, 3)

    again = bench.trainer()
    assert (again.update, again.version) == (1, 4), "3 has named other weights"
    books = run.flow.books()
    assert books.outcomes["trained"] == books.outcomes["rolled_back"] == 2 and books.balance == 0
    bench.feed(version=4)
    assert again.step(None) and bench.checkpoints() == ["000000", "000001", "000002"]


def test_a_broken_connection_after_the_commit_trains_no_segment_twice(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(trainer__checkpoint_every=1)
    trainer = bench.trainer()

    def broken(_: str) -> None:
        raise UNREACHABLE[0]("injected")

    monkeypatch.setattr(trainer.intake.reader, "remove", broken)
    bench.feed(shm=True)
    assert trainer.step(None)
    assert bench.checkpoints() == ["000000", "000001"] and len(bench.samples()) == 1
    assert not trainer.step(None) and trainer.update == 1


def test_f03_entries_of_a_lost_reply_are_found_after_a_reconnect(make: Make, run: Run) -> None:
    bench = make()
    trainer = bench.trainer()
    bench.feed()
    # Delivered, and the reply never arrived.
    run.client.xreadgroup("trainers", "trainer-0", {run.keys.trajectories: ">"})
    assert not trainer.step(None)
    trainer.recover()
    trainer.recover()
    assert trainer.meter.sample()["segments"] == 2, "what is held is not taken again"
    assert trainer.step(None) and trainer.update == 1


@pytest.mark.parametrize("ack", ["update", "checkpoint"])
def test_f10_what_a_group_made_anew_delivers_once_more_is_not_taken_again(
    make: Make, run: Run, ack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(updates=10, trainer__ack=ack, trainer__checkpoint_every=2)
    trainer = bench.trainer()
    learnt: list[int] = []
    add = trainer.learner.add
    monkeypatch.setattr(trainer.learner, "add", lambda s: (learnt.append(s.ticket), add(s))[1])
    for update in (1, 2):
        bench.feed(count=1, version=update)
        assert not trainer.step(None)
        run.client.xgroup_destroy(run.keys.trajectories, "trainers")
        for _ in range(5):
            assert not trainer.step(None), "one segment is no update, however often it is delivered"
        bench.feed(count=1, version=update)
        assert any(trainer.step(None) for _ in range(6)), "what was delivered once more is read first, one at a time"
    books = run.flow.books()
    assert (books.outcomes["trained"], books.outcomes["lost_with_server"], books.balance) == (4, 0, 0)
    assert bench.waiting() == 0 and learnt == [1, 2, 3, 4]


def test_weights_of_an_update_that_a_lost_server_did_not_take_expire(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(updates=10)
    trainer = bench.trainer()
    bench.feed()
    seen, finish = bench.seen(), trainer.learner.finish
    monkeypatch.setattr(trainer.learner, "finish", lambda version: (bench.lose_everything(seen), finish(version))[1])
    assert trainer.step(None) and trainer.version == 2
    trainer.start_anew()
    manifest = bench.weights()
    assert manifest.version == 3
    chunks = list(run.client.scan_iter(match=run.keys.weights + ":*"))
    lasting = {name.decode() for name in chunks if run.client.ttl(name) < 0}
    assert lasting == {run.keys.weight_chunk(3, manifest.epoch, i) for i in range(len(manifest.chunk_digests))}
    assert len(chunks) > len(lasting)


def test_f43_a_trainer_without_data_names_the_role_that_is_missing(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    trainer = bench.trainer()
    run.worker("simulator")
    monkeypatch.setattr(trainer_module, "SAY_WAITING_S", 0.0)
    trainer.step(None)
    assert run.events()[-1] == ("waiting", "trainer has no data for 0 s: no generator is alive")


def test_f43_a_trainer_without_data_names_the_task_whose_tickets_nobody_takes(
    make: Make, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make(environment__tasks={"near": {}, "far": {}}, simulators__env_batches=2)
    trainer = bench.trainer()
    run.worker("simulator"), run.worker("generator")
    run.flow.grant(4, 60.0, turns=tasks.turns_of(run.flow.config().environment, "near"))
    monkeypatch.setattr(trainer_module, "SAY_WAITING_S", 0.0)
    trainer.step(None)
    reason = "tickets of far wait; attach simulators, of which each has a task by its number"
    assert run.events()[-1] == ("waiting", f"trainer has no data for 0 s: {reason}")


def test_two_trainers_that_see_the_same_segments_end_with_the_same_weights(make: Make, run: Run) -> None:
    bench = make(trainer__epochs=2, trainer__minibatch_samples=4)
    digests = []
    for order in (1, -1):
        trainer = bench.trainer()
        for permit in bench.permits(2)[::order]:
            bench.publish(Permit(permit.ticket, permit.attempt, 0), version=trainer.version)
        assert trainer.step(None)
        digests.append(bench.weights().digest)
        # The second life starts from checkpoint 0 again; the same tickets are given out.
        run.client.hset(run.keys.flow, "next_ticket", 0)
    assert digests[0] == digests[1]
