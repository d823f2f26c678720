"""RoboCasa's adapter, with a double in the simulator's place: the simulator itself was never run here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_stream.environments.conformance import check_environment
from vla_stream.environments.robocasa import CAMERAS, STATE, RoboCasa
from vla_stream.errors import EnvironmentFailed, InputError
from vla_stream.plugins import ENVIRONMENTS, load_class

ONE = np.ones(1, dtype=bool)
SIZES = dict(zip(STATE, (3, 4, 2, 3, 4), strict=True))


class Kitchen:
    """What the adapter touches of a robosuite environment: its state is the sum of all actions, above 3 is success."""

    action_dim = 12

    def __init__(self, **options: Any) -> None:
        self.options, self.closed = options, False
        self.sim = SimpleNamespace(render=self._render)

    def reset(self) -> dict[str, np.ndarray]:
        self.place = self.rng.uniform(-1, 0)
        self.word = ("mug", "apple", "pan")[int(self.rng.integers(3))]
        return self._look()

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        assert np.abs(action).max() <= 1
        self.place += float(action.sum()) / 12
        return self._look(), 0.0, False, {}

    def get_ep_meta(self) -> dict[str, str]:
        return {"lang": f"put the {self.word} away"}

    def close(self) -> None:
        self.closed = True

    def _check_success(self) -> bool:
        return self.place > 3

    def _look(self) -> dict[str, np.ndarray]:
        return {name: np.full(size, self.place) for name, size in SIZES.items()}

    def _render(self, width: int, height: int, camera_name: str) -> np.ndarray:
        image = np.zeros((height, width, 3), dtype=np.uint8)
        image[0] = 100 + 10 * CAMERAS.index(camera_name)  # the bottom row
        return image


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("robocasa", "robosuite", "robosuite.controllers"):
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        module.make = Kitchen
        module.load_composite_controller_config = lambda **named: named
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    yield


def make(max_steps: int = 20, **options: Any) -> RoboCasa:
    return RoboCasa(1, max_steps, RoboCasa.Options(**options))


def test_without_the_simulator_it_says_where_it_was_looked_for() -> None:
    with pytest.raises(InputError, match=r"robosuite is not installed in the environment of .*simulators\.python"):
        RoboCasa.check_installed(RoboCasa.Options())


@pytest.mark.usefixtures("simulator")
def test_the_double_keeps_the_protocol_through_it() -> None:
    assert load_class(ENVIRONMENTS, "robocasa") is RoboCasa
    report = check_environment(lambda rows, steps: RoboCasa(rows, steps, RoboCasa.Options(camera_size=8)), 1, 20)
    assert report.problems == {}


@pytest.mark.usefixtures("simulator")
def test_images_are_upright_success_ends_and_the_sentence_is_the_episodes() -> None:
    env = make(camera_size=8, layout_ids=[1])
    assert env._env.options["layout_ids"] == [1] and env._env.options["env_name"] == "PnPCounterToCab"
    seen = env.reset(ONE, np.array([5], dtype=np.uint64))
    assert [int(seen.images[camera][0, -1, 0, 0]) for camera in CAMERAS] == [100, 110, 120]
    assert not any(seen.images[camera][0, 0].any() for camera in CAMERAS)
    sentences = {env.reset(ONE, np.array([n], dtype=np.uint64)).instruction[0] for n in range(12)}
    assert sentences == {"put the mug away", "put the apple away", "put the pan away"}
    result, rewards = env.step(np.zeros((1, 12), dtype=np.float32), ONE), [0.0]
    while not result.terminated[0]:
        result = env.step(np.full((1, 12), 7, dtype=np.float32), ONE)
        rewards.append(float(result.reward[0]))
    assert result.success[0] and rewards[-1] == 1 and not any(rewards[:-1])
    with pytest.raises(EnvironmentFailed, match="not running"):
        env.step(np.zeros((1, 12), dtype=np.float32), ONE)


@pytest.mark.usefixtures("simulator")
def test_more_rows_than_a_process_can_hold_are_refused() -> None:
    with pytest.raises(InputError, match=r"2 rows.*one process per row"):
        RoboCasa(2, 20, RoboCasa.Options())
