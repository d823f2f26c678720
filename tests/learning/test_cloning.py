"""The warm start: demonstrations, their file, and the training on them, with a toy world and with the tabletop."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
import yaml
from pydantic import BaseModel

from vla_stream.cli.evaluate import word_replacement
from vla_stream.config import Pretrain
from vla_stream.environments.protocol import EnvironmentBatch, Observations, Specification, StepResult
from vla_stream.environments.tabletop import Tabletop
from vla_stream.errors import InputError
from vla_stream.evaluation import evaluate, replacer
from vla_stream.learning.cloning import (
    Demonstrations,
    Scenes,
    collect_demonstrations,
    collect_scenes,
    load_demonstrations,
    save_demonstrations,
    warm_start,
)
from vla_stream.policies.tiny import Tiny

CHUNK = 3


class Line:
    """A point on a line that walks to 0: the expert's step is −place, at most 1. Success within .2 of 0."""

    Options: ClassVar[type[BaseModel]] = BaseModel
    rows_per_process: ClassVar[int | None] = None
    whole_batch: ClassVar[bool] = False

    def __init__(self, rows: int, max_steps: int = 12, start: float = 2.9) -> None:
        self.rows, self.max_steps, self.start = rows, max_steps, start
        self.specification = Specification({"eye": (16, 16)}, state_dims=2, action_dims=1)
        self.place, self.steps = np.zeros(rows, np.float32), np.zeros(rows, np.int64)
        self.executed: list[np.ndarray] = []

    def look(self) -> Observations:
        images = {
            "eye": np.broadcast_to(
                (self.place * 20 + 100).astype(np.uint8)[:, None, None, None], (self.rows, 16, 16, 3)
            )
        }
        state = np.stack([self.place, np.full(self.rows, 7.0, np.float32)], axis=1)
        return Observations(images, state, [f"walk {row % 2}" for row in range(self.rows)])

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        for row in np.flatnonzero(mask):
            self.place[row] = np.random.default_rng(int(seeds[row])).uniform(2.3, self.start)
            self.steps[row] = 0
        return self.look()

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        assert active.all() or not self.whole_batch
        self.executed.append(actions.copy())
        self.place = np.where(active, self.place + actions[:, 0], self.place).astype(np.float32)
        self.steps += active
        success = active & (np.abs(self.place) < 0.2)
        truncated = active & ~success & (self.steps >= self.max_steps)
        return StepResult(self.look(), success.astype(np.float32), success, truncated, success)

    def expert_actions(self) -> np.ndarray:
        return np.clip(-self.place, -1, 1)[:, None].astype(np.float32)

    def grounding_targets(self) -> np.ndarray:
        return np.stack([self.place / 3, np.zeros(self.rows)], axis=1).astype(np.float32)

    def close(self) -> None:
        pass


class WholeLine(Line):
    whole_batch = True


class Mute:
    """An environment without an expert and without grounding."""

    Options: ClassVar[type[BaseModel]] = BaseModel
    rows_per_process: ClassVar[int | None] = None
    whole_batch: ClassVar[bool] = False
    specification = Specification({}, 1, 1)
    rows, max_steps = 1, 4

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        return Observations({}, np.zeros((1, 1), np.float32), ["wait"])

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        raise AssertionError("nobody should step it")

    def close(self) -> None:
        pass


def collect(batch: EnvironmentBatch, episodes: int = 5, noise: float = 0.2, seed: int = 3) -> Demonstrations:
    return collect_demonstrations(batch, episodes, noise, CHUNK, seed)


def make_policy(specification: Specification, chunk: int = CHUNK) -> Tiny:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return Tiny(Tiny.Options(words=6), specification, chunk)


def assert_equal(first: Observations, second: Observations) -> None:
    assert set(first.images) == set(second.images)
    for camera in first.images:
        np.testing.assert_array_equal(first.images[camera], second.images[camera])
    np.testing.assert_array_equal(first.state, second.state)
    assert list(first.instruction) == list(second.instruction)


def test_labels_are_what_the_expert_says_at_each_moment_and_the_noise_is_only_executed() -> None:
    batch = Line(1)
    demonstrations = collect(batch, episodes=1)
    place = demonstrations.observations.state[:, 0]
    np.testing.assert_allclose(demonstrations.actions[:, 0, 0], np.clip(-place, -1, 1))
    np.testing.assert_allclose(demonstrations.actions[:-1, 1, 0], np.clip(-place[1:], -1, 1))
    executed = np.concatenate(batch.executed)[:, 0]
    np.testing.assert_allclose(np.diff(place), executed[:-1], atol=1e-6)
    assert not np.allclose(executed, demonstrations.actions[:, 0, 0])
    assert np.abs(executed).max() <= 1.0


