"""The config: closed, typed, composed left to right; every mistake is one line that names key, value and remedy."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from vla_stream.config import Config, Section, cross_check, load, notes, validate
from vla_stream.errors import InputError

MINIMAL: dict[str, Any] = {
    "environment": {"name": "tabletop", "max_steps": 40},
    "policy": {"name": "tiny", "chunk": 4},
    "trainer": {"segments_per_update": 8},
}


def with_value(key: str, value: object) -> dict[str, Any]:
    """MINIMAL with one dotted key set."""
    data = copy.deepcopy(MINIMAL)
    *sections, last = key.split(".")
    place = data
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    return data


def without(key: str) -> dict[str, Any]:
    data = copy.deepcopy(MINIMAL)
    section, _, last = key.rpartition(".")
    del (data[section] if section else data)[last]
    return data


def problems_of(data: dict[str, Any]) -> list[str]:
    with pytest.raises(InputError) as caught:
        validate(data)
    return str(caught.value).split("\n")


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to_file(text: str, name: str = "config.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return to_file


YAML = """
environment: {name: tabletop, max_steps: 40}
policy: {name: tiny, chunk: 4}
trainer: {segments_per_update: 8}
"""


# ---- reading and composing


def test_a_minimal_file_gives_a_whole_config(write: Any) -> None:
    config = load([write(YAML)])
    assert (config.environment.name, config.trainer.segments_per_update, config.flow.max_staleness) == (
        "tabletop",
        8,
        1,
    )


def test_later_files_win_key_by_key(write: Any) -> None:
    second = write("trainer: {epochs: 1}\nenvironment: {max_steps: 20}\n", "second.yaml")
    config = load([write(YAML), second])
    assert (config.trainer.epochs, config.trainer.segments_per_update) == (1, 8)
    assert (config.environment.max_steps, config.environment.name) == (20, "tabletop")


def test_another_policy_or_environment_comes_without_the_options_of_the_one_before(write: Any) -> None:
    first = write(YAML + "policy: {name: tiny, chunk: 4, options: {words: 6, min_std: 0.1}}\n")
    second = write("policy: {name: pi0, options: {train: lora}}\n", "second.yaml")
    assert load([first, second]).policy.options == {"train": "lora"}
    assert load([first, second]).policy.chunk == 4
    assert load([first], ["policy.options.words=8"]).policy.options == {"words": 8, "min_std": 0.1}
    same = write("policy: {name: tiny, options: {words: 9}}\n", "third.yaml")
    assert load([first, same]).policy.options == {"words": 9, "min_std": 0.1}
    assert load([first], ["environment.name=gymnasium"]).environment.options == {}


@pytest.mark.parametrize("order", [1, -1])
def test_options_set_beside_a_name_are_kept_in_either_order(order: int, write: Any) -> None:
    first = write(YAML + "policy: {name: tiny, chunk: 4, options: {words: 6, min_std: 0.1}}\n")
    overrides = ["policy.options.words=9", "policy.name=pi0"][::order]
    policy = load([first], overrides).policy
    assert (policy.name, policy.options) == ("pi0", {"words": 9})


def test_options_of_a_file_without_a_name_are_kept_for_the_name_of_a_later_one(write: Any) -> None:
    nameless = write("policy: {options: {words: 9}}\n", "options.yaml")
    assert load([nameless, write(YAML)]).policy.options == {"words": 9}


def test_set_wins_over_files_and_the_last_set_over_the_first(write: Any) -> None:
    path = write(YAML + "updates: 5\n")
    config = load([path], ["updates=6", "trainer.epochs=2", "updates=7", "broker.lane=redis"])
    assert (config.updates, config.trainer.epochs, config.broker.lane) == (7, 2, "redis")


def test_set_takes_values_as_yaml_does(write: Any) -> None:
    overrides = ["generators.padded_sizes=[8, 16]", "pretrain=null", "simulators.segment={steps: 4}"]
    config = load([write(YAML)], overrides)
    assert config.generators.padded_sizes == [8, 16]
    assert config.pretrain is None
    assert config.segment_steps == 4


def test_one_form_of_a_segment_replaces_the_other(write: Any) -> None:
    steps = write(YAML + "simulators: {segment: {steps: 8}}\n")
    assert load([steps]).segment_steps == 8
    assert load([steps], ["simulators.segment=episode"]).segment_steps == 10
    episode = write(YAML + "simulators: {segment: episode}\n", "episode.yaml")
    assert load([episode, steps]).segment_steps == 8


@pytest.mark.parametrize(("text", "number"), [("1e-3", 1e-3), ("2.5e-4", 2.5e-4), ("1E2", 100.0), ("3", 3.0)])
def test_numbers_are_read_as_people_write_them(text: str, number: float, write: Any) -> None:
    assert load([write(YAML)], [f"trainer.learning_rate={text}"]).trainer.learning_rate == number


def test_an_attaching_worker_reads_the_same_config_from_json() -> None:
    config = validate(with_value("policy.init_from", "runs/a/checkpoint") | {"simulators": {"segment": "episode"}})
    assert validate(json.loads(config.model_dump_json())) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\n", "config.yaml: not valid YAML at line 2"),
        ("a: b: c\n", "config.yaml: not valid YAML at line 1"),
        ("- a\n- b\n", "config.yaml: holds list, expected a mapping of sections"),
        ("", "config.yaml: holds NoneType, expected a mapping of sections"),
        ("word", "config.yaml: holds str, expected a mapping of sections"),
        ("x: !!python/object/apply:os.getcwd []\n", "config.yaml: not valid YAML at line 1"),
    ],
)
def test_a_file_that_is_no_config_is_told_in_one_line(text: str, message: str, write: Any) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load([write(text)])
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.yaml: cannot read the config \(No such file or directory\)"):
        load([tmp_path / "none.yaml"])
    with pytest.raises(InputError, match=r"\(Is a directory\)"):
        load([tmp_path])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8 text"):
        load([tmp_path / "binary.yaml"])


def test_no_file_at_all_says_what_to_give() -> None:
    with pytest.raises(InputError, match=r"no file given, expected at least one, for example configs/quickstart\.yaml"):
        load([])


@pytest.mark.parametrize("override", ["", "trainer.epochs", "=3", ".epochs=3", "trainer.=3", "trainer..epochs=3"])
def test_a_set_without_key_or_value_shows_the_form(override: str, write: Any) -> None:
    with pytest.raises(InputError, match=r"expected section\.key=value, for example --set trainer\.epochs=2"):
        load([write(YAML)], [override])


def test_a_set_of_broken_yaml_is_told_in_one_line(write: Any) -> None:
    with pytest.raises(InputError, match=r"--set updates=\[1: '\[1' is not valid YAML"):
        load([write(YAML)], ["updates=[1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x.y=&a [*a]", "Circular reference detected"),
        ("x=&a {y: *a}", "Circular reference detected"),
        ("environment.options=&a {y: *a}", "Circular reference detected"),
        ("x=2001-99-99", "is not valid YAML"),
        ("x=" + 9999 * "[", "is not valid YAML"),
        ("environment.options={2001-01-01: 3}", "holds what is no plain data"),
    ],
)
def test_a_value_that_is_no_plain_data_is_told_in_one_line(text: str, message: str, write: Any) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load([write(YAML)], [text])
    assert "\n" not in str(caught.value)


def test_a_file_with_a_section_that_holds_itself_or_a_date_that_does_not_exist_is_told_in_one_line(write: Any) -> None:
    for text in ("&a {x: *a}", "x: 2001-99-99", "x: &a [*a]"):
        path = write(text)
        with pytest.raises(InputError) as caught:
            load([path, path])
        assert "\n" not in str(caught.value)


def test_problems_name_the_files_they_come_from(write: Any) -> None:
    one, two = write(YAML), write("updates: 0\n", "two.yaml")
    with pytest.raises(InputError, match=f"^{one}, {two}: updates is 0, expected greater than or equal to 1$"):
        load([one, two])


# ---- one line per problem


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("trainer.epoch", 3, "config: unknown key trainer.epoch; did you mean epochs?"),
        ("trainr", {}, "config: unknown key trainr; did you mean trainer?"),
        ("generators.max_batch", 8, "config: unknown key generators.max_batch; did you mean max_batch_size?"),
        ("broker.zzz", 1, "config: unknown key broker.zzz; known here: inline_below_bytes, lane"),
        ("updates", "ten", "config: updates is 'ten', expected a valid integer"),
        ("updates", "10", "config: updates is '10', expected a valid integer"),
        ("updates", True, "config: updates is True, expected a valid integer"),
        ("updates", 1.5, "config: updates is 1.5, expected a valid integer"),
        ("updates", None, "config: updates is None, expected a valid integer"),
        ("algorithm.gamma", 1.5, "config: algorithm.gamma is 1.5, expected less than or equal to 1"),
        ("algorithm.name", "ppq", "config: algorithm.name is 'ppq', expected 'ppo', 'appo', 'grpo', 'rloo' or 'rft'"),
        ("broker.lane", "tcp", "config: broker.lane is 'tcp', expected 'auto', 'inline', 'shm' or 'redis'"),
        ("trainer", 3, "config: trainer is 3, expected a mapping of its keys"),
        ("environment.options", [], "config: environment.options is [], expected a mapping of its keys"),
        ("generators.padded_sizes", 3, "config: generators.padded_sizes is 3, expected a valid array"),
        ("generators.padded_sizes", [0], "config: generators.padded_sizes.0 is 0, expected greater than or equal to 1"),
        ("flow.lease_s", 1e-4, "config: flow.lease_s is 0.0001, expected greater than or equal to 0.01"),
        ("flow.lease_s", math.inf, "config: flow.lease_s is inf, expected a finite number"),
        ("generators.padded_sizes", ["x"], "config: generators.padded_sizes.0 is 'x', expected a valid integer"),
        ("flow.lease_s", 1e300, "config: flow.lease_s is 1e+300, expected less than or equal to 1000000"),
        ("simulators.step_deadline_s", 1e300,
         "config: simulators.step_deadline_s is 1e+300, expected less than or equal to 1000000"),
        ("generators.max_wait_ms", 1e7,
         "config: generators.max_wait_ms is 10000000.0, expected less than or equal to 1000000"),
        ("trainer.segments_per_update", 10**30,
         f"config: trainer.segments_per_update is {10**30}, expected less than or equal to 1000000000"),
        ("flow.stale_limit", 10**30,
         f"config: flow.stale_limit is {10**30}, expected less than or equal to 1000000000"),
        ("generators.padded_sizes", [10**10],
         "config: generators.padded_sizes.0 is 10000000000, expected less than or equal to 1000000000"),
        ("runs_dir", "a\0b", "config: runs_dir is 'a\\x00b', expected a path without NUL bytes"),
        ("seed", 2**63, "config: seed is 9223372036854775808, expected less than or equal to 9223372036854775807"),
    ],
)  # fmt: skip
def test_a_wrong_value_or_key_is_one_line_with_the_remedy(key: str, value: object, line: str) -> None:
    assert problems_of(with_value(key, value)) == [line]


@pytest.mark.parametrize("value", ["episodes", 16, None, [16], True], ids=str)
def test_a_segment_of_neither_form_is_one_line_that_shows_both(value: object) -> None:
    assert problems_of(with_value("simulators.segment", value)) == [
        f"config: simulators.segment is {value!r}, expected episode, or the number of chunk steps, "
        "for example {steps: 16}"
    ]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ({"step": 16}, "config: unknown key simulators.segment.step; did you mean steps?"),
        ({"steps": 3, "stepz": 3}, "config: unknown key simulators.segment.stepz; did you mean steps?"),
        ({"steps": 0}, "config: simulators.segment.steps is 0, expected greater than or equal to 1"),
        ({"steps": "x"}, "config: simulators.segment.steps is 'x', expected a valid integer"),
        ({}, "config: simulators.segment.steps is missing; T: chunk steps per segment; "
             "rows that end are reset at the next chunk step."),
    ],
)  # fmt: skip
def test_a_mistake_within_one_form_of_a_segment_is_told_for_that_form(value: object, line: str) -> None:
    assert problems_of(with_value("simulators.segment", value)) == [line]


def test_a_missing_key_is_told_with_its_description() -> None:
    assert problems_of(without("trainer.segments_per_update")) == [
        "config: trainer.segments_per_update is missing; B: segments that one update consumes."
    ]
    assert problems_of(without("policy")) == ["config: policy is missing; see configs/quickstart.yaml"]


def test_a_misspelt_required_key_is_told_once() -> None:
    data = with_value("trainer.segment_per_update", 8)
    del data["trainer"]["segments_per_update"]
    assert problems_of(data) == ["config: unknown key trainer.segment_per_update; did you mean segments_per_update?"]


def test_two_problems_are_two_lines() -> None:
    data = with_value("updates", 0) | {"seed": -1}
    assert len(problems_of(data)) == 2


# ---- combinations


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("policy.chunk", 3, ["policy.chunk is 3", "environment.max_steps is 40", "a multiple of 3"]),
        ("generators.max_batch_size", 4,
         ["generators.max_batch_size is 4", "simulators.envs_per_slot is 8", "at least 8"]),
        ("generators.padded_sizes", [8, 64],
         ["generators.padded_sizes holds 64", "generators.max_batch_size is 32", "remove it"]),
        ("flow.stale_limit", 0, ["flow.stale_limit is 0", "flow.max_staleness is 1", "raise stale_limit"]),
    ],
)  # fmt: skip
def test_a_combination_that_cannot_work_names_both_fields_and_the_remedy(
    key: str, value: object, named: list[str]
) -> None:
    (line,) = problems_of(with_value(key, value))
    assert all(part in line for part in named), line


def test_keeping_segments_for_checkpoints_that_come_too_seldom_is_refused() -> None:
    data = MINIMAL | {"trainer": MINIMAL["trainer"] | {"ack": "checkpoint"}, "flow": {"max_staleness": 2}}
    (line,) = problems_of(data)
    assert "trainer.checkpoint_every is 20" in line and "lower it to 3, 1 + flow.max_staleness" in line
    data["trainer"] |= {"checkpoint_every": 3}
    validate(data)
    data["flow"] |= {"order": "ticket"}
    (line,) = problems_of(data)
    assert "trainer.ack is checkpoint but flow.order is ticket" in line and "set flow.order to arrival" in line


def test_in_ticket_order_nothing_staler_than_eta_is_trained_and_another_limit_is_refused() -> None:
    assert validate(MINIMAL | {"flow": {"order": "ticket", "max_staleness": 2}}).flow.stale_limit_versions == 2
    (line,) = problems_of(MINIMAL | {"flow": {"order": "ticket", "stale_limit": 3}})
    assert "flow.stale_limit is set but flow.order is ticket" in line and "remove stale_limit" in line


def test_in_ticket_order_how_far_to_read_ahead_cannot_be_chosen() -> None:
    in_order, ahead = {"flow": {"order": "ticket"}}, {"trainer": MINIMAL["trainer"] | {"prefetch_segments": 8}}
    (line,) = problems_of(MINIMAL | in_order | ahead)
    assert "trainer.prefetch_segments is 8 but flow.order is ticket" in line
    assert line.endswith("remove prefetch_segments or set order to arrival")
    assert validate(MINIMAL | ahead).trainer.prefetch_segments == 8
    config = validate(MINIMAL | in_order)
    assert validate(json.loads(config.model_dump_json())) == config, "with all defaults written out it is no problem"


@pytest.mark.parametrize(
    ("trainer", "named"),
    [
        ({"update": "streaming"}, ["trainer.update is streaming", "trainer.epochs is 3", "set epochs to 1"]),
        ({"optimiser_steps": 2}, ["trainer.optimiser_steps is 2", "trainer.update is buffered", "to streaming"]),
        ({"ranks": 3}, ["trainer.ranks is 3", "trainer.segments_per_update is 8", "a multiple of 3"]),
        ({"ranks": 4, "update": "streaming", "epochs": 1, "optimiser_steps": 4},
         ["trainer.ranks is 4", "trainer.optimiser_steps 4 takes 2", "a multiple of 16"]),
        ({"ranks": 2, "record_every": 5}, ["trainer.ranks is 2", "trainer.record_every is 5", "record_every to 0"]),
        ({"ranks": 2, "device": "cuda:1"}, ["trainer.ranks is 2", "trainer.device is cuda:1", "set it to cuda,"]),
        ({"update": "streaming", "epochs": 1, "optimiser_steps": 3},
         ["trainer.optimiser_steps is 3", "trainer.segments_per_update is 8", "a multiple of 3"]),
    ],
)  # fmt: skip
def test_options_of_one_way_to_update_are_not_ignored_in_the_other(
    trainer: dict[str, object], named: list[str]
) -> None:
    (line,) = problems_of(MINIMAL | {"trainer": MINIMAL["trainer"] | trainer})
    assert all(part in line for part in named), line


# ---- algorithms

EPISODES: dict[str, Any] = MINIMAL | {"simulators": {"segment": "episode"}}


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ({"name": "grpo", "value_clip": 0.2},
         "config: algorithm.value_clip is set but algorithm.name is grpo, which does not use it; remove it, or set "
         "name to ppo or appo"),
        ({"name": "rft", "length": "own"},
         "config: algorithm.length is set but algorithm.name is rft, which does not use it; remove it, or set name to "
         "grpo or rloo"),
        ({"name": "appo", "correction": "none"},
         "config: algorithm.correction is set but algorithm.name is appo, which does not use it; remove it, or set "
         "name to ppo or grpo or rloo"),
        ({"correction": "tis", "clip": 0.2},
         "config: algorithm.clip is set but algorithm.correction is tis, which does not use it; remove it, or set "
         "correction to decoupled or none"),
        ({"correction": "none", "proximal": "interpolated"},
         "config: algorithm.proximal is set but algorithm.correction is none, which does not use it; remove it, or set "
         "correction to decoupled"),
        ({"entropy_decay": {"to": 0.1, "at_update": 9}},
         "config: algorithm.entropy_decay is set but algorithm.entropy_coefficient is 0; remove it, or raise "
         "entropy_coefficient"),
        ({"imitation_coefficient": 0.1},
         "config: algorithm.imitation_coefficient is 0.1 but there is no section pretrain, whose demonstrations are "
         "imitated; add it or set the coefficient to 0"),
    ],
)  # fmt: skip
def test_an_option_that_the_algorithm_does_not_use_is_refused_with_the_remedy(
    algorithm: dict[str, Any], line: str
) -> None:
    assert problems_of(EPISODES | {"algorithm": algorithm}) == [line]


def test_a_bound_of_the_kl_to_a_guessed_policy_is_refused_and_told_how_to_keep_either() -> None:
    (line,) = problems_of(MINIMAL | {"algorithm": {"max_kl": 0.01, "proximal": "interpolated"}})
    assert "algorithm.max_kl is 0.01 but algorithm.proximal is interpolated" in line
    assert line.endswith("remove max_kl, or set proximal to recomputed")
    for works in ({"max_kl": 0.01}, {"proximal": "interpolated"}, {"max_kl": None, "proximal": "interpolated"}):
        assert validate(MINIMAL | {"algorithm": works}).algorithm.problems() == []


@pytest.mark.parametrize("name", ["grpo", "rloo", "rft"])
def test_an_algorithm_without_critic_wants_whole_episodes_and_no_settings_of_one(name: str) -> None:
    data = EPISODES | {"algorithm": {"name": name}}
    assert validate(data).trainer.value_learning_rate is None
    trainer = MINIMAL["trainer"] | {"value_learning_rate": 1e-3, "critic_warmup_updates": 0}
    lines = problems_of(data | {"trainer": trainer, "simulators": {"segment": {"steps": 8}}})
    assert [line.split(";")[0] for line in lines] == [
        f"config: trainer.value_learning_rate is set but algorithm.name is {name}, which has no critic",
        f"config: trainer.critic_warmup_updates is set but algorithm.name is {name}, which has no critic",
        f"config: algorithm.name is {name} but simulators.segment is {{steps: 8}}",
    ]
    assert "set segment to episode" in lines[2] and "set it to null" in lines[0]
    validate(data | {"trainer": trainer | {"value_learning_rate": None, "critic_warmup_updates": None}})


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_group_of_one_row_is_refused(name: str) -> None:
    data = EPISODES | {"algorithm": {"name": name}, "simulators": {"segment": "episode", "envs_per_slot": 1}}
    (line,) = problems_of(data)
    assert line == (
        f"config: algorithm.name is {name} but simulators.envs_per_slot is 1; raise envs_per_slot to at least 2, since "
        "the rows of a slot are compared"
    )
    validate(data | {"algorithm": {"name": "rft"}})


@pytest.mark.parametrize("name", ["ppo", "appo", "grpo", "rloo", "rft"])
def test_a_config_shows_the_options_that_its_algorithm_uses_and_is_read_again_as_the_same(name: str) -> None:
    config = validate(EPISODES | {"algorithm": {"name": name}})
    shown = json.loads(config.model_dump_json())
    assert set(shown["algorithm"]) == config.algorithm.used
    assert ("value_clip" in shown["algorithm"]) is config.algorithm.has_critic
    assert validate(shown) == config and json.loads(validate(shown).model_dump_json()) == shown


def test_no_correction_has_to_be_asked_for_and_is_warned_about_where_data_may_be_old() -> None:
    base = with_value("trainer.segments_per_update", 16) | {"simulators": {"count": 2, "slots": 2}}
    assert notes(validate(base)) == [] and validate(base).algorithm.correction == "decoupled"
    (note,) = notes(validate(base | {"algorithm": {"correction": "none"}}))
    assert "algorithm.correction is none but flow.max_staleness is 1" in note and "set correction to decoupled" in note
    assert notes(validate(base | {"algorithm": {"correction": "none"}, "flow": {"max_staleness": 0}})) == []
    assert notes(validate(base | {"algorithm": {"name": "appo"}})) == []


def test_two_sources_of_first_weights_are_refused() -> None:
    data = with_value("policy.init_from", "runs/a") | {"pretrain": {}}
    (line,) = problems_of(data)
    assert "policy.init_from and pretrain are both set; remove one" in line


def test_a_config_that_works_has_no_problems_and_says_what_deserves_a_sentence() -> None:
    data = with_value("trainer.segments_per_update", 16) | {"simulators": {"count": 2, "slots": 2}}
    config = validate(data)
    assert cross_check(config) == [] and notes(config) == []
    idle = validate(with_value("trainer.segments_per_update", 1))
    assert any("4 slots but only 2 permits" in note for note in notes(idle))
    few = validate(data | {"trainer": {"segments_per_update": 15}})
    assert any("fewer than four times the 4 slots" in note for note in notes(few))
    in_order = validate(data | {"trainer": {"segments_per_update": 15}, "flow": {"order": "ticket"}})
    assert notes(in_order) == []


# ---- what follows from it


def test_derived_numbers() -> None:
    config = validate(MINIMAL | {"name": "a", "simulators": {"count": 3, "env_batches": 2, "slots": 4}})
    assert config.run_dir == Path("runs/a")
    assert (config.chunk_steps_per_episode, config.segment_steps, config.slots_in_all) == (10, 16, 24)


@pytest.mark.parametrize(("eta", "given", "limit"), [(0, None, 2), (1, None, 4), (2, None, 6), (2, 3, 3), (0, 0, 0)])
def test_the_stale_limit_is_two_eta_plus_two_unless_given(eta: int, given: int | None, limit: int) -> None:
    config = validate(MINIMAL | {"flow": {"max_staleness": eta, "stale_limit": given}})
    assert config.flow.stale_limit_versions == limit


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "a{b", "x" * 65, "a:b", "a\n"])
def test_a_run_name_that_could_not_be_a_key_or_a_folder_is_refused(name: str) -> None:
    assert problems_of(MINIMAL | {"name": name})[0].startswith(f"config: name is {name!r}, expected")


def test_every_field_of_every_section_has_a_sentence() -> None:
    def fields(model: type[Section]) -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if field.description is None and not str(field.annotation).count("vla_stream."):
                found.append(f"{model.__name__}.{name}")
        return found

    sections = [Config, *Section.__subclasses__()]
    modules = {"vla_stream.config", "vla_stream.algorithm", "vla_stream.sections"}
    assert [name for section in sections if section.__module__ in modules for name in fields(section)] == []


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        validate(MINIMAL).updates = 0  # type: ignore[misc]
