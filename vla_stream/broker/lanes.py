"""Ways for observation bytes: written once by the simulator, read by a generator and the trainer.

inline  in the entry itself; no reference.
shm     one file per segment under /dev/shm, appended by pwrite, read by pread. For readers that see the run's folder.
redis   one hash per segment, one field per write, with a TTL. For readers anywhere.

The run's folder under /dev/shm is made by its launcher alone, under a random name: whoever finds it there shares that
/dev/shm, and nobody else does, whatever their host is called (containers!).
Plain files, not multiprocessing's SharedMemory: on Python 3.11 its tracker deletes segments of others at exit (F29).
A file whose segment is done with is renamed, and its writer takes it for a later one: to write into pages that exist
takes a fifth of the time of new ones. So a reader copies before it compares digests, and never maps.
A reference is `<lane>:<segment>:<place>:<bytes>:<xxh3>`; a reader trusts none of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from vla_stream.broker.codec import MAX_PACKET_BYTES, Piece, digest_of, write_all
from vla_stream.broker.connection import Client
from vla_stream.errors import BadMessage, PayloadElsewhere, PayloadUnreachable

SHM_ROOT = Path("/dev/shm")
SEGMENT = re.compile(r"[0-9]{1,18}\.[0-9]{1,4}-[0-9a-f]{8}")
REFERENCE = re.compile(r"(shm|redis):([^:]{1,64}):([0-9]{1,15}):([0-9]{1,12}):([0-9a-f]{16})")
FREE = "free-"  # before the name of the segment that a file was written for, once that is done with
MIN_FREE_BYTES = 64 * 1024 * 1024
HEAD_BYTES = 4096  # of a packet: what `read_into` shows of it first


class Lane(Protocol):
    """Write side of one lane."""

    name: str

    def write(self, segment: str, place: int, *data: Piece) -> str:
        """Store `data` of a segment, joined, at `place` (a counter: 0, 1, …); returns its reference."""

    def renew(self, segment: str) -> None:
        """Keep the segment's bytes alive for another lifetime."""

    def remove(self, segment: str) -> None:
        """Forget all bytes of the segment. Idempotent."""

    def release(self, segment: str) -> None:
        """The segment is published: write no more, and leave its bytes to their readers."""


def segment_name(ticket: int, attempt: int) -> str:
    """`<ticket>.<attempt>-<token>`; the token keeps numbers that a flushed server gives out again apart."""
    return f"{ticket}.{attempt}-{secrets.token_hex(4)}"


def shm_folder(run: str, token: str) -> Path:
    """Private folder of one run on this host; the run's random `token` tells runs of one name apart."""
    return SHM_ROOT / f"vla-stream-{os.getuid()}-{run}-{token}"


class ShmLane:
    """One file per segment. `place` is unused: the offset in the file takes its role."""

    name = "shm"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.largest_bytes = 0  # of all writes so far, also of those that failed
        self._open: dict[str, tuple[int, int]] = {}
        self._written: list[str] = []  # segments whose files may be free by now

    def write(self, segment: str, place: int, *data: Piece) -> str:
        size = sum(map(len, data))
        self.largest_bytes = max(self.largest_bytes, size)
        descriptor, offset = self._open.get(segment, (-1, 0))
        if descriptor < 0:
            descriptor = self._create(segment)
        try:
            end = offset + write_all(data, lambda pieces, done: os.pwritev(descriptor, pieces, offset + done))
        except OSError as exc:
            self._open[segment] = (descriptor, offset)
            raise PayloadUnreachable(f"{self.folder}: cannot write {size} bytes ({exc.strerror})") from exc
        self._open[segment] = (descriptor, end)
        return f"shm:{segment}:{offset}:{size}:{digest_of(*data)}"

    def renew(self, segment: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / segment)

    def remove(self, segment: str) -> None:
        self.release(segment)
        set_free(self.folder, segment)

    def release(self, segment: str) -> None:
        """The segment is published: stop writing, keep the file for its readers."""
        descriptor, _ = self._open.pop(segment, (-1, 0))
        if descriptor >= 0:
            os.close(descriptor)

    def lacks(self, needed_bytes: int) -> str | None:
        """What keeps so many bytes out of /dev/shm, or None. Our own free files are room, too."""
        if shm_lacks(self.folder, needed_bytes) is None:
            return None
        free_bytes = 0
        for segment in self._written:
            with contextlib.suppress(OSError):
                free_bytes += os.stat(f"{self.folder}/{FREE}{segment}").st_size
        return shm_lacks(self.folder, needed_bytes - free_bytes)

    def _create(self, segment: str) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        if not self._take_free(segment):
            flags |= os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(self.folder / segment, flags, 0o600)
        except OSError as exc:
            raise PayloadUnreachable(f"{self.folder}: cannot create a segment file ({exc.strerror})") from exc
        self._written.append(segment)
        return descriptor

    def _take_free(self, segment: str) -> bool:
        """Whether a free file is this segment's now. The oldest are asked first: mostly they are done with first."""
        for name in list(self._written):
            if name in self._open or os.path.lexists(f"{self.folder}/{name}"):
                continue
            self._written.remove(name)
            with contextlib.suppress(OSError):  # swept, or removed by people: forgotten
                free = f"{self.folder}/{FREE}{name}"
                os.utime(free)  # else `sweep`, whose list may be older than this segment's permit, took it for old
                os.rename(free, f"{self.folder}/{segment}")
                return True
        return False


def set_free(folder: Path, segment: str) -> None:
    """The segment is done with. Idempotent."""
    with contextlib.suppress(OSError):  # gone, or somebody's folder stands in the way: swept later
        os.rename(f"{folder}/{segment}", f"{folder}/{FREE}{segment}")


