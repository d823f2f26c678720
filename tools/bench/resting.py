"""A worker whose metrics rest while the file of VLA_STREAM_RESTING exists: what metrics.py starts.

    python resting.py ROLE RUN ID       as `python -m workers.ROLE RUN ID`, to look at the file once a second

Methods are exchanged for ones that do nothing, so that those which count are the library's own, with nothing around
them. Records of updates are written all the time: they are what is measured by.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from vla_stream.metrics import Meter, Usage
from workers.worker import Worker

FILE = "VLA_STREAM_RESTING"


def _nothing(*_: object) -> None:
    pass


RESTING: dict[type, dict[str, Callable[..., Any]]] = {
    Meter: {
        **dict.fromkeys(("count", "mean", "highest", "gauge", "bucket", "spend", "note"), _nothing),
        "busy": lambda *_: contextlib.nullcontext(),
        "spans": lambda *_: ([], 0),
        "sample": lambda *_: {},
    },
    Usage: {"sample": lambda *_: {}},
}
COUNTING = {cls: {name: getattr(cls, name) for name in methods} for cls, methods in RESTING.items()}
emit = Worker.emit


def let_rest(resting: bool) -> None:
    """All meters of this process, or none."""
    for cls, methods in (RESTING if resting else COUNTING).items():
        for name, method in methods.items():
            setattr(cls, name, method)


def emit_or_rest(worker: Worker, kind: str, sample: dict[str, float]) -> None:
    """In place of Worker.emit, which the main loop calls once a second."""
    if kind == "second":
        resting = Path(os.environ[FILE]).exists()
        let_rest(resting)
        if resting:
            return
    emit(worker, kind, sample)


if __name__ == "__main__":
    Worker.emit = emit_or_rest  # type: ignore[method-assign]
    role, *sys.argv[1:] = sys.argv[1:]
    import_module(f"workers.{role}").main()
