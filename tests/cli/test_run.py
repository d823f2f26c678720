"""`vla-stream run` for real: all roles as processes, to the last update, and its end in every way."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vla_stream.broker.complaints import Garbled
from vla_stream.broker.connection import UNREACHABLE, Client, ResponseError, connect
from vla_stream.cli import samples
from vla_stream.flow import Flow, FlowState
from vla_stream.learning import checkpoint
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys

CONFIG = """
updates: 2
environment: {name: tabletop, max_steps: 8}
policy: {name: tiny, chunk: 4}
simulators: {count: 1, slots: 2, envs_per_slot: 2, segment: {steps: 2}}
generators: {count: 1, max_batch_size: 4}
trainer: {segments_per_update: 4, epochs: 1, checkpoint_every: 1}
broker: {inline_below_bytes: 0}
pretrain: {episodes: 2, steps: 2}
evaluation: {episodes: 3}
"""
MAIN = ("-m", "vla_stream.cli.main")
MAIN_IN_ITS_TERMINAL = (
    "-c",
    "import fcntl, termios; fcntl.ioctl(1, termios.TIOCSCTTY, 0); from vla_stream.cli.main import main; main()",
)
QUICK = ("--set", "pretrain=null", "--set", "evaluation.episodes=0")


class Shell:
    """Runs commands in a folder of its own; none outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []
        (folder / "mini.yaml").write_text(CONFIG)

    def start(self, *arguments: str, terminal: int | None = None) -> subprocess.Popen[str]:
        """A command, in a `terminal` of its own if one is given."""
        environment = {name: value for name, value in os.environ.items() if name != "VLA_STREAM_REDIS"}
        process = subprocess.Popen(
            [sys.executable, *(MAIN if terminal is None else MAIN_IN_ITS_TERMINAL), *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            start_new_session=terminal is not None,
        )
        self._started.append(process)
        return process

    def call(self, *arguments: str, deadline_s: float = 120) -> tuple[int, str]:
        process = self.start(*arguments)
        shown, _ = process.communicate(timeout=deadline_s)
        return process.returncode, shown

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    yield made
    made.close()


def wait_for(condition: Callable[[], Any], what: str, deadline_s: float = 90) -> Any:
    deadline = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)
    return found


