"""Which folder a run gets, and that two launchers never share one."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest
import yaml

from vla_stream.cli.folder import RunFolder
from vla_stream.config import Config, validate
from vla_stream.errors import InputError


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return validate(
        {
            "name": "demo",
            "runs_dir": str(tmp_path / "runs"),
            "environment": {"name": "tabletop", "max_steps": 8},
            "policy": {"name": "tiny", "chunk": 4},
            "trainer": {"segments_per_update": 4},
        }
    )


def began(config: Config, name: str | None = None, resume: bool = False) -> str:
    """Open and close a run's folder; its name."""
    folder = RunFolder.open(config, name=name, resume=resume)
    folder.close()
    return folder.config.name


def test_a_config_run_again_without_a_name_gets_the_next_number(config: Config) -> None:
    assert [began(config) for _ in range(3)] == ["demo", "demo-2", "demo-3"]


def test_the_folder_holds_the_resolved_config_under_its_own_name(config: Config) -> None:
    began(config)
    began(config)
    kept = yaml.safe_load((config.runs_dir / "demo-2" / "config.yaml").read_text())
    assert validate(kept).name == "demo-2"
    assert kept["trainer"]["segments_per_update"] == 4


def test_a_named_run_that_exists_is_refused_with_both_remedies(config: Config) -> None:
    began(config, name="mine")
    with pytest.raises(InputError, match="exists; continue it with --resume, or give another --run NAME"):
        began(config, name="mine")


def test_resume_without_a_name_takes_the_newest_run_of_the_config(config: Config) -> None:
    for _ in range(3):
        began(config)
    began(config, name="demo-other")
    for age, name in enumerate(["demo-other", "demo-2", "demo-3", "demo"]):
        os.utime(config.runs_dir / name / "config.yaml", (1000 - age, 1000 - age))
    assert began(config, resume=True) == "demo-2"


def test_resume_says_what_changed(config: Config) -> None:
    began(config, name="mine")
    changed = validate(config.model_dump(mode="json") | {"updates": 7})
    folder = RunFolder.open(changed, name="mine", resume=True)
    folder.close()
    assert folder.notes == ["since the run began, updates changed from 100 to 7"]


@pytest.mark.parametrize("damage", [b"\xff", b"date: 2001-99-99", b"[", b"- a list", b"", b"&a [*a]", 9999 * b"["])
def test_resume_beside_a_damaged_config_costs_a_note(config: Config, damage: bytes) -> None:
    began(config, name="mine")
    file = config.runs_dir / "mine" / "config.yaml"
    kept = file.read_text()
    file.write_bytes(damage)
    folder = RunFolder.open(config, name="mine", resume=True)
    folder.close()
    assert folder.notes == [
        f"since the run began, {file} was damaged, so what else changed is not told; it is written anew"
    ]
    assert file.read_text() == kept


def test_nothing_to_resume_is_an_error(config: Config) -> None:
    with pytest.raises(InputError, match="holds no run to resume; start it without --resume"):
        began(config, name="never", resume=True)
    with pytest.raises(InputError, match=r"^--run: name is 'a\\nb', expected") as caught:
        began(config, name="a\nb", resume=True)
    assert "\n" not in str(caught.value)


def test_f50_a_folder_in_use_is_refused_until_its_launcher_ends(config: Config) -> None:
    first = RunFolder.open(config, name="mine", resume=False)
    with pytest.raises(InputError, match="in use by another"):
        began(config, name="mine", resume=True)
    first.close()
    assert began(config, name="mine", resume=True) == "mine"


def test_the_url_is_readable_by_its_owner_only_and_goes_with_the_run(config: Config) -> None:
    folder = RunFolder.open(config, name=None, resume=False)
    folder.write_url("redis://:secret@host:1/0")
    file = folder.path / "redis.url"
    assert file.stat().st_mode & 0o777 == 0o600
    folder.close()
    assert not file.exists()


def test_the_url_is_there_whole_or_not_at_all(config: Config) -> None:
    folder = RunFolder.open(config, name=None, resume=False)
    url = "redis://host:1/0"
    seen: set[str] = set()
    writing = threading.Event()

    def look() -> None:
        while not writing.is_set():
            with contextlib.suppress(FileNotFoundError):
                seen.add((folder.path / "redis.url").read_text())

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(500):
        folder.write_url(url)
    writing.set()
    thread.join()
    folder.close()
    assert seen == {f"{url}\n"}
