"""tools/check_layout.py on small trees that break one rule each."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[1]

GOOD = {
    "pyproject.toml": "",
    "configs/quickstart.yaml": "",
    "tools/run": "",
    "tests/broker/test_queue.py": "",
    "tests/conftest.py": "",
    "vla_stream/__init__.py": "",
    "vla_stream/errors.py": "",
    "vla_stream/config.py": "from vla_stream.errors import InputError",
    "vla_stream/flow.py": "from vla_stream.streams import keys\nfrom vla_stream.broker import queue",
    "vla_stream/batching.py": "",
    "vla_stream/broker/__init__.py": "",
    "vla_stream/broker/queue.py": "import redis\nfrom vla_stream.errors import InputError",
    "vla_stream/streams/__init__.py": "",
    "vla_stream/streams/keys.py": '"""Keys."""\nPREFIX = "vla:{"',
    "vla_stream/streams/actions.py": '"""See vla:{demo}:actions."""\nfrom vla_stream.broker.queue import Queue',
    "vla_stream/policies/tiny.py": "from vla_stream.environments.protocol import Observation",
    "vla_stream/environments/protocol.py": "import numpy",
    "vla_stream/cli/main.py": "from workers import trainer",
    "workers/__init__.py": "",
    "workers/trainer.py": "from vla_stream import flow",
}
TREE = """# vla-stream
```
tools/run
```
Then the tree:
```
pyproject.toml            — packaging
configs/quickstart.yaml   — starts here
vla_stream/               — the library
  errors.py               — errors
  config.py               — config
  flow.py                 — flow
  batching.py             — batching
  broker/
    queue.py              — queue
  streams/                — edges
    keys.py               — keys
    actions.py            — actions
  policies/tiny.py        — policy
  environments/protocol.py  — protocol
  cli/main.py             — command line
workers/trainer.py        — trainer
tools/run                 — runs
tests/                    — tests
  broker/                 — tests of the broker
```
"""


@pytest.fixture(scope="module")
def layout() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layout", REPO / "tools" / "check_layout.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(layout: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """check({path: text, or None to leave the file out}) → the violations of the good tree with these changes."""

    def run(changes: dict[str, str | None] | None = None) -> list[str]:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        for path, text in {**GOOD, "README.md": TREE, **(changes or {})}.items():
            if text is not None:
                (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / path).write_text(text)
        status = layout.main(tmp_path)
        problems = capsys.readouterr().err.splitlines()
        assert status == bool(problems)
        return problems

    return run


def test_a_good_tree_passes(check: Callable[..., list[str]]) -> None:
    assert check() == []


@pytest.mark.parametrize(
    ("path", "code", "complaint"),
    [
        ("vla_stream/streams/actions.py", "import redis", "actions.py:1: imports redis; only vla_stream.broker"),
        ("workers/trainer.py", "from redis.exceptions import X", "imports redis.exceptions; only vla_stream.broker"),
        ("vla_stream/broker/queue.py", "from vla_stream.streams import keys", "streams.keys, a higher floor"),
        ("vla_stream/streams/actions.py", "import vla_stream.flow", "vla_stream.flow, a higher floor"),
        ("vla_stream/streams/actions.py", "from .. import flow", "vla_stream.flow, a higher floor"),
        ("vla_stream/broker/__init__.py", "from ..streams.keys import PREFIX", "streams.keys, a higher floor"),
        ("workers/trainer.py", "from vla_stream.cli.main import main", "cli.main, a higher floor"),
        ("vla_stream/errors.py", "from vla_stream.broker import queue", "broker.queue, a higher floor"),
        ("vla_stream/flow.py", "from workers.trainer import X", "only vla_stream.cli may import workers"),
        ("vla_stream/config.py", "def f():\n    import workers.trainer", "config.py:2: imports workers.trainer"),
        ("vla_stream/policies/tiny.py", "from vla_stream.streams import keys", "work without Redis"),
        ("vla_stream/policies/tiny.py", "import vla_stream.broker.queue", "work without Redis"),
        ("vla_stream/batching.py", "from vla_stream.flow import X", "work without Redis"),
        ("vla_stream/flow.py", 'KEY = "vla:{x}:books"', "'vla:{x}:books' is a key name"),
        ("workers/trainer.py", 'KEY = f"vla:{1}:books"', "'vla:' is a key name"),
    ],
)
def test_a_forbidden_import_or_key_name_is_named_with_its_place(
    check: Callable[..., list[str]], path: str, code: str, complaint: str
) -> None:
    [problem] = check({path: code})
    assert problem.startswith(f"layout: {path}:") and complaint in problem


def test_a_detour_to_redis_is_found(check: Callable[..., list[str]]) -> None:
    problems = check(
        {
            "vla_stream/config.py": "from vla_stream.flow import X",
            "vla_stream/policies/tiny.py": "from vla_stream import config",
        }
    )
    assert problems == [
        "layout: vla_stream/policies/tiny.py: reaches vla_stream.flow by way of vla_stream.config, "
        "but environments, policies, learning and batching are to work without Redis"
    ]


@pytest.mark.parametrize("path", ["docs/guide.md", "notes.txt", ".env"])
def test_an_unknown_top_level_entry_is_named(check: Callable[..., list[str]], path: str) -> None:
    [problem] = check({path: ""})
    assert problem.startswith(f"layout: {path.split('/')[0]}: no such top-level entry")


def test_ignored_files_are_no_entries(check: Callable[..., list[str]]) -> None:
    assert check({".gitignore": "runs/\n", "runs/demo/config.yaml": ""}) == []


@pytest.mark.parametrize("path", ["vla_stream/new.py", "workers/new.py", "configs/new.yaml", "tools/bench/new.py"])
def test_a_file_that_the_tree_lacks_is_named(check: Callable[..., list[str]], path: str) -> None:
    assert check({path: ""}) == [f"layout: README.md: the tree lacks {path}; add a line `{path}  — what it is`"]


def test_a_folder_of_tests_that_the_tree_lacks_is_named(check: Callable[..., list[str]]) -> None:
    [problem] = check({"tests/cli/test_run.py": ""})
    assert "the tree lacks tests/cli/" in problem
    assert check({"tests/cli/test_run.py": "", "tests/broker/test_more.py": ""}) == [problem]


def test_a_line_of_a_file_that_is_gone_is_named(check: Callable[..., list[str]]) -> None:
    [problem] = check({"vla_stream/batching.py": None})
    assert "README.md:13: the tree lists vla_stream/batching.py, which is not there" in problem


def test_a_line_without_a_remark_is_named(check: Callable[..., list[str]]) -> None:
    problems = check({"README.md": TREE.replace("errors.py               — errors", "errors.py")})
    assert any("README.md:10: the tree has 'errors.py', expected `path  — what`" in problem for problem in problems)


def test_a_readme_without_a_tree_is_named(check: Callable[..., list[str]]) -> None:
    [problem] = check({"README.md": "# Title\n\nNo fence.\n"})
    assert "README.md: no tree" in problem
