"""No orphan processes: a child ends when its parent does, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel (Linux) to kill this process with its parent, and end now if the parent is already gone.

    The kernel follows the thread that started us, so whoever starts workers does it from a thread that lives as long.
    Elsewhere workers notice by `orphaned()`.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if orphaned(parent_pid):
        os._exit(1)


def orphaned(parent_pid: int) -> bool:
    """Whether the process that started us is gone."""
    return os.getppid() != parent_pid
