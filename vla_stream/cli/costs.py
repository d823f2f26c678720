"""What the stages of a run take, from the metrics that its workers wrote, never from options. Pure. Times are in ms.

chunk, reset     simulators: from sending a chunk to a batch's processes to their answer; mean and spread
infer            generators: least squares of a + b·rows over all inferences, those of the warm-up too
way              of a request: from the end of its chunk into the stream, out of it into a batch, and its reply's
                 way back; what it waited for a free device is no part of it
fit              to train one segment on one device: in streaming one segment per update is timed alone, else the
                 update's end, less its optimiser steps; a short run of `plan` is not streaming, since a segment
                 alone is timed to a tenth, and all of them to a hundredth
read, a_pass     the trainer, for one segment: reading it, which rank 0 does for all; its passes without gradients, in
                 one process
publish, swap    from an update's end to its commit; what new weights cost a generator between two batches
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from vla_stream import plugins
from vla_stream.batching import Strategy
from vla_stream.cli.pulse import ROLES
from vla_stream.cli.samples import Record, number
from vla_stream.config import Config
from vla_stream.errors import InputError
from vla_stream.model import Stages, lognormal

FEWEST_UPDATES = 4  # until the second one much is still beginning


@dataclass(frozen=True, slots=True)
class Placement:
    """Simulator processes, generators (one device each), and devices that train."""

    simulators: int
    generators: int
    trainers: int

    @property
    def devices(self) -> int:
        return self.generators + self.trainers

    def __str__(self) -> str:
        return f"{self.simulators} simulators, {self.generators} generators, {self.trainers} to train"


@dataclass(frozen=True, slots=True)
class Costs:
    """See the module. cpu_s: per environment step, by role, and `environment` for simulators' child processes;
    apart: the trainer's devices compute while its process goes on; devices, ranks: that trained when it was measured;
    request_bytes: of a request's observations."""

    chunk: float
    chunk_deviation: float
    reset: float
    resets: float
    steps: float
    env_steps: float
    infer_batch: float
    infer_row: float
    way: float
    swap: float
    fit: float
    read: float
    a_pass: float
    apart: bool
    optimiser_step: float
    optimiser_steps: int
    publish: float
    devices: int
    ranks: int
    cpu_s: Mapping[str, float]
    request_bytes: float
    weights_bytes: float

    def stages(self, config: Config, placement: Placement) -> Stages:
        """Of a run of this config with that placement."""
        s, trainer = config.simulators, config.trainer
        streaming = trainer.update == "streaming"
        # A rank for each device, unless a process has several.
        ranks = self.ranks if self.devices > self.ranks else placement.trainers
        in_a_rank = self.a_pass if self.apart or not streaming else self.a_pass + self.fit
        return Stages(
            batches=placement.simulators * s.env_batches,
            slots=s.slots,
            rows=s.envs_per_slot,
            steps=self.steps,
            env_steps=self.env_steps,
            chunk=lognormal(self.chunk, self.chunk_deviation),
            reset=self.reset,
            resets=self.resets,
            infer_batch=self.infer_batch,
            infer_row=self.infer_row,
            sizes=tuple(config.generators.padded_sizes),
            max_rows=config.generators.max_batch_size,
            segments=trainer.segments_per_update,
            segment=self.fit if streaming else 0.0,
            fit=0.0 if streaming else self.fit,
            host=self.read + in_a_rank / ranks,
            optimiser_step=self.optimiser_step,
            optimiser_steps=trainer.optimiser_steps if streaming else self.optimiser_steps,
            streaming=streaming,
            publish=self.publish,
            swap=self.swap,
            way=self.way,
        )

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "cpu_s": dict(self.cpu_s)}


def rules(config: Config, generators: int) -> list[Strategy]:
    """The batching rule of each generator."""
    made: Callable[[int, float], Strategy] = plugins.load_class(plugins.BATCHING, config.generators.batching)
    return [made(config.generators.max_batch_size, config.generators.max_wait_ms) for _ in range(generators)]


def measured(records: Sequence[Record], config: Config) -> Costs:
    """Of a run of this config, from its second update to its last. Raises InputError: too little of it is there."""
    updates = [record for record in records if record.get("kind") == "update"]
    if len(updates) < FEWEST_UPDATES:
        raise InputError(f"metrics: {len(updates)} updates, expected at least {FEWEST_UPDATES}; let the run go on")
    began, ended = float(updates[1]["time"]), float(updates[-1]["time"])
    seconds = [record for record in records if record.get("kind") == "second"]
    window = [
        r for r in seconds if float(r["time"]) - (number(r, "seconds") or 0.0) > began and float(r["time"]) < ended + 1
    ]
    simulators, generators, trainers = (_Sums(r for r in window if r.get("role") == role) for role in ROLES)
    needed = (("chunks", simulators), ("segments", simulators), ("inferences", generators), ("served", generators))
    for name, found in needed:
        if not found[name]:
            raise InputError(f"metrics: no {name} between update 2 and the last; give more --updates, or a longer run")
    inferences = generators
    if generators.spread == 0:
        # All batches were of one size: what generators tried before their first request tells the others.
        tried = [r for r in seconds if r.get("role") == "generator" and not number(r, "served")]
        inferences = _Sums([r for r in window if r.get("role") == "generator"] + tried)
    infer_batch, infer_row = line(inferences)
    chunk = simulators["chunk_ms"] / simulators["chunks"]
    # The stream's times are whole milliseconds, rounded down: half of one is no wait.
    back = simulators.mean("replies_ms", "replies") - generators.mean("served_ms", "served") + 0.5
    into = 1000 * (generators.spent("read") + generators.spent("collate")) / generators["batches"]
    env_steps = simulators["env_steps"]
    cpu = {role: _Sums(r for r in window if r.get("role") == role).cpu_s / env_steps for role in ROLES}
    training = _training(updates, trainers, config)
    cpu["trainer"] *= training["ranks"]  # only rank 0 tells, and the others do no less
    return Costs(
        chunk=chunk,
        chunk_deviation=math.sqrt(max(0.0, simulators["chunk_ms2"] / simulators["chunks"] - chunk**2)),
        reset=simulators.mean("reset_ms", "resets"),
        resets=min(1.0, simulators["slots_reset"] / simulators["segments"]),
        steps=_steps(config, simulators),
        infer_batch=infer_batch,
        infer_row=infer_row,
        way=max(0.0, simulators.mean("sent_ms", "sent") + back + into),
        swap=generators.mean("swaps_ms", "swaps"),
        cpu_s=cpu | {"environment": simulators["environment_cpu_s"] / env_steps},
        request_bytes=sum(simulators.every("bytes.")) / max(1.0, simulators["sent"]),
        **training,
    )


