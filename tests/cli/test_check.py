"""`vla-stream check` tries classes of one's own out, and looks at a policy's checkpoint; `run` looks at that too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vla_stream.cli.main import call

CONFIG = """
environment: {name: "fakes:Line", max_steps: 12}
policy: {name: "fake_policies:Linear", chunk: 4}
trainer: {segments_per_update: 8}
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(exit code, output, its error lines) of a command in a folder with mine.yaml."""
    (tmp_path / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLA_STREAM_REDIS", raising=False)

    def run(*arguments: str, command: str = "check") -> tuple[int, str, list[str]]:
        code = call([command, "mine.yaml", *arguments])
        shown = capsys.readouterr()
        return code, shown.out, [line for line in shown.err.splitlines() if line.startswith("Error: ")]

    return run


def test_classes_of_ones_own_are_tried_out(check: Any) -> None:
    code, shown, _ = check()
    assert code == 0
    assert "environment fakes:Line: keeps the protocol\n" in shown
    assert "policy fake_policies:Linear: log-probs of act and evaluate differ by" in shown
    assert shown.endswith("policy fake_policies:Linear: keeps the protocol\nthe config is valid\n")


def test_what_is_wrong_with_them_is_one_line_each(check: Any) -> None:
    code, shown, errors = check("--set", "policy.name=broken_policies:Forgetful")
    assert code == 2 and "the config is valid" not in shown
    (line,) = errors
    assert line.startswith("Error: policy broken_policies:Forgetful: logprobs: log-probs of act and evaluate differ by")


def test_a_person_may_leave_it_out_or_want_it_for_what_the_project_brings(check: Any) -> None:
    code, shown, _ = check("--no-conformance")
    assert code == 0 and "protocol" not in shown
    ours = ("--set", "environment.name=tabletop", "--set", "policy.name=tiny")
    assert "protocol" not in check(*ours)[1]
    assert check(*ours, "--conformance")[1].count("keeps the protocol") == 2


@pytest.mark.parametrize("command", ["check", "run"])
def test_a_checkpoint_of_another_model_is_told_before_any_worker_starts(
    check: Any, tmp_path: Path, command: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "paligemma"}))
    changes = ("policy.name=pi0", f"policy.options.checkpoint={tmp_path}/model")
    flags = [part for change in changes for part in ("--set", change)]
    code, _, (line,) = check(*flags, command=command)
    assert code == 2 and not (tmp_path / "runs").exists()
    assert "model/config.json: model_type is 'paligemma', expected 'pi0'" in line
