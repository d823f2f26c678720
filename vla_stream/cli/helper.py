"""A command of ours as a process beside the launcher: demonstrations, evaluations. The launcher stays responsive."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from vla_stream.errors import InputError, RunFailed
from workers.processes import kill_group, log_tail
from workers.supervisor import EXIT_BAD_INPUT

TELL_S = 15.0
END_S = 10.0
NICE = 10


class Interrupted(Exception):
    """The person asked to end."""


class Helper:
    """`vla-stream <arguments>`; what it prints goes to `output`, its progress and errors to `log`.

    follows: it hears what it is fed, line by line, and yields to others that want the same core."""

    def __init__(self, name: str, arguments: Sequence[str], output: Path, log: Path, *, follows: bool = False) -> None:
        self.name, self.output, self.log = name, output, log
        with output.open("wb") as out, log.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vla_stream.cli.main", *arguments],
                stdin=subprocess.PIPE if follows else subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={"OMP_NUM_THREADS": "1", **os.environ, "VLA_STREAM_PARENT": str(os.getpid())},
                start_new_session=True,
            )
        if follows:
            with contextlib.suppress(OSError):  # it has ended already
                os.setpriority(os.PRIO_PROCESS, self.process.pid, NICE)  # whom it starts inherits that

    def feed(self, line: str) -> None:
        """Raises OSError: it has ended. A few short lines fit a pipe that nobody reads yet, so this does not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """As Ctrl-C would, so that it clears up; killed if that takes long."""
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            kill_group(self.process)
            self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def last_word(self) -> str:
        lines = log_tail(self.log)
        return lines[-1] if lines else ""


def wait_for(helpers: Sequence[Helper], idle: Callable[[], bool], tell: Callable[[str], None]) -> None:
    """Until all have ended well. `idle` is called often; when it answers True, the helpers are killed.

    Raises Interrupted, or RunFailed (InputError for bad input) with the last line of the one that failed.
    """
    next_word_s = time.monotonic() + TELL_S
    try:
        while any(helper.process.poll() is None for helper in helpers):
            if idle():
                raise Interrupted
            if time.monotonic() > next_word_s:
                next_word_s = time.monotonic() + TELL_S
                for helper in helpers:
                    tell(f"{helper.name}: {helper.last_word() or 'starts'}")
            time.sleep(0.05)
        for helper in helpers:
            if helper.process.returncode:
                last = helper.last_word().removeprefix("Error: ") or f"exit code {helper.process.returncode}"
                failed = InputError if helper.process.returncode == EXIT_BAD_INPUT else RunFailed
                raise failed(f"{helper.name}: {last}; see {helper.log}")
    finally:
        for helper in helpers:
            helper.kill()
