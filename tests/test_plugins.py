"""Environments and policies by name: an entry point, or module:Class; a wrong name is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field

from vla_stream import plugins
from vla_stream.config import Section
from vla_stream.errors import InputError
from vla_stream.plugins import ENVIRONMENTS, POLICIES, load_class, parse_options


class Tabletop:
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")

        colours: int = Field(default=3, description="Number of colours.")
        size: tuple[int, int] = (48, 48)
        assets: Path | None = None


def test_an_entry_point_is_found_by_its_name() -> None:
    assert load_class(ENVIRONMENTS, "tabletop").__name__ == "Tabletop"


def test_finding_an_environment_does_not_import_its_simulator() -> None:
    loaded = set(sys.modules)
    load_class(ENVIRONMENTS, "maniskill")
    assert not {"mani_skill", "sapien"} & (set(sys.modules) - loaded)


@pytest.mark.parametrize("name", ["os:system", "os:path", "collections:OrderedDict"])
def test_what_has_no_options_is_named_in_one_line(name: str) -> None:
    with pytest.raises(InputError, match=r"^environment.options: .+ has no Options, expected a class with") as caught:
        parse_options(load_class(ENVIRONMENTS, name), {}, "environment.options")
    assert "\n" not in str(caught.value)


def test_an_own_class_is_found_by_module_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_lab.py").write_text("class Kitchen:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_class(ENVIRONMENTS, "my_lab:Kitchen").__name__ == "Kitchen"


def test_a_name_that_is_nearly_right_gets_the_right_one() -> None:
    with pytest.raises(InputError, match=r"vla_stream.environments: no entry 'tabeltop'; did you mean tabletop\?"):
        load_class(ENVIRONMENTS, "tabeltop")


def test_a_name_that_is_not_nearly_right_gets_all_of_them() -> None:
    with pytest.raises(InputError, match=r"no entry 'zzz'; known: .*tiny.*, or module:Class"):
        load_class(POLICIES, "zzz")


@pytest.mark.parametrize(
    "name", ["no_such_module:Class", "json:NoSuchClass", ":Class", "json:", ".json:Class", "a:b:c"]
)
def test_a_class_that_is_not_there_is_one_line_that_shows_the_form(name: str) -> None:
    with pytest.raises(InputError, match=r"cannot be imported .*expected module:Class on the Python path") as caught:
        load_class(POLICIES, name)
    assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)


def test_an_entry_point_whose_packages_are_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "heavy", "heavy.module:Heavy"

        def load(self) -> object:
            raise ImportError("No module named 'heavy'")

    monkeypatch.setattr(plugins, "entry_points", lambda group: [Point()])
    with pytest.raises(InputError, match=r"heavy: heavy\.module:Heavy cannot be imported \(No module named 'heavy'\)"):
        load_class(POLICIES, "heavy")


def test_options_are_those_of_the_class_as_yaml_writes_them() -> None:
    options = parse_options(Tabletop, {"colours": 2, "size": [32, 24], "assets": "a/b"}, "environment.options")
    assert (options.colours, options.size, options.assets) == (2, (32, 24), Path("a/b"))


def test_defaults_need_no_options() -> None:
    assert parse_options(Tabletop, {}, "environment.options").colours == 3


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"colors": 2}, "environment.options: unknown key colors; did you mean colours?"),
        ({"colours": "two"}, "environment.options: colours is 'two', expected a valid integer"),
        ({"colours": True}, "environment.options: colours is True, expected a valid integer"),
    ],
)
def test_a_wrong_option_is_one_line_with_the_remedy(data: dict[str, object], line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_options(Tabletop, data, "environment.options")
    assert str(caught.value) == line


def test_options_may_be_sections_like_those_of_the_config() -> None:
    class Kitchen:
        class Options(Section):
            shelf: int

    with pytest.raises(InputError) as caught:
        parse_options(Kitchen, {"shelv": 1}, "environment.options")
    assert str(caught.value) == "environment.options: unknown key shelv; did you mean shelf?"


def test_an_attached_worker_imports_only_modules_that_were_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.ALLOWED_VARIABLE, "json,other")
    assert plugins.load_class(plugins.POLICIES, "json:JSONDecoder").__name__ == "JSONDecoder"
    with pytest.raises(InputError, match=r"may not import; attach with --allow subprocess if you trust it"):
        plugins.load_class(plugins.POLICIES, "subprocess:Popen")
