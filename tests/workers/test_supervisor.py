"""The supervisor, with small fake workers that do what a file tells them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_run import sockets_of

from vla_stream.broker.connection import Client
from vla_stream.broker.server import EmbeddedServer
from vla_stream.errors import InputError
from vla_stream.streams.keys import Keys
from workers.supervisor import WATCH_S, Notice, Supervisor

DEADLINE_S = 15.0

# argv: role, run, id. What to do stands in the module's globals, prepended per test.
FAKE = """
import os, signal, sys, time
signals = []
signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
open(os.path.join(FOLDER, sys.argv[3] + ".pid"), "a").write(f"{os.getpid()}\\n")
"""
UNTIL_TOLD = "while len(signals) < 1: time.sleep(0.01)\n"
STUBBORN = "while True: time.sleep(0.01)\n"


class Bench:
    """A supervisor of fake workers, and what it has told so far."""

    def __init__(self, url: str, run: str, folder: Path) -> None:
        self.url, self.run, self.folder = url, run, folder
        self.told: list[Notice] = []
        self.made: list[Supervisor] = []

    def supervise(self, body: str, **options: object) -> Supervisor:
        script = self.folder / f"fake{len(self.made)}.py"
        script.write_text(f"FOLDER = {str(self.folder)!r}\n{FAKE}\n{body}")

        def command(role: str, run: str, worker_id: str) -> list[str]:
            return [sys.executable, "-S", "-E", str(script), role, run, worker_id]

        supervisor = Supervisor(self.url, self.run, self.folder, command=command, **options)  # type: ignore[arg-type]
        self.made.append(supervisor)
        return supervisor

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not in time; told: {self.told}; {self.made}"
            for supervisor in self.made:
                self.told += supervisor.step()
            time.sleep(0.01)

    def pids(self, worker_id: str) -> list[int]:
        file = self.folder / f"{worker_id}.pid"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    def kinds(self) -> list[str]:
        return [notice.kind for notice in self.told]

    def first(self, kind: str) -> Notice:
        return next(notice for notice in self.told if notice.kind == kind)


@pytest.fixture
def bench(redis_url: str, run_name: str, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(redis_url, run_name, tmp_path)
    yield made
    for supervisor in made.made:
        supervisor.close()


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_gets_its_name_its_device_and_the_url_in_its_environment_only(bench: Bench) -> None:
    wanted = ["TOKEN", "REDIS", "DEVICE", "RUNS", "PARENT"]
    supervisor = bench.supervise(
        f"print(*[os.environ['VLA_STREAM_' + name] for name in {wanted}], flush=True)\n" + UNTIL_TOLD
    )
    assert supervisor.launch("simulator", 3, ["cuda:0", "cuda:1"]) == ["simulator-0", "simulator-1", "simulator-2"]
    log = bench.folder / bench.run / "logs" / "simulator-2.log"
    bench.until(lambda: log.exists() and log.read_text().endswith("\n"))
    token, url, device, runs, parent = log.read_text().split()
    assert len(token) == 16
    assert (url, device, runs, int(parent)) == (bench.url, "cuda:0", str(bench.folder), os.getpid())
    command = Path(f"/proc/{bench.pids('simulator-2')[0]}/cmdline").read_text().split("\0")
    assert command[-4:-1] == ["simulator", bench.run, "simulator-2"]
    assert not any(bench.url in part for part in command)


def test_f05_workers_share_no_socket_with_their_supervisor(bench: Bench, client: Client) -> None:
    assert client.ping()
    supervisor = bench.supervise(UNTIL_TOLD)
    supervisor.launch("simulator", 1)
    bench.until(lambda: bool(bench.pids("simulator-0")))
    ours = sockets_of(os.getpid())
    assert len(ours) >= 2, "the test's connection and the supervisor's"
    assert not ours & sockets_of(bench.pids("simulator-0")[0])


def test_a_crashed_worker_is_restarted_under_its_name_and_its_cause_is_told_once(bench: Bench, client: Client) -> None:
    supervisor = bench.supervise(
        f"if open(os.path.join(FOLDER, 'simulator-0.pid')).read().count('\\n') < 3: raise ValueError('no more eggs')\n"
        f"{UNTIL_TOLD}"
    )
    supervisor.launch("simulator", 1)
    token = client.hget(Keys(bench.run).worker("simulator-0"), "token")
    bench.until(lambda: len(bench.pids("simulator-0")) == 3)
    crashes = [notice for notice in bench.told if notice.kind == "crashed"]
    assert [notice.text for notice in crashes] == ["simulator-0 crashed: ValueError: no more eggs"] * 2
    assert crashes[0].details[-1] == "ValueError: no more eggs"
    assert crashes[1].details == ()
    assert client.hget(Keys(bench.run).worker("simulator-0"), "token") == token
    bench.until(lambda: client.xlen(Keys(bench.run).events) >= 4)
    entries: Any = client.xrange(Keys(bench.run).events)
    events = [fields[b"text"].decode() for _, fields in entries]
    assert "simulator-0 crashed: ValueError: no more eggs" in events
    assert not supervisor.failures


def test_a_crashed_worker_is_named_once_in_the_sentence_that_tells_its_last_line(bench: Bench) -> None:
    supervisor = bench.supervise("print('generator-0: weights 2 are demanded', flush=True); sys.exit(1)\n")
    supervisor.launch("generator", 1)
    bench.until(lambda: "crashed" in bench.kinds())
    assert bench.first("crashed").text == "generator-0 crashed: weights 2 are demanded"


def test_f42_a_worker_that_crashes_in_a_loop_is_restarted_five_times_then_its_role_has_failed(bench: Bench) -> None:
    supervisor = bench.supervise("raise KeyError('camera')\n")
    supervisor.launch("simulator", 1)
    bench.until(lambda: bool(supervisor.failures))
    assert len(bench.pids("simulator-0")) == 6
    assert supervisor.failures == {"simulator": "simulator-0 crashed again and again, last: KeyError: 'camera'"}
    assert supervisor.children == {}


def test_bad_input_is_not_restarted_and_its_last_line_is_the_cause(bench: Bench) -> None:
    supervisor = bench.supervise("print('simulator-0: camera top: unknown, use front', flush=True); sys.exit(2)\n")
    supervisor.launch("simulator", 1)
    bench.until(lambda: bool(supervisor.failures))
    assert supervisor.failures == {"simulator": "camera top: unknown, use front"}
    assert len(bench.pids("simulator-0")) == 1


def test_f46_a_worker_that_gives_up_is_not_restarted(bench: Bench) -> None:
    supervisor = bench.supervise("print('trainer-0: 5 updates in a row were skipped', flush=True); sys.exit(3)\n")
    supervisor.launch("trainer", 1)
    bench.until(lambda: bool(supervisor.failures))
    assert supervisor.failures == {"trainer": "5 updates in a row were skipped"}
    assert len(bench.pids("trainer-0")) == 1


def test_a_finished_worker_is_not_restarted_and_its_name_is_free_again(bench: Bench, client: Client) -> None:
    supervisor = bench.supervise("")
    supervisor.launch("trainer", 1)
    bench.until(lambda: not supervisor.children)
    assert supervisor.finished == {"trainer-0": 0}
    assert bench.kinds() == ["ended"]
    assert not client.exists(Keys(bench.run).worker("trainer-0"))
    assert not supervisor.failures


def test_draining_waits_for_those_that_finish_and_stops_those_that_do_not(bench: Bench) -> None:
    supervisor = bench.supervise(
        f"if sys.argv[1] == 'generator':\n    {STUBBORN}\nwhile len(signals) < 1: time.sleep(0.01)\n"
    )
    supervisor.launch("simulator", 1)
    supervisor.launch("generator", 1)
    bench.until(lambda: bool(bench.pids("simulator-0") and bench.pids("generator-0")))
    supervisor.drain(0.3)
    bench.until(lambda: not supervisor.children)
    assert supervisor.finished["simulator-0"] == 0
    assert supervisor.finished["generator-0"] == -signal.SIGKILL
    assert "restarted" not in bench.kinds()
    assert bench.first("stopped").text == "generator-0: not finished in time, stopped"


def test_generators_are_asked_to_leave_only_when_the_simulators_have_left(bench: Bench) -> None:
    supervisor = bench.supervise(
        f"gate = os.path.join(FOLDER, 'gate')\n{UNTIL_TOLD}"
        "while sys.argv[1] == 'simulator' and not os.path.exists(gate): time.sleep(0.01)\n"
    )
    supervisor.launch("simulator", 1)
    supervisor.launch("generator", 1)
    bench.until(lambda: bool(bench.pids("simulator-0") and bench.pids("generator-0")))
    supervisor.drain(10)
    until_s = time.monotonic() + 0.3
    bench.until(lambda: time.monotonic() > until_s)
    assert list(supervisor.children) == ["simulator-0", "generator-0"]
    (bench.folder / "gate").touch()
    bench.until(lambda: not supervisor.children)
    assert supervisor.finished == {"simulator-0": 0, "generator-0": 0}


def test_scaling_starts_what_is_missing_and_lets_the_newest_finish_and_leave(bench: Bench) -> None:
    supervisor = bench.supervise(UNTIL_TOLD)
    supervisor.launch("simulator", 1)
    supervisor.scale("simulator", 3)
    bench.until(lambda: all(bench.pids(f"simulator-{number}") for number in range(3)))
    supervisor.scale("simulator", 1)
    supervisor.scale("simulator", 2)  # at once: those that leave do not count any more
    bench.until(lambda: supervisor.count("simulator") == 2 and bool(bench.pids("simulator-3")))
    assert list(supervisor.children) == ["simulator-0", "simulator-3"]
    assert supervisor.finished == {"simulator-1": 0, "simulator-2": 0} and "restarted" not in bench.kinds()


def test_a_worker_that_crashes_on_its_way_out_is_not_started_again(bench: Bench) -> None:
    supervisor = bench.supervise(UNTIL_TOLD + "sys.exit(7)\n")
    supervisor.launch("generator", 2)
    bench.until(lambda: bool(bench.pids("generator-0") and bench.pids("generator-1")))
    supervisor.scale("generator", 1)
    bench.until(lambda: supervisor.count("generator") == 1)
    assert list(supervisor.children) == ["generator-0"] and "restarted" not in bench.kinds()
    assert bench.first("lost").text.startswith("generator-1 ended while it was to leave")


def test_a_worker_that_crashed_is_not_started_again_where_there_are_too_many(bench: Bench) -> None:
    supervisor = bench.supervise(UNTIL_TOLD)
    supervisor.launch("generator", 2)
    bench.until(lambda: bool(bench.pids("generator-0") and bench.pids("generator-1")))
    crashed = supervisor.children["generator-1"]
    assert crashed.process is not None
    crashed.process.kill()
    crashed.process.wait()
    crashed.process = None  # before its restart
    supervisor.scale("generator", 1)
    supervisor.step()
    assert list(supervisor.children) == ["generator-0"] and len(bench.pids("generator-1")) == 1


def test_a_worker_that_crashes_while_draining_is_reported_and_stays_down(bench: Bench) -> None:
    supervisor = bench.supervise(UNTIL_TOLD + "raise RuntimeError('too late')\n")
    supervisor.launch("simulator", 1)
    bench.until(lambda: bool(bench.pids("simulator-0")))
    supervisor.drain(10)
    bench.until(lambda: not supervisor.children)
    assert bench.first("lost").text == "simulator-0 ended while draining: RuntimeError: too late"
    assert not supervisor.failures


def test_a_worker_that_was_asked_to_leave_before_it_could_listen_has_just_ended(bench: Bench) -> None:
    supervisor = bench.supervise(f"signal.signal(signal.SIGTERM, signal.SIG_DFL)\n{STUBBORN}")
    supervisor.launch("simulator", 2)
    bench.until(lambda: bool(bench.pids("simulator-0") and bench.pids("simulator-1")))
    os.kill(bench.pids("simulator-1")[0], signal.SIGTERM)
    bench.until(lambda: "crashed" in bench.kinds())
    supervisor.drain(10)
    bench.until(lambda: not supervisor.children)
    assert [notice.text for notice in bench.told if notice.worker == "simulator-0"] == ["simulator-0 has finished"]
    assert bench.first("crashed").text == "simulator-1 crashed: killed by SIGTERM", "nobody had asked it"


def test_a_server_that_is_down_is_told_once_and_its_return_too(bench: Bench, tmp_path: Path) -> None:
    with EmbeddedServer.start(tmp_path) as server:
        bench.url = server.url
        supervisor = bench.supervise(UNTIL_TOLD)
        supervisor.launch("simulator", 1)
        server.stop()
        bench.until(lambda: supervisor.unreachable_since_s is not None)
        until_s = time.monotonic() + 2 * WATCH_S + 0.5
        bench.until(lambda: time.monotonic() > until_s)
        assert bench.kinds().count("redis") == 1
        server.restart()
        bench.until(lambda: supervisor.unreachable_since_s is None)
        assert bench.kinds().count("redis") == 2 and bench.told[-1].text.endswith("answers again")


def test_f49_stop_sends_a_second_signal_and_leaves_no_process_of_the_group(bench: Bench) -> None:
    supervisor = bench.supervise(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(os.path.join(FOLDER, 'child.pid'), 'w').write(f'{child.pid}\\n')\n"
        "while len(signals) < 2: time.sleep(0.01)\n"
        "os._exit(0)\n",
        stop_s=30.0,  # also where every core is taken
    )
    supervisor.launch("simulator", 1)
    bench.until(lambda: bool(bench.pids("child")))
    supervisor.stop()
    assert supervisor.finished == {"simulator-0": 0}
    wait_for(lambda: not running(bench.pids("child")[0]))


def test_f49_what_a_crashed_worker_had_started_is_killed_with_it(bench: Bench) -> None:
    supervisor = bench.supervise(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "open(os.path.join(FOLDER, 'child.pid'), 'a').write(f'{child.pid}\\n')\n"
        f"{STUBBORN}"
    )
    supervisor.launch("simulator", 1)
    bench.until(lambda: bool(bench.pids("child")))
    os.kill(bench.pids("simulator-0")[0], signal.SIGKILL)
    bench.until(lambda: "restarted" in bench.kinds())
    assert bench.first("crashed").text == "simulator-0 crashed: killed by SIGKILL"
    wait_for(lambda: not running(bench.pids("child")[0]))


@pytest.mark.parametrize(("role", "state"), [("generator", "running"), ("simulator", "waiting: full")])
def test_f06_a_worker_that_loops_and_falls_silent_is_killed_and_restarted(
    bench: Bench, client: Client, role: str, state: str
) -> None:
    supervisor = bench.supervise(STUBBORN, silent_after_s=0.2, busy_after_s=3600.0)
    (name,) = supervisor.launch(role, 1)
    bench.until(lambda: bool(bench.pids(name)))
    client.hset(Keys(bench.run).worker(name), "state", state)
    bench.until(lambda: supervisor.children[name].state == state)
    client.delete(Keys(bench.run).worker(name))
    bench.until(lambda: len(bench.pids(name)) == 2)
    assert [kind for kind in bench.kinds() if kind != "redis"] == ["silent", "crashed", "restarted"]
    assert "alive but silent" in bench.first("crashed").text
    wait_for(lambda: not running(bench.pids(name)[0]))


@pytest.mark.parametrize(("role", "state"), [("generator", "loading"), ("trainer", "updating")])
def test_f06_a_worker_that_may_be_busy_for_minutes_is_given_them(
    bench: Bench, client: Client, role: str, state: str
) -> None:
    supervisor = bench.supervise(STUBBORN, silent_after_s=0.05, busy_after_s=0.6)
    (name,) = supervisor.launch(role, 1)
    bench.until(lambda: bool(bench.pids(name)))
    client.hset(Keys(bench.run).worker(name), "state", state)
    bench.until(lambda: supervisor.children[name].state == state)
    client.delete(Keys(bench.run).worker(name))
    bench.until(lambda: supervisor.children[name].silent_since_s is not None)
    began_s = time.monotonic()
    bench.until(lambda: "silent" in bench.kinds())
    assert time.monotonic() - began_s >= 0.5


def test_f53_two_supervisors_of_a_run_share_out_the_names(bench: Bench) -> None:
    first, second = bench.supervise(UNTIL_TOLD), bench.supervise(UNTIL_TOLD)
    assert first.launch("simulator", 2) == ["simulator-0", "simulator-1"]
    assert second.launch("simulator", 1) == ["simulator-2"]
    assert first.launch("simulator", 1) == ["simulator-3"]


def test_a_second_trainer_is_refused_with_the_place_of_the_first(bench: Bench) -> None:
    first, second = bench.supervise(UNTIL_TOLD), bench.supervise(UNTIL_TOLD)
    first.launch("trainer", 1)
    with pytest.raises(InputError, match=r"has its trainer already, trainer-0 on .* expected none; stop it first"):
        second.launch("trainer", 1)


def test_f43_a_missing_role_is_named_once(bench: Bench, client: Client) -> None:
    supervisor = bench.supervise(UNTIL_TOLD, watch_roles=True, silent_after_s=0.2, missing_after_s=0.1)
    supervisor.launch("trainer", 1)
    supervisor.launch("generator", 1)
    client.hset(Keys(bench.run).flow, "desired", "running")
    bench.until(lambda: "missing" in bench.kinds())
    assert bench.first("missing").text.startswith("trainer waits for data: no simulator is alive;")
    seen = len(bench.told)
    until_s = time.monotonic() + 0.5
    bench.until(lambda: time.monotonic() > until_s)
    assert "missing" not in [notice.kind for notice in bench.told[seen:]]


def test_f49_files_of_dead_segments_are_swept_and_those_of_live_ones_stay(
    bench: Bench, client: Client, tmp_path: Path
) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in ("3.1-0011aabb", "4.1-0011aabb", "5.1-0011aabb"):
        (folder / name).touch()
    for name in ("3.1-0011aabb", "4.1-0011aabb"):
        os.utime(folder / name, (1, 1))
    client.zadd(Keys(bench.run).published, {"4.1": 4})
    bench.supervise(UNTIL_TOLD, shm=folder)
    bench.until(lambda: not (folder / "3.1-0011aabb").exists())
    assert sorted(path.name for path in folder.iterdir()) == ["4.1-0011aabb", "5.1-0011aabb"]


def test_f49_a_supervisor_killed_by_sigkill_leaves_no_worker_and_no_file(
    redis_url: str, run_name: str, tmp_path: Path
) -> None:
    shm = tmp_path / "shm"
    worker = (
        "import os, sys, time; from workers.lifeline import die_with_parent;"
        "die_with_parent(int(os.environ['VLA_STREAM_PARENT'])); print(os.getpid(), flush=True); time.sleep(600)"
    )
    launcher = f"""
import sys, time
from pathlib import Path
from workers.janitor import Janitor
from workers.supervisor import Supervisor
janitor = Janitor(Path({str(shm)!r}))
(janitor.folder / "1.1-0011aabb").touch()
command = lambda role, run, worker_id: [sys.executable, "-c", {worker!r}]
supervisor = Supervisor({redis_url!r}, {run_name!r}, Path({str(tmp_path)!r}), command=command)
supervisor.launch("simulator", 2)
print("up", flush=True)
while True:
    supervisor.step()
    time.sleep(0.01)
"""
    with subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        logs = [tmp_path / run_name / "logs" / f"simulator-{number}.log" for number in (0, 1)]
        wait_for(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
        pids = [int(log.read_text()) for log in logs]
        assert all(running(pid) for pid in pids)
        process.kill()
    wait_for(lambda: not any(running(pid) for pid in pids))
    wait_for(lambda: not shm.exists())


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
