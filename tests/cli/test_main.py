"""The command line as a person meets it: help at once, mistakes in one line with the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from vla_stream.cli import main
from vla_stream.cli.main import COMMANDS, call
from vla_stream.errors import InputError, RunFailed

CONFIG = """
environment: {name: tabletop, max_steps: 8}
policy: {name: tiny, chunk: 4}
trainer: {segments_per_update: 4}
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No run and no server of the machine that tests run on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLA_STREAM_REDIS", raising=False)
    (tmp_path / "good.yaml").write_text(CONFIG)
    return tmp_path


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from vla_stream.cli.main import call\n"
        "code = call(['--help'])\n"
        "heavy = {'torch', 'redis', 'pydantic', 'numpy', 'rich', 'matplotlib', 'mujoco'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    for name in COMMANDS:
        assert f"\n  {name} " in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_exists_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call([name, "--help"]) == 0
    assert f"Usage: vla-stream {name}" in capsys.readouterr().out


def test_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--version"]) == 0
    assert capsys.readouterr().out.startswith("vla-stream 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stauts"], "No such command 'stauts'. Did you mean status?"),
        (["status", "--jsno"], "No such option '--jsno'"),
        (["run"], "Missing argument 'CONFIG...'"),
        (["run", "good.yaml", "--updates", "0"], "Invalid value for '--updates'"),
        (["run", "none.yaml"], "none.yaml: cannot read the config"),
        (["run", "good.yaml", "--set", "trainer.epohs=2"], "unknown key trainer.epohs; did you mean epochs?"),
        (["run", "good.yaml", "--set", "policy.chunk=3"], "policy.chunk is 3 but environment.max_steps is 8"),
        (["run", "good.yaml", "--redis", "redis://localhost:1/0"], "nothing listens there"),
        (["run", "good.yaml", "--redis", "localhost:6379"], "expected redis:// or rediss:// (TLS) or unix://"),
        (["run", "good.yaml", "--run", "a b"], "--run: name is 'a b'"),
        (["run", "good.yaml", "--resume"], "holds no run to resume"),
        (["check", "good.yaml", "--set", "environment.name=tabeltop"], "did you mean tabletop?"),
        (["check", "good.yaml", "--set", "policy.options.stdd=1"], "unknown key"),
        (["run", "good.yaml", "--set", "environment.options.shapng=1"], "unknown key shapng; did you mean shaping?"),
        (["run", "good.yaml", "--set", "policy.init_from=gone"], "policy.init_from is 'gone', no such folder"),
        (["check", "good.yaml", "--set", "pretrain.demos=gone"], "pretrain.demos is 'gone', no such file"),
        (["demos", "good.yaml"], "pretrain: the config has no such section"),
        (["eval", "good.yaml", "--checkpoint", "here"], "here: holds no complete checkpoint"),
        (["eval", "good.yaml", "--checkpoint", "x", "--replace", "red"], "expected WORD=WORD"),
        (["status"], "--run: not given and no run in runs/ is alive"),
        (["status", "--run", "demo"], "run demo: no server given, and runs/demo/redis.url is not there"),
        (["stop", "--run", "demo", "--redis", "unix:///nowhere/redis.sock"], "no such socket"),
        (["simulators", "--run", "demo", "--redis", "unix:///x", "--device", "1"], "1 names no kind of device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_with_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert call(arguments) == 2
    shown = capsys.readouterr().err
    errors = [line for line in shown.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in shown
    assert not (elsewhere / "runs").exists()


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (InputError("file x: is missing, expected one"), 2, "Error: file x: is missing, expected one\n"),
        (InputError("first\nsecond"), 2, "Error: first\nError: second\n"),
        (RunFailed("simulator: it burns"), 1, "Error: simulator: it burns\n"),
        (OSError(28, "No space left on device", "runs/a/b"), 1, "Error: runs/a/b: No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
    ids=["bad input", "several problems", "failed run", "full disk", "Ctrl-C"],
)
def test_errors_become_words_and_exit_codes(
    error: BaseException,
    code: int,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setattr(main.LazyGroup, "get_command", lambda self, ctx, name: broken)
    assert call(["status"]) == code
    assert capsys.readouterr().err.strip("\n") == shown.strip("\n")


def test_check_prints_the_resolved_config_and_what_a_run_would_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["check", "good.yaml", "--set", "trainer.epochs=7"]) == 0
    shown = capsys.readouterr().out
    assert "  epochs: 7\n" in shown
    assert "2 simulators with 32 environments in 4 slots, 1 generators, 1 trainer" in shown
    assert "up to 512 chunk steps, 2048 environment steps of tabletop" in shown
    assert "note: " in shown
    assert shown.endswith("the config is valid\n")
