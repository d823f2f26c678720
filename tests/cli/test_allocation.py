"""Numbers of workers by where the time goes, in a world whose rates are known, from records with given times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from vla_stream.cli.allocation import AGAIN_S, Allocator
from vla_stream.cli.main import call
from vla_stream.cli.samples import Record
from vla_stream.config import Allocation, load
from vla_stream.errors import InputError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
START_S = 4.0  # that a new worker takes until it works


@dataclass
class World:
    """Environment steps per second that one simulator, one generator and the trainer can make; `processors`: all
    simulators. A step of a slot waits `answer` of its time for a generator that is free."""

    simulator: float = 100.0
    generator: float = 200.0
    trainer: float = 1000.0
    processors: float = 1e9
    answer: float = 0.3

    def rate(self, counts: Mapping[str, int]) -> float:
        asked = min(counts["simulator"] * self.simulator, self.processors)
        return min(asked, counts["generator"] * self.generator, self.trainer)

    def records(self, time: float, counts: Mapping[str, int]) -> list[Record]:
        rate = self.rate(counts)
        generator, trainer = rate / (counts["generator"] * self.generator), rate / self.trainer
        # Where processors are the limit, steps take longer.
        stepping = (1 - self.answer) * rate / min(counts["simulator"] * self.simulator, self.processors)
        held = 1 - self.answer - stepping if trainer >= 1 else 0.0
        asked = 1 - stepping - held
        about = {"time": time, "kind": "second", "seconds": 1.0}
        found: list[Record] = [
            {**about, "worker": f"simulator-{i}", "role": "simulator", "env_steps": rate / counts["simulator"]}
            | {"busy.stepping": stepping, "busy.asked": asked, "busy.held": held}
            for i in range(counts["simulator"])
        ]
        for i in range(counts["generator"]):
            spent = {"busy.infer": generator, "busy.waiting": 1 - generator}
            found.append({**about, "worker": f"generator-{i}", "role": "generator", **spent})
        spent = {"busy.add": trainer, "busy.waiting": 1 - trainer}
        found.append({**about, "worker": "trainer-0", "role": "trainer", **spent})
        found.append({**about, "worker": "trainer-0", "role": "trainer", "kind": "update", "update": int(time)})
        return found


@dataclass
class Life:
    """What became of the numbers, and when."""

    counts: dict[str, int]
    moves: list[tuple[float, str]]

    def moves_after(self, time: float) -> int:
        return sum(at > time for at, _ in self.moves)


def live(world: World, allocator: Allocator, counts: dict[str, int], seconds: int, began: int = 0) -> Life:
    life, running_from = Life(counts, []), began + START_S
    for time in range(began, began + seconds):
        allocator.pulse.add(world.records(float(time), life.counts))
        move = allocator.decide(life.counts, time >= running_from)
        if move is not None:
            life.counts, running_from = dict(move.counts), time + START_S
            life.moves.append((float(time), move.why))
    return life


def limits(**changes: int) -> Allocation:
    return Allocation(**({"most_simulators": 16, "most_generators": 8} | changes))


@pytest.mark.parametrize("start", [(1, 1), (16, 1), (1, 8), (2, 5)])
def test_from_any_placement_the_trainer_has_all_it_can_take_within_a_minute_and_then_nothing_moves(
    start: tuple[int, int],
) -> None:
    world = World()
    life = live(world, Allocator(limits()), {"simulator": start[0], "generator": start[1]}, 180)
    assert world.rate(life.counts) >= 0.9 * world.trainer
    assert max((time for time, _ in life.moves), default=0.0) < 60 and life.moves_after(60) == 0, life.moves


def test_what_is_best_already_stays() -> None:
    # 10 simulators and 5 generators are just enough.
    life = live(World(), Allocator(limits()), {"simulator": 10, "generator": 5}, 180)
    assert life.moves == []


def test_limits_are_kept() -> None:
    life = live(World(), Allocator(limits(most_simulators=3, most_generators=2)), {"simulator": 1, "generator": 1}, 120)
    assert life.counts == {"simulator": 3, "generator": 2}


def test_workers_that_bring_nothing_go_again_and_are_not_tried_again_for_a_while() -> None:
    world = World(processors=220.0)  # as of two simulators and a bit
    allocator = Allocator(limits())
    life = live(world, allocator, {"simulator": 3, "generator": 4}, int(AGAIN_S))
    assert life.counts == {"simulator": 3, "generator": 4} and len(life.moves) == 2, life.moves
    assert "back to 4 generators and 3 simulators" in life.moves[1][1]
    later = live(world, allocator, life.counts, 60, began=int(AGAIN_S) + 30)
    assert len(later.moves) == 2


def test_devices_that_both_roles_take_move_from_the_one_that_idles_to_the_one_that_works() -> None:
    world = World(simulator=100.0, generator=300.0, trainer=5000.0)
    life = live(world, Allocator(limits(together=8)), {"simulator": 2, "generator": 6}, 180)
    assert life.counts == {"simulator": 6, "generator": 2} and life.moves_after(60) == 0, life.moves


def test_a_role_that_the_trainer_leaves_idle_gives_workers_back_one_by_one() -> None:
    world = World(trainer=150.0)
    life = live(world, Allocator(limits()), {"simulator": 8, "generator": 8}, 180)
    assert world.rate(life.counts) == world.trainer
    assert life.counts["simulator"] < 6 and life.counts["generator"] <= 3, life.counts


def test_nothing_is_decided_while_a_worker_starts_or_a_role_is_silent() -> None:
    world, allocator = World(), Allocator(limits())
    for time in range(30):
        allocator.pulse.add(world.records(float(time), {"simulator": 1, "generator": 1}))
        assert allocator.decide({"simulator": 1, "generator": 1}, running=False) is None
    silent = Allocator(limits())
    for time in range(30):
        records = world.records(float(time), {"simulator": 1, "generator": 1})
        silent.pulse.add([record for record in records if record["role"] != "trainer"])
        assert silent.decide({"simulator": 1, "generator": 1}, running=True) is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_gets_the_simulators_that_it_lacks_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "updates": 90,
        "environment": {"name": "emulated", "max_steps": 8, "options": {"image_size": 16, "step_ms": 60}},
        "policy": {"name": "emulated", "chunk": 4, "options": {"devices": ["0"], "trainer_devices": ["1"]}},
        "simulators": {"count": 1, "slots": 1, "envs_per_slot": 2, "segment": {"steps": 2}},
        "trainer": {"segments_per_update": 4, "epochs": 1, "critic_warmup_updates": 0, "checkpoint_every": 1000},
        "allocation": {"most_simulators": 3, "most_generators": 1},
        "evaluation": {"episodes": 0},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLA_STREAM_REDIS", raising=False)
    assert call(["run", "mine.yaml", "--run", "grows", "--plain"]) == 0
    shown = capsys.readouterr().out
    # Whether by one or by two at once, and from what is told of its time, depends on what else the machine does.
    assert "instead of 1 generator and 1 simulator: " in shown, shown
    records = [json.loads(line) for line in (tmp_path / "runs/grows/metrics.jsonl").read_text().splitlines()]
    assert {record["worker"] for record in records if record.get("role") == "simulator"} >= {
        f"simulator-{i}" for i in range(3)
    }


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("{most_simulators: 1, most_generators: 2}", "simulators.count is 2 but allocation.least_simulators is 1"),
        ("{most_simulators: 4, most_generators: 2, together: 2}", "simulators.count and generators.count are 3"),
    ],
)
def test_a_run_does_not_begin_outside_of_its_limits(section: str, line: str) -> None:
    with pytest.raises(InputError, match=line):
        load([QUICKSTART], [f"allocation={section}"])
