"""Questions to another interpreter (`simulators.python`, `policy.python`): each is a short program of ours, run there.

A program gets a word and a text, and answers with one JSON object on stdout, or with why it refuses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_stream import __version__
from vla_stream.errors import InputError
from workers.lifeline import die_with_parent

REMEDY = "give one with vla-stream and what shall run there in it, such as tools/setup makes in .venvs/"

_REFUSED = "refused"


def ask(
    python: Path, key: str, module: str, question: str, text: str, limit_s: float | None, limit_key: str = ""
) -> dict[str, Any]:
    """What `module` answers there. key, limit_key: what the config calls the interpreter, and the time it is given.

    Raises InputError: what the module refuses; and, beginning with the key, for an interpreter that is not there,
    cannot run vla-stream, or has another one."""
    subject = f"{key} is {str(python)!r}"
    try:
        done = subprocess.run(
            [str(python), "-m", module, question],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except OSError as exc:
        raise InputError(f"{subject}: {exc.strerror}; {REMEDY}") from exc
    except subprocess.TimeoutExpired as exc:
        remedy = f"raise {limit_key}, or {REMEDY}" if limit_key else REMEDY
        raise InputError(f"{subject}: no answer within {exc.timeout:g} s; {remedy}") from exc
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
        if not isinstance(answer, dict) or not ({"version", _REFUSED} & answer.keys()):
            raise ValueError("no answer of ours")
    except ValueError as exc:
        last = lines[-1].strip()[:300] if lines else f"it said nothing and ended with code {done.returncode}"
        raise InputError(f"{subject}: cannot run vla-stream there ({last}); {REMEDY}") from exc
    if _REFUSED in answer:
        raise InputError(str(answer[_REFUSED]))
    if answer["version"] != __version__:
        raise InputError(
            f"{subject}: has vla-stream {answer['version']}, expected {__version__} as in {sys.executable}; "
            "install the same in both"
        )
    return answer


def reply(answer: Callable[[str, str], dict[str, Any]]) -> None:
    """The other end, there: answers the question that this program was started with."""
    die_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # simulators and models print when they are imported
    try:
        told = {"version": __version__, **answer(sys.argv[1], sys.stdin.read())}
    except InputError as exc:
        told = {_REFUSED: str(exc)}
    with answers:
        json.dump(told, answers)
