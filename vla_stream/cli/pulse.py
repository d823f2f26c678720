"""How a run does right now, by its workers' records: rates, where each role's time goes, and what holds it up. Pure:
time comes with the records."""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from vla_stream.cli.samples import Record, number

WINDOW_S = 10.0
GONE_S = 60.0
MOST_WORKERS = 1000
MOMENT_S = 1e-3  # no record covers less, whatever it says
ROLES = ("simulator", "generator", "trainer")
# What the stages of a role's meter are to it: work, waiting for what it takes in, being held back from giving more.
WORK = {"simulator": ("stepping",), "generator": ("infer",), "trainer": ("add", "update")}
INPUT = {"simulator": ("asked",), "generator": ("waiting",), "trainer": ("waiting",)}
OUTPUT = {"simulator": ("held",), "generator": (), "trainer": ()}
BUCKET = re.compile(r"(.+)\[(.+)\]")
LIMITS = 0.85  # a role that works for this share of its time is what the run waits for
LITTLE = 0.5


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the time: at work, waiting for input, held back by what comes after. What is missing to 1 went elsewhere."""

    work: float
    input: float
    output: float


class Pulse:
    """The last seconds of a run."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s, self.now_s = window_s, 0.0
        self._began_s: float | None = None
        self._seconds: deque[Record] = deque(maxlen=10 * MOST_WORKERS)  # one per worker and second
        self._last: dict[str, Record] = {}  # of each worker: a trainer in a long update says nothing meanwhile
        self._updates: deque[Record] = deque(maxlen=11)

    def add(self, records: Iterable[Record]) -> None:
        """New records, in the stream's order."""
        for record in records:
            time_s = number(record, "time")
            if time_s is None:
                continue
            self.now_s = max(self.now_s, time_s)
            if record.get("kind") == "update":
                self._updates.append(record)
            elif record.get("role") in ROLES:
                covered_s = number(record, "seconds") or 1.0
                self._began_s = time_s - covered_s if self._began_s is None else self._began_s
                self._seconds.append(record)
                self._last.pop(str(record.get("worker", "")), None)
                self._last[str(record.get("worker", ""))] = record
                while len(self._last) > MOST_WORKERS:
                    del self._last[next(iter(self._last))]
                self._forget_old()  # also where nobody asks for anything

    def advance(self, now_s: float) -> None:
        """It is so late by the server's clock, also when nobody writes records."""
        self.now_s = max(self.now_s, now_s)

    def rate(self, role: str, metric: str) -> float:
        """Per second, of all workers of a role, for example `rate("simulator", "env_steps")`."""
        if self._began_s is None:
            return 0.0
        covered_s = max(1.0, min(self.window_s, self.now_s - self._began_s))
        return sum(number(record, metric) or 0.0 for record in self._recent() if record["role"] == role) / covered_s

    def updates_per_s(self) -> float | None:
        """Over the last ten updates."""
        return self._per_update_second("update", counted=False)

    def trained_per_s(self) -> float | None:
        """Environment steps that updates consumed, per second, over the last ten."""
        return self._per_update_second("trained_env_steps", counted=True)

    def mean(self, role: str, metric: str, weight: str | None = None) -> float | None:
        """Of all workers of a role, weighted by another metric (`mean("generator", "fill", "batches")`)."""
        total = weights = 0.0
        for record in self._recent():
            value = number(record, metric)
            if record["role"] == role and value is not None:
                share = 1.0 if weight is None else number(record, weight) or 0.0
                total, weights = total + share * value, weights + share
        return total / weights if weights else None

    def histogram(self, metric: str) -> dict[str, float]:
        """Observations per bucket, by its upper bound, in their order."""
        counts: Counter[str] = Counter()
        for record in [*self._recent(), *self._updates]:
            for name in record:
                base, _, bound = name.partition("[")
                if base == metric and is_bucket(name):
                    counts[bound.rstrip("]")] += int(number(record, name) or 0)
        return {bound: counts[bound] for bound in sorted(counts, key=_bound)}

    def shares(self) -> dict[str, Shares]:
        """Of each worker, by its name: over the window, or as its last record said."""
        spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        seconds: dict[str, float] = defaultdict(float)
        roles: dict[str, str] = {}
        recent = [record for record in self._recent() if record.get("worker", "") in self._last]
        heard = {record.get("worker", "") for record in recent}
        silent = [last for worker, last in self._last.items() if worker not in heard and not self._gone(last)]
        for record in [*recent, *silent]:
            worker = str(record.get("worker", ""))
            covered_s = max(MOMENT_S, number(record, "seconds") or 1.0)
            seconds[worker], roles[worker] = seconds[worker] + covered_s, str(record["role"])
            for name in record:
                if name.startswith("busy."):
                    spent[worker][name.removeprefix("busy.")] += covered_s * (number(record, name) or 0.0)

        def share(worker: str, stages: Mapping[str, tuple[str, ...]]) -> float:
            spent_s = sum(spent[worker][stage] for stage in stages[roles[worker]])
            return min(1.0, max(0.0, spent_s / seconds[worker]))

        return {worker: Shares(share(worker, WORK), share(worker, INPUT), share(worker, OUTPUT)) for worker in roles}

    def role_shares(self) -> dict[str, Shares]:
        """The mean of each role's workers."""
        found: dict[str, list[Shares]] = defaultdict(list)
        for worker, shares in self.shares().items():
            found[str(self._last[worker]["role"])].append(shares)
        return {
            role: Shares(fmean(s.work for s in all_), fmean(s.input for s in all_), fmean(s.output for s in all_))
            for role, all_ in ((role, found[role]) for role in ROLES if found[role])
        }

    def last(self, worker: str) -> Record:
        """Its newest record; empty when it has not been heard of."""
        return self._last.get(worker, {})

    def bottleneck(self) -> str:
        """What the run waits for, in words; empty as long as a role is missing."""
        shares = self.role_shares()
        if set(shares) != set(ROLES):
            return ""
        busiest = max(ROLES, key=lambda role: shares[role].work)
        work = {role: _percent(shares[role].work) for role in ROLES}
        simulator, generator, trainer = (shares[role] for role in ROLES)
        if busiest == "trainer" and trainer.work >= LIMITS:
            held = f"simulators are held back {_percent(simulator.output)} of it"
            return f"the trainer is the limit: at work {work['trainer']} of the time, {held}"
        if busiest == "generator" and generator.work >= LIMITS:
            return (
                f"generators are the limit: at work {work['generator']} of the time, "
                f"simulators wait {_percent(simulator.input)} of it for actions: add generators"
            )
        if generator.input >= LITTLE and simulator.work >= LITTLE:
            return f"generators wait {_percent(generator.input)} of the time for requests: add simulators"
        if simulator.output >= LITTLE:
            return (
                f"simulators are held back {_percent(simulator.output)} of the time until an update frees permits: "
                "raise flow.max_staleness, or make updates faster"
            )
        shown = ", ".join(f"{role}s {work[role]}" for role in ROLES)
        return f"no role is the limit (at work: {shown}): they wait for each other, or for processors"

    def _recent(self) -> list[Record]:
        self._forget_old()
        return list(self._seconds)

    def _forget_old(self) -> None:
        since_s = self.now_s - self.window_s
        while self._seconds and (number(self._seconds[0], "time") or 0.0) <= since_s:
            self._seconds.popleft()

    def _gone(self, last: Record) -> bool:
        """Whether it says so little since it has left: only a trainer's update takes that long."""
        return last["role"] != "trainer" and (number(last, "time") or 0.0) < self.now_s - GONE_S

    def _per_update_second(self, metric: str, *, counted: bool) -> float | None:
        if len(self._updates) < 2:
            return None
        first, *others = self._updates
        seconds = (number(others[-1], "time") or 0.0) - (number(first, "time") or 0.0)
        amount = sum(number(record, metric) or 0.0 for record in others) if counted else len(others)
        return amount / seconds if seconds > 0 else None


def is_bucket(name: str) -> bool:
    """Whether it is `<metric>[<bound>]`, as Meter.bucket writes it."""
    match = BUCKET.fullmatch(name)
    return match is not None and (match[2] == "inf" or _bound(match[2]) != float("inf"))


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
