"""What a person wants to know while a run goes on, computed from metric records. Pure: time comes with the records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from vla_stream.cli.pulse import Pulse
from vla_stream.cli.samples import Record, number

BY_TASK = "success."  # before a task's name
TASKS_SHOWN = 4
UPDATE_WINDOW = 10  # updates over which the time to go is averaged


class Progress:
    """The state of a run as far as its metrics tell."""

    def __init__(self, target_updates: int) -> None:
        self.target_updates = target_updates
        self.update = 0
        self.queue_depth: int | None = None
        self.workers: dict[str, int] = {}
        self.trainer_state = ""
        self.phase = ""  # what goes on before there are workers
        self.last: Record = {}
        self.first_success: float | None = None
        self.env_steps = 0.0
        self.pulse = Pulse()
        self.now_s = 0.0
        self._sampled = False
        self._updates: deque[float] = deque(maxlen=UPDATE_WINDOW + 1)

    def add(self, records: Iterable[Record]) -> None:
        """New records, in the stream's order."""
        for record in records:
            time_s = number(record, "time")
            if time_s is None:
                continue
            self.now_s = max(self.now_s, time_s)
            self.pulse.add([record])
            if record.get("kind") == "update":
                self._add_update(record, time_s)
            elif record.get("role") == "simulator":
                steps = number(record, "env_steps")
                self._sampled |= steps is not None
                self.env_steps += steps or 0.0

    def _add_update(self, record: Record, time_s: float) -> None:
        self.last = record
        update = number(record, "update")
        if update is not None:
            # Not the maximum: after a trainer's crash the count goes back to its checkpoint.
            self.update = int(update)
        if self.first_success is None:
            self.first_success = number(record, "success")
        self._updates.append(time_s)

    @property
    def success(self) -> float | None:
        return number(self.last, "success")

    @property
    def sampled_per_s(self) -> float | None:
        """Environment steps that simulators made, per second."""
        return self.pulse.rate("simulator", "env_steps") if self._sampled else None

    @property
    def trained_per_s(self) -> float | None:
        """Environment steps that updates consumed, per second."""
        return self.pulse.trained_per_s()

    @property
    def batch_fill(self) -> float | None:
        """Rows of the mean batch as a share of max_batch_size."""
        return self.pulse.mean("generator", "fill", "batches")

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last update, at the pace of the last few."""
        if len(self._updates) < 2:
            return None
        pace_s = (self._updates[-1] - self._updates[0]) / (len(self._updates) - 1)
        return max(0.0, pace_s * (self.target_updates - self.update) - (self.now_s - self._updates[-1]))

    def parts(self) -> list[tuple[str, str]]:
        """(label, value) of everything that is known, in the order of interest."""
        staleness, worst = number(self.last, "staleness"), number(self.last, "staleness_max")
        success = share(self.success)
        if self.first_success is not None and self.success is not None:
            success += f" (first {share(self.first_success)})"
        shown = {
            "success": success,
            **self._by_task(),
            "return": decimal(number(self.last, "return")),
            "env-steps/s sampled": count(self.sampled_per_s),
            "trained": count(self.trained_per_s),
            "staleness": decimal(staleness) + (f" (max {worst:.0f})" if worst is not None else ""),
            "queue": "" if self.queue_depth is None else str(self.queue_depth),
            "batch fill": share(self.batch_fill),
            "KL": decimal(number(self.last, "kl_behaviour"), 3),
            "ETA": duration(self.eta_s),
        }
        return [(label, value) for label, value in shown.items() if value]

    def _by_task(self) -> dict[str, str]:
        """Success of each task, where there are several; of many those that are worst."""
        found = {name.removeprefix(BY_TASK): number(self.last, name) for name in self.last if name.startswith(BY_TASK)}
        worst = sorted(found, key=lambda name: found[name] or 0.0)[:TASKS_SHOWN]
        return {name: share(value) for name, value in found.items() if name in worst}

    def line(self) -> str:
        """One plain line."""
        words = [f"update {self.update}/{self.target_updates}"]
        if not self.last:
            words.append(self.waiting())
        words += [f"{label} {value}" for label, value in self.parts()]
        return " · ".join(word for word in words if word)

    def waiting(self) -> str:
        """What goes on before the first update."""
        if self.phase:
            return self.phase
        there = [
            f"{number} {role}{'s' if number > 1 else ''}" for role, number in sorted(self.workers.items()) if number
        ]
        trainer = f"trainer: {self.trainer_state}" if self.trainer_state else "trainer starts"
        return f"{trainer} ({', '.join(there)})" if there else trainer


def share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def decimal(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """`42s`, `3m05s`, `2h10m`."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
