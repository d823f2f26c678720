"""`vla-stream trace` of a live run and of a finished one: valid, and in agreement with `status`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vla_stream.cli.main import call
from vla_stream.cli.pulse import Pulse
from vla_stream.cli.samples import Record, load
from vla_stream.cli.timeline import Timeline

CONFIG = """
updates: 100000
environment: {name: "fakes:Line", max_steps: 12, options: {step_s: 0.01}}
policy: {name: "fake_policies:Linear", chunk: 2}
simulators: {count: 1, env_batches: 2, slots: 2, envs_per_slot: 2, segment: {steps: 3}}
generators: {count: 1, max_batch_size: 4}
trainer: {segments_per_update: 4, epochs: 1, critic_warmup_updates: 0}
evaluation: {episodes: 0}
"""
TESTS = Path(__file__).parents[1]
TOLERANCE = 0.05

pytestmark = pytest.mark.slow


def wait_for(condition: Callable[[], object], what: Callable[[], str], deadline_s: float = 90) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a run in tmp_path that has made some updates."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLA_STREAM_REDIS", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "mini.yaml").write_text(CONFIG)
    made: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "vla_stream.cli.main", "run", "mini.yaml", "--run", "mine", *arguments]
        with (tmp_path / "out").open("wb") as out:
            made.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out))
        updates = tmp_path / "runs" / "mine" / "updates.jsonl"
        wait_for(lambda: updates.exists() and updates.read_bytes().count(b"\n") > 3, (tmp_path / "out").read_text)
        return made[-1]

    yield start
    for process in made:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
        process.kill()
        process.wait()


def check_schema(trace: dict[str, Any]) -> dict[str, set[str]]:
    """Chrome's trace event format, as far as we use it; returns the stages of each worker."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] == "ms"
    workers, tracks = {}, {}
    stages: dict[str, set[str]] = defaultdict(set)
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is type(event["tid"]) is int and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            if event["name"] == "process_name":
                workers[event["pid"]] = event["args"]["name"].partition(" ")[0]
            if event["name"] == "thread_name":
                tracks[event["pid"], event["tid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X" and set(event) <= {"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"}
        assert type(event["ts"]) is type(event["dur"]) is int and event["ts"] >= 0 and event["dur"] > 0
        stages[workers[event["pid"]]].add(event["name"])
        # On one thread spans follow each other, or lie within each other.
        open_ends, end = ends[event["pid"], event["tid"]], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], event
        open_ends.append(end)
    assert set(ends) == set(tracks)
    return stages


def steady(records: list[Record], worker: str, since_s: float) -> list[Record]:
    """Its samples since then, but for those of a second in which the machine stood still, and the next: `status` cuts
    shares at 1, so that what was spent before such a second's end is lost to it."""
    mine = [record for record in records if record.get("worker") == worker and record.get("kind") == "second"]
    return [
        record
        for before, record in itertools.pairwise(mine)
        if max(float(before["seconds"]), float(record["seconds"])) < 1.3 and float(before["time"]) > since_s
    ]


def compare(timeline: Timeline, records: list[Record], worker: str) -> None:
    """Shares of the time as drawn and as recorded, over the seconds that the records cover."""
    drawn, said, seconds = Counter[str](), Counter[str](), 0.0
    for record in records:
        pulse = Pulse()
        pulse.add([record])
        covered_s, end_us = float(record["seconds"]), int(1e6 * float(record["time"]))
        seen = timeline.shares(end_us - int(1e6 * covered_s), end_us)
        for name in ("work", "input", "output"):
            drawn[name] += covered_s * getattr(seen[worker], name)  # type: ignore[assignment]
            said[name] += covered_s * getattr(pulse.shares()[worker], name)  # type: ignore[assignment]
        seconds += covered_s
    assert said["work"] > 0.01 * seconds
    for name, spent_s in said.items():
        assert drawn[name] / seconds == pytest.approx(spent_s / seconds, abs=TOLERANCE), (worker, name, drawn, said)


@pytest.mark.timeout(240)
def test_a_trace_is_valid_and_its_bubbles_are_those_of_status_live_and_afterwards(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    process = started("--set", "trace=true")
    assert call(["trace", "live.json", "--seconds", "4"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("live.json: 4.0 s of 3 workers") and "  simulator-0: at work " in shown
    live = json.loads((tmp_path / "live.json").read_text())
    stages = check_schema(live)
    assert {"step", "reset"} <= stages["simulator-0"] and {"waiting", "infer"} <= stages["generator-0"]
    assert {"waiting", "update", "publish"} <= stages["trainer-0"]
    batches = {event["args"]["name"] for event in live["traceEvents"] if event["name"] == "thread_name"}
    assert {"batch 0", "batch 1", "main", "collect"} <= batches

    folder, workers = tmp_path / "runs" / "mine", ("simulator-0", "generator-0", "trainer-0")
    since_s = live["otherData"]["began_us"] / 1e6

    def seconds() -> dict[str, list[Record]]:
        records = load(folder / "metrics.jsonl")
        return {worker: steady(records, worker, since_s) for worker in workers}

    wait_for(lambda: min(map(len, seconds().values())) >= 4, lambda: str(load(folder / "metrics.jsonl")[-20:]))
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    timeline = Timeline()
    timeline.add(load(folder / "trace.jsonl"))
    for worker, records in seconds().items():
        compare(timeline, records[:-1], worker)
    assert call(["trace", "after.json", "--run", "mine", "--seconds", "2"]) == 0
    assert capsys.readouterr().out.startswith("after.json: 2.0 s of 3 workers")
    check_schema(json.loads((tmp_path / "after.json").read_text()))


@pytest.mark.timeout(120)
def test_a_run_without_a_trace_says_how_to_get_one(
    tmp_path: Path, started: Callable[..., subprocess.Popen[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    process = started()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)
    assert not (tmp_path / "runs" / "mine" / "trace.jsonl").exists()
    assert call(["trace", "x.json", "--run", "mine"]) == 2
    assert "a finished run has a trace only if it ran with --set trace=true" in capsys.readouterr().err
    assert call(["trace", "x.json", "--run", "never"]) == 2
    assert not (tmp_path / "x.json").exists()
