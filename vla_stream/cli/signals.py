"""Ctrl-C, SIGTERM and a closed terminal, as a number that loops look at: the first drains, the second stops."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any


class Signals:
    """asked: 0 go on, 1 drain, 2 or more stop at once. As a context it takes the signals over and gives them back."""

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        # nohup ignores SIGHUP, and is meant.
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hang_up)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Within, all of them raise KeyboardInterrupt where the program is, as one thread and a debugger expect."""
        before = {number: signal.signal(number, self._raise) for number in self._before}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        (self._hang_up if number == signal.SIGHUP else self._ask)(number, frame)
        raise KeyboardInterrupt

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked += 1

    def _hang_up(self, number: int, frame: FrameType | None) -> None:
        self.asked += 2
        # The terminal is gone, or the other end of a pipe: writing there would raise in the midst of cleaning up.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                os.dup2(nowhere, stream.fileno())