def test_without_noise_the_labels_are_executed() -> None:
    batch = Line(1)
    demonstrations = collect(batch, episodes=1, noise=0.0)
    np.testing.assert_array_equal(np.concatenate(batch.executed), demonstrations.actions[:, 0])


def test_chunks_end_with_their_episode() -> None:
    demonstrations = collect(Line(2), episodes=2, noise=0.0)
    starts = np.flatnonzero(np.diff(demonstrations.observations.state[:, 0]) > 0) + 1
    (last,) = starts - 1  # of the first episode
    assert demonstrations.valid[last].tolist() == [True, False, False]
    assert demonstrations.valid[last - 1].tolist() == [True, True, False]
    assert demonstrations.valid[-1].tolist() == [True, False, False]
    assert demonstrations.valid[0].all()
    assert not demonstrations.actions[~demonstrations.valid].any()


@pytest.mark.parametrize("kind", [Line, WholeLine])
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_demonstrations_do_not_depend_on_the_rows_they_are_collected_with(kind: type[Line], rows: int) -> None:
    one, many = collect(Line(1)), collect(kind(rows))
    np.testing.assert_array_equal(one.observations.state, many.observations.state)
    np.testing.assert_array_equal(one.actions, many.actions)
    np.testing.assert_array_equal(one.valid, many.valid)
    assert (one.episodes, one.successes) == (many.episodes, many.successes) == (5, 5)


def test_another_seed_gives_other_demonstrations() -> None:
    assert not np.array_equal(collect(Line(1)).observations.state[0], collect(Line(1), seed=4).observations.state[0])


def test_demonstrations_that_all_fail_are_an_error() -> None:
    with pytest.raises(InputError, match="none of 5 demonstrations succeeded"):
        collect(Line(2, max_steps=1))


def test_an_environment_without_expert_or_grounding_is_named() -> None:
    with pytest.raises(InputError, match="Mute has no expert_actions"):
        collect(Mute())
    with pytest.raises(InputError, match=r"Mute has no grounding_targets.*grounding_scenes to 0"):
        collect_scenes(Mute(), 3, seed=0)


def test_scenes_are_first_observations_with_their_targets_whatever_the_rows() -> None:
    one, many = collect_scenes(Line(1), 7, seed=0), collect_scenes(Line(3), 7, seed=0)
    assert len(one) == len(many) == 7
    np.testing.assert_array_equal(one.observations.state, many.observations.state)
    np.testing.assert_allclose(one.targets[:, 0], one.observations.state[:, 0] / 3)
    np.testing.assert_array_equal(one.targets, many.targets)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    demonstrations, scenes = collect(Line(2)), collect_scenes(Line(2), 3, seed=0)
    path = tmp_path / "folder" / "demos.safetensors"
    save_demonstrations(path, demonstrations, scenes, "line")
    loaded, loaded_scenes = load_demonstrations(path, "line", CHUNK, Line(1).specification)
    assert_equal(loaded.observations, demonstrations.observations)
    np.testing.assert_array_equal(loaded.actions, demonstrations.actions)
    np.testing.assert_array_equal(loaded.valid, demonstrations.valid)
    assert (loaded.episodes, loaded.successes) == (5, 5)
    assert isinstance(loaded_scenes, Scenes)
    assert_equal(loaded_scenes.observations, scenes.observations)
    np.testing.assert_array_equal(loaded_scenes.targets, scenes.targets)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_file_without_scenes_gives_none(tmp_path: Path) -> None:
    save_demonstrations(tmp_path / "demos", collect(Line(2)), None, "line")
    assert load_demonstrations(tmp_path / "demos", "line", CHUNK, Line(1).specification)[1] is None


@pytest.mark.parametrize(
    ("environment", "chunk", "specification", "told"),
    [
        ("other", CHUNK, Line(1).specification, "environment.name is line, but this run has other"),
        ("line", 4, Line(1).specification, "policy.chunk is 3, but this run has 4"),
        ("line", CHUNK, Specification({"eye": (32, 32)}, 2, 1), "cameras is"),
        ("line", CHUNK, Specification({"eye": (16, 16)}, 3, 1), "state dims is 2, but this run has 3"),
        ("line", CHUNK, Specification({"eye": (16, 16)}, 2, 5), "action dims is 1, but this run has 5"),
    ],
)
def test_a_file_made_for_something_else_is_refused(
    tmp_path: Path, environment: str, chunk: int, specification: Specification, told: str
) -> None:
    save_demonstrations(tmp_path / "demos", collect(Line(2)), None, "line")
    with pytest.raises(InputError, match=told):
        load_demonstrations(tmp_path / "demos", environment, chunk, specification)