def processes_of(run: str) -> list[str]:
    """Command lines, other than zombies', that name the run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if run in line:
            found.append(line)
    return found


@pytest.mark.timeout(180)
def test_a_run_alone_ends_in_an_evaluated_policy_and_leaves_only_its_folder(shell: Shell, run_name: str) -> None:
    code, shown = shell.call("run", "mini.yaml", "--run", run_name)
    assert code == 0, shown
    folder = shell.folder / "runs" / run_name
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["updates"], summary["before"]["episodes"], summary["after"]["episodes"]) == (2, 3, 3)
    assert (folder / "curve.png").stat().st_size > 10_000
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"000000", "000001", "000002"}
    kinds = {record.get("kind") for record in samples.load(folder / "metrics.jsonl")}
    assert kinds == {"start", "second", "update", "books", "evaluation"}
    assert "2 demonstrations" in shown
    assert "2 updates from" in shown
    assert "Traceback" not in shown + "".join(log.read_text() for log in (folder / "logs").iterdir())
    assert not (folder / "redis.url").exists()
    assert processes_of(run_name) == []
    assert not list(Path("/dev/shm").glob(f"*{run_name}*"))

    code, shown = shell.call("run", "mini.yaml", "--run", run_name)
    assert (code, "exists; continue it with --resume" in shown) == (2, True)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_survives_kills_refuses_a_twin_drains_on_ctrl_c_and_resumes(
    shell: Shell, run_name: str, redis_url: str, client: Client
) -> None:
    flow, keys = Flow(client, Keys(run_name)), Keys(run_name)
    where = ["--run", run_name, "--redis", redis_url]
    process = shell.start("run", "mini.yaml", *where, "--updates", "100000")

    def update() -> int:
        state = flow.state()
        return 0 if state is None else state.update

    wait_for(lambda: update() >= 2, "two updates")
    code, shown = shell.call("run", "mini.yaml", *where, "--set", "runs_dir=others")
    assert (code, "already runs on this server" in shown) == (2, True)

    for role in ("simulator", "generator", "trainer"):
        code, shown = shell.call("status", *where, "--json")
        pid = next(worker["pid"] for worker in json.loads(shown)["workers"] if worker["role"] == role)
        os.kill(pid, signal.SIGKILL)
        said = f"{role}-0 is started again"
        wait_for(lambda: any(fields[b"text"].decode() == said for _, fields in events(client, keys)), said)  # noqa: B023
        before = update()
        wait_for(lambda: update() > before + 1, f"updates after the {role} was killed")  # noqa: B023

    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert process.returncode == 1, shown
    assert "segments in flight are finished" in shown
    again = f"go on with: vla-stream run mini.yaml --updates 100000 --run {run_name} --resume and the same --redis"
    assert again in shown
    assert "crashed: killed by SIGKILL" in shown
    assert processes_of(run_name) == []
    assert list(client.scan_iter(match=keys.everything_pattern)) == []
    assert not list(Path("/dev/shm").glob(f"*{run_name}*"))

    newest = max(int(path.name) for path in checkpoint.places(shell.folder / "runs" / run_name / "checkpoints"))
    code, shown = shell.call("run", "mini.yaml", *where, "--resume", "--updates", str(newest + 2))
    assert code == 0, shown
    summary = json.loads((shell.folder / "runs" / run_name / "summary.json").read_text())
    assert summary["updates"] == newest + 2


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_f48_a_run_killed_at_once_with_all_its_workers_is_resumed_with_other_worker_counts(
    shell: Shell, run_name: str, redis_url: str, client: Client
) -> None:
    flow, keys = Flow(client, Keys(run_name)), Keys(run_name)
    where = ["--run", run_name, "--redis", redis_url]
    process = shell.start("run", "mini.yaml", *where, "--updates", "100000", "--set", "flow.lease_s=2")

    def state() -> FlowState:
        found = flow.state()
        assert found is not None
        return found

    wait_for(lambda: flow.state() is not None and state().update >= 3, "three updates")
    pids = [worker.pid for worker in presence.alive(client, keys)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate(timeout=30)
    before, books = state(), flow.books()
    assert books.started > 0 and list(client.scan_iter(match=keys.workers_pattern)), "nobody cleared anything away"

    counts = ["--set", "simulators.count=2", "--set", "generators.count=2", "--set", "flow.lease_s=2"]
    process = shell.start("run", "mini.yaml", *where, "--resume", "--updates", "100000", *counts)
    wait_for(lambda: state().epoch > before.epoch and state().update > before.update, "more updates than before")
    assert state().version > before.version
    assert sorted(w.role for w in presence.alive(client, keys)) == [
        "generator", "generator", "launcher", "simulator", "simulator", "trainer"
    ]  # fmt: skip
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=60)
    assert f"taking over run {run_name}" in shown
    final = closed_books(shell, run_name)
    assert final["balance"] == 0 and final["started"] > books.started


def closed_books(shell: Shell, run: str) -> samples.Record:
    """The books as the launcher left them at the run's end."""
    records = samples.load(shell.folder / "runs" / run / "metrics.jsonl")
    return next(record for record in reversed(records) if record["kind"] == "books")


