"""Does an environment keep the protocol? Played on a few rows, and answered with the first thing wrong of each kind.

`vla-stream check` runs this on a class of one's own. The pieces that policies/conformance.py needs too are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from vla_stream.environments.chunks import check_result, read_images, reset_checked
from vla_stream.environments.protocol import EnvironmentBatch, Expert, Observations, StepResult
from vla_stream.errors import EnvironmentFailed, InputError

_ROWS = 3
_SHORT = 3  # steps of a short episode
_DEMONSTRATIONS = 8
_STATE_TOLERANCE = 1e-5

Subject = TypeVar("Subject")


class NotConforming(Exception):
    """What is wrong, in one line."""


@dataclass(frozen=True, slots=True)
class Report:
    """problems: name of a check → what is wrong; notes: what was measured, or could not be looked at."""

    problems: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def run_checks(checks: Iterable[Callable[[Subject], str | None]], subject: Subject) -> Report:
    """All of them, whatever the others find. A check returns a note, or raises; what it raises is the problem, but
    for an InputError: then there is nothing to check."""
    report = Report()
    for check in checks:
        try:
            note = check(subject)
        except InputError:
            raise
        except Exception as exc:  # the subject is someone else's code
            told = str(exc) if isinstance(exc, NotConforming) else f"{type(exc).__name__}: {exc}"
            report.problems[check.__name__] = " ".join(told.split())[:500]
        else:
            report.notes.extend([note] if note else [])
    return report


def check_environment(
    make: Callable[[int, int], EnvironmentBatch], rows_per_process: int | None, max_steps: int
) -> Report:
    """make: (rows, max_steps) → a new batch of the class, with the options to be checked; rows_per_process: the
    class's; max_steps: of an episode."""
    return run_checks(
        (
            shapes,
            seeding,
            inactive_rows,
            final_observation,
            success_flag,
            no_shared_buffers,
            bad_action_rejected,
            closing,
        ),
        _Maker(make, min(_ROWS, rows_per_process or _ROWS), max_steps),
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    make: Callable[[int, int], EnvironmentBatch]
    rows: int
    max_steps: int

    @contextmanager
    def batch(self, max_steps: int | None = None) -> Iterator[EnvironmentBatch]:
        """One at a time: a simulator may not bear two in one process."""
        batch = self.make(self.rows, self.max_steps if max_steps is None else max_steps)
        try:
            yield batch
        finally:
            batch.close()


def shapes(maker: _Maker) -> None:
    """Rows, horizon, dtypes and shapes are those that were asked for and specified."""
    with maker.batch() as batch:
        if not isinstance(batch, EnvironmentBatch):
            raise NotConforming("it lacks a part of EnvironmentBatch, see environments/protocol.py")
        if batch.max_steps != maker.max_steps:
            raise NotConforming(f"max_steps is {batch.max_steps}, expected {maker.max_steps} as it was made with")
        low, high = batch.specification.action_low, batch.specification.action_high
        if not low < high:
            raise NotConforming(f"actions range from {low} to {high}, expected an ascending range")
        _reset(batch)
        result = _step(batch, _actions(batch, 0))
        if result.reward.dtype != np.float32:
            raise NotConforming(f"reward is {result.reward.dtype}, expected float32")


def seeding(maker: _Maker) -> None:
    """A row's seed decides all that follows: not its place, its neighbours, or what was before. Other seeds, other
    scenes."""
    with maker.batch() as batch:
        seeds = _seeds(batch)
        first = _play(batch, seeds)
        _expect_same(
            first, _play(batch, seeds), "the same seeds again", "a reset must leave nothing of the last episode"
        )
        moved = [seen.take(np.roll(np.arange(batch.rows), 1)) for seen in _play(batch, np.roll(seeds, -1), shift=-1)]
        _expect_same(first, moved, "the same seeds in other rows", "a row must not depend on its place or neighbours")
        scenes = [first[0].take([0]), *(_reset(batch, seeds + 10 * n).take([0]) for n in range(1, 4))]
        if not any(_difference(scenes[0], scene) for scene in scenes[1:]):
            raise NotConforming("four seeds give the same first observation; the seed must decide the scene")
    with maker.batch() as other:
        _expect_same(first, _play(other, seeds), "the same seeds in a new batch", "the seed alone must decide")


def inactive_rows(maker: _Maker) -> str | None:
    """Rows that are not active, or not reset, stay as they are and hold zeros."""
    with maker.batch() as batch:
        if batch.whole_batch:
            return "whole_batch: rows are never left out, so that was not looked at"
        before = _reset(batch)
        active = np.arange(batch.rows) > 0
        result = _step(batch, _actions(batch, 0), active)
        difference = _difference(before.take([0]), _copy(batch, result.observations).take([0]))
        if difference:
            raise NotConforming(f"a row that is not active moved: {difference}")
        if result.reward[0] or result.terminated[0] or result.truncated[0] or result.success[0]:
            raise NotConforming("a row that is not active has a reward or a flag, expected 0 and False")
        before = _copy(batch, result.observations)
        after = _copy(batch, reset_checked(batch, ~active, _seeds(batch) + 7))
        for row in map(int, np.flatnonzero(active)):
            difference = _difference(before.take([row]), after.take([row]))
            if difference:
                raise NotConforming(f"a row that is not reset changed: {difference}")
    return None


def final_observation(maker: _Maker) -> None:
    """An episode is truncated at max_steps, and shows what is there then: nothing is reset behind one's back.

    What a longer episode shows at that moment is the measure, without state dims that tell the time by max_steps."""
    played: dict[int, list[StepResult]] = {}
    for horizon in (_SHORT, 2 * _SHORT):
        with maker.batch(horizon) as batch:
            _reset(batch)
            running, played[horizon] = np.ones(batch.rows, dtype=bool), []
            for index in range(_SHORT):
                if running.any():
                    result = _step(batch, _actions(batch, index), None if batch.whole_batch else running)
                    played[horizon].append(replace(result, observations=_copy(batch, result.observations)))
                    running &= ~(result.terminated | result.truncated)
            if horizon == _SHORT and running.any():
                raise NotConforming(f"a row goes on after its {_SHORT} steps, expected truncated or terminated")
            if horizon > _SHORT and any(result.truncated.any() for result in played[horizon]):
                raise NotConforming(f"a row is truncated within {_SHORT} of {horizon} steps, expected only at the last")
    for index, (short, long) in enumerate(zip(played[_SHORT], played[2 * _SHORT], strict=False)):
        if index == 0:
            timeless = np.isclose(short.observations.state, long.observations.state, atol=_STATE_TOLERANCE).all(0)
        now, expected = short.observations, long.observations
        difference = _difference(
            replace(now, state=now.state * timeless), replace(expected, state=expected.state * timeless)
        )
        if difference:
            raise NotConforming(
                f"step {index + 1} of {_SHORT} does not show what a longer episode shows there ({difference}); "
                "switch autoreset off, the observation of the last step is needed"
            )


def success_flag(maker: _Maker) -> str | None:
    """The environment's own expert is told that it succeeds."""
    with maker.batch() as batch:
        if not isinstance(batch, Expert):
            return "no expert_actions(): whether success is told was not looked at"
        everyone = np.ones(batch.rows, dtype=bool)
        for first in range(0, _DEMONSTRATIONS, batch.rows):
            _reset(batch, _seeds(batch) + first)
            running, succeeded = everyone.copy(), ~everyone
            while running.any():
                result = _step(batch, batch.expert_actions(), everyone if batch.whole_batch else running)
                succeeded |= running & result.success
                running &= ~(result.terminated | result.truncated)
            if succeeded.any():
                return None
        raise NotConforming(
            f"the expert played {_DEMONSTRATIONS} episodes or more and `success` was never set; set it in the step in "
            "which the task is done"
        )


def no_shared_buffers(maker: _Maker) -> None:
    """What was returned does not change later, and writing into it changes nothing."""
    with maker.batch() as batch:
        seeds = _seeds(batch)
        kept = [(plain, _detached(plain)) for plain in (_plain(batch, seen) for seen in _raw_play(batch, seeds))]
        expected = _play(batch, seeds)
        for observations, copy in kept:
            difference = _difference(observations, copy)
            if difference:
                raise NotConforming(f"an observation changed after it was returned ({difference}); return copies")
        spoilt = []
        for observations in _raw_play(batch, seeds):
            plain = _plain(batch, observations)
            spoilt.append(_detached(plain))
            for array in (plain.state, *plain.images.values()):
                if array.flags.writeable:
                    array[...] = 77
        _expect_same(expected, spoilt, "writing into what was returned", "return copies")


def bad_action_rejected(maker: _Maker) -> None:
    """Actions of another shape, or not finite in an active row, raise EnvironmentFailed."""
    with maker.batch() as batch:
        _reset(batch)
        good = _actions(batch, 0)
        for what, bad in (
            ("an action dim too many", np.concatenate([good, good[:, :1]], axis=1)),
            ("a row too few", good[:-1]),
            ("NaN", np.full_like(good, np.nan)),
            ("infinity", np.full_like(good, np.inf)),
        ):
            try:
                batch.step(bad, np.ones(batch.rows, dtype=bool))
            except EnvironmentFailed:
                continue
            except Exception as exc:
                raise NotConforming(
                    f"actions with {what} raise {type(exc).__name__}, expected EnvironmentFailed"
                ) from exc
            raise NotConforming(f"actions with {what} are executed, expected EnvironmentFailed")


def closing(maker: _Maker) -> None:
    """close() may be called twice."""
    with maker.batch() as batch:
        batch.close()  # and once more when this block ends


def _seeds(batch: EnvironmentBatch) -> np.ndarray:
    return np.arange(1, batch.rows + 1, dtype=np.uint64)


def _actions(batch: EnvironmentBatch, index: int) -> np.ndarray:
    """Half-hearted ones f32[B, A], other ones for every row and step."""
    low, high = batch.specification.action_low, batch.specification.action_high
    middle, half = (low + high) / 2, (high - low) / 4
    random = np.random.default_rng(index).uniform(-half, half, (batch.rows, batch.specification.action_dims))
    return (middle + random).astype(np.float32)


def _reset(batch: EnvironmentBatch, seeds: np.ndarray | None = None) -> Observations:
    everyone = np.ones(batch.rows, dtype=bool)
    return _copy(batch, reset_checked(batch, everyone, _seeds(batch) if seeds is None else seeds))


def _step(batch: EnvironmentBatch, actions: np.ndarray, active: np.ndarray | None = None) -> StepResult:
    result = batch.step(actions, np.ones(batch.rows, dtype=bool) if active is None else active)
    check_result(result, batch.specification, batch.rows)
    return result


def _raw_play(batch: EnvironmentBatch, seeds: np.ndarray, shift: int = 0) -> Iterator[Observations]:
    """A reset and two steps, as returned. shift: rows by which the actions are moved."""
    yield reset_checked(batch, np.ones(batch.rows, dtype=bool), seeds)
    for index in range(2):
        result = _step(batch, np.roll(_actions(batch, index), shift, axis=0))
        yield result.observations
        if (result.terminated | result.truncated).any():
            return


def _play(batch: EnvironmentBatch, seeds: np.ndarray, shift: int = 0) -> list[Observations]:
    return [_copy(batch, observations) for observations in _raw_play(batch, seeds, shift)]


def _plain(batch: EnvironmentBatch, observations: Observations) -> Observations:
    """With images that are read: some simulators render them only now."""
    return read_images(observations, batch.specification)


def _detached(observations: Observations) -> Observations:
    images = {camera: image.copy() for camera, image in observations.images.items()}
    return Observations(images, observations.state.copy(), list(observations.instruction))


def _copy(batch: EnvironmentBatch, observations: Observations) -> Observations:
    return _detached(_plain(batch, observations))


def _expect_same(expected: list[Observations], got: list[Observations], how: str, remedy: str) -> None:
    for index, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        difference = _difference(ours, theirs)
        if difference:
            raise NotConforming(f"{how}: {difference} after {index} steps; {remedy}")


def _difference(ours: Observations, theirs: Observations) -> str:
    """What differs first; empty where nothing does."""
    for camera, image in ours.images.items():
        if not np.array_equal(image, theirs.images[camera]):
            return f"another image {camera}"
    if not np.allclose(ours.state, theirs.state, atol=_STATE_TOLERANCE):
        return f"another state, by {np.abs(ours.state - theirs.state).max():.3g}"
    return "" if list(ours.instruction) == list(theirs.instruction) else "another instruction"
