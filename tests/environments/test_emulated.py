"""The emulated simulator: its times are those of its seeds, and its bytes are real."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vla_stream.emulation import Devices
from vla_stream.environments.chunks import read_images, run_chunk
from vla_stream.environments.emulated import Emulated, lognormal_ms
from vla_stream.environments.protocol import EnvironmentBatch, Observations
from vla_stream.errors import EnvironmentFailed, InputError
from vla_stream.plugins import ENVIRONMENTS, load_class, parse_options


def make(rows: int = 2, max_steps: int = 6, **options: Any) -> Emulated:
    return Emulated(rows, max_steps, parse_options(Emulated, {"image_size": 8, **options}, "environment.options"))


def everywhere(batch: Emulated) -> np.ndarray:
    return np.ones(batch.rows, dtype=bool)


def reset(batch: Emulated, *seeds: int) -> Observations:
    observations = batch.reset(everywhere(batch), np.array(seeds, dtype=np.uint64))
    return read_images(observations, batch.specification)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What batches would have slept since the last look, in ms."""
    slept: list[float] = []
    monkeypatch.setattr(Devices, "compute", lambda self, seconds, asked_s: slept.append(seconds * 1000))
    return slept


def run(batch: Emulated, steps: int, active: list[bool] | None = None) -> None:
    """A chunk of so many steps, and a look at its end."""
    mask = everywhere(batch) if active is None else np.array(active)
    actions = np.zeros((batch.rows, steps, batch.specification.action_dims), dtype=np.float32)
    chunk = run_chunk(batch, actions, mask, ~everywhere(batch), np.zeros(batch.rows, dtype=np.uint64))
    read_images(chunk.observations, batch.specification)


def test_it_offers_the_protocol() -> None:
    assert load_class(ENVIRONMENTS, "emulated") is Emulated
    assert isinstance(make(), EnvironmentBatch)


def test_images_are_of_the_size_asked_for_and_differ_from_step_to_step() -> None:
    batch = make(cameras=["front", "wrist"], image_size=32, state_dims=5, action_dims=3)
    first = reset(batch, 1, 2)
    assert {name: image.shape for name, image in first.images.items()} == dict.fromkeys(
        ("front", "wrist"), (2, 32, 32, 3)
    )
    assert (first.images["front"].dtype, first.state.shape, batch.specification.action_dims) == (np.uint8, (2, 5), 3)
    before = first.images["front"].copy()
    second = batch.step(np.zeros((2, 3), np.float32), everywhere(batch)).observations.images["front"]
    assert (second != before).mean() > 0.9
    np.testing.assert_array_equal(first.images["front"], before)


def test_a_chunk_takes_the_longest_of_its_active_rows_times_step_by_step(slept: list[float]) -> None:
    batch = make(rows=3, step_ms=10.0, step_sigma=0.8)
    reset(batch, 1, 2, 3)
    times = batch._step_ms.copy()
    run(batch, 4)
    run(batch, 2, [True, False, True])
    expected = [times[:, :4].max(axis=0).sum(), times[[0, 2], 4:6].max(axis=0).sum()]
    assert slept == pytest.approx([0, *expected])
    assert expected[0] > times[:, :4].sum(axis=1).max()  # a sum of maxima, not a maximum of sums


def test_a_seed_decides_the_times_of_a_whole_episode_in_any_row(slept: list[float]) -> None:
    batch, other = make(rows=3, step_ms=10.0, step_sigma=0.8), make(rows=1, step_ms=10.0, step_sigma=0.8)
    reset(batch, 1, 2, 3)
    reset(other, 3)
    np.testing.assert_array_equal(batch._step_ms[2], other._step_ms[0])
    assert len(np.unique(batch._step_ms)) == batch._step_ms.size


def test_the_times_have_the_mean_and_spread_asked_for() -> None:
    times = lognormal_ms(np.random.default_rng(0), 8.8, 1.077, 200_000)
    assert times.mean() == pytest.approx(8.8, rel=0.02) and np.log(times).std() == pytest.approx(1.077, rel=0.01)
    assert set(lognormal_ms(np.random.default_rng(0), 8.8, 0.0, 3)) == {8.8}


def test_a_reset_takes_its_time_once_for_all_rows_and_a_row_on_a_device_adds_its_own(slept: list[float]) -> None:
    batch = make(rows=4, step_ms=5.0, row_ms=10.0, reset_ms=40.0)
    reset(batch, 1, 2, 3, 4)
    run(batch, 1, [True, True, False, True])
    batch.reset(~everywhere(batch), np.zeros(4, dtype=np.uint64)).take([0])
    assert slept == pytest.approx([40, 5 + 3 * 10, 0])


def test_time_is_waited_for_when_an_image_is_read_and_only_once(slept: list[float]) -> None:
    batch = make(step_ms=60.0)
    reset(batch, 1, 2)
    observations = batch.step(np.zeros((2, 7), np.float32), everywhere(batch)).observations
    assert slept == [0]
    observations.take([0])
    observations.take([1])
    assert slept == [0, 60, 0]


def test_the_time_of_a_chunk_runs_from_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(Devices, "compute", lambda self, seconds, asked_s: asked.append(asked_s))
    batch = make(step_ms=1.0)
    reset(batch, 1, 2)
    before_s = time.monotonic()
    batch.step(np.zeros((2, 7), np.float32), everywhere(batch))
    after_s = time.monotonic()
    batch.step(np.zeros((2, 7), np.float32), everywhere(batch)).observations.take([0])
    assert before_s <= asked[-1] <= after_s


def test_a_step_really_takes_its_time() -> None:
    batch = make(step_ms=10.0)
    reset(batch, 1, 2)
    start_s = time.monotonic()
    run(batch, 5)
    assert time.monotonic() - start_s >= 0.05


def test_a_row_ends_after_max_steps_terminated_with_the_success_of_its_seed() -> None:
    batch = make(rows=64, max_steps=2)
    batch.reset(everywhere(batch), np.arange(64, dtype=np.uint64))
    actions = np.zeros((64, 7), np.float32)
    first, last = (batch.step(actions, everywhere(batch)) for _ in range(2))
    assert not first.terminated.any() and last.terminated.all() and not last.truncated.any()
    assert 16 < last.success.sum() < 48
    np.testing.assert_array_equal(last.reward, last.success.astype(np.float32))
    with pytest.raises(EnvironmentFailed, match="row that is not running; reset it"):
        batch.step(actions, everywhere(batch))


def test_batches_on_devices_take_one_each(tmp_path: Path) -> None:
    options: dict[str, Any] = {"devices": ["0", "1"], "folder": str(tmp_path)}
    first, second = make(**options), make(**options)
    assert [batch._devices.names for batch in (first, second)] == [("0",), ("1",)]
    with pytest.raises(InputError, match="each of 0, 1 has its simulator already"):
        make(**options)
    first.close()
    assert make(**options)._devices.names == ("0",)


def test_the_batches_that_come_first_are_the_stragglers(tmp_path: Path, slept: list[float]) -> None:
    options: dict[str, Any] = {"stragglers": 1, "straggler_factor": 5.0, "folder": str(tmp_path), "step_ms": 10.0}
    batches = [make(**options) for _ in range(2)]
    for batch in batches:
        reset(batch, 1, 2)
        run(batch, 2)
    assert slept == pytest.approx([0, 100, 0, 20])


@pytest.mark.parametrize("options", [{"devices": ["a/b"]}, {"devices": [""]}, {"cameras": []}, {"step_ms": -1.0}])
def test_nonsense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        make(**options)
