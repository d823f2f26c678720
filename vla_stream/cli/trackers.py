"""A run's metrics in the tools that people have for such: TensorBoard, Weights & Biases, Prometheus.

All read the launcher's records (samples.py), after these are in metrics.jsonl. One that fails is left out, and said so:
it must not end the run.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from vla_stream.cli.pulse import BUCKET, Pulse, is_bucket
from vla_stream.cli.samples import TEXTS, Record, number
from vla_stream.errors import InputError
from vla_stream.metrics import AGE_BOUNDS_MS, FILL_BOUNDS

if TYPE_CHECKING:
    from vla_stream.config import Config

BOUNDS: dict[str, Sequence[float]] = {"fill": FILL_BOUNDS, "age_ms": AGE_BOUNDS_MS, "staleness": range(11)}
MOST_SERIES = 100_000
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "prometheus_port": "prometheus_client"}
# Metrics that only say which record it is, or how long it covers.
ABOUT = (*TEXTS, "time", "seconds", "update", "version")
# Everything else in a worker's record is a gauge.
COUNTERS = re.compile(
    r"aborted|batches|chunk_steps|dead_letters|env_steps|episodes|handed_back|overdue|poisoned|refused|"
    r"replies|replies_dropped|replies_ms|requests|rows|segments|bytes\..+|chunks|chunk_ms2?|environment_cpu_s|"
    r"inferences|inferred_.+|reset_ms|resets|sent|sent_ms|served|served_ms|slots_reset|swaps|swaps_ms"
)


class Tracker(Protocol):
    """Somewhere else that records go."""

    name: str

    def add(self, records: Sequence[Record]) -> None:
        """New records, in the stream's order."""

    def close(self) -> None:
        """There will be no more."""


class Trackers:
    """Those that a config asks for. tell: hears of one that fails."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._trackers: list[Tracker] = []

    def open(self, config: Config) -> None:
        """Raises InputError: a package, a login, a port."""
        check_installed(config)
        tracking = config.tracking
        if tracking.prometheus_port is not None:
            self._trackers.append(Prometheus(config.name, tracking.prometheus_port))
        if tracking.tensorboard:
            self._trackers.append(TensorBoard(config))
        if tracking.wandb is not None:
            self._trackers.append(WeightsAndBiases(config, tracking.wandb))

    def add(self, records: Iterable[Record]) -> list[Record]:
        """Pass the records on, and return them."""
        found = list(records)
        if found:
            self._each(lambda tracker: tracker.add(found))
        return found

    def close(self) -> None:
        """Idempotent."""
        self._each(lambda tracker: tracker.close())
        self._trackers.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as exc:  # other people's packages, networks, disks
                self._trackers.remove(tracker)
                reason = " ".join(str(exc).split())[:200]
                self._tell(f"{tracker.name}: {type(exc).__name__}: {reason}; no more metrics go there, the run goes on")


def check_installed(config: Config) -> None:
    """Raises InputError, one line per package that a tracker of this config lacks."""
    asked = {name for name, value in config.tracking.model_dump().items() if value not in (None, False)}
    lacking = sorted(name for name in asked if find_spec(PACKAGES[name]) is None)
    if lacking:
        raise InputError(
            "\n".join(
                f"tracking.{name}: the package {PACKAGES[name]} is not installed; "
                "pip install 'vla-stream[tracking]', or set it to null"
                for name in lacking
            )
        )


class _PerUpdate:
    """One step per update: its own figures, and the rates of the moment; and what its policy's evaluation says."""

    def __init__(self) -> None:
        self._pulse = Pulse()

    def steps(self, records: Sequence[Record]) -> Iterator[tuple[int, dict[str, float]]]:
        """(update, figures) of those records that are of an update; an evaluation's come later than its update's."""
        for record in records:
            self._pulse.add([record])
            update, kind = number(record, "update"), record.get("kind")
            if kind not in ("update", "evaluation") or update is None:
                continue
            found = {name: number(record, name) for name in record if name not in ABOUT}
            figures = {f"{kind}/{name}": value for name, value in found.items() if value is not None}
            if kind == "evaluation":
                yield int(update), figures
                continue
            for role, shares in self._pulse.role_shares().items():
                figures |= {f"time/{role}.{what}": getattr(shares, what) for what in ("work", "input", "output")}
            figures["rate/env_steps"] = self._pulse.rate("simulator", "env_steps")
            yield int(update), figures


class TensorBoard:
    """Event files in runs/<name>/tensorboard."""

    name = "TensorBoard"

    def __init__(self, config: Config) -> None:
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(config.run_dir / "tensorboard"))
        self._updates = _PerUpdate()

    def add(self, records: Sequence[Record]) -> None:
        """See the protocol."""
        for update, figures in self._updates.steps(records):
            for name, value in figures.items():
                self._writer.add_scalar(name, value, update)
            self._writer.flush()

    def close(self) -> None:
        """See the protocol."""
        self._writer.close()


