"""The best placement of a run on some devices and cores, by the model of the pipeline and measured costs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from vla_stream.cli.costs import Costs, Placement, rules
from vla_stream.config import Config, rank_problems
from vla_stream.model import simulate

NEARLY = 0.99  # of the best: fewer simulators that give as much are better
UPDATES, WARM_UP = 16, 4  # of a simulation


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a placement gives. alone: what each part could do, environment steps per second, if only it took time."""

    placement: Placement
    steps_per_s: float
    alone: Mapping[str, float]

    @property
    def loads(self) -> dict[str, float]:
        """Of each part: at work for this share of the time."""
        return {part: self.steps_per_s / most for part, most in self.alone.items()}

    @property
    def bottleneck(self) -> str:
        return max(self.loads, key=lambda part: self.loads[part])


def alone(costs: Costs, config: Config, placement: Placement, cores: float) -> dict[str, float]:
    """Environment steps per second of each part of a placement, if only it took time; no order of work gives more."""
    stages = costs.stages(config, placement)
    full = max(1, stages.requests)
    inference = stages.infer(full * stages.rows) / full
    a_segment = stages.resets * stages.reset
    # A batch's slots go together: each chunk after one inference at least.
    a_segment += stages.steps * (costs.chunk + costs.way + stages.infer(stages.rows))
    slots = min(stages.batches * stages.slots, (1 + config.flow.max_staleness) * stages.segments)
    cpu_s = sum(costs.cpu_s.values())
    return {
        "simulators": 1000 * slots * costs.env_steps / a_segment,
        "generators": 1000 * placement.generators * costs.env_steps / (costs.steps * inference),
        "training": 1000 * stages.segments * costs.env_steps / stages.train(placement.trainers),
        "cores": cores / cpu_s if cpu_s else math.inf,
    }


def outlook(costs: Costs, config: Config, placement: Placement, cores: float) -> Outlook:
    """What this placement gives."""
    found = simulate(
        costs.stages(config, placement),
        rules(config, placement.generators),
        placement.trainers,
        max_staleness=config.flow.max_staleness,
        updates=UPDATES,
        warm_up=WARM_UP,
    )
    parts = alone(costs, config, placement, cores)
    return Outlook(placement, min(found.steps_per_s, parts["cores"]), parts)


def most_simulators(config: Config) -> int:
    """More of them never have a permit at the same time."""
    s = config.simulators
    permits = (1 + config.flow.max_staleness) * config.trainer.segments_per_update
    return max(1, math.ceil(permits / (s.env_batches * s.slots)))


def may_train(costs: Costs, config: Config, devices: int) -> bool:
    """Whether so many can: of ranks with a device each, an update's segments are equal parts."""
    if devices == 1 or costs.devices > costs.ranks:
        return True
    trainer = config.trainer.model_copy(update={"device": "auto", "record_every": 0})  # what a person may well change
    return not rank_problems(config.model_copy(update={"trainer": trainer}), devices)


def best(costs: Costs, config: Config, devices: int, cores: float) -> list[Outlook]:
    """The best placements on so many devices, one per number of generators, best first; those are left out that cannot
    be the best, whatever the order of work. Each has the fewest simulators that give nearly all it can give."""
    most = most_simulators(config)
    candidates = [
        Placement(most, generators, max(n for n in range(1, devices - generators + 1) if may_train(costs, config, n)))
        for generators in range(1, devices)
    ]

    def limit(placement: Placement) -> float:
        return min(alone(costs, config, placement, cores).values())

    found: list[Outlook] = []
    for placement in sorted(candidates, key=limit, reverse=True):
        if found and limit(placement) < max(outlook.steps_per_s for outlook in found):
            break
        found.append(outlook(costs, config, placement, cores))
    found.sort(key=lambda outlook: outlook.steps_per_s, reverse=True)
    return [_fewest(costs, config, one, cores) for one in found]


def _fewest(costs: Costs, config: Config, full: Outlook, cores: float) -> Outlook:
    """Bisection: more simulators never give much less."""
    low, high, found = 0, full.placement.simulators, full
    while high - low > 1:
        middle = (low + high) // 2
        tried = replace(full.placement, simulators=middle)
        if min(alone(costs, config, tried, cores).values()) >= NEARLY * full.steps_per_s:
            seen = outlook(costs, config, tried, cores)
            if seen.steps_per_s >= NEARLY * full.steps_per_s:
                high, found = middle, seen
                continue
        low = middle
    return found


def one_more(costs: Costs, config: Config, of: Outlook, cores: float) -> Iterator[tuple[str, Outlook]]:
    """What one more of each gives: a simulator, a generator with its device, a device to train (or as many as make
    equal parts again), a core."""
    at = of.placement
    yield "simulator", outlook(costs, config, replace(at, simulators=at.simulators + 1), cores)
    yield "generator", outlook(costs, config, replace(at, generators=at.generators + 1), cores)
    segments = config.trainer.segments_per_update
    more = next((n for n in range(at.trainers + 1, segments + 1) if may_train(costs, config, n)), None)
    if more is not None:
        name = "device to train" if more == at.trainers + 1 else f"device to train, and others, so that {more} do"
        yield name, outlook(costs, config, replace(at, trainers=more), cores)
    yield "core", outlook(costs, config, at, cores + 1)
