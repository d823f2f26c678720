"""Child processes as groups: seen as ended before they are reaped, and killed whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

TAIL_BYTES = 65536


def has_exited(process: subprocess.Popen[bytes]) -> bool:
    """Without reaping it, so that its pid and its group's number stay its own until the group is killed."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a process started with start_new_session and to all that it started. Only before it is reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM when only zombies are left
        os.killpg(process.pid, signal.SIGKILL)


def send_signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """A signal to the process alone, not to what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def signal_name(number: int) -> str:
    """`SIGKILL` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_tail(log: Path, start: int = 0) -> list[str]:
    """The non-empty lines that were written since byte `start`, from the last 64 KB."""
    try:
        with log.open("rb") as file:
            file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip()[:500] for line in text.splitlines() if line.strip()]