class WeightsAndBiases:
    """A run of a project there; WANDB_MODE=offline keeps it in runs/<name>/wandb."""

    name = "Weights & Biases"

    def __init__(self, config: Config, project: str) -> None:
        import wandb

        config.run_dir.mkdir(parents=True, exist_ok=True)
        about = config.model_dump(mode="json")
        try:
            self._run: Any = wandb.init(project=project, name=config.name, dir=str(config.run_dir), config=about)
        except Exception as exc:
            reason = " ".join(str(exc).split())[:200]
            raise InputError(f"tracking.wandb: {reason}; log in with `wandb login`, or set WANDB_MODE=offline") from exc
        self._updates, self._newest = _PerUpdate(), 0

    def add(self, records: Sequence[Record]) -> None:
        """See the protocol."""
        for update, figures in self._updates.steps(records):
            # Its steps only grow, so what is late is logged with the newest one.
            self._newest = max(self._newest, update)
            self._run.log(figures | {"of_update": update}, step=self._newest)

    def close(self) -> None:
        """See the protocol."""
        self._run.finish()


class Prometheus:
    """An endpoint on loopback: per worker, counters since the launcher's start, last gauges, histograms; and the last
    update. Histograms carry no sum: workers count buckets only."""

    name = "Prometheus"

    def __init__(self, run: str, port: int) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = run
        self._totals: dict[tuple[str, str, str], float] = {}  # (worker, role, metric)
        self._gauges: dict[tuple[str, str, str], float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as exc:
            raise InputError(
                f"tracking.prometheus_port: {port} cannot be opened ({exc.strerror}); choose another one"
            ) from exc

    def add(self, records: Sequence[Record]) -> None:
        """See the protocol."""
        for record in records:
            about = str(record.get("worker", "")), str(record.get("role", ""))
            kind = record.get("kind")
            of_update = kind in ("update", "evaluation")
            for name in record:
                value = number(record, name) if name not in (*TEXTS, "time", "seconds") else None
                if value is None:
                    continue
                counted = is_bucket(name) or (not of_update and COUNTERS.fullmatch(name) is not None)
                place = (*about, f"{kind}_{name}" if of_update and not counted else name)
                values: dict[tuple[str, str, str], float] = self._totals if counted else self._gauges
                if place in values or len(values) < MOST_SERIES:
                    values[place] = values.get(place, 0.0) + value if counted else value

    def collect(self) -> Iterator[Any]:
        """What a scrape shows."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        labels = ("run", "worker", "role", "part")
        families: dict[str, Any] = {}
        # Copied: the launcher's thread writes while the server's reads.
        for (worker, role, metric), value in self._gauges.copy().items():
            whole, _, part = metric.partition(".")  # of busy.infer, or success.<task>
            name = _metric_name(whole)
            family = families.setdefault(name, GaugeMetricFamily(name, f"{whole}, the last one", labels=labels))
            family.add_metric((self._run, worker, role, part), value)
        histograms: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
        for (worker, role, metric), value in self._totals.copy().items():
            if bucket := BUCKET.fullmatch(metric):
                histograms[worker, role, bucket[1]][bucket[2]] = value
                continue
            whole, _, part = metric.partition(".")
            name = _metric_name(whole)
            family = families.setdefault(name, CounterMetricFamily(name, f"{whole}, in all", labels=labels))
            family.add_metric((self._run, worker, role, part), value)
        for (worker, role, metric), counts in histograms.items():
            name = _metric_name(f"{metric}_histogram")
            family = families.setdefault(name, HistogramMetricFamily(name, f"{metric}, in all", labels=labels[:3]))
            family.add_metric((self._run, worker, role), buckets=_cumulative(metric, counts), sum_value=None)
        yield from families.values()

    def describe(self) -> Iterator[Any]:
        """Nothing is known before the first record."""
        return iter(())

    def close(self) -> None:
        """See the protocol."""
        with contextlib.suppress(OSError):
            self._server.shutdown()
            self._server.server_close()
        self._thread.join(timeout=5.0)


def _cumulative(metric: str, counts: dict[str, float]) -> list[tuple[str, float]]:
    """Observations up to each bound, as Prometheus has them: always the same bounds, so that workers can be summed."""
    known = {f"{bound:g}" for bound in BOUNDS.get(metric, ())}
    bounds = sorted((bound for bound in known | counts.keys() if bound != "inf"), key=float)
    totals = accumulate(counts.get(bound, 0.0) for bound in bounds)
    return [*zip(bounds, totals, strict=True), ("+Inf", sum(counts.values()))]


def _metric_name(metric: str) -> str:
    return "vla_stream_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
