"""The interpreters of simulators that have an environment of their own, made by tools/setup; for marked tests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from vla_stream.config import Config, validate

VENVS = Path(__file__).parents[1] / ".venvs"


def interpreter(profile: str) -> Path:
    """Fails where tools/setup was not run: a marked test is not skipped."""
    python = VENVS / profile / "bin" / "python"
    assert python.exists(), f"{python} is missing; run tools/setup {profile}"
    return python


def config_for(profile: str, **options: Any) -> Config:
    """A config whose simulators run the environment `profile` there."""
    return validate(
        {
            "environment": {"name": profile, "max_steps": 220, "options": options},
            "policy": {"name": "tiny", "chunk": 4},
            "simulators": {"python": str(interpreter(profile))},
            "trainer": {"segments_per_update": 8},
        }
    )


def answer(profile: str, code: str, folder: Path) -> Any:
    """What a program there hands to `tell(...)`, as JSON. folder: of its answer."""
    prologue = (
        "import json, sys\nimport numpy as np\nONE = np.ones(1, dtype=bool)\n"
        "def seeds(n): return np.array([n], dtype=np.uint64)\n"
        "def tell(answer): json.dump(answer, open(sys.argv[1], 'w'))\n"
    )
    file = folder / "answer.json"
    done = subprocess.run(
        [interpreter(profile), "-W", "ignore", "-c", prologue + code, file],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text())
