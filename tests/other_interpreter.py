"""An interpreter with an environment and a policy that nobody else can import: what `.venvs/<name>/bin/python` is,
without the minutes that one takes to install."""

from __future__ import annotations

import sys
from pathlib import Path

ENVIRONMENT = "only_there:Apart"
POLICY = "policy_only_there:Apart"
MODULE = """
import numpy as np
from pydantic import Field
from fakes import Line
from vla_stream.errors import InputError

class Apart(Line):
    class Options(Line.Options):
        missing: bool = Field(default=False, description="Something it needs is.")

    @classmethod
    def check_installed(cls, options):
        print("noise on stdout, as simulators make it")
        if options.missing:
            raise InputError("only_there: no entry in the attic, expected one")

    def expert_actions(self):
        return np.ones((self.rows, 2), dtype=np.float32)

class Bare:
    Options = Line.Options
"""


POLICY_MODULE = """
import sys
from pydantic import Field
from fake_policies import Linear
from vla_stream.errors import InputError

print("noise on stdout, as models make it")

class Apart(Linear):
    class Options(Linear.Options):
        checkpoint: str = Field(default="", description="A file.")

    @staticmethod
    def check_installed():
        if "only_there" in sys.modules:
            raise InputError("only_there: the simulator's packages are in the policy's process")

class Detached(Apart):
    def evaluate(self, *given):
        evaluation = super().evaluate(*given)
        return type(evaluation)(evaluation.logprobs.detach(), evaluation.entropy, evaluation.values)
"""


def make_interpreter(folder: Path) -> Path:
    """A program in `folder` that is this Python, plus the modules."""
    there = folder / "there"
    there.mkdir()
    (there / "only_there.py").write_text(MODULE)
    (there / "policy_only_there.py").write_text(POLICY_MODULE)
    python = there / "python"
    tests = Path(__file__).parent
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH="{there}:{tests}"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python
