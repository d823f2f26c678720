"""Payload lanes: written once, read by reference, removed with their segment; a reader trusts no reference (F28)."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import in_use

from vla_stream.broker import lanes
from vla_stream.broker.codec import MAX_PACKET_BYTES, digest_of
from vla_stream.broker.connection import Client
from vla_stream.broker.lanes import (
    FREE,
    PayloadReader,
    RedisLane,
    ShmLane,
    parse_reference,
    segment_name,
    shm_folder,
    shm_lacks,
    sweep,
)
from vla_stream.errors import BadMessage, PayloadElsewhere, PayloadUnreachable
from vla_stream.streams.keys import Keys

DATA = [os.urandom(1000), os.urandom(37), os.urandom(64)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "lane"
    made.mkdir()
    return made


@pytest.fixture
def keys(run_name: str) -> Keys:
    return Keys(run_name)


@pytest.fixture
def reader(client: Client, keys: Keys, folder: Path) -> PayloadReader:
    return PayloadReader(client, keys.blob, folder)


@pytest.fixture(params=["shm", "redis"])
def lane(request: pytest.FixtureRequest, client: Client, keys: Keys, folder: Path) -> Iterator[ShmLane | RedisLane]:
    yield ShmLane(folder) if request.param == "shm" else RedisLane(client, keys.blob, lifetime_s=3600)


Either = ShmLane | RedisLane


def test_every_write_of_a_segment_can_be_read_by_its_reference(lane: Either, reader: PayloadReader) -> None:
    segment = segment_name(17, 1)
    references = [lane.write(segment, place, data) for place, data in enumerate(DATA)]
    assert [bytes(reader.read(reference)) for reference in reversed(references)] == DATA[::-1]


def test_a_reference_reads_like_its_documentation(lane: Either) -> None:
    segment = segment_name(17, 2)
    name, where, place, size, digest = lane.write(segment, 0, DATA[0]).split(":")
    assert (name, where, place, size) == (lane.name, segment, "0", "1000")
    assert digest == digest_of(DATA[0])


def test_bytes_stay_readable_after_release_and_are_gone_after_remove(lane: Either, reader: PayloadReader) -> None:
    segment = segment_name(1, 1)
    reference = lane.write(segment, 0, DATA[0])
    lane.release(segment)
    assert bytes(reader.read(reference)) == DATA[0]
    lane.remove(segment)
    lane.remove(segment)
    with pytest.raises(PayloadUnreachable):
        reader.read(reference)


def test_a_reader_can_remove_the_segment_that_a_reference_belongs_to(lane: Either, reader: PayloadReader) -> None:
    segment = segment_name(1, 1)
    first, second = lane.write(segment, 0, DATA[0]), lane.write(segment, 1, DATA[1])
    reader.remove(first)
    reader.remove(first)
    with pytest.raises(PayloadUnreachable):
        reader.read(second)


def test_segments_of_one_lane_do_not_meet(lane: Either, reader: PayloadReader) -> None:
    one, other = segment_name(1, 1), segment_name(2, 1)
    kept, removed = lane.write(one, 0, DATA[0]), lane.write(other, 0, DATA[1])
    lane.remove(other)
    assert bytes(reader.read(kept)) == DATA[0]
    with pytest.raises(PayloadUnreachable):
        reader.read(removed)


def test_a_ticket_number_given_out_again_by_a_flushed_server_gets_another_segment_name() -> None:
    assert segment_name(5, 1) != segment_name(5, 1)


def test_f27_bytes_that_were_replaced_do_not_pass_for_the_referenced_ones(lane: Either, reader: PayloadReader) -> None:
    segment = segment_name(1, 1)
    reference = lane.write(segment, 0, DATA[0])
    if isinstance(lane, ShmLane):
        with (lane.folder / segment).open("r+b") as file:
            file.write(b"other")
    else:
        lane.client.hset(lane.key_of(segment), "0", DATA[1])
    with pytest.raises(BadMessage, match="other bytes than were referenced"):
        reader.read(reference)


# ---- shm


def test_shm_files_are_private_to_the_user(folder: Path) -> None:
    segment = segment_name(1, 1)
    ShmLane(folder).write(segment, 0, b"x")
    assert (folder / segment).stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_done_with_is_written_again_and_what_was_read_from_it_stays(
    folder: Path, reader: PayloadReader
) -> None:
    lane, first, second = ShmLane(folder), segment_name(1, 1), segment_name(2, 1)
    old = lane.write(first, 0, DATA[0])
    number, read = (folder / first).stat().st_ino, reader.read(old)
    lane.release(first)
    reader.remove(old)
    new = lane.write(second, 0, DATA[1])
    assert (folder / second).stat().st_ino == number and in_use(folder) == [second]
    assert read == DATA[0] and reader.read(new) == DATA[1]
    with pytest.raises(PayloadUnreachable):
        reader.read(old)


def test_a_file_that_is_written_again_under_its_reader_is_gone_to_that(
    folder: Path, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, segment = ShmLane(folder), segment_name(1, 1)
    reference = lane.write(segment, 0, DATA[0])
    pread = os.pread

    def late(descriptor: int, size: int, offset: int) -> bytes:
        reader.remove(reference)
        lane.write(segment_name(2, 1), 0, DATA[2])
        return pread(descriptor, size, offset)

    lane.release(segment)
    monkeypatch.setattr(lanes.os, "pread", late)
    with pytest.raises(PayloadUnreachable, match="done with"):
        reader.read(reference)


def test_files_in_use_are_never_written_again_and_there_are_no_more_than_were_in_use_at_a_time(folder: Path) -> None:
    lane, used = ShmLane(folder), []
    for ticket in range(400):
        used.append(segment_name(ticket, 1))
        lane.write(used[-1], 0, DATA[0])
        lane.release(used[-1])
        if len(used) > 20:
            # The oldest stays; of the others it is now this one, now that one.
            lane.remove(used.pop(1 + ticket * 7 % (len(used) - 1)))
        assert in_use(folder) == sorted(used)
    assert len(os.listdir(folder)) == 21


def test_a_free_file_that_somebody_removed_is_forgotten(folder: Path) -> None:
    lane = ShmLane(folder)
    for ticket in range(3):
        segment = segment_name(ticket, 1)
        lane.write(segment, 0, DATA[0])
        lane.remove(segment)
        (folder / f"{FREE}{segment}").unlink()
    assert os.listdir(folder) == [] and list(lane._written) == [segment]


def test_f28_a_file_that_was_free_for_long_is_not_swept_while_it_is_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, done, begun = ShmLane(folder), segment_name(1, 1), segment_name(2, 1)
    lane.write(done, 0, DATA[0])
    lane.remove(done)
    os.utime(folder / f"{FREE}{done}", (0, 0))
    opened = os.open

    def late(path: str, flags: int, mode: int = 0o777) -> int:
        assert sweep(folder, [], older_than_s=60) == 0, "its permit may be younger than the sweep's list"
        return opened(path, flags, mode)

    monkeypatch.setattr(lanes.os, "open", late)
    lane.write(begun, 0, DATA[0])
    assert in_use(folder) == [begun]


def test_f28_a_free_file_of_its_own_is_room_to_a_writer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lane, kept, done = ShmLane(folder), segment_name(1, 1), segment_name(2, 1)
    for segment in (kept, done):
        lane.write(segment, 0, DATA[0])
    monkeypatch.setattr(lanes, "shm_lacks", lambda _, needed_bytes: "full" if needed_bytes > 0 else None)
    assert lane.lacks(1000) == "full"
    lane.remove(done)
    assert lane.lacks(1000) is None and lane.lacks(1001) == "full"


def test_f29_a_reader_that_ends_leaves_the_segment_to_other_processes(
    folder: Path, reader: PayloadReader, redis_url: str, run_name: str
) -> None:
    # SharedMemory of Python 3.11 has the segment deleted when the first process that opened it ends.
    reference = ShmLane(folder).write(segment_name(1, 1), 0, DATA[0])
    program = (
        "import sys; from pathlib import Path; from vla_stream.broker.connection import connect;"
        "from vla_stream.broker.lanes import PayloadReader; from vla_stream.streams.keys import Keys;"
        "url, run, folder, reference = sys.argv[1:];"
        "reader = PayloadReader(connect(url, name='reader'), Keys(run).blob, Path(folder));"
        "print(len(reader.read(reference)))"
    )
    command = [sys.executable, "-c", program, redis_url, run_name, str(folder), reference]
    for _ in range(2):
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "1000\n"
    assert bytes(reader.read(reference)) == DATA[0]


def test_neither_writing_nor_reading_shm_leaks_file_descriptors(folder: Path, reader: PayloadReader) -> None:
    lane = ShmLane(folder)
    before = len(os.listdir("/dev/fd"))
    for ticket in range(20):
        segment = segment_name(ticket, 1)
        reference = lane.write(segment, 0, DATA[0])
        assert bytes(reader.read(reference)) == DATA[0]
        lane.release(segment) if ticket % 2 else lane.remove(segment)
    assert len(os.listdir("/dev/fd")) == before


def test_f28_a_full_shm_is_a_named_error_and_the_write_can_be_repeated(
    folder: Path, reader: PayloadReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, segment = ShmLane(folder), segment_name(1, 1)
    first = lane.write(segment, 0, DATA[0])

    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(lanes.os, "pwritev", full)
        with pytest.raises(PayloadUnreachable, match=f"{folder}: cannot write 37 bytes .*No space left"):
            lane.write(segment, 1, DATA[1])
    second = lane.write(segment, 1, DATA[1])
    assert [bytes(reader.read(item)) for item in (first, second)] == DATA[:2]


def test_f28_a_writer_does_not_make_the_runs_folder_which_marks_its_launchers_dev_shm(tmp_path: Path) -> None:
    with pytest.raises(PayloadUnreachable, match="cannot create a segment file"):
        ShmLane(tmp_path / "another").write(segment_name(1, 1), 0, b"x")
    assert not (tmp_path / "another").exists()


def test_f28_a_reference_of_another_host_is_told_from_one_that_is_gone(
    client: Client, keys: Keys, folder: Path, reader: PayloadReader
) -> None:
    segment = segment_name(1, 1)
    reference = ShmLane(folder).write(segment, 0, b"x")
    with pytest.raises(PayloadElsewhere, match="cannot be opened here"):
        PayloadReader(client, keys.blob, folder.with_name("another host")).read(reference)
    reader.remove(reference)
    with pytest.raises(PayloadUnreachable, match="cannot be opened here") as caught:
        reader.read(reference)
    assert type(caught.value) is PayloadUnreachable


def test_f28_a_file_shorter_than_its_reference_is_refused(folder: Path, reader: PayloadReader) -> None:
    segment = segment_name(1, 1)
    reference = ShmLane(folder).write(segment, 0, DATA[0])
    os.truncate(folder / segment, 999)
    with pytest.raises(BadMessage, match="file is shorter than the referenced 1000 bytes"):
        reader.read(reference)


def test_a_link_in_the_folder_is_not_followed(folder: Path, reader: PayloadReader, tmp_path: Path) -> None:
    segment = segment_name(1, 1)
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / segment).symlink_to(tmp_path / "secret")
    with pytest.raises(PayloadUnreachable):
        reader.read(f"shm:{segment}:0:6:{digest_of(b'secret')}")
    with pytest.raises(PayloadUnreachable):
        ShmLane(folder).write(segment, 0, b"x")


def test_the_sweep_removes_only_old_files_of_no_live_ticket(folder: Path) -> None:
    lane = ShmLane(folder)
    names = {member: f"{member}-0123abcd" for member in ("1.1", "1.2", "2.1", "3.1")}
    for name in names.values():
        lane.write(name, 0, b"x")
    old = time.time() - 100
    for member in ("1.1", "1.2", "2.1"):
        os.utime(folder / names[member], (old, old))
    lane.renew(names["2.1"])
    assert sweep(folder, {"1.2"}, older_than_s=50) == 1
    assert sorted(os.listdir(folder)) == sorted(names[member] for member in ("1.2", "2.1", "3.1"))


def test_what_somebody_put_in_the_place_of_a_file_is_left_alone(folder: Path) -> None:
    lane, done, begun = ShmLane(folder), segment_name(1, 1), segment_name(2, 1)
    lane.write(done, 0, DATA[0])
    (folder / f"{FREE}{done}").mkdir()
    lane.remove(done)
    assert lane.lacks(0) is None
    lane.write(begun, 0, DATA[0])
    assert sweep(folder, [], older_than_s=-1) == 2 and os.listdir(folder) == [f"{FREE}{done}"]


def test_a_file_is_not_taken_from_a_segment_that_is_still_written(folder: Path) -> None:
    lane, forged, begun = ShmLane(folder), segment_name(1, 1), segment_name(2, 1)
    lane.write(forged, 0, DATA[0])
    os.rename(folder / forged, folder / f"{FREE}{forged}")  # by a reader, for an entry that somebody forged
    lane.write(begun, 0, DATA[0])
    assert in_use(folder) == [begun] and os.listdir(folder) != [begun]


def test_a_sweep_of_a_folder_that_does_not_exist_removes_nothing(tmp_path: Path) -> None:
    assert sweep(tmp_path / "none", set(), 0) == 0


def test_renewing_or_removing_a_segment_that_is_gone_does_nothing(lane: Either) -> None:
    lane.renew(segment_name(1, 1))
    lane.remove(segment_name(1, 1))


def test_shm_folders_of_two_servers_or_two_runs_differ() -> None:
    assert len({shm_folder("a", "unix:///1"), shm_folder("a", "unix:///2"), shm_folder("b", "unix:///1")}) == 3
    assert shm_folder("a", "unix:///1") == shm_folder("a", "unix:///1")


def test_f28_shm_that_is_full_or_another_says_so(folder: Path, tmp_path: Path) -> None:
    free = shutil.disk_usage(folder).free
    assert shm_lacks(folder, free // 2) is None
    assert shm_lacks(folder, 10 * free) == "/dev/shm is full"
    none = tmp_path / "none"
    assert shm_lacks(none, 0) == f"{none} is not there: its launcher has another /dev/shm, or none"


# ---- redis


def test_the_redis_lane_keeps_one_hash_per_segment_with_a_lifetime(client: Client, keys: Keys) -> None:
    lane, segment = RedisLane(client, keys.blob, lifetime_s=3600), segment_name(17, 1)
    for place, data in enumerate(DATA):
        lane.write(segment, place, data)
    key = keys.blob(segment)
    assert client.hlen(key) == 3
    assert 3_590_000 < client.pttl(key) <= 3_600_000


def test_renewing_or_releasing_restores_the_whole_lifetime(client: Client, keys: Keys) -> None:
    lane, segment = RedisLane(client, keys.blob, lifetime_s=3600), segment_name(17, 1)
    lane.write(segment, 0, b"x")
    for keep in (lane.renew, lane.release):
        client.pexpire(keys.blob(segment), 10_000)
        keep(segment)
        assert client.pttl(keys.blob(segment)) > 3_590_000


def test_f28_a_vanished_blob_is_unreachable_and_not_damaged(client: Client, keys: Keys, reader: PayloadReader) -> None:
    lane, segment = RedisLane(client, keys.blob, lifetime_s=3600), segment_name(17, 1)
    reference = lane.write(segment, 0, b"x")
    client.delete(keys.blob(segment))
    with pytest.raises(PayloadUnreachable, match="field 0 is gone"):
        reader.read(reference)


# ---- references


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "shm",
        "http:17.1-5c0ffee0:0:10:0123456789abcdef",
        "shm:../../etc/passwd:0:10:0123456789abcdef",
        "shm:17.1-5c0ffee0/../x:0:10:0123456789abcdef",
        "shm:17.1-5C0FFEE0:0:10:0123456789abcdef",
        "shm:17.1-5c0ffee0:-1:10:0123456789abcdef",
        "shm:17.1-5c0ffee0:0:10:0123456789abcde",
        "shm:17.1-5c0ffee0:0:10:0123456789abcdef\n",
        f"redis:17.1-5c0ffee0:0:{MAX_PACKET_BYTES + 1}:0123456789abcdef",
        "shm:17.1-5c0ffee0:٣:10:0123456789abcdef",
    ],
)
def test_f27_a_foreign_reference_is_a_bad_message(reference: str, reader: PayloadReader) -> None:
    with pytest.raises(BadMessage, match="expected <lane>:<segment>:<place>:<bytes>:<xxh3>"):
        parse_reference(reference)
    with pytest.raises(BadMessage):
        reader.read(reference)
    with pytest.raises(BadMessage):
        reader.remove(reference)


def test_f27_an_offset_far_behind_the_file_is_refused_without_mapping_it(folder: Path, reader: PayloadReader) -> None:
    segment = segment_name(1, 1)
    ShmLane(folder).write(segment, 0, b"x")
    with pytest.raises(BadMessage, match="shorter"):
        reader.read(f"shm:{segment}:999999999999999:10:0123456789abcdef")
