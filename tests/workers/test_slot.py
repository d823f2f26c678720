"""The slot's state machine: what it asks, records, holds, resets and publishes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from live_run import in_use

from vla_stream.broker.lanes import ShmLane
from vla_stream.environments.chunks import ChunkResult
from vla_stream.environments.protocol import Observations
from vla_stream.errors import EnvironmentFailed, PayloadUnreachable
from vla_stream.flow import Permit
from vla_stream.policies.protocol import Act
from vla_stream.streams.observations import unpack_observations
from vla_stream.streams.trajectories import Episode, Trajectory
from workers.slot import Place, Slot, State, slot_part

K, T, H, A = 2, 3, 2, 2
NONE = np.zeros(K, dtype=bool)


def make_slot(steps: int = T, *, episode: bool = False) -> Slot:
    place = Place("simulator-0", "9f2c11ab", 0, 1)
    return Slot(place, slice(K, 2 * K), steps, whole_episode=episode)


def seen(*values: float) -> Observations:
    """A row per value, which is all that it shows."""
    state = np.array(values, dtype=np.float32)[:, None]
    return Observations({}, state, [f"go to {value:g}" for value in values])


def act(value: float = 0.0) -> Act:
    actions = np.full((K, H, A), value, dtype=np.float32)
    return Act(actions, actions - 1, np.zeros(K, dtype=np.float32), {"token": np.full((K, 1), value)})


def chunk(
    after: Observations,
    terminated: tuple[int, ...] = (),
    truncated: tuple[int, ...] = (),
    final: Observations | None = None,
    active: np.ndarray | None = None,
) -> ChunkResult:
    """Rows that end do so in their first step; reward 1 per executed step."""
    active = ~NONE if active is None else active
    ends, cut = np.isin(np.arange(K), terminated), np.isin(np.arange(K), truncated)
    executed = np.stack([active, active & ~ends & ~cut], axis=1)
    rewards = executed.sum(axis=1).astype(np.float32)
    return ChunkResult(
        after, final, np.array(truncated, dtype=np.int64), executed, rewards, ends, cut, ends.copy(), ends.copy()
    )


def turn(slot: Slot, result: ChunkResult, version: int = 4, value: float = 0.0) -> None:
    """Reply and chunk; the request is already out."""
    assert slot.state is State.ASKED
    slot.answer(act(value), version)
    assert slot.state is State.READY
    slot.state = State.STEPPING
    slot.advance(result)


def shown(payload: bytes | str) -> list[float]:
    assert isinstance(payload, bytes)
    return [float(value) for value in unpack_observations(payload).state[:, 0]]


def run_segment(slot: Slot, ticket: int, version: int = 4, lane: ShmLane | None = None) -> Trajectory:
    """A whole segment of T steps in which nothing ends."""
    slot.begin(Permit(ticket, 1, 0), lane)
    slot.ask(seen(0, 0))
    for step in range(T):
        turn(slot, chunk(seen(step + 1, step + 1)), version)
        if slot.state is State.WANTING:
            slot.ask(slot.last_observations)
    trajectory = slot.finish()
    slot.published()
    return trajectory


def test_a_slot_goes_from_permit_to_published_through_its_states() -> None:
    slot = make_slot(steps=1)
    states = [slot.state]
    slot.begin(Permit(7, 2, 5))
    states.append(slot.state)
    request = slot.ask(seen(1, 2))
    states.append(slot.state)
    assert repr(slot) == "<Slot 0.1 asked 7.2 step 0>"
    turn(slot, chunk(seen(3, 4)))
    states.append(slot.state)
    slot.finish()
    slot.published()
    states.append(slot.state)
    assert states == [State.IDLE, State.WANTING, State.ASKED, State.FINISHED, State.IDLE]
    assert (str(request.id), request.n, request.min_version) == ("simulator-0/9f2c11ab/0.1/7.2/0", K, 5)
    assert request.payload is not None and shown(request.payload) == [1, 2]


def test_every_chunk_step_has_its_own_request_id() -> None:
    slot = make_slot()
    slot.begin(Permit(7, 1, 0))
    ids = [str(slot.ask(seen(0, 0)).id)]
    for step in range(T - 1):
        turn(slot, chunk(seen(step, step)))
        ids.append(str(slot.ask(slot.last_observations).id))
    assert [identity.rpartition("/")[2] for identity in ids] == ["0", "1", "2"]


def test_a_reply_of_another_number_of_rows_is_refused() -> None:
    slot = make_slot()
    slot.begin(Permit(7, 1, 0))
    slot.ask(seen(0, 0))
    one_row = Act(*(array[:1] for array in (act().actions, act().logprobs, act().values)))
    with pytest.raises(EnvironmentFailed, match="1 rows, expected 2"):
        slot.answer(one_row, 4)


def test_steps_a_segment_has_t_plus_one_observations_and_the_version_of_every_step() -> None:
    slot = make_slot()
    slot.begin(Permit(7, 1, 0))
    slot.ask(seen(0, 10))
    for step, version in enumerate((4, 4, 6)):
        turn(slot, chunk(seen(step + 1, step + 11)), version, value=step)
        assert slot.step == step + 1
        if step < T - 1:
            assert not slot.resets_due().any()
            slot.ask(slot.last_observations)
    trajectory = slot.finish()
    assert [shown(payload) for payload in trajectory.payloads] == [[0, 10], [1, 11], [2, 12], [3, 13]]
    assert trajectory.final_payload is None and trajectory.segment.final_index.shape == (0, 2)
    assert trajectory.segment.versions.tolist() == [4, 4, 6] and trajectory.version == 4
    assert trajectory.id == "simulator-0/9f2c11ab/0.1/7.1" and trajectory.member == "7.1"
    assert trajectory.segment.actions[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert trajectory.segment.extras["token"][:, 1, 0].tolist() == [0, 1, 2]
    assert trajectory.segment.valid.all() and trajectory.segment.executed.all()
    # It survives the wire.
    assert Trajectory.from_fields(trajectory.to_fields()).payloads == trajectory.payloads


def test_steps_a_row_that_ends_is_reset_by_its_chunk_except_in_the_last_one() -> None:
    slot = make_slot()
    slot.begin(Permit(7, 1, 0))
    assert slot.resets_due().all(), "a new slot starts with a reset of all rows"
    slot.ask(seen(0, 0))
    assert slot.resets_after().all()
    turn(slot, chunk(seen(1, 1), terminated=(0,)))
    slot.ask(slot.last_observations)
    assert slot.resets_after().all()
    turn(slot, chunk(seen(2, 2)))
    slot.ask(slot.last_observations)
    assert not slot.resets_after().any(), "the closing observation is that before the reset"
    turn(slot, chunk(seen(3, 3), terminated=(1,)))
    assert slot.finish().segment.terminated.tolist() == [[True, False], [False, False], [False, True]]
    slot.published()
    slot.begin(Permit(8, 1, 0))
    assert slot.resets_due().tolist() == [False, True], "row 0 goes on, row 1 ended"
    first = slot.ask(slot.look(seen(-1, 50), slot.resets_due()))
    assert first.payload is not None and shown(first.payload) == [3, 50]
    assert not slot.resets_due().any()


def test_steps_rows_go_on_into_the_next_segment_without_a_reset() -> None:
    slot = make_slot()
    first = run_segment(slot, 7)
    slot.begin(Permit(8, 1, 0))
    assert not slot.resets_due().any()
    request = slot.ask(slot.last_observations)
    assert request.payload == first.payloads[-1]


def test_observations_before_a_reset_are_kept_with_their_place() -> None:
    slot = make_slot()
    slot.begin(Permit(7, 1, 0))
    slot.ask(seen(0, 0))
    turn(slot, chunk(seen(90, 1), truncated=(0,), final=seen(77)))
    slot.ask(slot.last_observations)
    turn(slot, chunk(seen(91, 95), truncated=(1,), final=seen(88)))
    slot.ask(slot.last_observations)
    turn(slot, chunk(seen(92, 96)))
    trajectory = slot.finish()
    assert trajectory.segment.final_index.tolist() == [[0, 0], [1, 1]]
    assert trajectory.final_payload is not None and shown(trajectory.final_payload) == [77, 88]
    assert [shown(payload)[0] for payload in trajectory.payloads] == [0, 90, 91, 92]


def test_f51_episode_rows_that_ended_are_held_and_masked_until_all_have_ended() -> None:
    slot = make_slot(steps=5, episode=True)
    slot.begin(Permit(7, 1, 0))
    assert slot.resets_due().all()
    slot.ask(seen(0, 0))
    assert not slot.resets_after().any()
    turn(slot, chunk(seen(1, 1), terminated=(0,)))
    assert slot.held.tolist() == [True, False] and slot.state is State.WANTING
    request = slot.ask(slot.last_observations)
    assert request.n == K, "a request always has all rows of its slot"
    # A host has zeros and no sentence for a row that it did not step.
    empty = Observations({}, np.array([[0], [2]], dtype=np.float32), ["", "go to 2"])
    turn(slot, chunk(empty, active=~slot.held, truncated=(1,), final=seen(2)))
    assert slot.state is State.FINISHED
    trajectory = slot.finish()
    assert trajectory.segment.steps == 2, "T varies"
    assert trajectory.segment.valid.tolist() == [[True, True], [False, True]]
    assert trajectory.segment.executed[1, 0].tolist() == [False, False]
    assert shown(trajectory.payloads[-1]) == [1, 2], "a held row keeps what it saw last"
    slot.published()
    slot.begin(Permit(8, 1, 0))
    assert slot.resets_due().all() and not slot.held.any()


def test_episode_its_horizon_ends_a_segment_even_if_the_environment_does_not() -> None:
    slot = make_slot(steps=2, episode=True)
    slot.begin(Permit(7, 1, 0))
    slot.ask(seen(0, 0))
    turn(slot, chunk(seen(1, 1)))
    slot.ask(slot.last_observations)
    turn(slot, chunk(seen(2, 2)))
    assert slot.state is State.FINISHED


def test_an_episode_belongs_to_the_version_of_its_first_chunk_step_even_in_an_older_segment() -> None:
    slot = make_slot()
    assert run_segment(slot, 7, version=4).episodes == ()
    slot.begin(Permit(8, 1, 0))
    slot.ask(slot.last_observations)
    turn(slot, chunk(seen(1, 1), terminated=(0,)), version=6)
    slot.ask(slot.last_observations)
    turn(slot, chunk(seen(2, 2)), version=7)
    slot.ask(slot.last_observations)
    turn(slot, chunk(seen(3, 3), terminated=(0,)), version=8)
    # Three whole chunks of 2 steps in segment 7, then one step in 8; afterwards a new episode from version 7 on.
    assert slot.finish().episodes == (Episode(4, True, True, 7.0, 7), Episode(7, True, True, 3.0, 3))


def test_dropping_a_segment_forgets_it_and_resets_all_rows() -> None:
    slot = make_slot()
    run_segment(slot, 7, version=4)
    slot.begin(Permit(8, 1, 0))
    slot.ask(slot.last_observations)
    turn(slot, chunk(seen(1, 1)))
    slot.drop()
    assert slot.state is State.IDLE and slot.permit is None and slot.request is None and slot.step == 0
    slot.begin(Permit(8, 2, 0))
    assert slot.resets_due().all()
    slot.ask(seen(0, 0))
    turn(slot, chunk(seen(1, 1), terminated=(0,)), version=9)
    slot.ask(slot.last_observations)
    for _ in range(2):
        turn(slot, chunk(seen(2, 2)))
        if slot.state is State.WANTING:
            slot.ask(slot.last_observations)
    trajectory = slot.finish()
    assert trajectory.episodes == (Episode(9, True, True, 1.0, 1),), "nothing of what was dropped is counted"
    assert len(trajectory.payloads) == T + 1 and trajectory.segment.steps == T


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "shm"
    made.mkdir()
    return made


def test_the_bytes_of_a_segment_are_written_once_into_one_file_which_stays_until_it_is_trained(folder: Path) -> None:
    slot = make_slot()
    trajectory = run_segment(slot, 7, lane=ShmLane(folder))
    (file,) = folder.iterdir()
    references = trajectory.references()
    assert len(references) == T + 1 and {reference.split(":")[1] for reference in references} == {file.name}
    assert file.name.startswith("7.1-")


def test_a_segment_that_is_published_again_after_a_lost_reply_writes_nothing_more(folder: Path) -> None:
    slot, lane = make_slot(steps=1), ShmLane(folder)
    slot.begin(Permit(7, 1, 0), lane)
    slot.ask(seen(0, 0))
    turn(slot, chunk(seen(1, 1), truncated=(0,), final=seen(77)))
    first = slot.finish()
    (file,) = folder.iterdir()
    size = file.stat().st_size
    # The trainer may be done with it by now, and its file be another segment's.
    assert slot.finish().references() == first.references()
    assert file.stat().st_size == size


def test_dropping_a_segment_removes_its_file(folder: Path) -> None:
    slot = make_slot()
    slot.begin(Permit(7, 1, 0), ShmLane(folder))
    slot.ask(seen(0, 0))
    assert len(in_use(folder)) == 1
    slot.drop()
    assert in_use(folder) == []


def test_f28_a_lane_that_is_full_is_said_and_leaves_nothing(folder: Path) -> None:
    slot = make_slot()
    slot.begin(Permit(7, 1, 0), ShmLane(folder / "nothing" / "there"))
    with pytest.raises(PayloadUnreachable, match="cannot create a segment file"):
        slot.ask(seen(0, 0))
    slot.drop()
    assert slot.state is State.IDLE


def test_a_batch_is_cut_into_its_slots_rows() -> None:
    whole = ChunkResult(
        seen(0, 1, 2, 3),
        seen(70, 72, 73),
        np.array([0, 2, 3]),
        np.arange(8).reshape(4, 2) % 2 == 0,
        np.arange(4, dtype=np.float32),
        np.array([False, True, False, False]),
        np.array([True, False, True, True]),
        np.array([False, True, False, False]),
        np.array([False, True, False, False]),
    )
    part = slot_part(whole, slice(2, 4))
    assert part.observations.state[:, 0].tolist() == [2, 3] and part.rewards.tolist() == [2, 3]
    assert part.final is not None and part.final.state[:, 0].tolist() == [72, 73]
    assert part.final_rows.tolist() == [0, 1]
    assert slot_part(whole, slice(1, 2)).final is None
