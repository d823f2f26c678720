"""Checkpoints: whole or not at all, whatever happens while they are written."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from vla_stream.errors import InputError
from vla_stream.learning import checkpoint

WEIGHTS = {"net.weight": torch.arange(6.0).reshape(2, 3), "net.bias": torch.tensor([1.5], dtype=torch.bfloat16)}
META = {"run": "demo", "trained": 0, "skipped": 0}
MOMENTS = {"net.weight/step": torch.tensor(4.0), "net.weight/exp_avg": torch.full((2, 3), 0.25)}


def save(folder: Path, update: int, version: int = 0) -> Path:
    return checkpoint.save(folder, update, version or update, WEIGHTS, MOMENTS, META)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded_with_dtypes_and_bits(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", update=40, version=43)
    assert path.name == "000040" and names(path) == ["meta.json", "optimiser.safetensors", "policy.safetensors"]
    loaded = checkpoint.load(path)
    assert (loaded.update, loaded.version, loaded.meta) == (40, 43, META)
    for got, expected in ((loaded.policy, WEIGHTS), (loaded.optimiser, MOMENTS)):
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)


def test_tied_weights_are_saved_under_each_name(tmp_path: Path) -> None:
    tied = torch.arange(4.0).reshape(2, 2)
    path = checkpoint.save(tmp_path, 1, 1, {"embed": tied, "head": tied, "turned": tied.T}, {}, META)
    loaded = checkpoint.load(path).policy
    assert torch.equal(loaded["embed"], tied) and torch.equal(loaded["head"], tied)
    assert torch.equal(loaded["turned"], tied.T)


def test_newest_takes_the_highest_update_also_past_six_digits(tmp_path: Path) -> None:
    for update in (999_999, 20, 1_000_000):
        save(tmp_path, update)
    found, warnings = checkpoint.newest(tmp_path)
    assert found is not None and found.update == 1_000_000 and not warnings


def test_there_is_no_newest_checkpoint_before_the_first(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "never made") == (None, [])


def test_f47_a_write_that_a_crash_cut_short_is_invisible_and_swept_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 20)

    class Crash(BaseException):
        pass

    def crash(*_: object) -> None:
        raise Crash

    # At the rename everything is written but nothing is in place. A killed process cleans up nothing.
    monkeypatch.setattr(Path, "rename", crash)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(Crash):
        save(tmp_path, 40)
    monkeypatch.undo()
    assert len(names(tmp_path)) == 2
    found, warnings = checkpoint.newest(tmp_path)
    assert found is not None and found.update == 20 and not warnings
    checkpoint.prune(tmp_path, keep=3)
    assert names(tmp_path) == ["000020"]


def test_f47_files_and_folders_are_durable_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0])
        real_fsync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        calls.append("rename")
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    save(tmp_path / "checkpoints", 1)
    written = ["policy.safetensors", "optimiser.safetensors", "meta.json", ".unfinished"]
    assert calls == [*written, "rename", "checkpoints"]


@pytest.mark.parametrize("name", ["policy.safetensors", "optimiser.safetensors", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "cut short", "one byte changed"])
def test_f47_a_damaged_newest_checkpoint_is_skipped_with_a_warning(tmp_path: Path, name: str, damage: str) -> None:
    save(tmp_path, 20)
    file = save(tmp_path, 40) / name
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "cut short":
        file.write_bytes(data[: len(data) // 2])
    else:
        # The last byte of a tensor is a valid number too: only the digest can tell. In meta.json it is the brace.
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    found, warnings = checkpoint.newest(tmp_path)
    assert found is not None and found.update == 20
    assert len(warnings) == 1 and str(file) in warnings[0] and "expected" in warnings[0]
    assert checkpoint.newest_place(tmp_path) == tmp_path / "000020"


def test_f47_where_no_checkpoint_can_be_read_nobody_begins_anew_beside_them(tmp_path: Path) -> None:
    for update in (20, 40):
        (save(tmp_path, update) / "policy.safetensors").write_bytes(b"")
    told = r"none of its 2 checkpoints can be read, expected one; .*the newest is .*000040/policy.safetensors: damaged"
    for look in (checkpoint.newest, checkpoint.newest_place):
        with pytest.raises(InputError, match=told):
            look(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"trained": 0', '"other": 0', "lacks 'trained'"),
        ('"skipped": 0', '"skipped": "none"', "skipped is 'none'"),
        ('"trained": 0', '"trained": -1', "trained is -1"),
        ('"update": 40', '"update": 1e999', "update is inf"),
        ('"update": 40', '"update": true', "update is True"),
        ('"version": 40', f'"version": {10**30}', f"version is {10**30}"),
        ('"update": 40', '"update": 41', "holds update 41, expected 40 as its name says"),
        ('"format": 1', '"format": "' + 500 * r"a\n" + '"', "checkpoint format 'a"),
        ('"update": 40', f'"update": {100_000 * "["}{100_000 * "]"}', "maximum recursion depth"),
    ],
)
def test_f47_a_checkpoint_whose_meta_is_wrong_is_skipped_in_one_line(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    save(tmp_path, 20)
    file = save(tmp_path, 40) / "meta.json"
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    found, warnings = checkpoint.newest(tmp_path)
    assert found is not None and found.update == 20 and checkpoint.newest_place(tmp_path) == tmp_path / "000020"
    assert len(warnings) == 1 and told in warnings[0] and "\n" not in warnings[0] and len(warnings[0]) < 500


def test_copies_with_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    place = save(tmp_path, 20)
    for name in ("000040.bak", "٤٠", "best"):
        shutil.copytree(place, tmp_path / name)
    assert checkpoint.places(tmp_path) == [place] and checkpoint.newest_place(tmp_path) == place
    assert checkpoint.load(tmp_path / "best").update == 20


def test_a_checkpoint_of_another_format_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 20)
    about = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(InputError, match=r"000020: checkpoint format 99, expected 1"):
        checkpoint.load(path)


def test_a_missing_checkpoint_is_an_input_error_that_names_the_path(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"000020: no such folder, expected a checkpoint"):
        checkpoint.load(tmp_path / "000020")


def test_saving_an_update_again_replaces_it_and_leaves_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 20, version=20)
    save(tmp_path, 20, version=31)
    assert names(tmp_path) == ["000020"]
    assert checkpoint.load(tmp_path / "000020").version == 31


def test_f47_a_full_disk_raises_oserror_and_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 20)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(OSError, match=r"cannot be written"):
            save(tmp_path, 40)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["000020"]


def test_prune_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    for update in (20, 40, 60, 80, 100):
        save(tmp_path, update)
    checkpoint.prune(tmp_path, keep=2, protected={"000040"})
    assert names(tmp_path) == ["000040", "000080", "000100"]


def test_a_mark_that_is_made_while_another_process_prunes_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        checkpoint.prune(tmp_path, keep=1)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    (tmp_path / ".best").symlink_to("000020")  # as a crash leaves it
    checkpoint.mark(tmp_path, checkpoint.BEST, 40)
    assert names(tmp_path) == ["best"] and checkpoint.marked(tmp_path, checkpoint.BEST) == "000040"


def test_prune_and_save_take_a_symbolic_link_away_and_leave_what_it_points_to(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for update in (20, 40, 60):
        place = save(folder, update)
        place.symlink_to(place.rename(tmp_path / f"moved{update}"))
    shutil.rmtree(tmp_path / "moved60")
    (folder / "000010").write_text("a file")
    save(folder, 60)  # in the place of a link to nothing
    assert not (folder / "000060").is_symlink()
    checkpoint.prune(folder, keep=2)
    assert names(folder) == ["000040", "000060"] and checkpoint.load(folder / "000040").update == 40
    checkpoint.prune(folder, keep=1)
    assert names(folder) == ["000060"] and names(tmp_path) == ["checkpoints", "moved20", "moved40"]
    assert checkpoint.load(tmp_path / "moved20").update == 20


def test_prune_removes_the_others_where_one_cannot_be_removed_and_leaves_nothing_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for update in (20, 40, 60):
        save(tmp_path, update)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name == "000020":
            raise OSError(errno.EPERM, "Operation not permitted")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    for _ in range(2):
        with pytest.raises(OSError, match="not permitted"):
            checkpoint.prune(tmp_path, keep=1)
        assert names(tmp_path) == ["000020", "000060"]
