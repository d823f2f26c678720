"""An evaluator whose connection to the server drops at the worst moments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from fake_policies import Linear
from fakes import Line
from live_run import Run

from vla_stream.broker.connection import UNREACHABLE
from vla_stream.cli.held_out import Places, _Session, config_for
from vla_stream.config import Config
from vla_stream.learning import checkpoint
from workers.evaluator import Evaluator
from workers.inline import Actors


def save(folder: Path, update: int) -> Path:
    torch.manual_seed(update)
    policy = Linear(Linear.Options(), Line(1, 12, Line.Options()).specification, 2)
    return checkpoint.save(folder, update, update + 1, policy.state_dict(), {}, {"trained": 0, "skipped": 0})


class Drops:
    """The answer to each `one_in`-th call is lost."""

    def __init__(self, call: Callable[..., Any], one_in: int) -> None:
        self.call, self.one_in, self.calls, self.lost = call, one_in, 0, 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        answer = self.call(*arguments, **options)
        self.calls += 1
        if self.calls % self.one_in == 0:
            self.lost += 1
            raise UNREACHABLE[0]("dropped")
        return answer


def evaluated(run: Run, places: list[Path], one_in: int) -> tuple[list[list[float]], list[Drops]]:
    """Returns of each place's episodes, in a run whose evaluator loses answers; one_in 0: loses none."""
    base = run.config()
    flags: dict[str, Any] = {"whole_batch": False, "episodes": 9, "seed": 1, "sample": False, "replace": {}}
    config: Config = config_for(base, beside=True, **flags)
    other = Run(run.url, f"{config.name}-{one_in}", run.folder, run.client)
    config = config.model_copy(update={"name": other.name})
    assert other.flow.create(config)
    other.shm.mkdir(mode=0o700)
    actors, found, drops = Actors(config, run.url), list[list[float]](), list[Drops]()
    try:
        specification = actors.open()
        evaluator = Evaluator(actors.worker("evaluator"), config, specification)
        actors.make_generator()
        for place in places:
            again(lambda place=place: evaluator.begin(place))  # type: ignore[misc]
            if one_in and not drops:  # the first take-over is answered, else the evaluation begins anew
                for owner, name in (
                    (evaluator.flow, "commit"),
                    (evaluator.flow, "state"),
                    (evaluator.flow, "miss"),
                    (evaluator.intake.queue, "read"),
                    (evaluator.intake.queue, "recover"),
                    (evaluator.intake, "remove_payloads"),
                ):
                    drops.append(Drops(getattr(owner, name), one_in))
                    setattr(owner, name, drops[-1])
            for _ in range(2000):
                again(actors.step, most=1)  # it beats, too
                again(lambda: evaluator.step(None), most=1)
                if evaluator.done:
                    break
            assert evaluator.done
            found.append(evaluator.outcomes.returns.tolist())
    finally:
        actors.close()
        other.close()
    return found, drops


def again(call: Callable[[], object], most: int = 20) -> None:
    for _ in range(most):
        try:
            call()
            return
        except UNREACHABLE:
            pass
    assert most == 1, "it never comes through"


def test_answers_that_are_lost_change_no_outcome(run: Run, tmp_path: Path) -> None:
    places = [save(tmp_path / "checkpoints", update) for update in (1, 2, 3)]
    expected, _ = evaluated(run, places, 0)
    found, drops = evaluated(run, places, 2)
    assert found == expected and len({tuple(one) for one in found}) == 3
    assert all(drop.lost for drop in drops if drop.call.__name__ != "miss")


def test_a_checkpoint_whose_beginning_is_cut_off_is_begun_again() -> None:
    begun = list[Path]()

    class Stub:
        done = False

        def begin(self, place: Path) -> None:
            begun.append(place)
            if len(begun) == 1:
                raise UNREACHABLE[0]("dropped")

        def step(self, block_ms: int | None) -> None:
            raise AssertionError("it steps")

    place = Path("000040")
    session = _Session(cast(Any, None), Places([place]), cast(Any, None), cast(Any, None))
    session.evaluator = cast(Any, Stub())
    with pytest.raises(UNREACHABLE):
        session._step(cast(Any, None), None)
    assert session.place is None and not session._over
    with pytest.raises(AssertionError, match="it steps"):
        session._step(cast(Any, None), None)
    assert begun == [place, place]