class Unharmed:
    """A run with short deadlines whose keys the test damages. met: what reading the flow may raise meanwhile."""

    def __init__(self, shell: Shell, name: str, url: str, client: Client, met: type[ResponseError]) -> None:
        self.shell, self.name, self.client, self.keys, self._met = shell, name, client, Keys(name), met
        self.flow = Flow(client, self.keys)
        settings = ["--set", "flow.lease_s=1", "--set", "flow.reply_deadline_s=1", "--set", "evaluation.episodes=0"]
        self.process = shell.start("run", "mini.yaml", "--run", name, "--redis", url, "--updates", "100000", *settings)
        wait_for(lambda: self.update() >= 2, "two updates")
        self._before = self._pids()

    def update(self) -> int:
        try:
            state = self.flow.state()
        except self._met:
            return 0  # it is the flow itself that was damaged
        return 0 if state is None else state.update

    def finish(self) -> str:
        """End the run, and return what it said; nobody was restarted, and its books balance."""
        assert self._pids() == self._before, "nobody was restarted"
        self.process.send_signal(signal.SIGINT)
        shown, _ = self.process.communicate(timeout=60)
        books = closed_books(self.shell, self.name)
        assert books["balance"] == 0, books
        return shown

    def _pids(self) -> dict[str, int]:
        return {worker.id: worker.pid for worker in presence.alive(self.client, self.keys)}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_f27_a_key_of_another_type_in_place_of_any_of_ours_costs_what_it_held_and_not_the_run(
    shell: Shell, run_name: str, redis_url: str, client: Client
) -> None:
    keys = Keys(run_name)
    run = Unharmed(shell, run_name, redis_url, client, ResponseError)
    for key in [*keys.types, keys.actions("simulator-0"), keys.worker("trainer-0")]:
        start = run.update()
        client.delete(key)
        if keys.types.get(key) == "string":
            client.rpush(key, "x")
        else:
            client.set(key, "x")
        expected = keys.types.get(key, "stream" if "actions" in key else "hash").encode()
        wait_for(lambda: client.type(key) in (expected, b"none"), f"no stranger at {key}")  # noqa: B023
        wait_for(lambda: run.update() > start + 1, f"updates after {key} was overwritten")  # noqa: B023
    shown = run.finish()
    assert f"{keys.weights}: somebody wrote a string, expected our stream; removed" in shown


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_f27_a_field_of_the_flow_or_the_books_that_somebody_writes_over_costs_what_was_in_flight_and_not_the_run(
    shell: Shell, run_name: str, redis_url: str, client: Client
) -> None:
    keys = Keys(run_name)
    run = Unharmed(shell, run_name, redis_url, client, Garbled)
    damage = {keys.flow: ["update", "version", "epoch", "desired", "lane", "shm_token", "segments_per_update",
                          "specification"], keys.books: ["trained", "started"]}  # fmt: skip
    for key, field in [(key, field) for key, fields in damage.items() for field in fields]:
        start = run.update()
        value = 30 * "9" if field == "version" else "x"
        client.hset(key, field, value)
        wait_for(lambda: client.hget(key, field) != value.encode(), f"no foreign {field}")  # noqa: B023
        wait_for(lambda: run.update() > start + 1, f"updates after {field} was overwritten")  # noqa: B023
    shown = run.finish()
    assert f"{keys.flow}: field update is 'x', expected a number from 0 to" in shown
    assert "somebody else wrote it; removed" in shown


@pytest.mark.timeout(180)
def test_f47_resume_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(shell: Shell, run_name: str) -> None:
    arguments = ["run", "mini.yaml", "--run", run_name, *QUICK]
    code, shown = shell.call(*arguments)
    assert code == 0, shown
    folder = shell.folder / "runs" / run_name
    policy = folder / "checkpoints" / "000002" / "policy.safetensors"
    whole = policy.read_bytes()
    policy.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    code, shown = shell.call(*arguments, "--resume")
    assert code == 0, shown
    assert f"trainer-0: skipped a checkpoint: {policy}: damaged, xxh64 is " in shown
    updates = [json.loads(line)["update"] for line in (folder / "updates.jsonl").read_text().splitlines()]
    assert updates == [1, 2, 2]
    assert f"policy   {policy.parent.relative_to(shell.folder)}" in shown

    for place in checkpoint.places(folder / "checkpoints"):
        (place / "meta.json").unlink()
    code, shown = shell.call(*arguments, "--resume")
    (told,) = (line for line in shown.splitlines() if line.startswith("Error: "))
    assert (code, told.startswith(f"Error: trainer: {policy.parents[1]}: none of its 3 checkpoints can be read")) == (
        2,
        True,
    ), shown


def events(client: Client, keys: Keys) -> list[Any]:
    found: Any = client.xrange(keys.events)
    return list(found)


def ctrl_c_twice(process: subprocess.Popen[str], flow: Flow) -> None:
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(*UNREACHABLE):  # it may be over already
        wait_for(lambda: (state := flow.state()) is None or state.desired == "draining", "the first Ctrl-C's effect")
    process.send_signal(signal.SIGINT)


