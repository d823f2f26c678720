"""A run's folder under /dev/shm: made by its launcher, and removed when that ends, however it ends (F49)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

CLOSE_DEADLINE_S = 5.0

# $1 the folder. The launcher holds the other end of stdin, and the kernel closes it however the launcher dies. A worker
# that dies with it may write one more file meanwhile: then it is tried again. Once gone, the folder is not touched any
# more, since the next launcher makes it again.
_WATCHER = r"""
trap '' HUP INT TERM
while read -r word; do [ "$word" = now ] && break; done
rm -rf "$1" || { sleep 1; rm -rf "$1"; }
"""


class Janitor:
    """A small shell that waits for this process's end, SIGKILL included, and then removes `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Where there is no /dev/shm, observations take another way.
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
        self._watcher: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "vla-stream-janitor", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def close(self) -> None:
        """Remove the folder now; a second call does nothing."""
        watcher, self._watcher = self._watcher, None
        if watcher is None or watcher.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            watcher.stdin.write(b"now\n")
            watcher.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            watcher.stdin.close()
        try:
            watcher.wait(CLOSE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(watcher.pid, signal.SIGKILL)
            watcher.wait()
