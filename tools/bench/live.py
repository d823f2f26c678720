"""One real run, measured: all processes under a supervisor, an embedded server, and what its own records say.

The throughput is that of the trainer's records: environment steps of the updates after the warm-up, over the time from
the last warm-up update to the last one, by the server's clock. Nothing is left out of it: training, commits, weights.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vla_stream import config as settings
from vla_stream.cli import samples
from vla_stream.cli.folder import RunFolder
from vla_stream.cli.launch import Launch, server_for
from vla_stream.cli.progress import Progress
from vla_stream.cli.samples import METRICS_FILE, Record, number
from vla_stream.cli.signals import Signals
from vla_stream.cli.timeline import TRACE_FILE
from vla_stream.cli.trace import finished, save
from vla_stream.errors import RunFailed
from vla_stream.flow import FlowState

LOOK_S = 0.1
ACCOUNT_S = 0.5  # between two looks at all processes
LAST_RECORD_S = 5.0  # from the last commit to its record
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Interrupted(Exception):
    """The person asked to end."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Of the updates after the warm-up.

    load: mean of the machine's load average; others: cores kept busy by what is no part of this run, the bench included
    cpu_s: CPU seconds by role over `cpu_window_s`; figures: means of what workers measured of themselves
    """

    steps_per_s: float
    updates: int
    seconds: float
    load: float
    others: float
    cpu_window_s: float
    cpu_s: dict[str, float]
    figures: dict[str, float]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class _Quiet:
    """A display that only remembers, for the day the run fails."""

    told: list[str] = field(default_factory=list)

    def tell(self, text: str, details: Sequence[str] = ()) -> None:
        self.told += [text, *details]

    def show(self, progress: Progress) -> None:
        pass

    def close(self) -> None:
        pass


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """For runs and emulated devices; kept, with its logs, when a run in it failed."""
    folder = Path(tempfile.mkdtemp(prefix="vla-stream-bench-"))
    try:
        yield folder
    except RunFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def measure(
    files: Sequence[Path],
    overlay: Mapping[str, Any],
    overrides: Sequence[str],
    signals: Signals,
    *,
    updates: int,
    warm_up: int,
    trace: Path | None = None,
) -> Measured:
    """Run a config for `warm_up` + `updates` updates. trace: a file for what its workers did, for Perfetto.

    Raises Interrupted, RunFailed, InputError."""
    over = {**overlay, "updates": warm_up + updates, "trace": trace is not None}
    with launched(files, over, overrides, signals) as launch:
        launch.launch_workers()
        window = _drive(launch, signals, warm_up)
        if trace is not None:
            save(trace, *finished(launch.run_dir / TRACE_FILE, None))
        return _evaluate(samples.load(launch.run_dir / METRICS_FILE), window, warm_up)


@contextlib.contextmanager
def launched(
    files: Sequence[Path], overlay: Mapping[str, Any], overrides: Sequence[str], signals: Signals
) -> Iterator[Launch]:
    """A run in a folder and on a server of its own, still without workers. Raises RunFailed, InputError."""
    with scratch_folder() as scratch:
        over = scratch / "mode.yaml"
        settled = {name: with_own_devices(section, scratch) for name, section in overlay.items()}
        over.write_text(yaml.safe_dump({**settled, "runs_dir": str(scratch / "runs")}))
        config = settings.load([*files, over], overrides)
        folder = RunFolder.open(config, name=None, resume=False)
        try:
            with (
                server_for(None, folder.logs) as (url, server),
                Launch(folder.config, url, server, signals, _Quiet(), resume=False) as launch,
            ):
                yield launch
        except RunFailed as exc:
            raise RunFailed(f"{exc} (kept: {folder.path})") from exc
        finally:
            folder.close()


def with_own_devices(section: Any, scratch: Path) -> Any:
    """Emulated devices and stragglers of this run alone: others may use the same names at the same time."""
    options = section.get("options", {}) if isinstance(section, Mapping) else {}
    if not {"devices", "stragglers"} & set(options):
        return section
    folder = scratch / "devices"
    folder.mkdir(exist_ok=True)
    return {**section, "options": {**options, "folder": str(folder)}}


@dataclass(slots=True)
class Window:
    """The processor's account at the two ends of what is measured, and at looks between them."""

    began_s: float = 0.0
    ended_s: float = 0.0
    before: dict[int, tuple[str, float]] = field(default_factory=dict)
    after: dict[int, tuple[str, float]] = field(default_factory=dict)
    busy_s: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)

    def look(self) -> None:
        """The first look is where it begins, the last one where it ends."""
        self.ended_s, self.after = time.monotonic(), self.after | cpu_by_process(os.getpid())
        self.busy_s.append(machine_busy_s())
        self.loads.append(os.getloadavg()[0])
        if not self.before:
            self.began_s, self.before = self.ended_s, dict(self.after)

    @property
    def seconds(self) -> float:
        return max(self.ended_s - self.began_s, 1e-9)

    @property
    def load(self) -> float:
        """Mean of the machine's load average."""
        return sum(self.loads) / len(self.loads)

    @property
    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by role."""
        spent: dict[str, float] = {}
        for pid, (role, seconds) in sorted(self.after.items(), key=lambda item: item[1]):
            spent[role] = spent.get(role, 0.0) + seconds - self.before.get(pid, (role, 0.0))[1]
        return spent

    @property
    def others(self) -> float:
        """Cores kept busy by what is no part of this run."""
        return max(0.0, (self.busy_s[-1] - self.busy_s[0] - sum(self.cpu_s.values())) / self.seconds)


def step(launch: Launch, signals: Signals) -> FlowState | None:
    """One look at a run's workers, metrics and state. Raises RunFailed, Interrupted."""
    supervisor = launch.supervisor
    assert supervisor is not None
    supervisor.step()
    if supervisor.failures:
        role, cause = next(iter(supervisor.failures.items()))
        raise RunFailed(f"{role}: {cause}")
    if signals.asked:
        raise Interrupted
    return launch.beat()


