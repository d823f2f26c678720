"""The launcher's side of the server: whose run it is, what a dead one left, a server that forgets, a clean end."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from vla_stream.broker.connection import Client
from vla_stream.cli import samples
from vla_stream.cli.display import PlainDisplay
from vla_stream.cli.launch import Launch
from vla_stream.cli.samples import StreamFile, is_sample, load
from vla_stream.cli.signals import Signals
from vla_stream.config import Config, validate
from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError, RunFailed
from vla_stream.flow import Flow
from vla_stream.learning import checkpoint
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys
from vla_stream.streams.notices import dead_letters_in_all, sample, say
from workers.supervisor import Supervisor


@pytest.fixture
def config(tmp_path: Path, run_name: str) -> Config:
    return validate(
        {
            "name": run_name,
            "runs_dir": str(tmp_path),
            "environment": {"name": "tabletop", "max_steps": 8},
            "policy": {"name": "tiny", "chunk": 4},
            "trainer": {"segments_per_update": 4},
        }
    )


@pytest.fixture
def keys(run_name: str) -> Keys:
    return Keys(run_name)


@pytest.fixture
def signals() -> Signals:
    """Not installed: pytest keeps its own."""
    return Signals()


def make(config: Config, url: str, signals: Signals, *, resume: bool = False) -> Launch:
    config.run_dir.mkdir(exist_ok=True)
    return Launch(config, url, None, signals, PlainDisplay(), resume=resume)


def all_keys(client: Client, keys: Keys) -> set[object]:
    return set(client.scan_iter(match=keys.everything_pattern))


def attach(client: Client, keys: Keys, worker: str, role: str) -> None:
    """As a worker of another host would stand there."""
    client.hset(keys.worker(worker), mapping={"role": role, "host": "elsewhere", "pid": 7})


def test_f50_a_run_with_a_live_launcher_is_refused_and_other_names_do_not_meet(
    config: Config, redis_url: str, signals: Signals
) -> None:
    with make(config, redis_url, signals):
        for resume in (False, True):
            with pytest.raises(InputError, match=r"already runs on this server .*; give another --run NAME"):
                make(config, redis_url, signals, resume=resume).__enter__()
        other = validate(config.model_dump(mode="json") | {"name": f"{config.name}-b"})
        with make(other, redis_url, signals):
            pass


def test_what_a_dead_run_left_on_the_server_is_cleared_away(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys
) -> None:
    flow = Flow(client, keys)
    assert flow.create(config)
    flow.set_desired("stopped", by="a run that died")
    say(client, keys, "simulator-0", "lost", "an old event")
    with make(config, redis_url, signals):
        state = flow.state()
        assert state is not None and state.desired == "running"
        assert not client.exists(keys.events)


def test_attached_workers_that_outlived_their_launcher_are_taken_over_on_resume_only(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_stream.cli.launch.OTHERS_LEAVE_S", 0.1)
    flow = Flow(client, keys)
    assert flow.create(config)
    before = flow.state()
    flow.set_desired("paused", by="Ctrl-C")
    flow.set_lane("shm", by="a person", remote_reader="one that is gone")
    attach(client, keys, "simulator-7", "simulator")
    with pytest.raises(InputError, match="1 live workers, for example simulator-7 on elsewhere"):
        make(config, redis_url, signals).__enter__()
    with make(config, redis_url, signals, resume=True):
        assert flow.state() == before
        assert {item.id for item in presence.alive(client, keys)} == {"launcher", "simulator-7"}


def test_a_server_that_forgot_the_run_gets_it_back_as_it_was_seen_last(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys
) -> None:
    flow = Flow(client, keys)
    specification = Specification({"front": (48, 48)}, 8, 3)
    with make(config, redis_url, signals) as launch:
        flow.announce(specification)
        client.hset(keys.flow, mapping={"update": 12, "version": 14, "first_version": 3, "epoch": 2, "next_ticket": 70})
        launch.beat()
        client.delete(*all_keys(client, keys))  # type: ignore[arg-type]
        state = launch.beat()
        assert state is not None and state == flow.state()
        assert (state.update, state.version, state.first_version) == (12, 14, 3) and state.epoch > 2
        assert state.next_ticket > 70 + 1000
        assert flow.specification() == specification
        assert flow.config() == config


def test_f50_a_launcher_that_slept_until_another_took_its_run_over_leaves_that_run_alone(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys
) -> None:
    flow = Flow(client, keys)
    with pytest.raises(InputError, match="another launcher has it"), make(config, redis_url, signals) as sleeper:
        client.delete(*all_keys(client, keys))  # type: ignore[arg-type]
        with make(config, redis_url, signals) as other:
            token = client.hget(keys.worker("launcher"), "token")
            try:
                sleeper.beat()
            finally:
                sleeper.__exit__()
                state = flow.state()
                assert state is not None and state.desired == "running"
                assert other.beat() is not None and client.hget(keys.worker("launcher"), "token") == token


def test_f10_a_run_that_the_server_loses_at_its_very_end_has_ended_well_all_the_same(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys
) -> None:
    with make(config, redis_url, signals) as launch:
        client.delete(*all_keys(client, keys))  # type: ignore[arg-type]
        launch.desire("draining")
    assert all_keys(client, keys) == set()


def test_the_end_leaves_no_key_no_file_and_no_process_even_after_an_error(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys
) -> None:
    with pytest.raises(RuntimeError, match="in between"), make(config, redis_url, signals) as launch:
        shm = launch.flow.shm_folder()
        assert shm.stat().st_mode & 0o777 == 0o700
        (shm / "1.1-0011aabb").touch()
        sample(client, keys, "simulator-0", "simulator", "second", {"env_steps": 5})
        launch.beat()
        raise RuntimeError("in between")
    assert all_keys(client, keys) == set()
    assert not shm.exists()
    assert '"env_steps": 5.0' in (config.run_dir / "metrics.jsonl").read_text()


def test_events_of_others_are_told_once_and_noise_of_one_kind_is_held_back(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(config, redis_url, signals) as launch:
        say(client, keys, "trainer-0", "warm start", "warm start in 3 s")
        say(client, keys, "simulator-0", "started", "never shown")
        for number in range(5):
            say(client, keys, "simulator-0", "aborted", f"segment {number}")
        launch.beat()
    told = [line for line in capsys.readouterr().out.splitlines() if "update 0" not in line]
    assert [line[9:] for line in told] == ["trainer-0: warm start in 3 s", "simulator-0: segment 0"]


def test_another_number_of_workers_is_told_once(
    config: Config, redis_url: str, signals: Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(config, redis_url, signals) as launch, contextlib.closing(_Scaled(redis_url, config)) as supervisor:
        launch.flow.set_scale("generator", 2, by="test")
        for _ in range(2):
            launch._scale(launch.flow.state(), supervisor)
            launch._next_beat_s = 0.0
            launch.beat()
    told = [line[9:] for line in capsys.readouterr().out.splitlines() if "generators from now on" in line]
    assert told == ["2 generators from now on, as somebody asked for"] and supervisor.asked == [("generator", 2)]


class _Scaled(Supervisor):
    """Remembers what it was asked for."""

    def __init__(self, url: str, config: Config) -> None:
        super().__init__(url, config.name, config.runs_dir)
        self.asked: list[tuple[str, int]] = []

    def scale(self, role: str, count: int) -> None:
        self.asked.append((role, count))


def test_f27_what_anybody_writes_for_people_floods_neither_the_terminal_nor_the_server_nor_the_file(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(config, redis_url, signals) as launch:
        launch.beat()
        for number in range(2000):
            client.xadd(keys.events, {"kind": f"kind {number}", "text": "\x1b[2J" + "x" * 500})
            client.xadd(keys.metrics, {"kind": "second", "worker": "w", "role": "simulator", "env_steps": "NaNa"})
            client.xadd(keys.dead_letters, {"raw.data": "x" * 100})
        sample(client, keys, "simulator-0", "simulator", "second", {"env_steps": 5})
        launch._next_beat_s = 0.0
        launch.beat()
        assert client.xlen(keys.dead_letters) < 2000 <= dead_letters_in_all(client, keys)
        launch.close_books()
    told = [line for line in capsys.readouterr().out.splitlines() if line.endswith("x" * 500)]
    assert len(told) == 20 and "\x1b" not in "".join(told)
    records = samples.load(config.run_dir / "metrics.jsonl")
    assert [record.get("env_steps") for record in records] == [5.0, None] and records[1]["dead_letters"] == 2000


def test_f47_a_disk_that_takes_no_metrics_is_told_once_and_ends_nothing(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    with make(config, redis_url, signals) as launch:
        file = config.run_dir / "metrics.jsonl"
        config.run_dir.rename(config.runs_dir / "moved")
        for number in range(3):
            sample(client, keys, "trainer-0", "trainer", "update", {"update": number + 1})
            launch.read_metrics()
        launch.close_books()
        assert launch.progress.update == 3
        config.run_dir.mkdir()
        sample(client, keys, "trainer-0", "trainer", "update", {"update": 4})
        launch.read_metrics()
    assert '"update": 4.0' in file.read_text()
    told = [line[9:] for line in capsys.readouterr().out.splitlines() if "not written" in line]
    assert told == [f"{file}: not written (No such file or directory); the run goes on, these figures are lost"]


def test_metrics_go_on_after_a_file_whose_ids_somebody_damaged(
    config: Config, redis_url: str, signals: Signals, client: Client, keys: Keys
) -> None:
    with make(config, redis_url, signals) as launch:
        file = config.run_dir / "metrics.jsonl"
        for number in (1, 2):
            sample(client, keys, "trainer-0", "trainer", "update", {"update": number})
            launch.read_metrics()
        whole = file.read_text()
        file.write_bytes(whole.encode() + b'{"id": "garbage"}\n{"id": 7}\n{"id": "99999999999999999999-0"}\n\xff{"id"')
        sample(client, keys, "trainer-0", "trainer", "update", {"update": 3})
        again = StreamFile(client, keys.metrics, file, print, is_sample)
        assert [record["update"] for record in again.read()] == [3]
    assert [record["update"] for record in load(file) if "update" in record] == [1, 2, 3]


def test_a_server_that_loses_the_last_update_does_not_undo_it(config: Config, redis_url: str, signals: Signals) -> None:
    with make(config, redis_url, signals) as launch:
        supervisor = Supervisor(redis_url, config.name, config.runs_dir)
        supervisor.finished["trainer-0"] = 0
        state = launch.flow.state()
        with pytest.raises(RunFailed, match="ended at update 0 of 100 although nobody asked"):
            launch._reason_to_end(state, supervisor)
        place = checkpoint.save(
            config.run_dir / "checkpoints", 100, 100, {"w": torch.zeros(1)}, {}, {"trained": 0, "skipped": 0}
        )
        meta = (place / "meta.json").read_text()
        (place / "meta.json").write_text("{}")
        with pytest.raises(RunFailed, match="ended at update 0 of 100 although nobody asked"):
            launch._reason_to_end(state, supervisor)
        (place / "meta.json").write_text(meta)
        assert launch._reason_to_end(state, supervisor) == "finished"
        supervisor.close()
