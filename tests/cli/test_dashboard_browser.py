"""The dashboard as a person meets it: `vla-stream dashboard` beside a live run, in a real Chromium."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from own_server import free_port

from vla_stream.broker.connection import Client
from vla_stream.config import validate
from vla_stream.flow import Flow
from vla_stream.streams.keys import Keys
from vla_stream.streams.notices import say

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

CONFIG = """
name: seen
updates: 1000000
environment: {name: tabletop, max_steps: 8}
policy: {name: tiny, chunk: 4}
simulators: {count: 1, slots: 2, envs_per_slot: 2, segment: {steps: 2}}
generators: {count: 1, max_batch_size: 4}
trainer: {segments_per_update: 4, epochs: 1}
evaluation: {episodes: 0}
"""
PHONE = {"width": 390, "height": 844}
DESKTOP = {"width": 1280, "height": 900}
WAIT_S = 90.0
# Boxes of all that is to be read or pressed and may not lie on one another, as [what, left, top, right, bottom].
BOXES = """() => {
  const found = [];
  const add = (what, { left, top, right, bottom }) => {
    if (right > left && bottom > top) found.push([what, left, top + scrollY, right, bottom + scrollY]);
  };
  for (const control of document.querySelectorAll("button, select, input, #cameras img, progress")) {
    if (control.checkVisibility()) add(control.outerHTML.slice(0, 40), control.getBoundingClientRect());
  }
  const elsewhere = "button, select, .hidden, .skip, .plot, .scroll, title";
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const text = node.textContent.trim(), parent = node.parentElement;
    if (!text || !parent.checkVisibility() || parent.closest(elsewhere)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) add(text.slice(0, 40), rect);
  }
  for (const plot of document.querySelectorAll(".plot .svg-container")) add("a chart", plot.getBoundingClientRect());
  return found;
}"""


def wait_for(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"waited {WAIT_S:g} s for: {what}"
        time.sleep(0.1)


class Commands:
    """`vla-stream` commands in a folder; none outlives the tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, output: int | Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name != "VLA_STREAM_REDIS"}
        process = subprocess.Popen(
            [sys.executable, "-m", "vla_stream.cli.main", *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        self.started.append(process)
        return process

    def dashboard(self, *arguments: str) -> tuple[str, subprocess.Popen[str]]:
        """The address that it prints."""
        process = self.start("dashboard", *arguments, output=subprocess.PIPE)
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        assert address is not None, line
        return address[0], process

    def close(self) -> None:
        for process in self.started:
            process.terminate()
        for process in self.started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=30)
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("dashboard")
    (folder / "mini.yaml").write_text(CONFIG)
    with contextlib.closing(Commands(folder)) as made:
        yield made


@pytest.fixture(scope="module")
def live(commands: Commands) -> str:
    """Address of the dashboard of a run that trains."""
    log = (commands.folder / "run.log").open("w")
    run = commands.start("run", "mini.yaml", "--run", "seen", output=log)
    log.close()
    metrics = commands.folder / "runs" / "seen" / "metrics.jsonl"
    wait_for(lambda: run.poll() is not None or (metrics.exists() and '"update"' in metrics.read_text()), "an update")
    assert run.poll() is None, (commands.folder / "run.log").read_text()[-2000:]
    return commands.dashboard("--run", "seen", "--port", "0")[0]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    found = shutil.which("chromium")
    if found is None:
        pytest.fail("chromium is not on PATH; run tools/setup browser, or: apt-get install chromium")
    quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"]
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=[*quiet, *root, "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address; `page.said` and `page.asked_for` hold its console's errors and all addresses that it loaded."""
    with contextlib.ExitStack() as stack:

        def opened(address: str, size: dict[str, int] = DESKTOP, **settings: Any) -> Any:
            context = chromium.new_context(viewport=size, **settings)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(1000 * WAIT_S)
            page.said, page.asked_for = [], []
            page.on("console", lambda message: message.type in ("error", "warning") and page.said.append(message.text))
            page.on("pageerror", lambda error: page.said.append(str(error)))
            page.on("request", lambda request: page.asked_for.append(request.url))
            page.goto(address, wait_until="commit")
            page.wait_for_selector("#run:not(:text-is('…'))")
            return page

        yield opened


def whole(page: Any) -> Any:
    """Wait until every part shows something."""
    page.wait_for_selector("#cameras img")
    page.wait_for_selector("#curves .plot svg")
    page.wait_for_selector("#histograms .plot svg")
    page.wait_for_selector("#workers tbody tr")
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_loads_without_a_console_error_or_a_request_to_outside(
    live: str, scheme: str, open_page: Callable[..., Any]
) -> None:
    page = whole(open_page(live, color_scheme=scheme))
    assert page.said == []
    origin = live.partition("/?")[0] + "/"
    assert [url for url in page.asked_for if not url.startswith((origin, "data:"))] == []
    assert "token" not in page.url, "an address that is copied must not hold the token"
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60


def test_the_numbers_of_every_edge_and_the_cameras_image_change_while_the_run_lives(
    live: str, open_page: Callable[..., Any]
) -> None:
    page = whole(open_page(live))
    read = "Object.fromEntries([...document.querySelectorAll('.edge')].map(e => [e.dataset.edge, e.textContent]))"
    image = "document.querySelector('#cameras img').src"
    edges, picture = page.evaluate(read), page.evaluate(image)
    assert set(edges) == {"obs-requests", "actions", "trajectories", "weights"}
    assert picture.startswith("data:image/jpeg")
    wait_for(
        lambda: all(page.evaluate(read)[name] != text for name, text in edges.items()), f"other numbers than {edges}"
    )
    wait_for(lambda: page.evaluate(image) != picture, "another picture")
    assert page.evaluate("document.querySelector('#cameras img').naturalWidth") > 0
    assert page.text_content("#bottleneck").strip() not in ("", "…")


def test_buttons_work_by_keyboard_and_only_with_the_token(live: str, open_page: Callable[..., Any]) -> None:
    page = open_page(live.partition("?")[0])
    assert all(page.is_disabled(f"[data-press={name}]") for name in ("pause", "resume", "drain"))
    assert "need the token" in page.text_content("#answer")
    page = open_page(live.partition("?")[0] + "?token=wrong")
    page.click("[data-press=pause]")
    page.wait_for_selector("#answer:has-text('buttons need the token')")
    assert page.text_content("#desired") == "running"
    page = open_page(live)
    page.wait_for_selector("[data-press=pause]:enabled")
    for _ in range(2):  # the link to the content, then the first button
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector("#desired:text('paused')")
    page.reload()
    page.wait_for_selector("[data-press=resume]:enabled")
    page.focus("[data-press=drain]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#sure[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#sure", state="hidden")
    page.focus("[data-press=resume]")
    page.keyboard.press("Space")
    page.wait_for_selector("#desired:text('running')")


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_nothing_overlaps_and_nothing_sticks_out(
    live: str, size: dict[str, int], open_page: Callable[..., Any]
) -> None:
    page = whole(open_page(live, size))
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    boxes = page.evaluate(BOXES)
    assert len(boxes) > 60
    slack = 1.0
    over = [
        (a[0], b[0])
        for index, a in enumerate(boxes)
        for b in boxes[index + 1 :]
        if min(a[3], b[3]) - max(a[1], b[1]) > slack and min(a[4], b[4]) - max(a[2], b[2]) > 3 * slack
    ]
    assert over == []
    assert [box for box in boxes if box[1] < 0 or box[3] > size["width"]] == []
    inside = page.evaluate(
        """() => [...document.querySelectorAll('#loop .node')].flatMap((node) => {
            const box = node.querySelector('rect.box').getBoundingClientRect();
            return [...node.querySelectorAll('text')].map((text) => text.getBoundingClientRect())
              .filter((rect) => rect.left < box.left || rect.right > box.right || rect.bottom > box.bottom).length;
        })"""
    )
    assert inside == [0, 0, 0], "words that leave their node"


def test_nothing_moves_for_those_who_want_it_still(live: str, open_page: Callable[..., Any]) -> None:
    name = "getComputedStyle(document.querySelector('.edge.flowing path')).animationName"
    for wanted, expected in (("no-preference", "flow"), ("reduce", "none")):
        page = open_page(live, reduced_motion=wanted)
        page.wait_for_selector(".edge.flowing path", state="attached")
        assert page.evaluate(name) == expected


@pytest.fixture
def large(client: Client, run_name: str, redis_url: str, commands: Commands) -> tuple[Keys, str]:
    """A run of 200 workers that are only entries, and the address of its dashboard."""
    keys = Keys(run_name)
    config = {
        "name": run_name,
        "updates": 60,
        "environment": {"name": "tabletop", "max_steps": 8},
        "policy": {"name": "tiny", "chunk": 4},
        "trainer": {"segments_per_update": 4},
    }
    assert Flow(client, keys).create(validate(config))
    for number in range(200):
        client.hset(
            keys.worker(f"simulator-{number}"), mapping={"role": "simulator", "host": f"node{number}", "pid": 1}
        )
    return keys, commands.dashboard("--run", run_name, "--redis", redis_url, "--port", "0")[0]


def test_two_hundred_workers_stay_readable(large: tuple[Keys, str], open_page: Callable[..., Any]) -> None:
    page = open_page(large[1], PHONE)
    page.wait_for_selector("#workers tbody tr")
    assert page.locator("#workers tbody tr").count() == 200
    assert page.evaluate("document.querySelector('#workers').parentElement.clientHeight") <= 420
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.fill("#filter", "node199")
    assert page.locator("#workers tbody tr").count() == 1
    assert page.text_content("#worker-count") == "1 of 200"


def test_f27_what_strangers_write_is_text(
    large: tuple[Keys, str], client: Client, open_page: Callable[..., Any]
) -> None:
    keys, address = large
    evil = "<img src=x onerror=alert(1)>"
    client.hset(keys.worker("simulator-0"), "host", evil)
    say(client, keys, evil, evil, evil)
    page = open_page(address)
    page.wait_for_selector("#events li")
    assert page.text_content("#events li").count(evil) == 3
    page.fill("#filter", "onerror")
    assert page.text_content("#workers tbody tr").count(evil) == 1
    assert page.locator("#events img, #workers img").count() == 0 and page.said == []


def test_a_dashboard_that_goes_away_is_said_and_the_page_comes_back_by_itself(
    large: tuple[Keys, str], redis_url: str, commands: Commands, open_page: Callable[..., Any]
) -> None:
    where = ["--run", large[0].run, "--redis", redis_url, "--port", str(free_port())]
    address, process = commands.dashboard(*where)
    page = open_page(address)
    page.wait_for_selector("#problem", state="hidden")
    process.terminate()
    page.wait_for_selector("#problem:has-text('The dashboard does not answer')")
    process.wait(timeout=30)
    commands.dashboard(*where)
    page.wait_for_selector("#problem", state="hidden")


def test_a_run_that_is_lost_is_said_and_comes_back_by_itself(
    large: tuple[Keys, str], client: Client, open_page: Callable[..., Any]
) -> None:
    keys, address = large
    page = open_page(address)
    page.wait_for_selector("#problem", state="hidden")
    flow: Any = client.hgetall(keys.flow)
    client.delete(keys.flow)
    page.wait_for_selector(f"#problem:has-text('run {keys.run}: not on this server')")
    assert page.is_disabled("[data-press=pause]")
    client.hset(keys.flow, mapping=flow)
    page.wait_for_selector("#problem", state="hidden")
    page.wait_for_selector("[data-press=pause]:enabled")