class RedisLane:
    """One hash per segment; `key_of` gives its key (key names belong to streams/keys.py)."""

    name = "redis"

    def __init__(self, client: Client, key_of: Callable[[str], str], lifetime_s: float) -> None:
        self.client, self.key_of, self.lifetime_ms = client, key_of, int(lifetime_s * 1000)

    def write(self, segment: str, place: int, *data: Piece) -> str:
        joined = b"".join(data)
        with self.client.pipeline(transaction=True) as pipe:
            pipe.hset(self.key_of(segment), str(place), joined)
            pipe.pexpire(self.key_of(segment), self.lifetime_ms)
            pipe.execute()
        return f"redis:{segment}:{place}:{len(joined)}:{digest_of(joined)}"

    def renew(self, segment: str) -> None:
        self.client.pexpire(self.key_of(segment), self.lifetime_ms)

    def remove(self, segment: str) -> None:
        self.client.unlink(self.key_of(segment))

    def release(self, segment: str) -> None:
        """The segment is published: its readers have another lifetime for it."""
        self.renew(segment)


class PayloadReader:
    """Reads references of every lane."""

    def __init__(self, client: Client, key_of: Callable[[str], str], folder: Path) -> None:
        self.client, self.key_of, self.folder = client, key_of, folder

    def read(self, reference: str) -> bytes:
        """The referenced bytes. Raises PayloadUnreachable (gone), PayloadElsewhere (others may reach it) or BadMessage
        (not what was written)."""
        lane, segment, place, size, _ = parse_reference(reference)
        if lane == "redis":
            data = self._redis(segment, place)
        else:
            with self._opened(segment, place + size) as descriptor:
                data = os.pread(descriptor, size, place)
        self._verify(reference, data)
        return data

    def read_into(
        self, reference: str, arrange: Callable[[bytes, int], tuple[int, Sequence[memoryview]] | None]
    ) -> bool:
        """The same straight to where the bytes belong, for a packet in /dev/shm; False where nothing was read.

        arrange: from the first bytes and the size of all, how many bytes come before the places that it names for the
        others; None leaves the packet to `read`. What is in the places is valid only after this has returned True."""
        lane, segment, offset, size, _ = parse_reference(reference)
        if lane != "shm":
            return False
        with self._opened(segment, offset + size) as descriptor:
            head = os.pread(descriptor, min(size, HEAD_BYTES), offset)
            if (arranged := arrange(head, size)) is None:
                return False
            start, places = arranged
            os.preadv(descriptor, places, offset + start)
        self._verify(reference, head[:start], *places)
        return True

    def remove(self, reference: str) -> None:
        """Forget the segment that this reference belongs to. Idempotent."""
        lane, segment, *_ = parse_reference(reference)
        if lane == "shm":
            set_free(self.folder, segment)
        else:
            self.client.unlink(self.key_of(segment))

    @contextlib.contextmanager
    def _opened(self, segment: str, end: int) -> Iterator[int]:
        """Descriptor of a segment's file, which has bytes up to `end`."""
        try:
            descriptor = os.open(f"{self.folder}/{segment}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as exc:
            error = PayloadUnreachable if self.folder.is_dir() else PayloadElsewhere
            raise error(f"{self.folder / segment}: cannot be opened here ({exc.strerror})") from exc
        try:
            if os.fstat(descriptor).st_size < end:
                raise BadMessage(f"{segment}: file is shorter than the referenced {end} bytes")
            yield descriptor
        finally:
            os.close(descriptor)

    def _verify(self, reference: str, *data: Piece) -> None:
        lane, segment, _, size, digest = parse_reference(reference)
        found = sum(map(len, data))
        if found == size and digest_of(*data) == digest:
            return
        # Its writer may have taken the file for another segment meanwhile; the name went first.
        if lane == "shm" and not os.path.lexists(f"{self.folder}/{segment}"):
            raise PayloadUnreachable(f"{self.folder / segment}: its segment was done with while it was read")
        raise BadMessage(f"payload {reference} holds {found} other bytes than were referenced")

    def _redis(self, segment: str, place: int) -> bytes:
        data: Any = self.client.hget(self.key_of(segment), str(place))
        if data is None:
            raise PayloadUnreachable(
                f"{self.key_of(segment)}: field {place} is gone (expired, or its segment was removed)"
            )
        return bytes(data)


def parse_reference(reference: str) -> tuple[str, str, int, int, str]:
    """(lane, segment, place, bytes, digest). Raises BadMessage."""
    match = REFERENCE.fullmatch(reference)
    if match is None or SEGMENT.fullmatch(match[2]) is None or int(match[4]) > MAX_PACKET_BYTES:
        raise BadMessage(f"reference {reference[:80]!r}, expected <lane>:<segment>:<place>:<bytes>:<xxh3>")
    return match[1], match[2], int(match[3]), int(match[4]), match[5]


def shm_lacks(folder: Path, needed_bytes: int) -> str | None:
    """What keeps so many bytes out of a run's folder under /dev/shm, or None."""
    try:
        free_bytes = shutil.disk_usage(folder).free
    except OSError:
        return f"{folder} is not there: its launcher has another /dev/shm, or none"
    return f"{SHM_ROOT} is full" if free_bytes < needed_bytes else None


def sweep(folder: Path, live: Collection[str], older_than_s: float) -> int:
    """Remove files that belong to no live `<ticket>.<attempt>`, free ones too, and are old. Returns how many."""
    removed = 0
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return 0
    for entry in entries:
        with contextlib.suppress(OSError):  # gone, or no file of ours
            if entry.name.partition("-")[0] not in live and time.time() - entry.stat().st_mtime > older_than_s:
                os.unlink(entry.path)
                removed += 1
    return removed
