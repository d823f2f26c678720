"""status, events and inspect on a real server, with entries as workers write them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from garbage import mutated
from PIL import Image

from vla_stream.broker.connection import Client
from vla_stream.broker.tail import newest_entries
from vla_stream.cli.inspect import key_of
from vla_stream.cli.main import call
from vla_stream.config import validate
from vla_stream.environments.protocol import Observations
from vla_stream.flow import Flow
from vla_stream.streams.actions import ActionReply
from vla_stream.streams.keys import Keys
from vla_stream.streams.notices import sample, say
from vla_stream.streams.obs_requests import ObsRequest, RequestId
from vla_stream.streams.observations import pack_observations
from vla_stream.streams.presence import process_fields
from vla_stream.streams.weights import WeightsManifest

RED, BLUE = (200, 10, 10), (10, 10, 200)


@pytest.fixture
def keys(client: Client, run_name: str) -> Keys:
    """A run on the server, without workers."""
    config = {
        "name": run_name,
        "updates": 60,
        "environment": {"name": "tabletop", "max_steps": 8},
        "policy": {"name": "tiny", "chunk": 4},
        "trainer": {"segments_per_update": 4},
    }
    assert Flow(client, Keys(run_name)).create(validate(config))
    return Keys(run_name)


@pytest.fixture
def where(keys: Keys, redis_url: str) -> list[str]:
    return ["--run", keys.run, "--redis", redis_url]


def request(step: int) -> dict[bytes, bytes]:
    """Two rows, seen by two cameras of different size."""
    front = np.empty((2, 24, 24, 3), np.uint8)
    front[0], front[1] = RED, BLUE
    wrist = np.zeros((2, 12, 12, 3), np.uint8)
    words = ["touch the red cube", "touch the blue cube"]
    observations = Observations({"front": front, "wrist": wrist}, np.zeros((2, 3), np.float32), words)
    identity = RequestId("simulator-0", "9f2c11ab", 0, 1, 17, 1, step)
    return ObsRequest(identity, 2, 5, "sample", pack_observations(observations), "").to_fields()


def put(client: Client, stream: str, fields: dict[bytes, bytes]) -> None:
    client.xadd(stream, fields)  # type: ignore[arg-type]


def test_status_shows_workers_queues_and_books(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Flow(client, keys)
    client.hset(
        keys.worker("simulator-10"), mapping={"role": "simulator", "host": "node7", "pid": 12, "state": "running"}
    )
    client.hset(keys.worker("simulator-9"), mapping={"role": "simulator", "host": "node7", "pid": 11, "version": 3})
    put(client, keys.obs_requests, request(0))
    assert call(["status", *where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [worker["id"] for worker in found["workers"]] == ["simulator-9", "simulator-10"]
    assert found["queues"] == {"obs-requests": 1, "trajectories": 0} and found["dead_letters"] == 0
    assert found["flow"]["desired"] == "running"
    assert call(["status", *where]) == 0
    shown = capsys.readouterr().out
    assert f"run {keys.run}: running, update 0 of 60" in shown
    assert "segments 0 started = 0 trained + 0 in flight" in shown


def test_status_and_top_say_what_holds_the_run_up(
    client: Client,
    keys: Keys,
    where: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "130")
    Flow(client, keys)
    shares = {"simulator": ("stepping", 0.9), "generator": ("waiting", 0.62), "trainer": ("waiting", 0.6)}
    for role, (stage, share) in shares.items():
        client.hset(keys.worker(f"{role}-0"), mapping={"role": role, "host": "node7", "pid": 11, "state": "running"})
        numbers = {"seconds": 1.0, f"busy.{stage}": share, "env_steps": 700.0, "age_ms[5]": 3, "memory_mb": 286.0}
        sample(client, keys, f"{role}-0", role, "second", numbers)
    put(client, keys.obs_requests, request(0))
    assert call(["status", *where, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bottleneck"] == "generators wait 62 % of the time for requests: add simulators"
    assert {w["id"]: w["shares"]["work"] for w in found["workers"]} == {
        "simulator-0": 0.9,
        "generator-0": 0.0,
        "trainer-0": 0.0,
    }
    assert 0 <= found["oldest_s"]["obs-requests"] < 10 and found["oldest_s"]["trajectories"] == 0
    for command in (["status"], ["top", "--once"]):
        assert call([*command, *where]) == 0
        shown = capsys.readouterr().out
        assert "generators wait 62 % of the time" in shown and "90 %" in shown
    assert "700 env-steps/s" in shown and "286" in shown and "5 █" in shown


@pytest.mark.timeout(180)
def test_a_look_at_a_run_does_not_wait_for_torch(where: list[str]) -> None:
    # Stopwatches lie on a busy machine; what takes seconds is torch, and what draws.
    script = (
        "import sys\n"
        "from vla_stream.cli.main import call\n"
        "for command in (['status'], ['status', '--json'], ['top', '--once'], ['events']):\n"
        f"    assert call(command + {where!r}) == 0\n"
        "slow = {'torch', 'matplotlib', 'mujoco', 'gymnasium', 'transformers', 'plotly'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)


def test_in_a_pipe_no_sentence_and_no_line_of_a_table_is_broken(
    client: Client,
    keys: Keys,
    where: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    host = "a-host-whose-name-is-long.cluster.example"
    client.hset(keys.worker("simulator-0"), mapping={"role": "simulator", "host": host, "state": "waiting: no weights"})
    for command in (["status"], ["top", "--once"]):
        assert call([*command, *where]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("simulator-0")]
        assert host in line and line.rstrip().endswith("waiting: no weights")
    assert " 0 " not in line, "a simulator has no weights, so no version"


def test_f27_what_anybody_wrote_into_a_stream_breaks_no_command_and_no_terminal(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    source = random.Random(3)
    say(client, keys, "simulator-0", "lost", "gone")
    sample(client, keys, "simulator-0", "simulator", "second", {"env_steps": 5.0})
    manifest, _ = WeightsManifest.describe(1, 0, 1, b"weights")
    real = {
        "obs-requests": request(0),
        "trajectories": request(1),
        "actions:simulator-0": ActionReply(RequestId.parse("simulator-0/9f2c11ab/0.0/1.1/0"), 1, "d", None).to_fields(),
        "weights": manifest.to_fields(),
        "control": {b"desired": b"running", b"by": b"x"},
        "events": dict(newest_entries(client, keys.events, 1)[0].fields),
        "metrics": dict(newest_entries(client, keys.metrics, 1)[0].fields),
        "dead-letters": {b"raw.\x1b[2Jid": b"x", b"reason": b"r"},
    }
    for stream, fields in real.items():
        for _ in range(100):
            put(client, key_of(keys, stream), mutated(fields, source))
        assert call(["inspect", stream, *where, "--count", "200"]) == 0
    assert call(["status", *where]) == call(["status", *where, "--json"]) == call(["events", *where]) == 0
    assert call(["top", *where, "--once"]) == 0
    shown = capsys.readouterr().out
    assert "does not decode: entry's digest does not match" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_a_worker_of_this_host_whose_process_is_gone_is_not_shown(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    about = {**process_fields(), "pid": 2**22 + 1}
    client.hset(keys.worker("simulator-0"), mapping=about)
    assert call(["status", *where, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"] == []


def test_an_unknown_run_is_an_error(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["status", "--run", "nobody", "--redis", redis_url]) == 2
    assert "run nobody: not on this server" in capsys.readouterr().err


def test_events_are_sentences_with_time_and_worker(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        say(client, keys, "simulator-0", "lost", f"it fell {number} times")
    assert call(["events", *where, "--count", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[9:] for line in lines] == [f"simulator-0 lost: it fell {number} times" for number in (1, 2)]


def test_pause_and_resume_set_what_is_desired(client: Client, keys: Keys, where: list[str]) -> None:
    flow = Flow(client, keys)
    desired = []
    for command in ("pause", "resume", "drain", "stop"):
        assert call([command, *where]) == 0
        state = flow.state()
        assert state is not None
        desired.append(state.desired)
    assert desired == ["paused", "running", "draining", "stopped"]


def test_the_lane_is_shown_and_changed(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["lane", "redis", *where]) == 0
    assert capsys.readouterr().out == f"run {keys.run}: segments begun from now on have lane redis\n"
    assert call(["status", *where, "--json"]) == 0
    flow = json.loads(capsys.readouterr().out)["flow"]
    assert (flow["lane"], flow["remote_reader"]) == ("redis", "")
    assert call(["status", *where]) == 0
    assert "\nlane     redis\n" in capsys.readouterr().out


def test_the_numbers_of_workers_are_asked_for_and_other_words_are_refused(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["scale", "generators=3", "simulator=1", *where]) == 0
    shown = capsys.readouterr().out
    assert shown == f"run {keys.run}: its launcher is told to have 3 generators, 1 simulator\n"
    state = Flow(client, keys).state()
    assert state is not None and state.scale == {"generator": 3, "simulator": 1}
    for words, complaint in (
        ("trainers=2", "scale 'trainers=2': unknown, expected simulators=N or generators=N"),
        ("generators", "scale 'generators': expected a number from 1 to 1000"),
        ("generators=0", "scale 'generators=0': expected a number from 1 to 1000; `pause` stops all of a run"),
        ("simulators=¹", "scale 'simulators=¹': expected a number"),
    ):
        assert call(["scale", "simulators=5", words, *where]) == 2
        assert complaint in capsys.readouterr().err
    assert Flow(client, keys).state() == state
    assert call(["scale", "generators=3", "--run", "nobody", *where[2:]]) == 2


def test_while_a_reader_does_not_see_dev_shm_lane_auto_means_redis_and_lane_shm_is_refused(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flow = Flow(client, keys)
    assert flow.add_remote_reader("generator-1"), "which has ended meanwhile"
    client.hset(keys.worker("generator-2"), mapping={"role": "generator", "host": "node7", "pid": 12, "shm": "no"})
    assert call(["lane", "shm", *where]) == 2
    assert "lane shm: generator-2 on node7 does not see /dev/shm of run" in capsys.readouterr().err
    assert call(["lane", "auto", *where]) == 0
    assert "have lane auto, which is through Redis for generator-2" in capsys.readouterr().out
    assert call(["status", *where]) == 0
    assert "lane     auto, now through Redis: generator-2 does not see /dev/shm of the run" in capsys.readouterr().out
    client.delete(keys.worker("generator-2"))
    for lane in ("auto", "shm"):
        assert call(["lane", lane, *where]) == 0
        state = flow.state()
        assert state is not None and (state.lane, state.remote_reader) == (lane, "")


def test_an_unknown_lane_is_refused(where: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["lane", "tcp", *where]) == 2
    assert "lane 'tcp': unknown, expected one of auto, inline, shm, redis" in capsys.readouterr().err


def test_a_stopped_run_cannot_be_resumed_in_place(
    where: list[str], keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["stop", *where]) == 0
    assert call(["resume", *where]) == 2
    assert "already stopped; start it again with `vla-stream run … --resume`" in capsys.readouterr().err


def test_workers_are_not_attached_to_a_run_that_ends(
    where: list[str], keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["drain", *where]) == 0
    assert call(["simulators", *where]) == 2
    assert "is ending, expected one that goes on; nothing is attached" in capsys.readouterr().err


def test_inspect_shows_a_request_with_its_arrays(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    put(client, keys.obs_requests, request(3))
    assert call(["inspect", "obs-requests", *where]) == 0
    shown = capsys.readouterr().out
    assert "    id  simulator-0/9f2c11ab/0.1/17.1/3\n" in shown
    assert "    image.front: uint8[2, 24, 24, 3] from 10 to 200\n" in shown
    assert '    instruction: ["touch the blue cube", "touch the red cube"]\n' in shown


def test_inspect_shows_what_does_not_decode_and_why(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    put(client, keys.trajectories, {b"hello": b"\x00\xff" * 300})
    assert call(["inspect", "trajectories", *where]) == 0
    shown = capsys.readouterr().out
    assert "    hello  (600 bytes)\n" in shown
    assert "    does not decode: entry has schema" in shown


def test_inspect_knows_metrics_and_replies_by_simulator(
    client: Client, keys: Keys, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sample(client, keys, "simulator-0", "simulator", "second", {"env_steps": 120.0})
    put(client, keys.actions("simulator-0"), {b"id": b"x"})
    assert call(["inspect", "metrics", *where]) == 0
    assert "    env_steps  120\n" in capsys.readouterr().out
    assert call(["inspect", "actions:simulator-0", *where]) == 0
    assert "does not decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["obs-request"], "stream 'obs-request': unknown, expected obs-requests, actions:SIMULATOR"),
        (["actions"], "stream 'actions': unknown"),
        (["weights", "--image", "x.png"], "weights carries no images, expected obs-requests or trajectories"),
    ],
)
def test_inspect_refuses_what_it_cannot_show(
    arguments: list[str], message: str, where: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["inspect", *arguments, *where]) == 2
    assert message in capsys.readouterr().err


def test_the_images_of_a_request_become_one_picture_with_a_line_per_row(
    client: Client, keys: Keys, where: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(client, keys.obs_requests, {b"broken": b"entry"})
    put(client, keys.obs_requests, request(0))
    file = tmp_path / "new" / "picture.png"
    assert call(["inspect", "obs-requests", *where, "--image", str(file)]) == 0
    assert "row 1: touch the blue cube" in capsys.readouterr().out
    with Image.open(file) as image:
        # Two rows of 144 pixels under labels of 14; cameras of 24 and 12 pixels, six times enlarged, side by side.
        assert image.size == (144 + 2 + 72 + 2, 2 * (144 + 14))
        pixels = image.convert("RGB")
        assert pixels.getpixel((70, 14 + 70)) == RED
        assert pixels.getpixel((70, 14 + 144 + 14 + 70)) == BLUE
