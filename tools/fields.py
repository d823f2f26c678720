"""All settings of a config as tables, made from the models that check them, for configs/README.md.

    .venv/bin/python tools/fields.py          # writes anew what stands there below the line MARK

Needs no simulator and no VLA: classes of options are importable without their packages. tests/test_fields.py fails
when the file is not what this writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from vla_stream.algorithm import OPTIONS
from vla_stream.config import MAX_SEED, Config
from vla_stream.plugins import ENVIRONMENTS, POLICIES

FILE = Path(__file__).resolve().parents[1] / "configs" / "README.md"
MARK = "<!-- From here on written by tools/fields.py. -->"
SAFE = str.maketrans({"|": r"\|", "<": r"\<", "*": r"\*"})  # of Markdown's own, in a table's cell

Schema = Mapping[str, Any]


def reference() -> str:
    """The tables: the config section by section, then the options of each environment and policy of the project."""
    whole = Config.model_json_schema()
    sections = {name: _section(whole, field) for name, field in whole["properties"].items()}
    parts = ["## Top level", _table([_row(name, whole) for name, section in sections.items() if section is None])]
    for name, section in sections.items():
        if section is not None:
            absent = " (left out: none)" if whole["properties"][name].get("default", "") is None else ""
            rows = _rows(whole, section, "")
            told = _table(_used(rows) if name == "algorithm" else rows)
            parts += [f"## `{name}`{absent}", *_docstring(section), told]
    for title, group, place in (
        ("environment", ENVIRONMENTS, "environment.options"),
        ("policy", POLICIES, "policy.options"),
    ):
        parts.append(f"## `{place}`, by `{title}.name`")
        for options, names in _by_options(group).items():
            file = options.__module__.replace(".", "/") + ".py"
            schema = options.model_json_schema()
            parts += [f"### {', '.join(f'`{name}`' for name in names)}", f"[{file}](../{file})"]
            parts.append(_table(_rows(schema, schema, "")))
    return "\n\n".join(parts) + "\n"


def updated(text: str) -> str:
    """The file's text with its tables as they must be. Raises ValueError where the mark is missing."""
    before, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{FILE}: no line {MARK!r}, expected it above the tables")
    return f"{before}{MARK}\n\n{reference()}"


def _by_options(group: str) -> dict[type[BaseModel], list[str]]:
    """The models of the project's own classes, each with the names under which a config asks for it."""
    found: dict[type[BaseModel], list[str]] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        if point.value.startswith("vla_stream."):
            found.setdefault(point.load().Options, []).append(point.name)
    return found


def _docstring(section: Schema) -> list[str]:
    return [" ".join(section["description"].split())] if "description" in section else []


def _section(whole: Schema, field: Schema) -> Schema | None:
    """The section that a field is, may be, or has under names of one's own; None for a plain value."""
    for part in (field, *field.get("anyOf", ()), *field.get("oneOf", ()), _values(field)):
        if "$ref" in part:
            found: Schema = whole["$defs"][part["$ref"].rpartition("/")[2]]
            return found
    return None


def _values(field: Schema) -> Schema:
    """What a mapping's values must be; empty where they may be anything, and of a field that is none."""
    values = field.get("additionalProperties")
    if isinstance(values, Mapping):
        return values
    found: Schema = next(iter(field.get("patternProperties", {}).values()), {})
    return found


def _rows(whole: Schema, section: Schema, prefix: str) -> Iterator[tuple[str, ...]]:
    """One for each field, and below it those of the section that it may be."""
    for name, field in section["properties"].items():
        yield _row(name, section, prefix)
        inner = _section(whole, field)
        if inner is not None:
            named = ".NAME" if _values(field) else ""
            yield from _rows(whole, inner, f"{prefix}{name}{named}.")


def _row(name: str, section: Schema, prefix: str = "") -> tuple[str, ...]:
    field = section["properties"][name]
    default = "**required**" if name in section.get("required", ()) else _plain(field.get("default"))
    return f"`{prefix}{name}`", _kind(field), default, field.get("description", "").translate(SAFE)


def _used(rows: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows of `algorithm` with the algorithms that use each option, where not all do."""
    for key, kind, default, text in rows:
        users = [name for name, options in OPTIONS.items() if key.strip("`") in options]
        some = f" *{', '.join(users)}*" if 0 < len(users) < len(OPTIONS) else ""
        yield key, kind, default, text + some


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| key | value | default | |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _plain(default: object) -> str:
    if default in (None, {}, []):
        return "–"
    shown = yaml.safe_dump(default, default_flow_style=True, allow_unicode=True, width=1000)
    return f"`{shown.strip().removesuffix('...').strip()}`"


def _kind(field: Schema) -> str:
    """What a value must be, in words."""
    choices = [part for part in (*field.get("anyOf", ()), *field.get("oneOf", ())) if part.get("type") != "null"]
    if choices:
        return " or ".join(dict.fromkeys(_kind(part) for part in choices))
    if "enum" in field or "const" in field:
        return " · ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if "$ref" in field:
        return "section"
    match field.get("type"):
        case "integer" | "number" as kind:
            return kind + _range(field)
        case "boolean":
            return "`true` · `false`"
        case "string":
            return {"path": "path"}.get(field.get("format", ""), "text")
        case "array":
            if "prefixItems" in field:
                return f"list of {len(field['prefixItems'])}: {_kind(field['prefixItems'][0])}"
            return f"list: {_kind(field['items'])}"
        case "object":
            values = _values(field)
            return f"names: {_kind(values)}" if values else "mapping"
    raise ValueError(f"{field}: no words for such a field; add them to tools/fields.py")


def _range(field: Schema) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    if low is not None and high is not None:
        return f", {_short(low)} to {_short(high)}"
    bounds = [(">", above), ("≥", low), ("<", below), ("≤", high)]
    told = [f"{sign} {_short(bound)}" for sign, bound in bounds if bound is not None]
    return f" {' and '.join(told)}" if told else ""


def _short(number: float) -> str:
    return "2^63 - 1" if number == MAX_SEED else f"{number:g}".replace("e+0", "e")


if __name__ == "__main__":
    FILE.write_text(updated(FILE.read_text(encoding="utf-8")), encoding="utf-8")