@pytest.mark.parametrize("content", [None, b"", b"not a file of ours" * 10])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "demos"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="demos: cannot read the demonstrations") as caught:
        load_demonstrations(path, "line", CHUNK, Line(1).specification)
    assert "\n" not in str(caught.value)


def test_warm_start_learns_the_expert_and_sets_the_state_statistics() -> None:
    demonstrations = collect(Line(4), episodes=20)
    policy = make_policy(Line(1).specification)
    loss = policy.imitation_loss(demonstrations.observations, demonstrations.actions, demonstrations.valid)
    first = float(loss.detach())
    metrics = warm_start(policy, demonstrations, None, Pretrain(steps=60, batch=32, learning_rate=3e-3))
    assert metrics["imitation_loss"] < first / 20
    assert metrics["expert_success"] == 1.0
    np.testing.assert_allclose(policy.state_mean.numpy(), demonstrations.observations.state.mean(0), rtol=1e-5)
    assert policy.state_std[1] == 1.0  # this dim is always 7


def test_warm_start_leaves_the_std_as_configured() -> None:
    policy = make_policy(Line(1).specification)
    before = policy.log_std.detach().clone()
    warm_start(policy, collect(Line(4)), None, Pretrain(steps=3, batch=8))
    torch.testing.assert_close(policy.log_std.detach(), before)


def test_warm_start_is_the_same_every_time_and_another_seed_changes_it() -> None:
    demonstrations, scenes = collect(Line(4)), collect_scenes(Line(4), 20, seed=0)
    results = []
    for seed in (1, 1, 2):
        policy = make_policy(Line(1).specification)
        warm_start(policy, demonstrations, scenes, Pretrain(seed=seed, steps=5, batch=8, grounding_steps=5))
        results.append(torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_warm_start_tells_its_progress() -> None:
    told: list[tuple[str, int, int]] = []
    demonstrations, scenes = collect(Line(4)), collect_scenes(Line(4), 20, seed=0)
    pretrain = Pretrain(steps=60, batch=8, grounding_steps=10)
    warm_start(make_policy(Line(1).specification), demonstrations, scenes, pretrain, lambda *now: told.append(now))
    assert told == [("grounding", 10, 10), ("cloning", 50, 60), ("cloning", 60, 60)]


def test_grounding_teaches_the_tabletop_policy_to_see_the_named_cube() -> None:
    batch = Tabletop(16, 40, Tabletop.Options())
    scenes, held_out = collect_scenes(batch, 256, seed=0), collect_scenes(batch, 64, seed=1)
    demonstrations = collect_demonstrations(batch, 2, 0.0, 4, seed=0)
    policy = make_policy(batch.specification, chunk=4)
    before = float(policy.grounding_loss(held_out.observations, held_out.targets).detach())
    warm_start(policy, demonstrations, scenes, Pretrain(steps=1, grounding_steps=150, batch=32))
    after = float(policy.grounding_loss(held_out.observations, held_out.targets).detach())
    assert after < before / 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_quick_start_begins_mediocre_and_already_listens_to_the_colour() -> None:
    quickstart = yaml.safe_load((Path(__file__).parents[2] / "configs" / "quickstart.yaml").read_text())
    pretrain, chunk = Pretrain.model_validate(quickstart["pretrain"]), quickstart["policy"]["chunk"]
    batch = Tabletop(50, quickstart["environment"]["max_steps"], Tabletop.Options())
    torch.set_num_threads(1)
    torch.manual_seed(pretrain.seed)
    policy = Tiny(Tiny.Options.model_validate(quickstart["policy"]["options"]), batch.specification, chunk)
    demonstrations = collect_demonstrations(batch, pretrain.episodes, pretrain.action_noise, chunk, pretrain.seed)
    warm_start(policy, demonstrations, collect_scenes(batch, pretrain.grounding_scenes, pretrain.seed), pretrain)
    held_out = range(10_000_000, 10_000_200)
    assert 0.3 <= evaluate(policy, batch, chunk, held_out).success.mean() <= 0.6
    other_colour = replacer(word_replacement("red=green,green=blue,blue=red"))
    assert evaluate(policy, batch, chunk, held_out, other_colour).success.mean() < 0.1
