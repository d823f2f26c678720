"""Flow control: admission, permits, exactly-once publishing, commits, fencing; and books that balance whatever happens.

The example throughout is B = 4 segments per update.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vla_stream.broker.complaints import Garbled
from vla_stream.broker.connection import OUT_OF_MEMORY, Client, ResponseError, connect
from vla_stream.broker.scripts import MAX_ATTEMPTS, Script
from vla_stream.broker.server import EmbeddedServer
from vla_stream.config import validate
from vla_stream.environments.protocol import Specification
from vla_stream.errors import Expired, InputError, NoSuchRun
from vla_stream.flow import Consumed, Flow, LastSeen, Permit
from vla_stream.streams.keys import TRAINERS, Keys
from vla_stream.tasks import Turns

B = 4
LEASE_S = 60.0
BROKEN = Script("broken", "return redis.call('GET')")
WEIGHTS = {b"version": b"0"}


def make_flow(client: Client, run: str, *, eta: int, weights: bool = True) -> Flow:
    """A run of its own; with `weights` its first trainer has started: epoch 1, version 1, update 0."""
    config = validate(
        {
            "name": run,
            "environment": {"name": "tabletop", "max_steps": 40},
            "policy": {"name": "tiny", "chunk": 4},
            "trainer": {"segments_per_update": B},
            "flow": {"max_staleness": eta},
        }
    )
    flow = Flow(client, Keys(run))
    assert flow.create(config)
    client.xgroup_create(flow.keys.trajectories, TRAINERS, id="0", mkstream=True)
    if weights:
        flow.resume(epoch=0, update=0, version=1, trained=0, skipped=0, manifest=WEIGHTS)
    return flow


@pytest.fixture
def flow(client: Client, run_name: str) -> Flow:
    """η = 1."""
    return make_flow(client, run_name, eta=1)


def grant(flow: Flow, wanted: int, **options: bool) -> list[Permit]:
    granted = flow.grant(wanted, LEASE_S, **options)
    assert isinstance(granted, list), granted
    return granted


def publish(flow: Flow, permits: list[Permit]) -> list[Consumed]:
    """Publish all, and return what a trainer finds in the stream."""
    for permit in permits:
        assert flow.publish(permit.member, {b"ticket": permit.member.encode()}) == "added"
    members = {permit.member for permit in permits}
    return [item for item in in_stream(flow) if item.member in members]


def in_stream(flow: Flow) -> list[Consumed]:
    entries: Any = flow.client.xrange(flow.keys.trajectories)
    return [Consumed(entry.decode(), fields[b"ticket"].decode()) for entry, fields in entries]


def commit(flow: Flow, consumed: list[Consumed], *, epoch: int = 1, skipped: bool = False) -> str:
    state = flow.state()
    assert state is not None
    return flow.commit(epoch, state.update, state.version + 1, consumed, WEIGHTS, skipped=skipped)


def one_update(flow: Flow, *, epoch: int = 1, skipped: bool = False) -> None:
    assert commit(flow, publish(flow, grant(flow, B)), epoch=epoch, skipped=skipped) == "committed"


def let_leases_pass(flow: Flow, members: list[str]) -> None:
    """As if their simulator had been silent for longer than its lease."""
    for member in members:
        assert flow.client.zadd(flow.keys.permits, {member: 1.0}, xx=True, ch=True) == 1


def outcomes(flow: Flow) -> dict[str, int]:
    """The counters that are not 0."""
    return {name: count for name, count in flow.books().outcomes.items() if count}


# ---- the run


def test_f50_a_second_run_of_the_same_name_is_refused_and_changes_nothing(flow: Flow) -> None:
    before, config = flow.state(), flow.config()
    other = validate({**config.model_dump(mode="json"), "updates": 7})
    assert not flow.create(other)
    assert (flow.state(), flow.config()) == (before, config)


def test_an_attaching_worker_finds_the_config_and_one_without_run_is_told(flow: Flow, client: Client) -> None:
    assert flow.config().trainer.segments_per_update == B
    nowhere = Flow(client, Keys(flow.keys.run + "-other"))
    assert nowhere.state() is None
    assert nowhere.grant(1, LEASE_S) == "missing"
    with pytest.raises(InputError, match="not on this server; give the name and URL"):
        nowhere.config()


def test_the_state_of_a_run_is_what_its_parts_made_of_it(client: Client, run_name: str) -> None:
    flow = make_flow(client, run_name, eta=1, weights=False)
    state = flow.state()
    assert state is not None and len(state.generation) == 16
    assert (state.desired, state.update, state.version, state.epoch, state.next_ticket) == ("running", 0, 0, 0, 0)
    flow.resume(0, 0, 1, 0, 0, WEIGHTS)
    one_update(flow)
    state = flow.state()
    assert state is not None
    assert (state.update, state.version, state.first_version, state.epoch, state.next_ticket) == (1, 2, 1, 1, 4)


def test_f27_a_foreign_desired_state_is_named(flow: Flow) -> None:
    flow.client.hset(flow.keys.flow, "desired", "dancing")
    with pytest.raises(Garbled, match="desired is 'dancing', expected one of running, paused, draining, stopped"):
        flow.state()


def test_f55_the_desired_state_is_a_value_that_late_joiners_see_and_an_announcement(flow: Flow) -> None:
    flow.set_desired("paused", by="a person")
    late = Flow(flow.client, flow.keys).state()
    assert late is not None and late.desired == "paused"
    ((_, announced),) = flow.client.xrange(flow.keys.control)
    assert announced == {b"desired": b"paused", b"by": b"a person"}


def test_a_segment_is_permitted_with_the_lane_of_that_moment_which_is_announced(flow: Flow) -> None:
    (before,) = grant(flow, 1)
    flow.set_lane("redis", by="a person")
    (after,) = grant(flow, 1)
    assert (before.lane, after.lane) == ("auto", "redis")
    state = flow.state()
    assert state is not None and state.lane == "redis"
    ((_, announced),) = flow.client.xrange(flow.keys.control)
    assert announced == {b"lane": b"redis", b"by": b"a person"}


def test_how_many_workers_people_want_is_in_the_state_and_announced(flow: Flow) -> None:
    state = flow.state()
    assert state is not None and state.scale == {}
    flow.set_scale("generator", 3, by="a person")
    state = flow.state()
    assert state is not None and state.scale == {"generator": 3}
    ((_, announced),) = flow.client.xrange(flow.keys.control)
    assert announced == {b"scale": b"generator", b"count": b"3", b"by": b"a person"}
    flow.client.hset(flow.keys.flow, "scale.simulator", "many")
    with pytest.raises(Garbled, match=r"scale\.simulator"):
        flow.state()


def test_the_first_remote_reader_is_named_with_every_permit_until_a_person_sets_the_lane(flow: Flow) -> None:
    assert flow.add_remote_reader("generator-3") and not flow.add_remote_reader("trainer-0")
    state, (permit,) = flow.state(), grant(flow, 1)
    assert state is not None and state.remote_reader == permit.remote_reader == "generator-3"
    flow.set_lane("auto", by="a person", remote_reader="trainer-0")
    assert grant(flow, 1)[0].remote_reader == "trainer-0"
    flow.set_lane("auto", by="a person")
    state, (permit,) = flow.state(), grant(flow, 1)
    assert state is not None and state.remote_reader == permit.remote_reader == ""


def test_a_trace_is_never_cut_short_by_a_shorter_one_and_needs_a_run(flow: Flow) -> None:
    began_ms = flow.ask_for_trace(60.0)
    flow.ask_for_trace(1.0)
    state = flow.state()
    assert state is not None and state.trace_until_ms == began_ms + 60_000
    flow.client.hset(flow.keys.flow, "trace_until_ms", "soon")
    with pytest.raises(Garbled, match="trace_until_ms is 'soon', expected a number"):
        flow.ask_for_trace(1.0)
    flow.client.delete(flow.keys.flow)
    with pytest.raises(NoSuchRun):
        flow.ask_for_trace(1.0)


def test_the_lane_of_a_run_survives_its_server(flow: Flow) -> None:
    flow.set_lane("redis", by="a person")
    state, config = flow.state(), flow.config()
    assert state is not None
    last = LastSeen(state, flow.books())
    flow.client.delete(flow.keys.flow)
    assert flow.create(config, last)
    again = flow.state()
    assert again is not None and (again.lane, again.shm_token) == ("redis", state.shm_token)


@pytest.mark.parametrize(("field", "value"), [("lane", "tcp"), ("shm_token", "/../../home")])
def test_f27_a_foreign_lane_or_folder_is_named_and_not_used(flow: Flow, field: str, value: str) -> None:
    flow.client.hset(flow.keys.flow, field, value)
    with pytest.raises(Garbled, match=f"{field} is '{value}', expected "):
        flow.shm_folder()


def test_a_desired_state_for_a_misspelt_run_is_refused_and_takes_no_name(flow: Flow, client: Client) -> None:
    misspelt = Flow(client, Keys(flow.keys.run + "x"))
    with pytest.raises(InputError, match=f"run {flow.keys.run}x: not on this server"):
        misspelt.set_desired("stopped", by="a person")
    with pytest.raises(InputError, match=f"run {flow.keys.run}x: not on this server"):
        misspelt.set_lane("redis", by="a person")
    assert not misspelt.add_remote_reader("generator-0")
    assert client.exists(misspelt.keys.flow, misspelt.keys.control) == 0


@pytest.mark.parametrize("desired", ["paused", "draining", "stopped"])
def test_while_a_run_is_paused_draining_or_stopped_no_permit_is_given_and_those_given_may_finish(
    desired: Any, flow: Flow
) -> None:
    (permit,) = grant(flow, 1)
    flow.set_desired(desired, by="a person")
    assert flow.grant(1, LEASE_S) == desired
    assert flow.renew([permit.member], LEASE_S) == []
    assert len(publish(flow, [permit])) == 1
    flow.set_desired("running", by="a person")
    assert len(grant(flow, 1)) == 1


def test_f45_simulators_of_other_shapes_than_the_first_are_refused_with_both(flow: Flow) -> None:
    first = Specification({"front": (48, 48)}, state_dims=8, action_dims=3)
    assert flow.specification() is None
    flow.announce(first)
    flow.announce(Specification({"front": (48, 48)}, state_dims=8, action_dims=3))
    with pytest.raises(InputError, match=r'"action_dims": 7.*expected .*"action_dims": 3'):
        flow.announce(Specification({"front": (48, 48)}, state_dims=8, action_dims=7))
    assert flow.specification() == first


# ---- admission (NUMERICS.md)


def test_without_weights_nothing_starts(client: Client, run_name: str) -> None:
    assert make_flow(client, run_name, eta=1, weights=False).grant(1, LEASE_S) == "no weights"


def test_with_eta_2_twelve_permits_at_update_0_and_again_twelve_at_update_5(client: Client, run_name: str) -> None:
    flow = make_flow(client, run_name, eta=2)
    permits = grant(flow, 100)
    assert len(permits) == 12 and flow.grant(1, LEASE_S) == "full"
    flow.abort([permit.member for permit in permits])
    for _ in range(5):
        one_update(flow)
    state = flow.state()
    assert state is not None and state.update == 5
    assert len(grant(flow, 100)) == 12 and flow.grant(1, LEASE_S) == "full"


@pytest.mark.parametrize("eta", [0, 1, 2, 3])
def test_permits_and_published_segments_count_alike_and_a_commit_frees_exactly_b(
    eta: int, client: Client, run_name: str
) -> None:
    flow = make_flow(client, run_name, eta=eta)
    permits = grant(flow, 100)
    assert len(permits) == (1 + eta) * B
    consumed = publish(flow, permits)
    assert flow.grant(1, LEASE_S) == "full"
    commit(flow, consumed[:B])
    assert len(grant(flow, 100)) == B


def test_f24_permits_are_right_where_the_server_cannot_tell_a_lag(flow: Flow) -> None:
    consumed = publish(flow, grant(flow, B))
    flow.client.xreadgroup(TRAINERS, "trainer-0", {flow.keys.trajectories: ">"}, count=1)
    flow.client.xdel(flow.keys.trajectories, consumed[2].entry)
    (group,) = flow.client.xinfo_groups(flow.keys.trajectories)
    assert group["lag"] is None
    assert len(grant(flow, 100)) == B and flow.grant(1, LEASE_S) == "full"


def test_with_eta_1_the_oldest_weights_allowed_follow_the_table_of_numerics(flow: Flow) -> None:
    for _ in range(5):
        one_update(flow)
    v = 6
    assert [permit.min_version for permit in grant(flow, 100)] == [v - 1] * 4 + [v] * 4


def test_the_oldest_weights_allowed_are_the_same_whether_permits_come_at_once_or_one_by_one(flow: Flow) -> None:
    for _ in range(5):
        one_update(flow)
    publish(flow, grant(flow, 2))
    assert [grant(flow, 1)[0].min_version for _ in range(6)] == [5, 5, 6, 6, 6, 6]


def test_no_weights_from_before_this_lineage_are_allowed(client: Client, run_name: str) -> None:
    flow = make_flow(client, run_name, eta=2)
    assert {permit.min_version for permit in grant(flow, B)} == {1}
    flow.resume(epoch=1, update=0, version=9, trained=0, skipped=0, manifest=WEIGHTS)
    assert {permit.min_version for permit in grant(flow, B)} == {9}


def test_with_eta_0_every_segment_is_made_by_the_newest_weights(client: Client, run_name: str) -> None:
    flow = make_flow(client, run_name, eta=0)
    one_update(flow)
    assert [permit.min_version for permit in grant(flow, 100)] == [2] * B


def test_tickets_count_up_from_1_and_every_permit_is_another(flow: Flow) -> None:
    permits = grant(flow, 3) + grant(flow, 2)
    assert [permit.member for permit in permits] == ["1.1", "2.1", "3.1", "4.1", "5.1"]


def test_a_whole_batch_gets_all_its_permits_or_none(flow: Flow) -> None:
    grant(flow, 5)
    assert flow.grant(4, LEASE_S, all_or_none=True) == "full"
    assert len(grant(flow, 3, all_or_none=True)) == 3
    assert flow.books().started == 8


# ---- leases and refunds


def test_f35_a_lease_runs_out_by_the_servers_clock_and_its_ticket_is_given_out_again(flow: Flow) -> None:
    granted = flow.grant(1, lease_s=0.002)
    assert isinstance(granted, list)
    deadline = time.monotonic() + 10.0
    while flow.renew(["1.1"], lease_s=0.001) == []:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert [permit.member for permit in grant(flow, 2)] == ["1.2", "2.1"]
    assert outcomes(flow) == {"expired": 1}


def test_a_renewed_permit_does_not_expire(flow: Flow) -> None:
    (permit,) = grant(flow, 1)
    before = flow.client.zscore(flow.keys.permits, permit.member)
    assert flow.renew([permit.member], 2 * LEASE_S) == []
    after = flow.client.zscore(flow.keys.permits, permit.member)
    assert before is not None and after is not None and after - before > 0.9 * LEASE_S * 1000


def test_renewing_names_the_permits_that_are_gone_and_keeps_the_others(flow: Flow) -> None:
    one, two, three = grant(flow, 3)
    flow.abort([two.member])
    let_leases_pass(flow, [three.member])
    assert flow.renew([one.member, two.member, three.member, "99.1"], LEASE_S) == ["2.1", "3.1", "99.1"]
    assert flow.renew([], LEASE_S) == []


def test_f14_renewing_does_not_bring_a_passed_lease_back(flow: Flow) -> None:
    (permit,) = grant(flow, 1)
    let_leases_pass(flow, [permit.member])
    assert flow.renew([permit.member], LEASE_S) == [permit.member]
    assert [permit.member for permit in grant(flow, 1)] == ["1.2"]


def test_a_revived_owner_of_an_older_attempt_is_told_expired_and_the_new_owner_is_not(flow: Flow) -> None:
    (old,) = grant(flow, 1)
    let_leases_pass(flow, [old.member])
    (new,) = grant(flow, 1)
    assert (new.ticket, new.attempt) == (old.ticket, 2)
    with pytest.raises(Expired, match=r"permit 1\.1 is no longer held; its segment is dropped"):
        flow.publish(old.member, {b"ticket": b"1.1"})
    assert len(publish(flow, [new])) == 1


def test_refunded_numbers_go_out_first_the_lowest_before_the_others(flow: Flow) -> None:
    permits = grant(flow, 4)
    flow.abort([permits[2].member, permits[0].member])
    assert [permit.member for permit in grant(flow, 3)] == ["1.2", "3.2", "5.1"]


def test_after_three_failed_attempts_a_number_is_given_up_and_counted(flow: Flow) -> None:
    for attempt in range(1, MAX_ATTEMPTS + 1):
        (permit,) = grant(flow, 1)
        assert permit.member == f"1.{attempt}"
        assert flow.abort([permit.member]) == 1
    assert [permit.member for permit in grant(flow, 1)] == ["2.1"]
    books = flow.books()
    assert (books.given_up, books.outcomes["aborted"], books.started, books.balance) == (1, 3, 4, 0)


def test_every_way_to_fail_counts_as_an_attempt(flow: Flow) -> None:
    (first,) = grant(flow, 1)
    let_leases_pass(flow, [first.member])
    (second,) = grant(flow, 1)
    (entry,) = publish(flow, [second])
    assert flow.refuse(1, entry.entry, "refused")
    (third,) = grant(flow, 1)
    assert third.member == "1.3"
    flow.abort([third.member])
    assert flow.books().given_up == 1
    assert outcomes(flow) == {"expired": 1, "refused": 1, "aborted": 1}


def test_aborting_twice_or_what_is_published_changes_nothing(flow: Flow) -> None:
    one, two = grant(flow, 2)
    publish(flow, [two])
    assert flow.abort([one.member, two.member]) == 1
    assert flow.abort([one.member, two.member]) == 0
    assert flow.abort([]) == 0
    assert outcomes(flow) == {"aborted": 1} and flow.books().in_flight == 1


# ---- publishing


def test_f02_a_segment_is_published_exactly_once_however_often_it_is_sent(flow: Flow) -> None:
    (permit,) = grant(flow, 1)
    answers = [flow.publish(permit.member, {b"ticket": b"1.1"}) for _ in range(3)]
    assert answers == ["added", "repeat", "repeat"]
    assert [item.member for item in in_stream(flow)] == ["1.1"]
    assert flow.client.zcard(flow.keys.permits) == 0
    assert flow.live_members() == {"1.1"}


def test_the_entry_holds_the_fields_as_given(flow: Flow) -> None:
    (permit,) = grant(flow, 1)
    flow.publish(permit.member, {b"ticket": b"1.1", b"data": b"\x00\xff"})
    ((_, fields),) = flow.client.xrange(flow.keys.trajectories)
    assert fields == {b"ticket": b"1.1", b"data": b"\x00\xff"}


@pytest.mark.parametrize("member", ["7.1", "1.2", "", "nonsense"])
def test_what_was_never_permitted_is_not_published(member: str, flow: Flow) -> None:
    grant(flow, 1)
    with pytest.raises(Expired):
        flow.publish(member, {b"ticket": b"x"})
    assert in_stream(flow) == []


def test_repeats_after_the_commit_or_a_refusal_are_told_expired_and_are_not_added_again(flow: Flow) -> None:
    permits = grant(flow, B + 1)
    consumed = publish(flow, permits)
    commit(flow, consumed[:B])
    flow.refuse(1, consumed[B].entry, "refused")
    for permit in permits:
        with pytest.raises(Expired):
            flow.publish(permit.member, {b"ticket": permit.member.encode()})
    assert in_stream(flow) == []


def test_the_answer_to_publish_changes_no_counter(flow: Flow) -> None:
    (permit,) = grant(flow, 1)
    before = flow.books()
    with pytest.raises(Expired):
        flow.publish("9.1", {b"ticket": b"9.1"})
    flow.publish(permit.member, {b"ticket": b"1.1"})
    flow.publish(permit.member, {b"ticket": b"1.1"})
    assert flow.books() == before


# ---- damage by others


def test_f27_garbage_in_a_field_is_named(flow: Flow) -> None:
    flow.client.hset(flow.keys.books, "trained", "abc")
    with pytest.raises(Garbled, match="field trained is 'abc', expected a number"):
        flow.books()
    flow.client.hset(flow.keys.flow, "update", "x")
    with pytest.raises(Garbled, match="field update is 'x', expected a number"):
        flow.state()


DAMAGE = [
    *[("flow", name, "x") for name in ("desired", "lane", "shm_token", "specification", "update", "version", "epoch")],
    *[("flow", name, "x") for name in ("first_version", "segments_per_update", "max_staleness", "hold_until_ms")],
    *[("flow", name, value) for name in ("version", "next_ticket") for value in (30 * "9", "1e30", "-5", "", "\xff")],
    *[("books", name, value) for name in ("started", "trained") for value in ("x", "1.5", 30 * "9")],
]


@pytest.mark.parametrize(("key", "field", "value"), DAMAGE)
def test_f27_a_field_that_somebody_wrote_over_is_waited_for_until_the_flow_goes_and_is_made_anew(
    flow: Flow, key: str, field: str, value: str
) -> None:
    consumed = publish(flow, grant(flow, B))
    state, config = flow.state(), flow.config()
    assert state is not None and flow.remove_strangers() == []
    last = LastSeen(state, flow.books())
    damaged = getattr(flow.keys, key)
    flow.client.hset(damaged, field, value.encode("latin-1"))
    # Whatever each of these does meanwhile, it says nothing that would end its caller.
    with contextlib.suppress(Garbled):
        granted = flow.grant(1, LEASE_S)
        flow.abort([permit.member for permit in granted if isinstance(permit, Permit)])
    with contextlib.suppress(Garbled):
        flow.refuse(1, "1-1", "poisoned")
    with contextlib.suppress(Garbled):
        commit(flow, consumed)
    (told,) = flow.remove_strangers()
    assert told.startswith(f"{damaged}: field {field} is ") and told.endswith("somebody else wrote it; removed")
    assert flow.state() is None and flow.create(config, last) and flow.remove_strangers() == []
    books = flow.books()
    assert (books.in_flight, books.balance) == (0, 0)


def test_an_error_of_a_script_is_waited_for_where_the_flow_was_just_removed_and_else_not(flow: Flow) -> None:
    with pytest.raises(ResponseError, match=r"(?i)wrong number"):
        flow._call(BROKEN, [flow.keys.flow], [])
    flow.client.delete(flow.keys.flow)
    with pytest.raises(Garbled, match="removed, and not yet made anew"):
        flow._call(BROKEN, [flow.keys.flow], [])


def test_f10_a_flow_that_somebody_deleted_is_made_again_and_its_books_balance(flow: Flow, run_name: str) -> None:
    publish(flow, grant(flow, B)[:2])
    state, config = flow.state(), flow.config()
    assert state is not None
    last = LastSeen(state, flow.books())
    flow.client.delete(flow.keys.flow)
    assert flow.create(config, last)
    books = flow.books()
    assert (books.in_flight, books.outcomes["lost_with_server"], books.balance) == (0, B, 0)


def test_a_trainer_that_has_yet_to_take_over_a_new_life_of_the_server_is_not_told_it_was_replaced(
    flow: Flow,
) -> None:
    consumed = publish(flow, grant(flow, B))
    state, config = flow.state(), flow.config()
    assert state is not None
    last = LastSeen(state, flow.books())
    flow.client.delete(flow.keys.flow)
    assert flow.create(config, last)
    assert not flow.refuse(1, consumed[0].entry, "refused")
    assert flow.commit(1, 0, 2, consumed, WEIGHTS, skipped=False) == "missing"
    assert flow.books().balance == 0


def test_a_commit_that_meets_a_strangers_key_in_place_of_the_stream_changes_nothing(flow: Flow) -> None:
    consumed = publish(flow, grant(flow, B))
    before = (flow.state(), flow.books(), flow.live_members(), flow.client.xlen(flow.keys.weights))
    flow.client.set(flow.keys.trajectories, "x")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        commit(flow, consumed)
    assert (flow.state(), flow.books(), flow.live_members(), flow.client.xlen(flow.keys.weights)) == before
    assert flow.remove_strangers()
    assert commit(flow, consumed) == "committed"
    assert outcomes(flow) == {"trained": B} and flow.live_members() == set()


def test_a_segment_registered_anew_after_permits_are_given_again_would_be_one_too_many(flow: Flow) -> None:
    late, early = (permit.member for permit in grant(flow, 2))
    state, config = flow.state(), flow.config()
    assert state is not None
    last = LastSeen(state, flow.books())
    flow.client.delete(flow.keys.flow)
    assert flow.create(config, last)
    state = flow.state()
    assert state is not None
    assert flow.register(state.generation, [early], LEASE_S) == 1
    flow.client.hset(flow.keys.flow, "hold_until_ms", 0)  # its lease passes
    assert len(grant(flow, 100)) == 2 * B - 1
    assert flow.register(state.generation, [late], LEASE_S) == 0
    assert flow.renew([late, early], LEASE_S) == [late]
    assert outcomes(flow) == {"lost_with_server": 1} and flow.books().balance == 0


# ---- refusing


def test_f27_an_entry_that_names_a_living_ticket_but_is_not_its_own_costs_the_ticket_nothing(flow: Flow) -> None:
    (consumed,) = publish(flow, grant(flow, 1))
    foreign = flow.client.xadd(flow.keys.trajectories, {"ticket": consumed.member})
    assert flow.published_as([consumed.member, "9.9"]) == [consumed.entry, ""] and consumed.entry != foreign.decode()
    assert not flow.refuse(1, foreign.decode(), "poisoned")
    assert in_stream(flow) == [consumed] and flow.live_members() == {consumed.member}


def test_f17_a_published_segment_whose_entry_was_trimmed_is_counted_and_given_out_again(flow: Flow) -> None:
    lost, kept = publish(flow, grant(flow, 2))
    flow.client.xdel(flow.keys.trajectories, lost.entry)
    assert flow.miss(1, []) == [lost.member]
    assert flow.miss(1, []) == []
    assert flow.live_members() == {kept.member} and outcomes(flow) == {"poisoned": 1}
    assert [permit.member for permit in grant(flow, 1)] == ["1.2"]


def test_f54_a_zombie_trainer_can_refuse_nothing(flow: Flow) -> None:
    (consumed,) = publish(flow, grant(flow, 1))
    flow.resume(epoch=1, update=0, version=2, trained=0, skipped=0, manifest=WEIGHTS)
    with pytest.raises(Expired, match="replaced by a newer one"):
        flow.refuse(1, consumed.entry, "refused")
    flow.client.xdel(flow.keys.trajectories, consumed.entry)
    assert flow.miss(1, []) == []
    assert flow.live_members() == {consumed.member}


@pytest.mark.parametrize("counter", ["refused", "poisoned"])
def test_a_refused_segment_is_removed_counted_once_and_its_ticket_given_out_again(counter: Any, flow: Flow) -> None:
    (entry,) = publish(flow, grant(flow, 1))
    assert flow.refuse(1, entry.entry, counter)
    assert not flow.refuse(1, entry.entry, counter)
    assert in_stream(flow) == [] and flow.live_members() == set()
    assert outcomes(flow) == {counter: 1}
    assert [permit.member for permit in grant(flow, 2)] == ["1.2", "2.1"]


# ---- commits


def test_a_commit_counts_frees_and_publishes_in_one_step(flow: Flow) -> None:
    consumed = publish(flow, grant(flow, B + 1))
    flow.client.xreadgroup(TRAINERS, "trainer-0", {flow.keys.trajectories: ">"})
    assert flow.commit(1, 0, 2, consumed[:B], {b"version": b"2"}, skipped=False) == "committed"
    state = flow.state()
    assert state is not None and (state.update, state.version) == (1, 2)
    assert in_stream(flow) == consumed[B:]
    assert flow.client.xpending(flow.keys.trajectories, TRAINERS)["pending"] == 1
    assert outcomes(flow) == {"trained": B}
    assert flow.client.xrevrange(flow.keys.weights, count=1)[0][1] == {b"version": b"2"}


def test_f02_a_commit_whose_reply_was_lost_is_answered_repeat_and_counts_once(flow: Flow) -> None:
    consumed = publish(flow, grant(flow, B))
    answers = [flow.commit(1, 0, 2, consumed, WEIGHTS, skipped=False) for _ in range(3)]
    assert answers == ["committed", "repeat", "repeat"]
    assert outcomes(flow) == {"trained": B}
    assert flow.client.xlen(flow.keys.weights) == 2  # that of `resume`, and this one


def test_a_segment_that_was_refused_meanwhile_is_not_counted_a_second_time_by_the_commit(flow: Flow) -> None:
    consumed = publish(flow, grant(flow, B))
    flow.refuse(1, consumed[0].entry, "refused")
    assert commit(flow, consumed) == "committed"
    assert outcomes(flow) == {"refused": 1, "trained": B - 1} and flow.books().balance == 0


def test_a_skipped_update_advances_update_and_version_and_counts_as_skipped(flow: Flow) -> None:
    one_update(flow, skipped=True)
    state = flow.state()
    assert state is not None and (state.update, state.version) == (1, 2)
    assert outcomes(flow) == {"skipped": B}


@pytest.mark.parametrize(("expected_update", "version"), [(1, 3), (5, 2), (5, 1)])
def test_a_commit_that_expects_another_update_is_fenced_and_changes_nothing(
    expected_update: int, version: int, flow: Flow
) -> None:
    consumed = publish(flow, grant(flow, B))
    before = (flow.state(), flow.books(), in_stream(flow))
    with pytest.raises(Expired, match=f"its update {expected_update + 1} is void"):
        flow.commit(1, expected_update, version, consumed, WEIGHTS, skipped=False)
    assert (flow.state(), flow.books(), in_stream(flow)) == before


def test_a_commit_of_an_update_that_was_committed_with_another_version_is_fenced(flow: Flow) -> None:
    consumed = publish(flow, grant(flow, B))
    flow.commit(1, 0, 2, consumed, WEIGHTS, skipped=False)
    with pytest.raises(Expired):
        flow.commit(1, 0, 3, consumed, WEIGHTS, skipped=False)


def test_f54_a_zombie_trainer_is_fenced_off_and_changes_nothing(flow: Flow) -> None:
    consumed = publish(flow, grant(flow, B))
    flow.resume(epoch=1, update=0, version=2, trained=0, skipped=0, manifest=WEIGHTS)
    before = (flow.state(), flow.books(), in_stream(flow), flow.client.xlen(flow.keys.weights))
    with pytest.raises(Expired, match="trainer of epoch 1 was replaced by a newer one"):
        flow.commit(1, 0, 3, consumed, WEIGHTS, skipped=False)
    assert (flow.state(), flow.books(), in_stream(flow), flow.client.xlen(flow.keys.weights)) == before
    assert flow.commit(2, 0, 3, consumed, WEIGHTS, skipped=False) == "committed"


def test_f54_a_repeat_of_the_last_commit_of_an_old_epoch_is_fenced_too(flow: Flow) -> None:
    consumed = publish(flow, grant(flow, B))
    flow.commit(1, 0, 2, consumed, WEIGHTS, skipped=False)
    flow.resume(epoch=1, update=1, version=3, trained=B, skipped=0, manifest=WEIGHTS)
    with pytest.raises(Expired):
        flow.commit(1, 0, 2, consumed, WEIGHTS, skipped=False)


def test_of_two_trainers_that_start_at_once_one_is_told_to_go(flow: Flow) -> None:
    flow.resume(epoch=1, update=0, version=2, trained=0, skipped=0, manifest=WEIGHTS)
    with pytest.raises(Expired, match="another trainer took over while this one started"):
        flow.resume(epoch=1, update=0, version=2, trained=0, skipped=0, manifest=WEIGHTS)
    state = flow.state()
    assert state is not None and state.epoch == 2


def test_resuming_rolls_back_what_the_checkpoint_does_not_hold_and_the_books_balance(flow: Flow) -> None:
    for skipped in (False, True, False, False, True):
        one_update(flow, skipped=skipped)
    waiting = publish(flow, grant(flow, 2))
    flow.resume(epoch=1, update=2, version=7, trained=B, skipped=B, manifest=WEIGHTS)
    state = flow.state()
    assert state is not None
    assert (state.update, state.version, state.first_version, state.epoch) == (2, 7, 7, 2)
    assert outcomes(flow) == {"trained": B, "skipped": B, "rolled_back": 3 * B}
    assert flow.books().balance == 0
    assert in_stream(flow) == waiting  # not yet trained: still good
    one_update(flow, epoch=2)
    assert outcomes(flow)["trained"] == 2 * B and flow.books().balance == 0


def test_resuming_at_the_last_update_rolls_nothing_back(flow: Flow) -> None:
    one_update(flow)
    flow.resume(epoch=1, update=1, version=3, trained=B, skipped=0, manifest=WEIGHTS)
    assert outcomes(flow) == {"trained": B}


def test_resuming_a_run_that_is_not_there_is_refused(client: Client, run_name: str) -> None:
    with pytest.raises(Expired):
        Flow(client, Keys(run_name)).resume(0, 0, 1, 0, 0, WEIGHTS)


# ---- ticket order


def test_in_order_those_are_ready_that_no_running_ticket_can_come_before(flow: Flow) -> None:
    permits = grant(flow, B)
    assert flow.ready_in_order(B) == []
    publish(flow, [permits[0], permits[1], permits[3]])
    assert flow.ready_in_order(B) == ["1.1", "2.1"]
    publish(flow, [permits[2]])
    assert flow.ready_in_order(B) == ["1.1", "2.1", "3.1", "4.1"]


def test_in_order_the_lowest_tickets_come_first_and_not_those_published_first(flow: Flow) -> None:
    permits = grant(flow, 2 * B)
    publish(flow, permits[::-1])
    assert flow.ready_in_order(B) == ["1.1", "2.1", "3.1", "4.1"]


def test_in_order_ticket_10_comes_after_ticket_9(flow: Flow) -> None:
    one_update(flow)
    one_update(flow)
    publish(flow, grant(flow, B)[::-1])
    assert flow.ready_in_order(B) == ["9.1", "10.1", "11.1", "12.1"]


def test_in_order_a_lower_ticket_that_still_runs_is_waited_for(flow: Flow) -> None:
    permits = grant(flow, B + 1)
    publish(flow, permits[1:])
    assert flow.ready_in_order(B) == []
    flow.publish(permits[0].member, {b"ticket": b"1.1"})
    assert flow.ready_in_order(B) == ["1.1", "2.1", "3.1", "4.1"]


def test_in_order_a_higher_ticket_that_still_runs_is_not_waited_for(flow: Flow) -> None:
    publish(flow, grant(flow, B + 1)[:B])
    assert flow.ready_in_order(B) == ["1.1", "2.1", "3.1", "4.1"]


def test_in_order_a_lower_ticket_that_failed_is_waited_for_until_its_next_attempt_arrives(flow: Flow) -> None:
    permits = grant(flow, B + 1)
    publish(flow, permits[1:])
    let_leases_pass(flow, [permits[0].member])
    assert flow.ready_in_order(B) == []
    assert outcomes(flow) == {"expired": 1}
    again = grant(flow, 1)
    assert flow.ready_in_order(B) == []
    publish(flow, again)
    assert flow.ready_in_order(B) == ["1.2", "2.1", "3.1", "4.1"]


def test_in_order_a_number_given_up_is_no_longer_waited_for(flow: Flow) -> None:
    publish(flow, grant(flow, B + 1)[1:])
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert flow.ready_in_order(B) == []
        flow.abort([f"1.{attempt}"])
        if attempt < MAX_ATTEMPTS:
            assert grant(flow, 1)[0].member == f"1.{attempt + 1}"
    assert flow.ready_in_order(B) == ["2.1", "3.1", "4.1", "5.1"]


# ---- a full server


def test_f23_on_a_full_server_nothing_new_begins_and_all_that_frees_memory_works(
    tmp_path: Path,
) -> None:
    with EmbeddedServer.start(tmp_path) as server, contextlib.closing(connect(server.url, name="test")) as client:
        flow = make_flow(client, "full", eta=1)
        permits = grant(flow, 2 * B)
        client.config_set("maxmemory", 1)
        consumed = publish(flow, permits[: B + 1])
        assert flow.abort([permits[B + 1].member]) == 1
        assert flow.refuse(1, consumed[B].entry, "refused")
        assert commit(flow, consumed[:B]) == "committed"
        assert flow.renew([permits[B + 2].member], 30.0) == []
        flow.set_desired("paused", "a person")
        flow.set_desired("running", "a person")
        flow.resume(1, 1, 3, B, 0, WEIGHTS)
        before = (flow.state(), flow.books())
        with pytest.raises(OUT_OF_MEMORY):
            grant(flow, 1)
        assert (flow.state(), flow.books()) == before and flow.books().balance == 0
        client.config_set("maxmemory", 0)
        assert len(grant(flow, B)) == B and flow.books().balance == 0


# ---- the books, whatever happens


class Run(RuleBasedStateMachine):
    """Random interleavings of simulators, trainers and their deaths; the model knows what must come of each call."""

    client: Client
    run: str
    number = 0

    @initialize(eta=st.integers(0, 2), keep=st.booleans(), order=st.sampled_from([(0,), (0, 1), (0, 1, 0, 0, 0, 0)]))
    def start(self, eta: int, keep: bool, order: tuple[int, ...]) -> None:
        Run.number += 1
        self.flow = make_flow(self.client, f"{self.run}-{Run.number}", eta=eta)
        self.config = self.flow.config()
        self.eta = eta
        self.tasks = [Turns(task, order) for task in sorted(set(order))]
        self.keep = keep  # ack: checkpoint
        self.kept: dict[str, tuple[int, Consumed]] = {}  # member -> its update
        self.started = 0
        self.seen = self.look()
        self.given: list[str] = []  # every member ever granted
        self.held: set[str] = set()
        self.published: dict[str, Consumed] = {}
        self.epoch, self.update, self.version = 1, 0, 1
        self.counts = {"trained": 0, "skipped": 0}
        self.lineage: set[int] = set()  # tickets that this lineage consumed
        self.checkpoint = (0, dict(self.counts), set(self.lineage))
        self.last_commit: tuple[int, int, int, list[Consumed], bool] | None = None
        self.zombies: list[tuple[int, int, int, list[Consumed], bool]] = []

    def teardown(self) -> None:
        if hasattr(self, "flow"):
            self.client.delete(*self.client.scan_iter(match=self.flow.keys.flow[: -len("flow")] + "*", count=1000))

    @property
    def outstanding(self) -> int:
        return len(self.held) + len(self.published) + len(self.kept)

    def look(self) -> LastSeen:
        state = self.flow.state()
        assert state is not None
        return LastSeen(state, self.flow.books())

    @precondition(lambda self: self.outstanding < (1 + self.eta) * B)
    @rule(wanted=st.sampled_from([4 * B, B, 2, 1]), all_or_none=st.booleans(), task=st.integers(0, 1))
    def grant_permits(self, wanted: int, all_or_none: bool, task: int = 0) -> None:
        free = (1 + self.eta) * B - self.outstanding
        turns = self.tasks[task % len(self.tasks)]
        granted = self.flow.grant(wanted, LEASE_S, all_or_none=all_or_none, turns=turns)
        if free < (wanted if all_or_none else 1):
            assert granted == "full"
            return
        if len(self.tasks) == 1:
            assert isinstance(granted, list) and len(granted) == min(free, wanted)
        elif granted == "no turn":
            return
        assert isinstance(granted, list) and 0 < len(granted) <= min(free, wanted)
        assert not all_or_none or len(granted) == wanted
        for permit in granted:
            assert turns.order[(permit.ticket - 1) % len(turns.order)] == turns.task
            assert permit.member not in self.given
            assert permit.attempt <= MAX_ATTEMPTS
            assert self.version - self.eta <= permit.min_version <= self.version
            self.given.append(permit.member)
            self.held.add(permit.member)
        self.started += len(granted)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), lost_replies=st.integers(0, 2))
    def publish_segments(self, data: st.DataObject, lost_replies: int) -> None:
        order = sorted(self.held, reverse=data.draw(st.booleans()))
        self.publish(order[: data.draw(st.sampled_from([len(order), B, 1]))], lost_replies)

    def publish(self, members: list[str], lost_replies: int) -> None:
        for member in members:
            answers = [self.flow.publish(member, {b"ticket": member.encode()}) for _ in range(1 + lost_replies)]
            assert answers == ["added"] + ["repeat"] * lost_replies
            self.held.remove(member)
            ((entry, _),) = self.client.xrevrange(self.flow.keys.trajectories, count=1)
            self.published[member] = Consumed(entry.decode(), member)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def a_zombie_publishes_what_it_once_held(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(self.given))
        if member in self.held:
            return
        if member in self.published:
            assert self.flow.publish(member, {b"ticket": member.encode()}) == "repeat"
        else:
            with pytest.raises(Expired):
                self.flow.publish(member, {b"ticket": member.encode()})

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_simulator_dies(self, data: st.DataObject) -> None:
        lost = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1))
        let_leases_pass(self.flow, sorted(lost))
        assert set(self.flow.renew(sorted(lost), LEASE_S)) == lost
        self.flow.ready_in_order(B)  # one of the calls that collect passed leases
        self.held -= lost

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def a_simulator_aborts(self, data: st.DataObject) -> None:
        lost = data.draw(st.sets(st.sampled_from(sorted(self.held)), min_size=1))
        assert self.flow.abort(sorted(lost)) == len(lost)
        assert self.flow.abort(sorted(lost)) == 0
        self.held -= lost

    @precondition(lambda self: self.published)
    @rule(data=st.data(), counter=st.sampled_from(["refused", "poisoned"]))
    def the_trainer_refuses(self, data: st.DataObject, counter: Any) -> None:
        entry = self.published.pop(data.draw(st.sampled_from(sorted(self.published))))
        assert self.flow.refuse(self.epoch, entry.entry, counter)
        assert not self.flow.refuse(self.epoch, entry.entry, counter)

    @precondition(lambda self: len(self.published) >= B)
    @rule(data=st.data(), skipped=st.booleans(), lost_replies=st.integers(0, 2))
    def the_trainer_commits(self, data: st.DataObject, skipped: bool, lost_replies: int) -> None:
        self.update_from(sorted(self.published, reverse=data.draw(st.booleans()))[:B], skipped, lost_replies)

    def update_from(self, members: list[str], skipped: bool, lost_replies: int) -> None:
        consumed = [self.published.pop(member) for member in members]
        call = (self.epoch, self.update, self.version + 1, consumed, skipped)
        assert [self.commit(*call) for _ in range(1 + lost_replies)] == ["committed"] + ["repeat"] * lost_replies
        tickets = {int(member.partition(".")[0]) for member in members}
        assert len(tickets) == B and not tickets & self.lineage, "a ticket was trained twice in one lineage"
        self.lineage |= tickets
        self.counts["skipped" if skipped else "trained"] += B
        if self.keep:
            self.kept |= {item.member: (self.update + 1, item) for item in consumed}
        self.update, self.version, self.last_commit = self.update + 1, self.version + 1, call

    @rule(lost_replies=st.integers(0, 1), skipped=st.booleans(), reverse=st.booleans())
    def a_whole_update_goes_well(self, lost_replies: int, skipped: bool, reverse: bool) -> None:
        if len(self.kept) > self.eta * B:
            self.the_trainer_saves_a_checkpoint(released=True)
        # As simulators of all tasks do, again and again; one round is enough unless what is left cannot fill an update.
        for _ in range(2):
            for task in range(len(self.tasks)):
                if self.outstanding < (1 + self.eta) * B:
                    self.grant_permits(4 * B, all_or_none=False, task=task)
            self.publish(sorted(self.held, reverse=reverse), lost_replies)
        self.update_from(sorted(self.published, reverse=reverse)[:B], skipped, lost_replies)

    @precondition(lambda self: self.last_commit is not None)
    @rule(released=st.booleans())
    def the_trainer_saves_a_checkpoint(self, released: bool) -> None:
        self.checkpoint = (self.update, dict(self.counts), set(self.lineage))
        if released:  # else it dies in between, or will do it at the next one
            assert self.flow.release(self.epoch, self.update) == len(self.kept)
            self.kept.clear()

    @precondition(lambda self: self.last_commit is not None)
    @rule()
    def the_trainer_dies_and_resumes(self) -> None:
        assert self.last_commit is not None
        self.zombies.append(self.last_commit)
        if self.published:
            # It dies between training and commit: it will come back with these.
            self.zombies.append((self.epoch, self.update, self.version + 1, list(self.published.values()), False))
        self.update, counts, lineage = self.checkpoint
        self.counts, self.lineage, self.last_commit = dict(counts), set(lineage), None
        self.published |= {member: item for member, (update, item) in self.kept.items() if update > self.update}
        self.kept.clear()
        self.take_over()

    def take_over(self) -> None:
        state = self.flow.state()
        assert state is not None
        self.version = max(self.version, state.version) + 1
        self.flow.resume(
            state.epoch, self.update, self.version, self.counts["trained"], self.counts["skipped"], WEIGHTS
        )
        self.epoch = state.epoch + 1

    @rule()
    def the_launcher_looks(self) -> None:
        self.seen = self.look()

    @rule(data=st.data(), by_a_new_trainer=st.booleans())
    def the_server_loses_everything(self, data: st.DataObject, by_a_new_trainer: bool) -> None:
        if self.last_commit is not None:
            self.zombies.append(self.last_commit)
        alive = data.draw(st.sets(st.sampled_from(sorted(self.held)))) if self.held else set()
        keys = self.flow.keys
        self.client.delete(*self.client.scan_iter(match=keys.flow[: -len("flow")] + "*", count=1000))
        assert self.flow.grant(1, LEASE_S) == "missing"
        assert self.flow.create(self.config, self.seen)
        self.client.xgroup_create(keys.trajectories, TRAINERS, id="0", mkstream=True)
        state = self.flow.state()
        assert state is not None
        self.started = self.seen.books.started
        lost = self.flow.books().outcomes["lost_with_server"]
        assert self.flow.register("another life", sorted(alive), LEASE_S) == 0
        for _ in range(2):  # the second time as after a lost reply
            self.flow.register(state.generation, sorted(alive), LEASE_S)
        self.started += max(0, len(alive) - lost)
        assert self.flow.grant(1, LEASE_S) == "holding", "no permits for one lease"
        self.client.hset(keys.flow, "hold_until_ms", 0)  # which passes
        self.held = alive
        self.published.clear()
        self.kept.clear()
        if by_a_new_trainer:
            self.update, counts, lineage = self.checkpoint
            self.counts, self.lineage = dict(counts), set(lineage)
        self.take_over()
        self.last_commit = None
        # As the trainer does: the counters of its checkpoint are those of this server's books.
        self.counts = {name: self.flow.books().outcomes[name] for name in self.counts}
        self.checkpoint = (self.update, dict(self.counts), set(self.lineage))
        self.seen = self.look()

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def a_zombie_trainer_commits(self, data: st.DataObject) -> None:
        with pytest.raises(Expired):
            self.commit(*data.draw(st.sampled_from(self.zombies)))

    def commit(self, epoch: int, update: int, version: int, consumed: list[Consumed], skipped: bool) -> str:
        return self.flow.commit(epoch, update, version, consumed, WEIGHTS, skipped=skipped, keep=self.keep)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "flow"):
            return
        books = self.flow.books()
        assert books.balance == 0, books
        assert books.started == self.started
        assert books.in_flight == len(self.held) + len(self.published)
        assert self.outstanding <= (1 + self.eta) * B
        assert {name: books.outcomes[name] for name in self.counts} == self.counts
        assert self.flow.live_members() == self.held | set(self.published) | set(self.kept)
        assert {item.member for item in in_stream(self.flow)} == set(self.published) | set(self.kept)
        state = self.flow.state()
        assert state is not None
        assert (state.update, state.version, state.epoch) == (self.update, self.version, self.epoch)

    @invariant()
    def no_ticket_is_in_two_places(self) -> None:
        if not hasattr(self, "flow"):
            return
        waiting = {member.decode() for member in self.client.zrange(self.flow.keys.refunded, 0, -1)}
        tickets = [member.partition(".")[0] for member in [*self.held, *self.published, *self.kept, *waiting]]
        assert len(set(tickets)) == len(tickets)
        assert self.outstanding + len(waiting) <= (1 + self.eta) * B, "room is kept for what waits"


def test_the_books_balance_over_random_lives_and_deaths(client: Client, run_name: str) -> None:
    machine = type("ThisRun", (Run,), {"client": client, "run": run_name})
    # Derandomised: CI must not flake.
    limits = settings(derandomize=True, database=None, deadline=None, max_examples=25, stateful_step_count=40)
    run_state_machine_as_test(machine, settings=limits)
