"""Which run and which server a command means when it is told less than everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_stream.cli.main import call
from vla_stream.cli.options import find_target
from vla_stream.cli.pools import split_devices
from vla_stream.errors import InputError


@pytest.fixture(autouse=True)
def no_server_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLA_STREAM_REDIS", raising=False)


def write_url(runs: Path, name: str, url: str) -> None:
    (runs / name).mkdir()
    (runs / name / "redis.url").write_text(url + "\n")


def test_the_only_run_that_lives_here_is_meant(tmp_path: Path) -> None:
    write_url(tmp_path, "demo", "unix:///tmp/x/redis.sock")
    (tmp_path / "finished").mkdir()
    target = find_target(None, None, tmp_path)
    assert (target.run, target.url) == ("demo", "unix:///tmp/x/redis.sock")


def test_of_several_runs_one_must_be_named(tmp_path: Path) -> None:
    write_url(tmp_path, "demo", "unix:///a")
    write_url(tmp_path, "demo-2", "unix:///b")
    with pytest.raises(InputError, match=r"demo, demo-2 run here, expected exactly one; give --run NAME"):
        find_target(None, None, tmp_path)
    assert find_target("demo-2", None, tmp_path).url == "unix:///b"


def test_a_run_whose_launcher_was_killed_is_not_taken_for_one_that_lives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "socket").touch()
    write_url(tmp_path, "demo", "unix:///gone/redis.sock")
    write_url(tmp_path, "demo-2", f"unix://{tmp_path}/socket")
    assert find_target(None, None, tmp_path).run == "demo-2"
    assert call(["status", "--run", "demo", "--runs", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert "run demo: its server is gone, as after a kill -9 of its launcher; go on with: vla-stream run" in shown


@pytest.mark.parametrize("name", ["a\nb", "a b", "../x", "", "a\n"])
def test_a_name_that_no_run_can_have_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--run: '.*' is no run's name, expected letters, digits") as caught:
        find_target(name, "unix:///a", tmp_path)
    assert "\n" not in str(caught.value)


def test_the_flag_comes_before_the_variable_and_the_variable_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_url(tmp_path, "demo", "unix:///file")
    monkeypatch.setenv("VLA_STREAM_REDIS", "unix:///variable")
    assert find_target("demo", None, tmp_path).url == "unix:///variable"
    assert find_target("demo", "unix:///flag", tmp_path).url == "unix:///flag"


@pytest.mark.parametrize(
    ("text", "devices"),
    [("", []), ("cpu", ["cpu"]), ("cuda:0,1", ["cuda:0", "cuda:1"]), ("cuda:2, cpu", ["cuda:2", "cpu"])],
)
def test_a_list_of_devices_may_leave_out_the_kind_after_the_first(text: str, devices: list[str]) -> None:
    assert split_devices(text) == devices
