"""Checkpoints on disk: `<folder>/<update:06d>/` with policy.safetensors, optimiser.safetensors and meta.json.

A checkpoint appears whole or not at all: it is written to a temporary folder beside its place, made durable, then
renamed. One process writes checkpoints to a folder; any number may read it.

meta.json, for example:
    {"format": 1, "update": 40, "version": 43, "digests": {"policy.safetensors": "8f1c…", …},
     "meta": {"run": "demo", "trained": 1280, "skipped": 0, "score": 0.81}}
`digests` are xxh64 over each file's bytes; `meta` is what the caller gave, with the counters that its books go on from.
`<folder>/best` is a symbolic link to one of them, which is kept as long as it is there, and so is `<folder>/evaluated`,
that which is being evaluated beside the run. An evaluation leaves its result in the checkpoint, as evaluation.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash
from safetensors import SafetensorError

from vla_stream.config import MAX_NUMBER
from vla_stream.errors import InputError

if TYPE_CHECKING:  # the launcher looks for checkpoints too, and has no use for torch
    from torch import Tensor

Found = TypeVar("Found")

FORMAT = 1
POLICY, OPTIMISER, META = "policy.safetensors", "optimiser.safetensors", "meta.json"
COUNTERS = ("trained", "skipped")  # segments; `meta` holds them
BEST, EVALUATED = "best", "evaluated"
EVALUATION = "evaluation.json"
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint in memory, all tensors on the host."""

    path: Path
    update: int
    version: int
    policy: dict[str, Tensor]
    optimiser: dict[str, Tensor]
    meta: dict[str, Any]


def save(
    folder: Path,
    update: int,
    version: int,
    policy_state: Mapping[str, Tensor],
    optimiser_state: Mapping[str, Tensor],
    meta: Mapping[str, Any],
) -> Path:
    """Write a checkpoint durably and return its folder; one of the same update is replaced. `meta` must fit JSON, and
    hold COUNTERS.

    Raises OSError if the disk does not take it (the folder then holds what it held before).
    """
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / f"{update:06d}"
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder))
    try:
        for name, state in ((POLICY, policy_state), (OPTIMISER, optimiser_state)):
            _write(unfinished / name, state)
        digests = {name: _digest(unfinished / name) for name in (POLICY, OPTIMISER)}
        about = {"format": FORMAT, "update": update, "version": version, "digests": digests, "meta": dict(meta)}
        (unfinished / META).write_text(json.dumps(about, indent=1, sort_keys=True), encoding="utf-8")
        for path in (unfinished / POLICY, unfinished / OPTIMISER, unfinished / META, unfinished):
            _make_durable(path)
        # mkdtemp makes it private; a checkpoint is as readable as any other file of the run.
        unfinished.chmod(folder.stat().st_mode & 0o777)
        replaced = _set_aside(place) if os.path.lexists(place) else None
        unfinished.rename(place)
        _make_durable(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)  # the new one stands; `prune` sweeps what is left
    return place


