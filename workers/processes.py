"""Child processes as groups: seen as ended before they are reaped, killed whole, and not restarted without end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections import deque
from pathlib import Path

TAIL_BYTES = 65536
RESTARTS_AT_ONCE = 5  # one request that ends its generator does it up to four times: see MAX_DELIVERIES in requests.py
RESTARTS_PER_MINUTE = 3


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


class RestartBudget:
    """Some restarts at once, then so many per minute (F42)."""

    def __init__(self, at_once: int = RESTARTS_AT_ONCE, per_minute: float = RESTARTS_PER_MINUTE) -> None:
        self.at_once, self.per_minute = at_once, per_minute
        self._spent: deque[float] = deque()

    def take(self, now_s: float) -> bool:
        """Whether one more restart is allowed; counts it if so."""
        while self._spent and now_s - self._spent[0] > 60.0 * self.at_once / self.per_minute:
            self._spent.popleft()
        if len(self._spent) >= self.at_once:
            return False
        self._spent.append(now_s)
        return True