WAYS_TO_END: dict[str, Callable[[subprocess.Popen[str], Flow], None]] = {
    "Ctrl-C twice": ctrl_c_twice,
    "SIGTERM": lambda process, _: process.send_signal(signal.SIGTERM),
    "kill -9": lambda process, _: process.kill(),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("way", [*WAYS_TO_END, "a closed terminal"])
def test_f49_however_a_run_is_ended_no_process_no_server_and_no_file_in_dev_shm_stays(
    shell: Shell, run_name: str, way: str
) -> None:
    terminal, its_end = pty.openpty()
    arguments = ["run", "mini.yaml", "--run", run_name, *QUICK, "--updates", "100000"]
    process = shell.start(*arguments, terminal=its_end if way == "a closed terminal" else None)
    os.close(its_end)
    address = shell.folder / "runs" / run_name / "redis.url"
    wait_for(address.exists, "the embedded server's address")
    socket = Path(address.read_text().strip().removeprefix("unix://"))
    with contextlib.closing(connect(f"unix://{socket}", name="test")) as client:
        flow = Flow(client, Keys(run_name))
        wait_for(lambda: (state := flow.state()) is not None and state.update >= 1, "an update")
        server: Any = client.info("server")
        assert in_dev_shm(run_name) and len(processes_of(run_name)) > 4
        if way == "a closed terminal":
            os.close(terminal)
        else:
            WAYS_TO_END[way](process, flow)
            os.close(terminal)
    process.wait(60)
    wait_for(lambda: not processes_of(run_name), "the end of all processes", 20)
    wait_for(lambda: not runs(server["process_id"]) and not socket.parent.exists(), "the server's end", 20)
    wait_for(lambda: not in_dev_shm(run_name), "an empty /dev/shm", 20)
    if way != "kill -9":
        books = samples.load(shell.folder / "runs" / run_name / "metrics.jsonl")[-1]
        assert (books["kind"], books["balance"], process.returncode) == ("books", 0, 1)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("times", "limit_s"),
    [pytest.param(1, 4 + 22, marks=pytest.mark.slow), (2, 22)],
    ids=["Ctrl-C", "Ctrl-C twice"],
)
def test_f49_a_run_whose_server_is_frozen_ends_all_the_same(
    shell: Shell, run_name: str, times: int, limit_s: float
) -> None:
    """limit_s: the time to drain, and some answers of the server that do not come, on a machine that is busy."""
    settings = [*QUICK, "--set", "flow.drain_deadline_s=4", "--updates", "100000"]
    process = shell.start("run", "mini.yaml", "--run", run_name, *settings)
    address = shell.folder / "runs" / run_name / "redis.url"
    wait_for(address.exists, "the embedded server's address")
    with contextlib.closing(connect(address.read_text().strip(), name="test")) as client:
        flow = Flow(client, Keys(run_name))
        wait_for(lambda: (state := flow.state()) is not None and state.update >= 1, "an update")
        server: Any = client.info("server")
    os.kill(server["process_id"], signal.SIGSTOP)
    asked_s = time.monotonic()
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # two signals of one number that arrive together count once
    shown, _ = process.communicate(timeout=90)
    assert time.monotonic() - asked_s < limit_s
    assert process.returncode == 1 and "go on with: " in shown and "books of this session are not closed" in shown
    assert "Traceback" not in shown and processes_of(run_name) == [] and not in_dev_shm(run_name)
    wait_for(lambda: not runs(server["process_id"]), "the server's end", 20)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_f49_a_run_whose_output_nobody_reads_any_more_ends_as_asked(shell: Shell, run_name: str) -> None:
    process = shell.start("run", "mini.yaml", "--run", run_name, *QUICK, "--updates", "100000")
    file = shell.folder / "runs" / run_name / "updates.jsonl"
    wait_for(lambda: file.exists() and file.read_text().count("\n") >= 1, "an update")
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None  # else the fixture would read it
    seen = file.read_text().count("\n")
    wait_for(lambda: file.read_text().count("\n") > seen + 30, "more updates")
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == 1
    assert samples.load(file.with_name("metrics.jsonl"))[-1]["kind"] == "books"


def in_dev_shm(run: str) -> list[Path]:
    return list(Path("/dev/shm").glob(f"*{run}*"))


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.timeout(180)
def test_f10_a_server_killed_in_mid_run_costs_the_run_only_what_it_held(shell: Shell, run_name: str) -> None:
    settings = ["--updates", "12", "--set", "flow.lease_s=2", "--set", "evaluation.episodes=0"]
    process = shell.start("run", "mini.yaml", "--run", run_name, *settings)
    address = shell.folder / "runs" / run_name / "redis.url"
    wait_for(address.exists, "the embedded server's address")
    with contextlib.closing(connect(address.read_text().strip(), name="test")) as client:
        flow = Flow(client, Keys(run_name))

        def update() -> int:
            with contextlib.suppress(*UNREACHABLE):
                state = flow.state()
                return 0 if state is None else state.update
            return 0

        wait_for(lambda: update() >= 3, "three updates")
        before = update()
        server: Any = client.info("server")
        os.kill(int(server["process_id"]), signal.SIGKILL)
        wait_for(lambda: update() > before, "an update by the new server")
        assert flow.books().balance == 0
    shown, _ = process.communicate(timeout=90)
    assert process.returncode == 0, shown
    assert "12 updates from" in shown and "crashed" not in shown and "Traceback" not in shown
    numbers = [r["update"] for r in samples.load(shell.folder / "runs" / run_name / "metrics.jsonl") if "update" in r]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 12