def load(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises InputError if it is missing, incomplete, damaged, or of another format."""
    from safetensors.torch import load_file

    about = _verified(path)
    states = []
    for name in (POLICY, OPTIMISER):
        try:
            states.append(load_file(path / name))
        except (OSError, SafetensorError) as exc:
            raise InputError(f"{path / name}: {_reason(exc)}, expected safetensors; use an older checkpoint") from exc
    return Checkpoint(path, about["update"], about["version"], states[0], states[1], about["meta"])


def policy_bytes(path: Path) -> bytes:
    """The policy of a checkpoint as safetensors bytes, which is also how weights travel. Raises InputError."""
    _verified(path)
    try:
        return (path / POLICY).read_bytes()
    except OSError as exc:
        raise InputError(f"{path / POLICY}: {_reason(exc)}, expected safetensors; use an older checkpoint") from exc


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint of a run that is complete, and one sentence for each newer one that is not.

    None where there is no checkpoint at all. Raises InputError where there are some and none is complete: to begin
    anew beside them would throw a run away."""
    return _newest(folder, load)


def newest_place(folder: Path) -> Path | None:
    """The folder of the same one, by its digests: no tensor is loaded. Raises InputError."""

    def whole(path: Path) -> Path:
        _verified(path)
        return path

    return _newest(folder, whole)[0]


def places(folder: Path) -> list[Path]:
    """What is named like a checkpoint, by digits alone (`000040.bak` is not), oldest first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _is_number(path.name)), key=lambda path: int(path.name))


def best(folder: Path) -> tuple[str, float] | None:
    """The name of the best checkpoint, and its score; None where there is none that `mark_best` left."""
    name = marked(folder, BEST)
    if name is None:
        return None
    try:
        score = json.loads((folder / name / META).read_text(encoding="utf-8"))["meta"]["score"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return (name, score) if isinstance(score, float) and 0 <= score <= 1 else None


def marked(folder: Path, mark: str) -> str | None:
    """The name of the checkpoint with this mark (BEST or EVALUATED)."""
    try:
        name = os.readlink(folder / mark)
    except OSError:
        return None
    return name if _is_number(name) else None


def mark(folder: Path, mark: str, update: int) -> None:
    """From now on that one has it. Raises OSError."""
    link = folder / f".{mark}"  # `prune`, of another process, sweeps what is called unfinished
    link.unlink(missing_ok=True)
    link.symlink_to(f"{update:06d}")
    link.replace(folder / mark)


def unmark(folder: Path, mark: str) -> None:
    """Raises OSError."""
    (folder / mark).unlink(missing_ok=True)


def protected(folder: Path) -> set[str]:
    """Names of those with a mark. In this order: what was evaluated may become the best, and loses its first mark only
    then."""
    found = [marked(folder, EVALUATED), marked(folder, BEST)]
    return {name for name in found if name is not None}


def evaluation(path: Path) -> dict[str, Any] | None:
    """The result that an evaluation left in this checkpoint."""
    try:
        found = json.loads((path / EVALUATION).read_text(encoding="utf-8"))
        success = found["success"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(success, float) and 0 <= success <= 1 else None


def keep_evaluation(path: Path, result: Mapping[str, Any]) -> None:
    """Leave it there. Raises OSError."""
    unfinished = path / f".{EVALUATION}"
    unfinished.write_text(json.dumps(dict(result), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path / EVALUATION)


def prune(folder: Path, keep: int, protected: Collection[str] = ()) -> None:
    """Remove all but the newest `keep` checkpoints and those named in `protected`, and what a crash left unfinished.

    Of a symbolic link only the link goes. Raises the first OSError, after all else was removed."""
    errors: list[OSError] = []
    for path in places(folder)[:-keep]:
        if path.name not in protected:
            try:
                _set_aside(path)
            except OSError as exc:
                errors.append(exc)
    for path in folder.glob(f"{_UNFINISHED}*"):
        try:
            shutil.rmtree(path)
        except OSError as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


def _newest(folder: Path, read: Callable[[Path], Found]) -> tuple[Found | None, list[str]]:
    warnings: list[str] = []
    for path in reversed(places(folder)):
        try:
            return read(path), warnings
        except InputError as exc:
            warnings.append(f"skipped a checkpoint: {exc}")
    if warnings:
        last = warnings[0].removeprefix("skipped a checkpoint: ")
        raise InputError(
            f"{folder}: none of its {len(warnings)} checkpoints can be read, expected one; put a copy of one there, or "
            f"move them away to begin with update 0; the newest is {last}"
        )
    return None, warnings


def _verified(path: Path) -> dict[str, Any]:
    """meta.json of a checkpoint whose files are those that were written. Raises InputError."""
    if not path.is_dir():
        raise InputError(f"{path}: no such folder, expected a checkpoint, for example runs/demo/checkpoints/000040")
    try:
        about = json.loads((path / META).read_text(encoding="utf-8"))
        found, digests, meta = about["format"], dict(about["digests"]), dict(about["meta"])
        parsed = {"update": _number(about, "update"), "version": _number(about, "version"), "meta": meta}
        for counter in COUNTERS:
            _number(meta, counter)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as exc:
        raise InputError(f"{path / META}: {_reason(exc)}, expected a complete checkpoint; use an older one") from exc
    if found != FORMAT:
        raise InputError(f"{path}: checkpoint format {found!r:.40}, expected {FORMAT}; use the release that wrote it")
    if _is_number(path.name) and int(path.name) != parsed["update"]:
        raise InputError(
            f"{path}: holds update {parsed['update']}, expected {int(path.name)} as its name says; rename it, or use "
            "an older checkpoint"
        )
    for name in (POLICY, OPTIMISER):
        try:
            digest = _digest(path / name)
        except OSError as exc:
            raise InputError(f"{path / name}: {_reason(exc)}, expected safetensors; use an older checkpoint") from exc
        if digest != digests.get(name):
            raise InputError(
                f"{path / name}: damaged, xxh64 is {digest}, expected {digests.get(name)!r:.40}; use an older "
                "checkpoint"
            )
    return parsed


def _set_aside(path: Path) -> Path:
    """Take a checkpoint's name away, so that a crash while it is being removed leaves no half one under that name.

    Into a folder and not onto it: it may be a symbolic link, or a file."""
    aside = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=path.parent))
    try:
        path.rename(aside / path.name)
    except OSError:
        with contextlib.suppress(OSError):
            aside.rmdir()
        raise
    return aside


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()


def _number(data: Mapping[str, Any], name: str) -> int:
    """Raises KeyError or ValueError; nothing is converted."""
    value = data[name]
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{name} is {value!r:.40}")
    return value


def _write(path: Path, state: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save_file

    # Cloned: safetensors refuses tensors that share memory, as tied weights do.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    try:
        save_file(tensors, path)
    except SafetensorError as exc:
        raise OSError(f"{path}: cannot be written ({exc})") from exc


def _digest(path: Path) -> str:
    digest = xxhash.xxh64()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _make_durable(path: Path) -> None:
    """fsync of a file, or of a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(exc: Exception) -> str:
    if isinstance(exc, OSError):
        return exc.strerror or "cannot be read"
    return f"lacks {exc}" if isinstance(exc, KeyError) else f"not readable ({exc})"
