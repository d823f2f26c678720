"""runs/<name>/: which folder a run gets, and that only one launcher writes to it.

config.yaml       the resolved config          logs/          one log per worker, the server's, the helpers'
metrics.jsonl     see cli/samples.py           checkpoints/   written by the trainer
trace.jsonl       see cli/timeline.py, if the config has `trace: true`
updates.jsonl     what each update consumed    last_version   the highest version begun, by the trainer
curve.png         the learning curve           demos.safetensors, redis.url, summary.json, lock
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_stream.cli.options import URL_FILE
from vla_stream.cli.samples import METRICS_FILE
from vla_stream.cli.timeline import TRACE_FILE
from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.config import Config

CONFIG_FILE, LOCK_FILE, LOGS = "config.yaml", "lock", "logs"


class RunFolder:
    """The folder of one run, locked by this process until `close()` or its end. `config.name` is the run's name."""

    def __init__(self, config: Config, lock: int, notes: list[str]) -> None:
        self.config, self.notes = config, notes
        self.path = config.run_dir
        self.logs = self.path / LOGS
        self._lock = lock

    @classmethod
    def open(cls, config: Config, *, name: str | None, resume: bool) -> RunFolder:
        """`name`: as given by --run; without one the config's name is used, with -2, -3 … if that is taken.

        Raises InputError: exists, does not exist, in use.
        """
        notes: list[str] = []
        if name is not None:
            _renamed(config, name)  # before a path is made of it
        if resume:
            chosen = _to_resume(config, name)
        elif name is None:
            chosen = _unused(config)
            if chosen != config.name:
                notes.append(f"{config.runs_dir / config.name} exists: this run is {chosen} (--resume continues a run)")
        else:
            chosen = name
        renamed = _renamed(config, chosen)
        path = renamed.run_dir
        lock = _locked(path)
        if lock is None:
            raise InputError(f"{path}: in use by another `vla-stream run`, expected none; give another --run NAME")
        if not resume and any(item.name != LOCK_FILE for item in path.iterdir()):
            os.close(lock)
            raise InputError(f"{path}: exists; continue it with --resume, or give another --run NAME")
        if resume:
            notes += [f"since the run began, {line}" for line in _changes(path / CONFIG_FILE, renamed)]
        folder = cls(renamed, lock, notes)
        folder.logs.mkdir(exist_ok=True)
        folder._write_config()
        return folder

    @classmethod
    def open_evaluation(cls, config: Config) -> RunFolder:
        """For `config.name`, that of an evaluation; with -2, -3 … while another one uses it. What the last one left
        there is removed."""
        for number in range(1, 10_000):
            renamed = _renamed(config, config.name if number == 1 else f"{config.name}-{number}")
            lock = _locked(renamed.run_dir)
            if lock is not None:
                break
        else:
            raise InputError(f"{config.run_dir}: thousands of evaluations of this run, expected one or two at a time")
        for name in (CONFIG_FILE, METRICS_FILE, TRACE_FILE):
            (renamed.run_dir / name).unlink(missing_ok=True)
        shutil.rmtree(renamed.run_dir / LOGS, ignore_errors=True)
        folder = cls(renamed, lock, [])
        folder.logs.mkdir(exist_ok=True)
        folder._write_config()
        return folder

    def write_url(self, url: str) -> None:
        """So that other commands find the server; readable by this user only, since it may hold a password."""
        unfinished = self.path / f".{URL_FILE}"
        unfinished.unlink(missing_ok=True)
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(url + "\n")
        # Whole or not at all: whoever waits for it reads it as soon as it is there.
        unfinished.replace(self.path / URL_FILE)

    def close(self) -> None:
        (self.path / URL_FILE).unlink(missing_ok=True)
        os.close(self._lock)

    def _write_config(self) -> None:
        import yaml

        text = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        (self.path / CONFIG_FILE).write_text(text, encoding="utf-8")


def _locked(path: Path) -> int | None:
    """The lock of a run's folder, which is made; None while another process has it. Raises InputError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise InputError(f"{path}: cannot be made ({exc.strerror}); set runs_dir to a folder of yours") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _renamed(config: Config, name: str) -> Config:
    """Under another name, and with an absolute runs_dir, which workers in other folders share."""
    from vla_stream import config as settings

    data = config.model_dump(mode="json")
    return settings.validate({**data, "name": name, "runs_dir": str(config.runs_dir.resolve())}, "--run")


def _unused(config: Config) -> str:
    """Claims the first free name by making its folder, so that two runs started at once get two."""
    for number in range(1, 10_000):
        name = config.name if number == 1 else f"{config.name}-{number}"
        path = config.runs_dir / name
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not path.is_dir() or any(path.iterdir()):
                continue
        except OSError as exc:
            raise InputError(f"{path}: cannot be made ({exc.strerror}); set runs_dir to a folder of yours") from exc
        return name
    raise InputError(f"{config.runs_dir}: holds thousands of runs named {config.name}; give --run NAME")


def _to_resume(config: Config, name: str | None) -> str:
    if name is None:
        # The newest of those that this config started, demo, demo-2, …
        ours = re.compile(rf"{re.escape(config.name)}(-\d+)?")
        files = [file for file in config.runs_dir.glob(f"*/{CONFIG_FILE}") if ours.fullmatch(file.parent.name)]
        newest = max(files, key=lambda file: file.stat().st_mtime, default=None)
        name = config.name if newest is None else newest.parent.name
    path = config.runs_dir / name
    if not (path / CONFIG_FILE).exists():
        raise InputError(f"{path}: holds no run to resume; start it without --resume")
    return name


def _changes(file: Path, config: Config) -> Iterator[str]:
    import yaml

    try:
        before = dict(_flat(yaml.safe_load(file.read_text(encoding="utf-8"))))
    except (OSError, ValueError, yaml.YAMLError, AttributeError, RecursionError):
        yield f"{file} was damaged, so what else changed is not told; it is written anew"
        return
    for key, value in _flat(config.model_dump(mode="json")):
        if key in before and before[key] != value:
            yield f"{key} changed from {before[key]} to {value}"


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