def _training(updates: Sequence[Record], trainers: _Sums, config: Config) -> dict[str, Any]:
    """What concerns the trainer; of its updates the first is left out, which holds what happens once."""
    count, streaming = config.trainer.segments_per_update, config.trainer.update == "streaming"
    last = updates[1:]
    devices, ranks = int(_median(last, "devices")), int(_median(last, "ranks"))
    samples = _median(last, "samples") / count
    step, steps = 1000 * _median(last, "step_s"), round(_median(last, "optimiser_steps"))
    fit = 1000 * samples * median(_ratio(record, "fit_s", "fit_samples") for record in last)
    if streaming:
        # A segment that is timed alone takes a little longer; no device is busier than all of the time.
        periods = [1000 * (float(b["time"]) - float(a["time"])) for a, b in itertools.pairwise(last)]
        most = (median(periods) - steps * step) / count
        fit = min(fit, most) if fit else most  # none is timed alone where all ranks have but one
    a_pass = 0.0 if streaming else 1000 * _median(last, "pass_s") / count * ranks
    return {
        "env_steps": _median(last, "trained_env_steps") / count,
        "fit": fit * devices,
        "read": 1000 * trainers.spent("read") / max(1.0, trainers["segments"]),
        "a_pass": a_pass,
        "apart": _median(last, "apart") > 0,
        "optimiser_step": step,
        "optimiser_steps": steps,
        "publish": 1000 * _median(last, "publish_s"),
        "devices": devices,
        "ranks": ranks,
        "weights_bytes": 1e6 * _median(last, "weights_mb"),
    }


def line(sums: _Sums) -> tuple[float, float]:
    """(a, b) of an inference, neither negative, by what generators count; a is 0 where all were of one size."""
    n, x, y = sums["inferences"], sums["inferred_rows"], sums["inferred_ms"]
    if sums.spread == 0:
        return 0.0, y / x
    slope = max(0.0, (sums["inferred_rows_ms"] - x * y / n) / sums.spread)
    return max(0.0, (y - slope * x) / n), slope


class _Sums(dict[str, float]):
    """Counters of some workers, added up; 0 where nobody counted."""

    def __init__(self, records: Iterable[Record]) -> None:
        super().__init__()
        self.cpu_s = 0.0
        self._spent_s: dict[str, float] = {}
        for record in records:
            seconds = number(record, "seconds") or 0.0
            self.cpu_s += seconds * (number(record, "cpu") or 0.0)
            for name in record:
                value = number(record, name) or 0.0
                if name.startswith("busy."):
                    stage = name.removeprefix("busy.")
                    self._spent_s[stage] = self._spent_s.get(stage, 0.0) + seconds * value
                else:
                    self[name] = self[name] + value

    def __missing__(self, name: str) -> float:
        return 0.0

    @property
    def spread(self) -> float:
        """Σ(rows − mean)² of all inferences; 0 where they were of one size."""
        x, xx = self["inferred_rows"], self["inferred_rows2"]
        spread = xx - x * x / max(1.0, self["inferences"])
        return spread if spread > 1e-6 * xx else 0.0

    def mean(self, total: str, amount: str) -> float:
        return self[total] / self[amount] if self[amount] else 0.0

    def spent(self, stage: str) -> float:
        """Seconds."""
        return self._spent_s.get(stage, 0.0)

    def every(self, prefix: str) -> list[float]:
        return [value for name, value in self.items() if name.startswith(prefix)]


def _steps(config: Config, simulators: _Sums) -> float:
    """Chunk steps of a segment; those that end with their rows are counted."""
    if config.simulators.segment != "episode":
        return float(config.segment_steps)
    return min(float(config.segment_steps), simulators["replies"] / simulators["segments"])


def _median(updates: Sequence[Record], name: str) -> float:
    found = [value for record in updates if (value := number(record, name)) is not None]
    if not found:
        raise InputError(f"metrics: updates tell no `{name}`, expected a run of this release; run it again")
    return median(found)


def _ratio(record: Record, amount: str, of: str) -> float:
    return (number(record, amount) or 0.0) / max(1.0, number(record, of) or 0.0)
