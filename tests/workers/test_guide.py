"""The session with redis-cli of workers/README.md, played against a live run: each command prints what it should."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "workers" / "README.md"
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A 0 that stands alone is meant; other numbers, and digests, are any; … is any text.
MEANT = r"\(integer\) 0$|\"0\""
TOKEN = re.compile(rf"{MEANT}|…|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{{8,16}}\b|\d+(?:\.\d+)?")
FIELD = re.compile(r"\d+# ")  # redis-cli's number before a field of a hash
START_S, BLOCK_S = 240.0, 120.0


@dataclass(frozen=True)
class Command:
    line: str
    shown: tuple[str, ...]


def commands(block: str) -> list[Command]:
    """`$ command` and the lines that it prints."""
    parts = re.split(r"^\$ ", block, flags=re.MULTILINE)
    assert parts[0] == "", "a block begins with a command"
    return [Command(line, tuple(shown)) for line, *shown in (part.splitlines() for part in parts[1:])]


def fits(shown: tuple[str, ...], printed: str) -> bool:
    """Whether a command printed what the guide shows. A line `…` is any number of lines; a hash has no order."""
    got = [" ".join(line.split()) for line in printed.splitlines()]
    wanted = [line for line in shown if line != "…"]
    if wanted and all(FIELD.match(line.lstrip()) for line in wanted):
        fields = [FIELD.sub("", line) for line in got]
        found = [any(re.fullmatch(_of_line(FIELD.sub("", w.lstrip())), line) for line in fields) for w in wanted]
        return all(found) and (len(got) == len(wanted) or "…" in shown)
    pattern = "".join(r"(?:.*\n)*" if line == "…" else _of_line(line) + r"\n" for line in shown)
    return re.fullmatch(pattern, "".join(line + "\n" for line in got)) is not None


def _of_line(line: str) -> str:
    line, found, end = " ".join(line.split()), "", 0
    for token in TOKEN.finditer(line):
        text = token[0]
        any_number = r"\d+(?:\.\d+)?(?:e[-+]\d+)?" if text[0].isdigit() else r"[0-9a-f]{8,16}"
        if text == "…":
            any_number = ".*"
        elif re.fullmatch(MEANT, text):
            any_number = re.escape(text)
        elif re.search("[a-f]", text):
            any_number = r"[0-9a-f]{8,16}"
        found, end = found + re.escape(line[end : token.start()]) + any_number, token.end()
    return found + re.escape(line[end:])


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """The folder in which the quick start of the guide's name was started, without its warm start."""
    command = [sys.executable, "-m", "vla_stream.cli.main", "run", str(ROOT / "configs" / "quickstart.yaml")]
    command += ["--run", "mine", "--updates", "100000", "--set", "pretrain=null", "--set", "evaluation.episodes=0"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline_s, updates = time.monotonic() + START_S, tmp_path / "runs" / "mine" / "updates.jsonl"
        while not updates.exists() or updates.read_bytes().count(b"\n") < 2:
            assert process.poll() is None and time.monotonic() < deadline_s, (tmp_path / "log").read_text()[-1500:]
            time.sleep(0.2)
        yield tmp_path
        assert process.poll() is None, "the run has survived all of it"
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.wait(120)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_command_of_the_guide_prints_what_the_guide_says(live: Path) -> None:
    assert shutil.which("redis-cli"), "redis-cli is not there; tools/setup dev installs Debian's redis-tools"
    setup, *blocks = map(commands, BLOCK.findall(GUIDE.read_text(encoding="utf-8")))
    assert sum(map(len, blocks)) >= 20 and not any(command.shown for command in setup)
    prelude = "\n".join(command.line for command in setup)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}

    def play(command: Command) -> tuple[Command, str]:
        script = f"{prelude}\n{command.line}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=live, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        return command, done.stdout + done.stderr

    for block in blocks:
        deadline_s = time.monotonic() + BLOCK_S
        while True:
            # All of a block, also after one that failed: what it stops, it lets go on.
            wrong = [(c, said) for c, said in map(play, block) if not fits(c.shown, said)]
            if not wrong:
                break
            assert time.monotonic() < deadline_s, "\n".join(
                f"$ {command.line}\n{said}expected:\n" + "\n".join(command.shown) for command, said in wrong
            )
            time.sleep(0.2)


@pytest.mark.parametrize(
    ("shown", "printed", "right"),
    [
        ('"state" => "running"', '"state" => "running"', True),
        ('"state" => "running"', '"state" => "waiting"', False),
        (' 1# "update" => "2"\n 2# "lane" => "auto"', '1#  "lane" => "auto"\n2# "update" => "31"', True),
        ('1# "update" => "2"', '1# "update" => "2"\n2# "lane" => "auto"', False),
        ('1# "update" => "2"\n…', '1# "lane" => "auto"\n2# "update" => "2"', True),
        ('1# "update" => "2"\n2# "lane" => "auto"', '1# "update" => "2"', False),
        ('"rolled_back" => "0"', '"rolled_back" => "8"', False),
        ("(integer) 0", "(integer) 3", False),
        ("(integer) 3", "(integer) 0", True),
        ("simulator-0/1c61d1db/0.0/281.1/3", "simulator-1/deadbeef/0.0/3.2/0", True),
        ("simulator-0/1c61d1db/0.0/281.1/3", "generator-1/deadbeef/0.0/3.2/0", False),
        ('"host" => "…"', '"host" => "node 7"', True),
        ("actions: float32[16, 8] from -1.16 to 1.4", "actions: float32[16, 8] from -2 to 1e-05", True),
        ("first\n…\nlast", "first\nlast", True),
        ("first\n…\nlast", "first\nmore\nand more\nlast", True),
        ("first\n…", "last", False),
        ("", "anything", False),
        ("", "", True),
    ],
)
def test_numbers_of_the_guide_stand_for_any_and_words_for_themselves(shown: str, printed: str, right: bool) -> None:
    assert fits(tuple(shown.splitlines()), printed) == right
