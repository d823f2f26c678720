"""Several tasks: whose turn it is, who plays what, and that each gets its part however slow it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from test_flow import LEASE_S, let_leases_pass, make_flow, one_update, publish

from vla_stream import tasks
from vla_stream.broker.connection import Client
from vla_stream.config import Config, validate
from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError
from vla_stream.flow import Consumed, Flow, Permit
from vla_stream.tasks import Turns

B = 4


def config(listed: dict[str, Any], **changes: Any) -> Config:
    data: dict[str, Any] = {
        "environment": {
            "name": "tabletop",
            "max_steps": 40,
            "options": {"shaping": 1.0, "step_delay_ms": {"mean": 1.0, "sigma": 0.0}},
            "tasks": listed,
        },
        "policy": {"name": "tiny", "chunk": 4},
        "simulators": {"count": 2, "env_batches": 2},
        "trainer": {"segments_per_update": 8},
    }
    return validate(data | changes)


# ---- turns


@pytest.mark.parametrize("weights", [(1,), (1, 1), (3, 1), (5, 1, 1), (1, 2, 3, 4), (97, 2, 1)])
def test_a_round_has_each_task_as_often_as_its_weight_and_at_no_point_far_from_it(weights: tuple[int, ...]) -> None:
    names = [f"task{i}" for i in range(len(weights))]
    turns = tasks.round_of(tuple(zip(names, weights, strict=True)))
    assert Counter(turns) == dict(zip(names, weights, strict=True))
    for seen in range(1, len(turns) + 1):
        for name, weight in zip(names, weights, strict=True):
            assert abs(turns[:seen].count(name) - seen * weight / sum(weights)) < 1.5


def test_the_task_of_a_ticket_depends_on_its_number_alone_and_turns_say_the_same() -> None:
    environment = config({"far": {"weight": 1}, "near": {"weight": 2}}).environment
    found = [tasks.task_of(environment, ticket) for ticket in range(1, 10)]
    assert found == ["near", "far", "near"] * 3
    assert tasks.turns_of(environment, "far") == Turns(0, (1, 0, 1))
    assert tasks.turns_of(environment, "near") == Turns(1, (1, 0, 1))
    assert tasks.shares(environment) == {"far": pytest.approx(1 / 3), "near": pytest.approx(2 / 3)}
    assert tasks.dealt(environment, 5) == {"near": [0, 2, 3], "far": [1, 4]}


def test_a_run_that_lists_none_has_one_task_whose_config_is_the_runs() -> None:
    alone = config({})
    assert tasks.names(alone.environment) == ("",) and tasks.task_of(alone.environment, 7) == ""
    assert tasks.config_for(alone, "") is alone
    assert tasks.of_batches(alone, "simulator-5") == ["", ""] and tasks.left_out(alone, 1) == []


def test_a_tasks_options_go_on_top_of_the_environments() -> None:
    whole = config({"slow": {"options": {"step_delay_ms": {"mean": 9.0}}}, "quick": {}})
    slow, quick = (tasks.config_for(whole, name).environment for name in ("slow", "quick"))
    assert slow.options == {"shaping": 1.0, "step_delay_ms": {"mean": 9.0, "sigma": 0.0}}
    assert quick.options == whole.environment.options == {"shaping": 1.0, "step_delay_ms": {"mean": 1.0, "sigma": 0.0}}
    assert slow.tasks == {} and slow.max_steps == 40


def test_batches_are_dealt_over_the_simulators_by_their_numbers_a_slow_task_gets_more() -> None:
    two = config({"slow": {"batches": 3}, "quick": {}})
    dealt = [tasks.of_batches(two, f"simulator-{number}") for number in range(4)]
    assert dealt == [["slow", "slow"], ["quick", "slow"]] * 2
    assert tasks.left_out(two, 1) == ["quick"] and tasks.left_out(two, 2) == []


# ---- what cannot work


@pytest.mark.parametrize(
    ("listed", "changes", "told"),
    [
        ({"a": {}, "b": {}}, {"simulators": {"count": 1}}, "has no environment batch for b: simulators.count × simu"),
        ({"a": {"weight": 999}, "b": {"weight": 2}}, {}, "weight adds up to 1001, at most 1000; give smaller numbers"),
        ({f"t{i}": {} for i in range(101)}, {}, "environment.tasks lists 101, at most 100"),
        ({"a": {"weight": 0}}, {}, "environment.tasks.a.weight"),
        ({"a.b": {}}, {}, "environment.tasks.a.b"),
        ({"a": {"wieght": 2}}, {}, "did you mean weight"),
    ],
)
def test_what_cannot_work_is_one_line(listed: dict[str, Any], changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as caught:
        config(listed, **changes)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_pool_may_be_attached_later_where_the_run_starts_no_simulator() -> None:
    assert config({"a": {}, "b": {}}, simulators={"count": 0}).simulators.count == 0


def test_whole_batches_have_one_slot_each() -> None:
    two = config({"a": {}, "b": {}})
    with pytest.raises(InputError, match=r"tabletop steps whole batches, but simulators.slots is 2; set slots to 1"):
        tasks.check_whole_batch(two, True)
    tasks.check_whole_batch(two, False)
    tasks.check_whole_batch(config({}), True)


# ---- permits

QUICK, SLOW = Turns(0, (0, 0, 1)), Turns(1, (0, 0, 1))  # every third ticket is the slow task's


def members(granted: list[Permit] | str) -> list[str]:
    assert isinstance(granted, list), granted
    return [permit.member for permit in granted]


def test_each_task_gets_its_own_tickets_and_those_passed_over_wait_for_the_other(client: Client, run_name: str) -> None:
    flow = make_flow(client, run_name, eta=1)
    assert members(flow.grant(3, LEASE_S, turns=QUICK)) == ["1.1", "2.1", "4.1"]
    assert flow.waiting_tickets() == {3}
    assert members(flow.grant(1, LEASE_S, turns=SLOW)) == ["3.1"]
    assert members(flow.grant(1, LEASE_S, turns=SLOW)) == ["6.1"]
    assert flow.waiting_tickets() == {5}
    books = flow.books()
    assert (books.started, books.in_flight, books.balance) == (5, 5, 0), "a ticket that waits is not begun"


def test_a_quick_task_stops_where_the_room_of_the_slow_one_begins(client: Client, run_name: str) -> None:
    flow = make_flow(client, run_name, eta=1)
    assert members(flow.grant(100, LEASE_S, turns=QUICK)) == ["1.1", "2.1", "4.1", "5.1", "7.1", "8.1"]
    assert flow.grant(1, LEASE_S, turns=QUICK) == "no turn"
    assert members(flow.grant(100, LEASE_S, turns=SLOW)) == ["3.1", "6.1"]
    assert flow.grant(1, LEASE_S, turns=SLOW) == flow.grant(1, LEASE_S, turns=QUICK) == "full"


def test_a_ticket_that_failed_stays_its_tasks(client: Client, run_name: str) -> None:
    flow = make_flow(client, run_name, eta=1)
    flow.grant(4, LEASE_S, turns=QUICK)
    flow.grant(1, LEASE_S, turns=SLOW)
    flow.abort(["3.1"])
    let_leases_pass(flow, ["2.1"])
    assert members(flow.grant(1, LEASE_S, turns=QUICK)) == ["2.2"]
    assert members(flow.grant(1, LEASE_S, turns=SLOW)) == ["3.2"]
    assert flow.books().balance == 0


def test_all_or_none_looks_before_it_takes(client: Client, run_name: str) -> None:
    flow = make_flow(client, run_name, eta=1)
    before = flow.state()
    assert flow.grant(3, LEASE_S, all_or_none=True, turns=SLOW) == "no turn"
    assert flow.state() == before and flow.waiting_tickets() == set() and flow.books().started == 0
    assert members(flow.grant(2, LEASE_S, all_or_none=True, turns=SLOW)) == ["3.1", "6.1"]


def test_in_ticket_order_what_is_passed_over_is_waited_for_and_counts_for_the_version(
    client: Client, run_name: str
) -> None:
    flow = make_flow(client, run_name, eta=1)
    one_update(flow)  # with tickets 1 to 4; version 2
    slow = flow.grant(2, LEASE_S, turns=SLOW)
    assert isinstance(slow, list)
    # The second of update 2 may be a version old when it is trained, the first of update 3 as well.
    assert [(permit.member, permit.min_version) for permit in slow] == [("6.1", 1), ("9.1", 2)]
    publish(flow, slow)
    assert flow.ready_in_order(B) == [], "ticket 5 comes before"
    quick = flow.grant(100, LEASE_S, turns=QUICK)
    assert members(quick) == ["5.1", "7.1", "8.1", "10.1", "11.1"]
    assert isinstance(quick, list)
    publish(flow, quick)
    assert flow.ready_in_order(B) == ["5.1", "6.1", "7.1", "8.1"]


class Shop:
    """Simulated time on a real server: slots of two tasks, whose segments take so many ticks, and a trainer."""

    def __init__(self, flow: Flow, ticks: dict[Turns, int], slots: dict[Turns, int]) -> None:
        self.flow, self.ticks, self.slots = flow, ticks, slots
        self.working: list[tuple[int, Permit, Turns, int]] = []  # until, permit, whose, version at its start
        self.made: dict[str, tuple[Turns, int]] = {}  # by whom, and with which weights
        self.trained: list[int] = []
        self.trained_by: list[Turns] = []
        self.staleness: list[int] = []  # versions

    def run(self, updates: int, epoch: int = 1) -> None:
        update, version, now = 0, 1, 0
        while update < updates:
            assert now < 1000 * updates, "nothing moves any more"
            for turns, slots in self.slots.items():
                idle = slots - sum(whose == turns for _, _, whose, _ in self.working)
                granted = self.flow.grant(idle, LEASE_S, turns=turns) if idle else "busy"
                for permit in granted if isinstance(granted, list) else ():
                    self.working.append((now + self.ticks[turns], permit, turns, version))
            now += 1
            for item in [item for item in self.working if item[0] <= now]:
                self.working.remove(item)
                self.made[item[1].member] = item[2:]
                self.flow.publish(item[1].member, {b"ticket": item[1].member.encode()})
            entries: Any = self.flow.client.xrange(self.flow.keys.trajectories, count=B)
            if len(entries) < B:
                continue
            chosen = [(entry.decode(), fields[b"ticket"].decode()) for entry, fields in entries]
            consumed = [Consumed(*item) for item in chosen]
            assert self.flow.commit(epoch, update, version + 1, consumed, {b"v": b"0"}, skipped=False) == "committed"
            tickets = [int(member.partition(".")[0]) for _, member in chosen]
            self.trained += tickets
            self.trained_by += [self.made[member][0] for _, member in chosen]
            self.staleness += [version - self.made[member][1] for _, member in chosen]
            update, version = update + 1, version + 1


def slow_part(trained: list[int], slow: Turns) -> float:
    turns = [slow.order[(ticket - 1) % len(slow.order)] for ticket in trained]
    return turns.count(slow.task) / len(turns)


@pytest.mark.parametrize("eta", [0, 1, 3])
@pytest.mark.parametrize("slots", [1, 12], ids=["one slow slot", "many slow slots"])
@pytest.mark.parametrize("order", [(0, 0, 1), (0, 1), (0,) * 11 + (1,)], ids=["third", "half", "twelfth"])
def test_a_task_twenty_times_as_slow_is_trained_as_often_as_its_weight_says(
    client: Client, run_name: str, eta: int, slots: int, order: tuple[int, ...]
) -> None:
    quick, slow = Turns(0, order), Turns(1, order)
    flow = make_flow(client, run_name, eta=eta)
    shop = Shop(flow, {quick: 1, slow: 20}, {quick: 8, slow: slots})
    shop.run(updates=60)
    share, off = order.count(1) / len(order), (1 + eta) * B / len(shop.trained)
    assert abs(slow_part(shop.trained, slow) - share) <= off, "no further off than what is under way"
    assert flow.books().balance == 0
    # Else they would be refused as too stale, and that would crowd the slow task out by another door.
    assert max(shop.staleness) <= 2 * eta + 2


def test_where_slots_take_any_ticket_the_slow_ones_are_crowded_out(client: Client, run_name: str) -> None:
    """That the test above can fail."""
    flow = make_flow(client, run_name, eta=1)
    quick, slow = Turns(0, (0,)), Turns(0, (0, 0))  # two kinds of slots, one kind of tickets
    shop = Shop(flow, {quick: 1, slow: 5}, {quick: 4, slow: 4})
    shop.run(updates=60)
    assert sum(whose == slow for whose in shop.trained_by) / len(shop.trained_by) < 0.35


def test_tasks_that_look_otherwise_are_refused_with_both_names() -> None:
    seen: dict[str, Specification] = {}
    tasks.check_shapes(seen, "near", Specification({"front": (48, 48)}, 8, 3))
    tasks.check_shapes(seen, "far", Specification({"front": (48, 48)}, 8, 3))
    with pytest.raises(InputError, match=r"environment\.tasks\.bare: has other cameras, state or actions than near"):
        tasks.check_shapes(seen, "bare", Specification({}, 8, 3))
