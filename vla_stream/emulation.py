"""Emulated devices: computing is sleeping while holding a lock that all processes of this host share.

What a profile in configs/profiles measures is the pipeline: processes, Redis, bytes, batching and admission are real,
and only the time that a GPU or a simulator would take is slept. A device is a file in a folder: whoever has it locked
computes, others wait. The kernel unlocks it when its owner dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from vla_stream.errors import InputError

# What a late wake-up gives back to the next computation: more than a busy host delays one, less than a hang.
_MOST_LATE_S = 0.05
_TIME = struct.Struct("<d")


def default_folder() -> Path:
    """Where a user's devices are, for all runs on this host: two runs that use one device share its time."""
    return Path(tempfile.gettempdir()) / f"vla-stream-devices-{os.getuid()}"


def sleep_until(deadline_s: float) -> None:
    """Until time.monotonic() reaches it."""
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(left_s)


class Devices:
    """Some devices that are computed on together, as one process sees them. No names: time of nobody's device.

    The times add up exactly: a computation begins when it was asked for, or when the one before it on that device was
    due to end, never when an operating system got round to it. So a late wake-up delays, but costs no device time.
    """

    def __init__(self, names: Sequence[str], folder: Path | None = None) -> None:
        self.names = tuple(names)
        self._late_s = 0.0
        # Sorted, so that two processes that want the same ones never wait for one another.
        self._files = [_open(self, (folder or default_folder()) / name) for name in sorted(set(names))]

    def compute(self, seconds: float, asked_s: float | None = None) -> None:
        """Wait for the devices and hold them for that long. asked_s: since when they were wanted (default: now)."""
        if seconds <= 0:
            return
        asked_s = (time.monotonic() if asked_s is None else asked_s) - self._late_s
        with self._locked():
            now_s = time.monotonic()
            # A time yet to come is of an owner that was killed in its sleep, or of an earlier boot.
            free_s = max((at_s for at_s in map(_read, self._files) if at_s <= now_s), default=asked_s)
            deadline_s = max(asked_s, free_s) + seconds
            sleep_until(deadline_s)
            for file in self._files:
                os.pwrite(file, _TIME.pack(deadline_s), 0)
        self._late_s = min(time.monotonic() - deadline_s, _MOST_LATE_S)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        for file in self._files:
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            for file in self._files:
                fcntl.flock(file, fcntl.LOCK_UN)


class Stream:
    """Computations on devices in the order in which they are launched, while their process goes on, as a CUDA stream
    makes them: only who reads a result waits."""

    def __init__(self, devices: Devices) -> None:
        self._devices, self._last = devices, Future[None]()
        self._last.set_result(None)
        self._thread = ThreadPoolExecutor(1, "emulated device")

    def launch(self, seconds: float, asked_s: float | None = None) -> None:
        """See `Devices.compute`."""
        asked_s = time.monotonic() if asked_s is None else asked_s
        self._last = self._thread.submit(self._devices.compute, seconds, asked_s)

    def wait(self) -> None:
        """Until all that was launched is computed."""
        self._last.result()


class Claim:
    """One of some names, for as long as this object and its process live: who comes first gets the first."""

    def __init__(self, names: Sequence[str], role: str, folder: Path | None = None) -> None:
        """A name that stands twice has room for two. Raises InputError when all are taken."""
        for index, name in enumerate(names):
            place = names[:index].count(name)
            file = _open(self, (folder or default_folder()) / f"{name}.{role}.{place}")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.name = name
                return
        raise InputError(
            f"emulated devices: each of {', '.join(names) or 'none'} has its {role} already; name more of them in the "
            "options, or start fewer (those of another run count too, unless it has another folder)"
        )


def _open(owner: object, path: Path) -> int:
    """A file that is closed, and thereby unlocked, with its owner."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    weakref.finalize(owner, os.close, file)
    return file


def _read(file: int) -> float:
    data = os.pread(file, _TIME.size, 0)
    return float(_TIME.unpack(data)[0]) if len(data) == _TIME.size else 0.0
