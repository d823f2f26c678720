"""The dashboard's server without a browser: who may look and press, what a look gives, and what it costs."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from garbage import mutated
from PIL import Image
from starlette.testclient import TestClient

from vla_stream.broker.connection import Client, connect
from vla_stream.broker.lanes import PayloadReader
from vla_stream.broker.server import EmbeddedServer
from vla_stream.broker.tail import Tail, newest_entries
from vla_stream.cli.dashboard import poller as poller_module
from vla_stream.cli.dashboard.access import Access
from vla_stream.cli.dashboard.cameras import Cameras
from vla_stream.cli.dashboard.poller import Poller
from vla_stream.cli.dashboard.server import PAGE, PARTS, make_app
from vla_stream.cli.dashboard.watch import MOST_POINTS, Watch
from vla_stream.cli.main import call
from vla_stream.cli.options import Target
from vla_stream.cli.samples import METRICS_FILE
from vla_stream.config import validate
from vla_stream.environments.protocol import Observations
from vla_stream.errors import InputError
from vla_stream.flow import Flow
from vla_stream.streams.keys import Keys
from vla_stream.streams.notices import sample, say
from vla_stream.streams.obs_requests import ObsRequest, RequestId
from vla_stream.streams.observations import pack_observations

LOCAL = "http://127.0.0.1:8642"
RED, BLUE = (200, 10, 10), (10, 10, 200)


def create(client: Client, run: str) -> None:
    """A run on a server, without workers."""
    config = {
        "name": run,
        "updates": 60,
        "environment": {"name": "tabletop", "max_steps": 8},
        "policy": {"name": "tiny", "chunk": 4},
        "trainer": {"segments_per_update": 4},
    }
    assert Flow(client, Keys(run)).create(validate(config))


@pytest.fixture
def keys(client: Client, run_name: str) -> Keys:
    create(client, run_name)
    return Keys(run_name)


@pytest.fixture
def target(run_name: str, redis_url: str, tmp_path: Path) -> Target:
    return Target(run_name, redis_url, tmp_path)


@pytest.fixture
def polling() -> Iterator[Callable[[Callable[[], Target]], Poller]]:
    with contextlib.ExitStack() as stack:

        def start(find: Callable[[], Target]) -> Poller:
            made = Poller(find)
            made.start()
            stack.callback(made.close)
            return made

        yield start


@pytest.fixture
def poller(polling: Callable[[Callable[[], Target]], Poller], target: Target) -> Poller:
    return polling(lambda: target)


def browser(poller: Poller, target: Target, host: str = "127.0.0.1") -> tuple[TestClient, Access]:
    access = Access(host, 8642)
    return TestClient(make_app(access, poller, lambda: target), base_url=f"http://{host}:8642"), access


def snapshot(poller: Poller) -> dict[str, Any]:
    return dict(json.loads(poller.snapshot()))


def wait_for(condition: Callable[[], object], what: str, deadline_s: float = 20.0) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"waited {deadline_s:g} s for: {what}"
        time.sleep(0.02)


def put_request(client: Client, keys: Keys, step: int, colour: tuple[int, int, int], slot: int = 1) -> None:
    image = np.full((2, 24, 24, 3), colour, np.uint8)
    observations = Observations({"front": image}, np.zeros((2, 3), np.float32), ["touch the\nred cube", "wait"])
    identity = RequestId("simulator-0", "9f2c11ab", 0, slot, 17, 1, step)
    fields = ObsRequest(identity, 2, 5, "sample", pack_observations(observations), "").to_fields()
    client.xadd(keys.obs_requests, fields)  # type: ignore[arg-type]


def put_worker(client: Client, keys: Keys, worker: str, **fields: str | int) -> None:
    about = {"role": worker.rpartition("-")[0], "host": "node7", "pid": 12, "state": "running", **fields}
    client.hset(keys.worker(worker), mapping=about)  # type: ignore[arg-type]


# ---- who may look, and press


def test_on_loopback_the_page_and_all_its_parts_come_from_here_without_a_token(poller: Poller, target: Target) -> None:
    web, _ = browser(poller, target)
    page = web.get("/")
    assert page.status_code == 200 and "default-src 'none'" in page.headers["content-security-policy"]
    named = set(re.findall(r'(?:src|href)="([\w.]+)"', page.text))
    texts = {name: web.get(f"/{name}").text for name in PARTS}
    named |= {name for text in texts.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert named == {*PARTS, "plotly.min.js"}
    assert all(web.get(f"/{name}").status_code == 200 for name in named)
    outside = [found for text in (page.text, *texts.values()) for found in re.findall(r"https?://[\w.]+", text)]
    assert set(outside) == {"http://www.w3.org"}, "the namespace of SVG, which nobody loads"


def test_every_file_of_the_page_is_part_of_the_package() -> None:
    folder = Path(str(files("vla_stream.cli.dashboard"))) / "page"
    assert {path.name for path in folder.iterdir()} == {*PARTS, PAGE}


def test_the_page_never_makes_html_of_data() -> None:
    folder = Path(str(files("vla_stream.cli.dashboard"))) / "page"
    scripts = "".join(path.read_text() for path in folder.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", scripts)


@pytest.mark.parametrize("path", ["/", "/page.js", "/plotly.min.js", "/snapshot", "/curves", "/cameras", "/nothing"])
def test_on_another_address_nothing_is_shown_without_the_token(path: str, poller: Poller, target: Target) -> None:
    web, access = browser(poller, target, "0.0.0.0")
    assert web.get(path).status_code == 401
    for wrong in (access.token + "x", access.token[:-1], ""):
        assert web.get(path, params={"token": wrong}).status_code == 401
    assert web.get(path, headers={"X-Token": "ä".encode()}).status_code == 401
    assert web.get(path, headers={"Cookie": f"{access.cookie}={access.token}"}).status_code == 401
    assert access.token not in web.get(path).text
    assert web.get(path, headers={"X-Token": access.token}).status_code == (404 if path == "/nothing" else 200)


def test_the_address_with_the_token_opens_the_page_and_its_parts_but_its_cookie_presses_no_button(
    client: Client, keys: Keys, poller: Poller, target: Target
) -> None:
    web, access = browser(poller, target, "0.0.0.0")
    page = web.get("/", params={"token": access.token})
    assert page.status_code == 200 and access.token not in page.headers["set-cookie"]
    assert "HttpOnly" in page.headers["set-cookie"] and "SameSite=strict" in page.headers["set-cookie"]
    assert web.get("/page.js").status_code == web.get("/snapshot").status_code == 200
    assert web.post("/press/pause").status_code == 403
    assert desired(client, keys) == "running"


def test_two_dashboards_on_one_host_do_not_take_each_others_cookie() -> None:
    first, second = Access("0.0.0.0", 8642), Access("0.0.0.0", 8643)
    assert first.cookie != second.cookie and first.look_key != second.look_key
    assert first.token not in repr(first)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8642", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:8642", 403),
        ("", 403),
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused_on_loopback(
    host: str, status: int, poller: Poller, target: Target
) -> None:
    web, access = browser(poller, target)
    for path in ("/", "/snapshot"):
        assert web.get(path, headers={"Host": host, "X-Token": access.token}).status_code == status


def desired(client: Client, keys: Keys) -> str:
    state = Flow(client, keys).state()
    assert state is not None
    return state.desired


def test_buttons_need_the_token_in_its_header_and_a_post(
    client: Client, keys: Keys, poller: Poller, target: Target
) -> None:
    web, access = browser(poller, target)
    good = {"X-Token": access.token}
    refused = web.post("/press/pause")
    assert refused.status_code == 403 and "buttons need the token" in refused.text
    assert web.post("/press/pause", params={"token": access.token}).status_code == 403, "addresses end up in logs"
    assert web.get("/press/pause", headers=good).status_code == 405
    assert desired(client, keys) == "running"
    for button, state in (("pause", "paused"), ("resume", "running"), ("drain", "draining")):
        assert web.post(f"/press/{button}", headers=good).json() == {"desired": state}
        assert desired(client, keys) == state
    assert newest_entries(client, keys.control, 1)[0].fields[b"by"] == b"vla-stream dashboard"
    assert web.post("/press/stop", headers=good).status_code == 404


def test_a_button_that_cannot_be_obeyed_says_why(client: Client, keys: Keys, poller: Poller, target: Target) -> None:
    web, access = browser(poller, target)
    Flow(client, keys).set_desired("stopped", by="test")
    refused = web.post("/press/resume", headers={"X-Token": access.token})
    assert refused.status_code == 409 and "already stopped; start it again" in refused.text


# ---- what a look gives


def test_a_look_shows_workers_queues_rates_shares_histograms_and_events(
    client: Client, keys: Keys, poller: Poller
) -> None:
    put_worker(client, keys, "simulator-10")
    put_worker(client, keys, "simulator-9", version=3)
    put_worker(client, keys, "generator-0")
    put_request(client, keys, 0, RED)
    figures = {"seconds": 1.0, "env_steps": 50.0, "busy.stepping": 0.75, "cpu": 0.5}
    for _ in range(3):
        sample(client, keys, "simulator-9", "simulator", "second", figures)
    batches = {"seconds": 1.0, "batches": 4.0, "requests": 8.0, "fill": 0.5, "fill[0.5]": 4.0, "age_ms[inf]": 1.0}
    sample(client, keys, "generator-0", "generator", "second", batches)
    sample(client, keys, "trainer-0", "trainer", "update", {"update": 1.0, "staleness[0]": 1.0, "staleness[2]": 3.0})
    say(client, keys, "simulator-9", "lost", "it fell")
    seen = snapshot(poller)
    assert seen["problem"] == "" and seen["age_s"] < 5
    found = seen["snapshot"]
    assert [worker["id"] for worker in found["workers"]] == ["generator-0", "simulator-9", "simulator-10"]
    assert found["workers"][1]["rate"] == 50 and found["workers"][1]["shares"]["work"] == pytest.approx(0.75)
    assert found["workers"][2]["rate"] is None and found["workers"][2]["shares"] is None
    assert found["alive"] == {"simulator": 2, "generator": 1}
    assert found["queues"] == {"obs-requests": 1, "trajectories": 0}
    assert found["rates"]["env_steps"] > 0 and found["rates"]["requests"] > 0 and found["rates"]["updates"] is None
    assert found["histograms"]["staleness"] == [["0", 1], ["1", 0], ["2", 3]]
    assert ["0.5", 4] in found["histograms"]["fill"] and found["histograms"]["age_ms"][-1] == ["inf", 1]
    assert [(event["worker"], event["kind"], event["text"]) for event in found["events"]] == [
        ("simulator-9", "lost", "it fell")
    ]


def test_f27_what_anybody_wrote_breaks_no_look_and_comes_as_plain_text(
    client: Client, keys: Keys, target: Target
) -> None:
    source = random.Random(4)
    say(client, keys, "<b>x</b>", "lost", "<script>alert(1)</script>")
    sample(client, keys, "simulator-0", "simulator", "second", {"env_steps": 5.0})
    sample(client, keys, "trainer-0", "trainer", "update", {"update": 1.0, "staleness[1]": 3.0, "success": 0.5})
    put_request(client, keys, 0, RED)
    streams = (keys.events, keys.metrics, keys.obs_requests)
    real = {stream: dict(newest_entries(client, stream, 1)[0].fields) for stream in streams}
    watch = Watch(client, target)
    for stream, fields in real.items():
        for _ in range(100):
            client.xadd(stream, mutated(fields, source))  # type: ignore[arg-type]
    endless = {
        "kind": b"update",
        "worker": b"t",
        "update": b"inf",
        "staleness[99999999999]": b"1e300",
        "success": b"nan",
    }
    client.xadd(keys.metrics, endless)
    put_worker(client, keys, "simulator-0\n\x1b[2J" + "x" * 5000, host="\x00<i>")
    found = watch.look()
    watch.cameras.follow([], 0.2)
    shown = json.dumps([found, watch.curves(), watch.seen_by_cameras()], allow_nan=False)
    assert len(shown) < 100_000
    texts = [text for event in found["events"] for text in (event["worker"], event["kind"], event["text"])]
    texts += [text for worker in found["workers"] for text in worker.values() if isinstance(text, str)]
    assert all(text.isprintable() and len(text) <= 2000 for text in texts)


def test_curves_have_one_row_per_surviving_update_also_of_those_that_only_the_launchers_file_holds(
    client: Client, keys: Keys, target: Target
) -> None:
    folder = target.runs_dir / target.run
    folder.mkdir()
    kept = [
        {"time": float(n), "kind": "update", "id": f"{n}-0", "update": n, "trained_env_steps": 10.0} for n in (1, 2, 3)
    ]
    (folder / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in kept))
    for update, success in ((3.0, 0.25), (4.0, 0.5)):
        sample(client, keys, "trainer-0", "trainer", "update", {"update": update, "success": success})
    watch = Watch(client, target)
    watch.look()
    curves = watch.curves()
    assert curves["x"]["updates"] == [1, 2, 3, 4] and curves["x"]["env_steps"] == [10, 20, 20, 20]
    assert curves["series"]["success"] == [None, None, 0.25, 0.5]


def test_long_curves_are_thinned_out_and_keep_their_newest_point(client: Client, keys: Keys, target: Target) -> None:
    folder = target.runs_dir / target.run
    folder.mkdir()
    kept = ({"time": float(n), "kind": "update", "id": f"{n}-0", "update": n} for n in range(1, 2400))
    (folder / METRICS_FILE).write_text("".join(json.dumps(record) + "\n" for record in kept))
    x = Watch(client, target).curves()["x"]["updates"]
    assert MOST_POINTS / 2 < len(x) <= MOST_POINTS and x[-1] == 2399


def test_hundreds_of_workers_are_one_quick_look(client: Client, keys: Keys, target: Target) -> None:
    with client.pipeline(transaction=False) as pipe:
        for number in range(200):
            pipe.hset(keys.worker(f"simulator-{number}"), mapping={"role": "simulator", "host": f"node{number}"})
        pipe.execute()
    for number in range(200):
        sample(client, keys, f"simulator-{number}", "simulator", "second", {"seconds": 1.0, "env_steps": 2.0})
    watch = Watch(client, target)
    began_s = time.thread_time()
    found = watch.look()
    assert len(found["workers"]) == 200 and all(worker["rate"] == 2 for worker in found["workers"])
    assert time.thread_time() - began_s < 0.5, "CPU seconds, of each second"


# ---- cameras


def pixel(picture: dict[str, Any], row: int = 0) -> tuple[int, ...]:
    head, _, data = picture["rows"][row]["cameras"][0]["src"].partition(",")
    assert head == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        found: Any = image.convert("RGB").getpixel((12, 12))
    return tuple(found)


def test_a_chosen_slot_shows_what_it_sees_and_then_what_it_sees_next(
    client: Client, keys: Keys, poller: Poller, target: Target
) -> None:
    web, _ = browser(poller, target)
    put_worker(client, keys, "simulator-0")
    web.get("/cameras")

    def see(colour: tuple[int, int, int], step: int) -> dict[str, Any]:
        put_request(client, keys, step, colour)
        seen: dict[str, Any] = {}

        def shown() -> bool:
            nonlocal seen
            seen = web.get("/cameras", params={"slot": "simulator-0/0.1"}).json()
            return (seen["pictures"].get("simulator-0/0.1") or {}).get("step") == step

        wait_for(shown, f"a picture of step {step}")
        return seen

    seen = see(RED, 0)
    wait_for(lambda: web.get("/cameras").json()["slots"] == ["simulator-0/0.1"], "the slot")
    first = seen["pictures"]["simulator-0/0.1"]
    assert first["rows"][0]["told"] == "touch the red cube" and first["rows"][0]["cameras"][0]["name"] == "front"
    assert np.allclose(pixel(first), RED, atol=12)
    assert np.allclose(pixel(see(BLUE, 1)["pictures"]["simulator-0/0.1"], 1), BLUE, atol=12)


def test_large_images_are_made_small_and_odd_ones_do_no_harm(client: Client, keys: Keys, tmp_path: Path) -> None:
    cameras = Cameras(Tail(client, keys.obs_requests), PayloadReader(client, keys.blob, tmp_path))
    wide = np.zeros((1, 30, 1200, 3), np.uint8)
    for slot, image in ((0, wide), (1, np.zeros((1, 0, 8, 3), np.uint8))):
        observations = Observations({"front": image}, np.zeros((1, 3), np.float32), ["go"])
        identity = RequestId("simulator-0", "9f2c11ab", 0, slot, 17, 1, 0)
        fields = ObsRequest(identity, 1, 0, "sample", pack_observations(observations), "").to_fields()
        client.xadd(keys.obs_requests, fields)  # type: ignore[arg-type]
    cameras.follow(["simulator-0/0.0", "simulator-0/0.1"], 0.2)
    assert cameras.slots == {"simulator-0/0.0", "simulator-0/0.1"} and list(cameras.pictures) == ["simulator-0/0.0"]
    source = cameras.pictures["simulator-0/0.0"]["rows"][0]["cameras"][0]["src"]
    with Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))) as image:
        assert max(image.size) == 256


def test_images_that_lie_in_another_hosts_memory_are_explained(client: Client, keys: Keys, tmp_path: Path) -> None:
    cameras = Cameras(Tail(client, keys.obs_requests), PayloadReader(client, keys.blob, tmp_path / "not-here"))
    reference = "shm:17.1-5c0ffee0:0:55360:0123456789abcdef"
    request = ObsRequest(RequestId("simulator-0", "9f2c11ab", 0, 0, 17, 1, 0), 1, 0, "sample", None, reference)
    client.xadd(keys.obs_requests, request.to_fields())  # type: ignore[arg-type]
    cameras.follow(["simulator-0/0.0"], 0.1)
    assert not cameras.pictures and "vla-stream lane redis" in cameras.problem


# ---- what looking costs, and what becomes of it when something is missing


def test_many_browsers_look_at_redis_as_often_as_one_and_nobody_never(
    client: Client, keys: Keys, poller: Poller, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller_module, "REST_AFTER_S", 0.4)
    monkeypatch.setattr(poller_module, "PERIOD_S", 0.2)
    assert poller.looks == 0, "nobody has looked"
    web, _ = browser(poller, target)
    began_s = time.monotonic()

    def look() -> None:
        while poller.looks < 3 and time.monotonic() < began_s + 20:
            assert web.get("/snapshot").status_code == 200

    browsers = [threading.Thread(target=look) for _ in range(8)]
    for thread in browsers:
        thread.start()
    for thread in browsers:
        thread.join()
    assert 3 <= poller.looks <= (time.monotonic() - began_s) / 0.2 + 2

    def connections() -> int:
        return sum(item["name"] == "vla-stream-dashboard" for item in client.client_list())

    wait_for(lambda: connections() == 0, "the poller's rest")
    looks = poller.looks
    time.sleep(0.5)
    assert poller.looks == looks
    wait_for(lambda: web.get("/snapshot").json()["snapshot"]["run"] == keys.run and poller.looks > looks, "a new look")


def test_a_run_that_is_not_there_is_said_and_comes_by_itself(client: Client, run_name: str, poller: Poller) -> None:
    seen = snapshot(poller)
    assert f"run {run_name}: not on this server" in seen["problem"] and seen["snapshot"] is None
    create(client, run_name)
    wait_for(lambda: snapshot(poller)["snapshot"], "the run")
    assert snapshot(poller)["problem"] == ""


def test_a_server_that_goes_away_is_said_and_another_one_found_by_itself(
    run_name: str, tmp_path: Path, polling: Callable[[Callable[[], Target]], Poller]
) -> None:
    urls: list[str] = []

    def find() -> Target:
        if not urls:
            raise InputError(f"run {run_name}: no server given")
        return Target(run_name, urls[-1], tmp_path)

    poller = polling(find)
    assert "no server given" in snapshot(poller)["problem"]
    for number in range(2):
        with EmbeddedServer.start(tmp_path / f"{number}") as server:
            with contextlib.closing(connect(server.url, name="test")) as client:
                create(client, run_name)
            urls.append(server.url)
            wait_for(lambda: not snapshot(poller)["problem"], "the run on this server")
        wait_for(lambda: "Redis at" in snapshot(poller)["problem"], "the loss")
        assert snapshot(poller)["snapshot"]["run"] == run_name, "what was seen last stays"


# ---- the command


def test_a_port_in_use_and_a_malformed_url_are_one_line(
    redis_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert call(["dashboard", "--run", "x", "--redis", redis_url, "--port", port]) == 2
    assert f"cannot listen at 127.0.0.1 port {port}" in capsys.readouterr().err
    assert call(["dashboard", "--run", "x", "--redis", "here"]) == 2
    assert "Redis url: got no scheme" in capsys.readouterr().err
    assert call(["dashboard", "--run", "x/y"]) == 2
    assert "is no run's name" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert call(["dashboard", "--run", "x"]) == 2
    assert "starlette is not installed; run tools/setup dashboard" in capsys.readouterr().err


def test_the_command_prints_the_address_with_its_token_serves_and_ends_on_ctrl_c(
    keys: Keys, redis_url: str, tmp_path: Path
) -> None:
    import urllib.request

    command = [sys.executable, "-m", "vla_stream.cli.main", "dashboard", "--run", keys.run, "--redis", redis_url]
    process = subprocess.Popen(
        [*command, "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        # A shell that runs the tests in the background has it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{20,}", line)
        assert address is not None, line
        with urllib.request.urlopen(address[0].replace("/?", "/snapshot?"), timeout=30) as answer:
            assert json.load(answer)["snapshot"]["run"] == keys.run
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.communicate()
