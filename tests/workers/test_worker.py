"""What every worker process shares: its name, its hash, the desired state, waiting for Redis, its exit code."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_run import Run

from vla_stream.broker.connection import UNREACHABLE, Client, connect
from vla_stream.broker.server import EmbeddedServer
from vla_stream.errors import Expired, InputError
from vla_stream.metrics import Span
from workers import worker as worker_module
from workers.replies import Replies
from workers.worker import Worker

DEADLINE_S = 15.0


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "BEAT_S", 0.0)


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_f53_a_name_is_taken_once_until_it_is_released(run: Run) -> None:
    run.start()
    first = run.worker("simulator")
    other = Worker("simulator", "simulator-0", "another token", run.name, run.url)
    with contextlib.closing(other.client):
        with pytest.raises(InputError, match="simulator-0: the name is taken by a live worker"):
            other.claim()
        first.release()
        other.claim()
        with pytest.raises(Expired, match="took this worker's name over"):
            first.beat()
        first.release()
        assert run.client.exists(run.keys.worker("simulator-0")), "the old owner cannot release what is another's"
        other.release()


def test_a_beat_shows_progress_and_a_sample_at_most_once_a_second(run: Run) -> None:
    run.start()
    worker = run.worker("generator")
    worker.progress, worker.version, worker.state, worker.device = 7, 3, "running", "cpu"
    worker.meter.count("batches", 5)
    worker.beat()
    shown: Any = run.client.hgetall(run.keys.worker("generator-0"))
    assert {name: shown[name] for name in (b"progress", b"version", b"state", b"device")} == {
        b"progress": b"7",
        b"version": b"3",
        b"state": b"running",
        b"device": b"cpu",
    }
    assert int(shown[b"pid"]) == os.getpid() and 0 < run.client.pttl(run.keys.worker("generator-0")) <= 60_000
    worker.beat()
    entries: Any = run.client.xrange(run.keys.metrics)
    assert len(entries) == 1 and entries[0][1][b"batches"] == b"5" and entries[0][1][b"kind"] == b"second"


def test_f06_a_step_of_minutes_is_not_taken_for_a_death(run: Run) -> None:
    run.start()
    worker, key = run.worker("trainer"), run.keys.worker("trainer-0")
    worker.beat()
    with worker.long_step("warm start"):
        assert run.client.pttl(key) > 60_000 and run.client.hget(key, "state") == b"warm start"
    worker.beat()
    assert 0 < run.client.pttl(key) <= 60_000


@pytest.mark.usefixtures("quick_beats")
def test_spans_are_sent_while_somebody_wants_them_and_those_of_a_long_step_that_began_before(run: Run) -> None:
    run.start()
    worker = run.worker("trainer")

    def beat(stage: str) -> list[str]:
        now_s = time.monotonic()
        worker.meter.note(Span("main", stage, now_s - 0.01, now_s))
        worker.beat()
        entries: Any = run.client.xrange(run.keys.trace)
        return [json.loads(fields[b"spans"])[0][1] for _, fields in entries]

    assert beat("before") == []
    run.flow.ask_for_trace(60)
    assert beat("wanted") == ["wanted"]
    run.client.hset(run.keys.flow, "trace_until_ms", int(worker._clock.now_ms()) + 1)
    time.sleep(0.005)  # a step during which the trace ends
    assert beat("long step") == ["wanted", "long step"]
    assert beat("after") == ["wanted", "long step"]
    worker.traced = True
    assert beat("always") == ["wanted", "long step", "always"]


def test_spans_are_on_the_servers_clock_with_what_is_said_of_their_own(run: Run) -> None:
    run.start()
    worker = run.worker("trainer")
    worker.traced = True
    with worker.meter.busy("update"):
        time.sleep(0.01)
    worker.beat()
    ((entry, fields),) = run.client.xrange(run.keys.trace)
    ((_, stage, start_us, end_us),) = json.loads(fields[b"spans"])
    assert stage == "update" and end_us - start_us >= 10_000
    late_us = 1000 * int(entry.split(b"-")[0]) - (end_us + int(fields[b"clock_us"]))
    assert -50_000 < late_us < 5_000_000
    assert (fields[b"role"], fields[b"pid"], fields[b"dropped"]) == (b"trainer", b"%d" % os.getpid(), b"0")


@pytest.mark.usefixtures("quick_beats")
def test_f55_the_desired_state_is_read_as_a_value(run: Run) -> None:
    run.start()
    run.flow.set_desired("paused", "test")
    late = run.worker("simulator")
    late.beat()
    assert (late.desired, late.draining, late.stopping) == ("paused", False, False)
    run.flow.set_desired("draining", "test")
    late.beat()
    assert (late.draining, late.stopping, late.leaving) == (True, False, False)
    run.flow.set_desired("stopped", "test")
    late.beat()
    assert (late.draining, late.stopping) == (True, True)


def test_f49_the_first_signal_drains_the_second_stops(run: Run) -> None:
    run.start()
    worker = run.worker("simulator")
    seen = []
    for _ in range(3):
        seen.append((worker.leaving, worker.draining, worker.stopping))
        worker.on_signal()
    assert seen == [(False, False, False), (True, True, False), (True, True, True)]


@pytest.mark.usefixtures("quick_beats")
def test_f49_a_worker_whose_parent_is_gone_ends(run: Run) -> None:
    run.start()
    worker = run.worker("simulator")
    worker.parent = os.getppid()
    worker.beat()
    worker.parent = 2**22 + 1
    with pytest.raises(Expired, match="the process that started this worker is gone"):
        worker.beat()


def test_f03_work_waits_for_redis_and_recovers_before_it_goes_on(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    run.start()
    calls: list[str] = []

    def work() -> str:
        calls.append("work")
        if calls.count("work") < 3:
            raise UNREACHABLE[0]("injected")
        return "done"

    assert run.worker("generator").patiently(work, lambda: calls.append("recover")) == "done"
    assert calls == ["work", "recover", "work", "recover", "work"]
    assert capfd.readouterr().err.count("waiting for it") == 1, "said once"


def test_waiting_for_redis_ends_when_the_worker_is_told_to_leave(run: Run) -> None:
    run.start()
    worker = run.worker("generator")

    def work() -> None:
        worker.on_signal()
        raise UNREACHABLE[0]("injected")

    assert worker.patiently(work) is None


def test_other_errors_are_not_waited_out(run: Run) -> None:
    run.start()

    def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.worker("generator").patiently(work)


def start(run: Run, role: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"workers.{role}", run.name, f"{role}-0"],
        env={**os.environ, "VLA_STREAM_TOKEN": "t", "VLA_STREAM_REDIS": run.url, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, told = process.communicate(timeout=30)
    return process.returncode, told


def test_bad_input_ends_a_worker_with_2_and_a_line_per_problem(run: Run) -> None:
    run.start()
    run.client.set(run.keys.config, "{}")
    code, told = end(start(run, "simulator"))
    assert code == 2 and "Traceback" not in told
    assert f"simulator-0: config of run {run.name}: environment is missing" in told


@pytest.mark.parametrize("role", ["simulator", "generator", "trainer"])
def test_f10_a_worker_that_starts_while_its_run_is_made_anew_on_the_server_is_to_be_started_again(
    run: Run, role: str
) -> None:
    code, told = end(start(run, role))
    assert code == 1 and "Traceback" not in told
    assert told.strip().splitlines()[-1] == (
        f"{role}-0: run {run.name}: not on this server; give the name and URL that `vla-stream run` prints"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_f47_a_full_disk_under_its_log_does_not_change_how_a_worker_ends(run: Run) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "workers.simulator", run.name, "simulator-0"],
            env={**os.environ, "VLA_STREAM_TOKEN": "t", "VLA_STREAM_REDIS": run.url},
            stderr=full,
            timeout=30,
            check=False,
        )
    assert process.returncode == 1


def test_bad_options_of_an_environment_end_a_simulator_with_2_and_one_line(run: Run) -> None:
    run.start(environment={"name": "fakes:Line", "max_steps": 12, "options": {"speed": 3}})
    code, told = end(start(run, "simulator"))
    assert code == 2 and "environment.options: unknown key speed" in told.strip().splitlines()[-1]
    assert not run.client.exists(run.keys.worker("simulator-0")), "its name is free again"


def test_a_simulator_drains_on_sigterm_and_gives_its_name_back(run: Run) -> None:
    run.start()
    process = start(run, "simulator")
    until(lambda: run.client.exists(run.keys.actions("simulator-0")) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    code, told = end(process)
    assert code == 0, told
    assert "ended as asked" in told
    assert not run.client.exists(run.keys.worker("simulator-0"), run.keys.actions("simulator-0"))


def test_f27_a_reply_stream_is_made_where_somebody_wrote_another_type(run: Run) -> None:
    stream = run.keys.actions("simulator-0")
    run.client.set(stream, "x")
    replies = Replies(run.worker("simulator").connect(), stream)
    replies.open()
    assert run.client.type(stream) == b"stream" and 0 < run.client.pttl(stream) <= 300_000
    run.client.xadd(stream, {"data": "x"})
    assert len(replies.read(None)) == 1


def test_a_reply_that_is_waited_for_makes_a_descriptor_readable_and_the_order_is_kept(run: Run) -> None:
    run.start()
    stream = run.keys.actions("simulator-0")
    replies = Replies(run.worker("simulator").connect(), stream)
    replies.open()
    descriptor = replies.ask(1000)
    assert replies.ask(1000) == descriptor and not readable(descriptor, 0)
    threading.Timer(0.05, lambda: [run.client.xadd(stream, {"n": number}) for number in range(3)]).start()
    found: list[bytes] = []
    deadline_s = time.monotonic() + DEADLINE_S
    while len(found) < 3:
        assert time.monotonic() < deadline_s
        descriptor = replies.ask(1000)
        found += [entry.fields[b"n"] for entry in replies.poll(readable(descriptor, DEADLINE_S))]
    assert found == [b"0", b"1", b"2"]


def readable(descriptor: int, timeout_s: float) -> set[int]:
    return {descriptor} if select.select([descriptor], [], [], timeout_s)[0] else set()


def test_consumed_replies_are_deleted_while_the_next_ones_are_waited_for_without_a_wake_up(run: Run) -> None:
    run.start()
    stream = run.keys.actions("simulator-0")
    replies = Replies(run.worker("simulator").connect(), stream)
    replies.open()
    run.client.xadd(stream, {"n": 1})
    assert [entry.fields[b"n"] for entry in replies.read(None)] == [b"1"]
    assert not readable(replies.ask(1000), 0.1), "what deletes must not look like a reply"
    run.client.xadd(stream, {"n": 2})
    until(lambda: replies.poll(readable(replies.ask(1000), 0)))
    until(lambda: run.client.xlen(stream) == 1)


def test_a_read_that_gets_no_answer_is_given_up_and_made_anew(run: Run) -> None:
    run.start()
    stream = run.keys.actions("simulator-0")
    replies = Replies(connect(run.url, name="reader", block_s=0.1, margin_s=0.1), stream)
    replies.open()
    replies.ask(60_000)  # as when the way back is cut
    time.sleep(0.25)
    assert replies.poll(set()) == []
    run.client.xadd(stream, {"n": 1})
    assert len(replies.poll(readable(replies.ask(100), DEADLINE_S))) == 1


def _milliseconds(client: Client) -> int:
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000


def test_f11_reading_replies_survives_a_flush(tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server, contextlib.closing(connect(server.url, name="test")) as client:
        stream = "vla:{x}:actions:simulator-0"
        reader = Replies(connect(server.url, name="reader", block_s=1.0), stream)
        reader.open()
        found: list[bytes] = []

        def arrived(count: int) -> bool:
            entries = reader.poll(readable(reader.ask(100), 0.2))
            found.extend(entry.fields[b"n"] for entry in entries)
            return len(found) == count

        entry: Any = client.xadd(stream, {"n": 1})
        first = int(entry.partition(b"-")[0])
        until(lambda: arrived(1))
        # A stream made anew begins its ids anew: in the same millisecond it would give the same id again.
        until(lambda: _milliseconds(client) > first)
        reader.ask(100)
        client.flushall()
        assert not Replies(client, stream).renew(), "the simulator sees that it has to open it again"
        Replies(client, stream).open()
        client.xadd(stream, {"n": 2})
        until(lambda: arrived(2))
        assert found == [b"1", b"2"]
