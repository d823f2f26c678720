"""Commands that need the policy in their own process go on in `policy.python`, where that names another interpreter."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vla_stream.errors import InputError

if TYPE_CHECKING:
    from vla_stream.config import Config

_CALLER = "VLA_STREAM_CALLER"  # the interpreter that the command was called in


def at_the_policy(config: Config) -> Config:
    """The config as seen from the policy's interpreter, once this process runs it: until then this does not return, but
    starts the command there, under the same process id. Raises InputError if that cannot be started."""
    caller = os.environ.pop(_CALLER, None)
    python = config.policy.python
    if python is None:
        return config
    if caller is None:
        from workers.interpreters import REMEDY

        command = [str(python), "-m", "vla_stream.cli.main", *sys.argv[1:]]
        try:
            os.execve(python, command, {**os.environ, _CALLER: sys.executable})
        except OSError as exc:
            raise InputError(f"policy.python is {str(python)!r}: {exc.strerror}; {REMEDY}") from exc
    # "This one", where the config names none for simulators, is still the one that the person called.
    simulators = {"python": config.simulators.python or Path(caller)}
    return config.model_copy(
        update={
            "policy": config.policy.model_copy(update={"python": None}),
            "simulators": config.simulators.model_copy(update=simulators),
        }
    )
