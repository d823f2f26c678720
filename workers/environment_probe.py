"""What an interpreter says about an environment: run by environment_apart.py, there where the simulator is installed.

    python -m workers.environment_probe look|try     task → its section `environment`, as JSON on stdin

Answers one line of JSON on stdout. `look`: what `About` holds; `try`: also what the conformance suite finds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from vla_stream import plugins
from vla_stream.config import Environment
from vla_stream.environments.conformance import Report, check_environment
from vla_stream.environments.protocol import EnvironmentBatch
from vla_stream.errors import InputError
from workers import interpreters
from workers.environment_process import PLAIN


def look(parts: Mapping[str, Environment]) -> dict[str, Any]:
    """What can be known without making the environment of each task, which are of one class. Raises InputError."""
    for task, environment in parts.items():
        where = "environment.options" + (f" with environment.tasks.{task}" if task else "")
        cls, _ = plugins.checked_environment(environment, where)
        for name in ("rows_per_process", "whole_batch"):
            if not hasattr(cls, name):
                raise InputError(
                    f"{environment.name}: lacks {name}, a part of EnvironmentBatch; see environments/protocol.py"
                )
    return {
        "class_name": cls.__name__,
        "rows_per_process": cls.rows_per_process,
        "whole_batch": cls.whole_batch,
        "offers": [name for name in PLAIN if hasattr(cls, name)],
    }


def try_out(environment: Environment) -> Report:
    """Whether it keeps the protocol. Raises InputError."""
    cls, options = plugins.checked_environment(environment)

    def make(rows: int, max_steps: int) -> EnvironmentBatch:
        batch: EnvironmentBatch = cls(rows, max_steps, options)
        return batch

    return check_environment(make, cls.rows_per_process, environment.max_steps)


def answer(question: str, text: str) -> dict[str, Any]:
    """To `look` or `try`."""
    parts = {task: Environment.model_validate(part) for task, part in json.loads(text).items()}
    about = look(parts)
    if question == "try":
        about["reports"] = {task: asdict(try_out(environment)) for task, environment in parts.items()}
    return about


if __name__ == "__main__":
    interpreters.reply(answer)