def _drive(launch: Launch, signals: Signals, warm_up: int) -> Window:
    """Until the record of the last update is there."""
    window = Window()
    next_look_s, overdue_s = 0.0, float("inf")
    while True:
        state = step(launch, signals)
        update = 0 if state is None else state.update
        if update >= warm_up and (time.monotonic() >= next_look_s or update >= launch.config.updates):
            next_look_s = time.monotonic() + ACCOUNT_S
            window.look()
        if update >= launch.config.updates:
            launch.read_metrics()
            overdue_s = min(overdue_s, time.monotonic() + LAST_RECORD_S)
            if (number(launch.progress.last, "update") or 0) >= launch.config.updates:
                return window
            if time.monotonic() > overdue_s:
                raise RunFailed(f"update {update} is committed, but its record did not come in {LAST_RECORD_S:g} s")
        time.sleep(LOOK_S)


def _evaluate(records: Sequence[Record], window: Window, warm_up: int) -> Measured:
    updates = [record for record in records if record.get("kind") == "update"]
    times = {int(number(record, "update") or 0): float(record["time"]) for record in updates}
    counted = [record for record in updates if (number(record, "update") or 0) > warm_up]
    # Without a warm-up there is no commit to count from: then from the first one on, which is not counted itself.
    if warm_up == 0:
        counted = counted[1:]
    start_s, end_s = times[max(1, warm_up)], max(times.values())
    steps = sum(number(record, "trained_env_steps") or 0.0 for record in counted)
    if not counted or end_s <= start_s:
        raise RunFailed(f"{len(updates)} updates were recorded, expected more than the warm-up of {warm_up}")
    between = [record for record in records if start_s <= float(record["time"]) <= end_s]
    return Measured(
        steps_per_s=steps / (end_s - start_s),
        updates=len(counted),
        seconds=end_s - start_s,
        load=window.load,
        others=window.others,
        cpu_window_s=window.seconds,
        cpu_s={role: round(seconds, 3) for role, seconds in window.cpu_s.items()},
        figures={**figures(between), **_trainer_figures(counted)},
    )


def figures(seconds: Sequence[Record]) -> dict[str, float]:
    """Means of what simulators and generators say of themselves, each weighted by what it is a mean of."""

    def mean(role: str, name: str, weight: str) -> float | None:
        chosen = [r for r in seconds if r.get("role") == role and r.get("kind") == "second" and number(r, name)]
        total = sum(number(r, weight) or 0.0 for r in chosen)
        return sum((number(r, name) or 0.0) * (number(r, weight) or 0.0) for r in chosen) / total if total else None

    found = {
        "batch fill": mean("generator", "fill", "batches"),
        "age at send ms": mean("generator", "age_ms", "batches"),
        "infer ms": mean("generator", "infer_ms", "batches"),
        "reply ms": mean("simulator", "reply_ms", "chunk_steps"),
        "generator busy": mean("generator", "busy.infer", "seconds"),
    }
    return {name: round(value, 4) for name, value in found.items() if value is not None}


def _trainer_figures(updates: Sequence[Record]) -> dict[str, float]:
    names = {"trainer waits s": "wait_s", "trainer updates s": "update_s", "staleness": "staleness"}
    return {
        shown: round(sum(number(r, name) or 0.0 for r in updates) / len(updates), 4) for shown, name in names.items()
    }


def cpu_by_process(root: int) -> dict[int, tuple[str, float]]:
    """(role, CPU seconds so far) of a process and all that descend from it."""
    found: dict[int, tuple[int, float]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            _, _, rest = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")
            fields = rest.split()
            found[int(entry.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S)
    ours, added = {root}, {root}
    while added:
        added = {pid for pid, (parent, _) in found.items() if parent in added} - ours
        ours |= added
    return {pid: (_role(pid, root), found[pid][1]) for pid in ours if pid in found}


def _role(pid: int, root: int) -> str:
    if pid == root:
        return "bench"
    if pid in _roles:
        return _roles[pid]
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    role = next((word.removeprefix("workers.") for word in words if word.startswith("workers.")), "")
    if not role and words and any(name in words[0] for name in ("redis", "valkey")):
        role = "redis"
    if role:
        _roles[pid] = role
    return role or "other"


_roles: dict[int, str] = {}  # by pid; they are not used again within one bench


def machine_busy_s() -> float:
    """CPU seconds that the machine has spent on anything since it started; 0 where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(ticks) - ticks[3] - ticks[4]) * _TICK_S
    return 0.0
