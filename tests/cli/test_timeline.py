"""Spans of workers as a trace and as shares: given entries, given clocks."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from vla_stream.cli.pulse import Shares
from vla_stream.cli.samples import Record
from vla_stream.cli.timeline import Timeline, is_trace

S = 1_000_000


def entry(worker: str, spans: list[Any], clock_us: float = 0.0, **fields: str | float) -> Record:
    about = {"worker": worker, "role": worker.rpartition("-")[0], "host": "node7", "pid": 4711.0}
    return {**about, "clock_us": clock_us, "dropped": 0.0, "spans": json.dumps(spans), **fields}


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_every_worker_is_a_process_and_every_track_a_thread_with_its_name() -> None:
    timeline = Timeline()
    spans = [["main", "waiting", 0, S], ["main", "infer", S, 2 * S], ["collect", "read", S, 2 * S]]
    timeline.add([entry("generator-0", spans), entry("simulator-0", [["batch 0", "step", 0, S, {"stepping": 1.0}]])])
    trace = timeline.chrome(0, 2 * S)
    names = {(e["pid"], e["name"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {(1, "process_name"): "simulator-0 (4711)", (2, "process_name"): "generator-0 (4711)"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    shown = [(tracks[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in complete(trace)]
    assert sorted(shown) == [
        ("batch 0", "step", 0, S),
        ("collect", "read", S, S),
        ("main", "infer", S, S),
        ("main", "waiting", 0, S),
    ]


def test_hosts_whose_clocks_differ_line_up_by_the_servers() -> None:
    timeline = Timeline()
    timeline.add([entry("simulator-0", [["batch 0", "step", 5, 10]], 100.0)])
    timeline.add([entry("generator-0", [["main", "infer", 1005, 1010]], -900.0, host="node8")])
    assert timeline.bounds_us == (105, 110)
    assert [event["ts"] for event in complete(timeline.chrome(100, 200))] == [5, 5]
    named = [event["args"]["name"] for event in timeline.chrome(0, 9)["traceEvents"] if event["name"] == "process_name"]
    assert named == ["simulator-0 on node7 (4711)", "generator-0 on node8 (4711)"]


def test_neighbours_do_not_meet_where_entries_disagree_on_the_clock() -> None:
    timeline = Timeline()
    for number, jitter_us in enumerate((30.0, -40.0, 0.0)):
        timeline.add([entry("trainer-0", [["main", "update", number * S, (number + 1) * S]], jitter_us)])
    spans = complete(timeline.chrome(0, 3 * S))
    assert [(span["ts"], span["ts"] + span["dur"]) for span in spans] == [(0, S), (S, 2 * S), (2 * S, 3 * S)]


def test_a_span_that_began_earlier_or_ended_later_is_cut_and_others_are_left_out() -> None:
    timeline = Timeline()
    timeline.add(
        [entry("trainer-0", [["main", "add", 0, S], ["main", "update", S, 9 * S], ["main", "read", 9 * S, S * 10]])]
    )
    spans = complete(timeline.chrome(3 * S, 5 * S))
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [("update", 0, 2 * S)]
    assert timeline.shares(3 * S, 5 * S)["trainer-0"] == Shares(1.0, 0.0, 0.0)


def test_shares_are_what_the_spans_count_as() -> None:
    timeline = Timeline()
    batch = [
        ["batch 0", "step", 0, S, {"stepping": 0.75, "asked": 0.25}],
        ["batch 0", "wait", S, 2 * S, {"asked": 1.0}],
    ]
    other = [["batch 1", "held", 0, 2 * S, {"held": 1.0}]]
    timeline.add([entry("simulator-0", batch + other)])
    timeline.add(
        [entry("generator-0", [["main", "infer", 0, S], ["main", "waiting", S, 4 * S], ["collect", "read", 0, S]])]
    )
    assert timeline.shares(0, 4 * S) == {
        "simulator-0": Shares(0.1875, 0.3125, 0.5),
        "generator-0": Shares(0.25, 0.75, 0.0),
    }


def test_a_worker_that_started_anew_is_another_process_and_the_same_worker() -> None:
    timeline = Timeline()
    timeline.add([entry("trainer-0", [["main", "update", 0, S], ["main", "waiting", S, 2 * S]])])
    timeline.add([entry("trainer-0", [["main", "update", 0, 2 * S]], 7.0 * S, pid=4712.0)])
    assert timeline.shares(0, 10 * S) == {"trainer-0": Shares(0.75, 0.25, 0.0)}
    assert len({event["pid"] for event in complete(timeline.chrome(0, 10 * S))}) == 2


def test_f27_what_no_worker_wrote_is_left_out() -> None:
    whole = entry("trainer-0", [["main", "update", 0, S, {"update": 1.0}]])
    broken: list[Any] = [
        "x",
        "{}",
        "[1]",
        "[[1, 2, 3, 4]]",
        '[["a", "b", 2, 1]]',
        '[["a", "b", 0, 1e300]]',
        "[" * 10**5,
    ]
    broken += ['[["a", "b", 0, 1, {"c": "d"}]]', '[["a", "b", true, NaN]]', f'[["a", "b", 0, {"9" * 400}]]', 5.0]
    records = [{**whole, "spans": spans} for spans in broken]
    records += [{**whole, "role": "king"}, {**whole, "pid": float("nan")}, {**whole, "clock_us": 1e300}, {}]
    timeline = Timeline()
    timeline.add([whole, *records])
    assert [is_trace(record) for record in (whole, *records)] == [True] + [False] * len(records)
    assert len(complete(timeline.chrome(0, S))) == 1


@pytest.mark.parametrize("seed", range(20))
def test_f27_a_mutated_entry_never_raises(seed: int) -> None:
    source = random.Random(seed)
    timeline = Timeline()
    spans = json.dumps([["main", "update", 0, S, {"update": 1.0}]] * 3)
    for _ in range(200):
        text = list(spans)
        for _ in range(source.randrange(1, 6)):
            text[source.randrange(len(text))] = source.choice('[]{}",:0123456789-eNa\x1b\u202e')
        timeline.add([{**entry("trainer-0", []), "spans": "".join(text)}])
    begin_us, end_us = timeline.bounds_us
    json.dumps(timeline.chrome(begin_us, end_us), allow_nan=False)
    timeline.shares(begin_us, end_us)
