"""`vla-stream bench scale`: 8 to 256 GPUs by the model of the pipeline, with the Redis servers as a resource.

Weak scaling: environments, segments per update, generators and devices that train grow with the GPUs, in a profile's
own ratio, so that an update takes as long on any number.

What is modelled of the servers: each moves so many bytes per second, first come, first served. An observation is
written once and read twice; requests of a batch and their bytes are on its partition's server, weights on
one of their own where there are several. Pulls of weights take what observations leave; while they last, an
observation on that server waits for one chunk of 2 MiB per puller, when it is written and when it is read. A version
that takes longer than an update is not waited for: readers go on with the newest, by all deltas up to it. Generators
infer by older weights meanwhile, until a request demands newer ones. An upload is part of an update.

Not built yet, only modelled: partitions, one pull per host, readers that need no base while they have the weights
before it, uploads in the background, weights on several servers. Not modelled: latency of a network, and collectives
that get slower with the number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from live import Interrupted, Measured, measure
from model import CONFIGS, Profile
from modes import FULL, overlay
from pipeline import profile_file
from report import Spread, machine, number, output_folder, output_option, ratio, table, write_json

from vla_stream import config as settings
from vla_stream.batching import WorkConserving
from vla_stream.cli import costs as measured_costs
from vla_stream.cli.curve import BLUE, GREY, ORANGE
from vla_stream.cli.plan import of_run
from vla_stream.cli.signals import Signals
from vla_stream.errors import InputError
from vla_stream.model import After, Stages, lognormal, simulate

FILES = {"json": "scale.json", "plot": "scale.png"}
GPUS = (8, 16, 32, 64, 128, 256)
HOST_GPUS = 8
SERVER_GB_S = 1.5  # what one Redis moves; `bench broker` measures it for a machine
WEIGHTS_GB = 7.0  # π0.5 in bf16: 3.3 billion parameters
DELTA = 0.05  # of the full bytes: `bench weights` measures it
BASE_EVERY = 20  # trainer.weights_base_every
ADAPTER_MB = 100.0  # LoRA of rank 32
CHUNK_BYTES = 2 * 2**20
BLACK, GREEN = "black", "tab:green"
ENDS = 0.9
ENOUGH = 1e-3  # ms left
UPDATES, WARM_UP = 24, 4  # as many between as lie between two bases


@dataclass(frozen=True, slots=True)
class Setup:
    """What of a run's transport differs.

    partitions  of observations, each on a server of its own; with more than one, so are weights. 0: no transport
    weights     bytes of a version; full: of a base; bases: every so many versions is one, 0: none
    per_host    generators of a host share one pull
    background  the trainer goes on while its weights are uploaded
    spread      weights lie on the partitions' servers in equal parts
    """

    name: str
    partitions: int = 1
    weights: float = 0.0
    full: float = 0.0
    bases: int = 0
    per_host: bool = False
    background: bool = False
    spread: bool = False


def setups(weights_gb: float, delta: float, adapter_mb: float) -> list[Setup]:
    """One thing after the other; those with a + are the one above them and something more."""
    full, adapter = weights_gb * 1e9, adapter_mb * 1e6
    host, everywhere = {"per_host": True}, {"spread": True}
    chains: tuple[tuple[Setup, dict[str, dict[str, Any]]], ...] = (
        (Setup("no transport", partitions=0), {}),
        (Setup("observations alone"), {}),
        (Setup("full weights", weights=full), {"+ one pull per host": host}),
        (
            Setup("deltas, as built", weights=delta * full, full=full, bases=BASE_EVERY),
            {
                "+ one pull per host": host,
                "+ bases for newcomers only": {"bases": 0},
                "+ upload in the background": {"background": True},
                "+ P = 2": {"partitions": 2},
                "+ P = 8": {"partitions": 8},
                "+ weights on all servers": everywhere,
                "+ P = 16": {"partitions": 16},
            },
        ),
        (
            Setup("adapters, as built", weights=adapter),
            {"+ one pull per host": host, "+ P = 8": {"partitions": 8}, "+ weights on all servers": everywhere},
        ),
    )
    found: list[Setup] = []
    for first, more in chains:
        found.append(first)
        for name, change in more.items():
            found.append(replace(found[-1], name=name, **change))
    return found


@dataclass(slots=True)
class _Server:
    """Times in ms. free: when all that came so far is served; worked: in all."""

    bytes_per_ms: float
    free: float = 0.0
    worked: float = 0.0

    def move(self, now: float, amount: float) -> float:
        """Time until it is through."""
        took = amount / self.bytes_per_ms
        self.free = max(self.free, now) + took
        self.worked += took
        return self.free - now


@dataclass(slots=True)
class Servers:
    """A Transport (vla_stream/model.py). pullers: of each version."""

    setup: Setup
    request_bytes: float
    segment_reads: float
    pullers: int
    bytes_per_ms: float
    way: float
    servers: list[_Server] = field(init=False)
    _committed: int = 0
    _pulled: int = 0
    _pulling: bool = False
    _after: After = field(init=False)
    _ready: Callable[[int], None] = field(init=False)

    def __post_init__(self) -> None:
        partitions = self.setup.partitions
        apart = partitions > 1 and not self.setup.spread
        self.servers = [_Server(self.bytes_per_ms) for _ in range(partitions + apart)]

    def request(self, now: float, batch: int) -> float:
        """Its observations are written and read, and it goes half of its way."""
        return self.way / 2 + self._move(now, batch, 2)

    def reply(self, now: float, batch: int) -> float:
        """Actions are small."""
        return self.way / 2

    def segment(self, now: float, batch: int) -> float:
        """Its closing observation is written, and the trainer reads all."""
        return self._move(now, batch, 1 + self.segment_reads)

    def version(self, now: float, number: int, after: After, ready: Callable[[int], None]) -> None:
        """Pulled by all, one version after the other, as long as the first server has time for it."""
        self._committed, self._after, self._ready = number, after, ready
        if not self.setup.weights or not self.servers:
            ready(number)
        elif not self._pulling:
            self._pull(now)

    def _pull(self, now: float) -> None:
        newest = self._committed
        self._pulling = True
        amount = sum(self._bytes(version) for version in self._missed(newest))
        amount *= self.pullers + self.setup.background
        servers = len(self.servers) if self.setup.spread else 1
        self._look(now, amount / self.bytes_per_ms / servers, newest)

    def _missed(self, newest: int) -> range:
        """Versions to pull: without deltas only the newest; with them all since the newest base."""
        if not self.setup.bases and not self.setup.full:
            return range(newest, newest + 1)
        first = self._pulled + 1
        bases = [version for version in range(first, newest + 1) if self._is_base(version)]
        return range(bases[-1] if bases else first, newest + 1)

    def _is_base(self, version: int) -> bool:
        return bool(self.setup.bases) and version % self.setup.bases == 0

    def _bytes(self, version: int) -> float:
        return self.setup.full if self._is_base(version) else self.setup.weights

    def _look(self, now: float, left: float, newest: int) -> None:
        """Again when it would be done, had the server nothing else to do meanwhile."""
        server = self.servers[-1]
        worked = server.worked
        if left > ENOUGH:
            self._after(left, lambda: self._look(now + left, min(left, server.worked - worked), newest))
            return
        self._pulling, self._pulled = False, newest
        self._ready(newest)
        if newest < self._committed:
            self._pull(now)

    def _move(self, now: float, batch: int, times: float) -> float:
        partitions = self.setup.partitions
        if not partitions:
            return 0.0
        beside_weights = self._pulling and (partitions == 1 or self.setup.spread)
        waits = 2 * self.pullers * CHUNK_BYTES / self.bytes_per_ms if beside_weights else 0.0
        return waits + self.servers[batch % partitions].move(now, times * self.request_bytes)


@dataclass(frozen=True, slots=True)
class Shape:
    """What is scaled: stages of `gpus` devices, of which so many are generators'."""

    name: str
    stages: Stages
    generators: int
    trainers: int
    request_bytes: float
    max_staleness: int

    @property
    def gpus(self) -> int:
        return self.generators + self.trainers

    def on(self, gpus: int) -> Shape:
        """As much of everything per GPU. Raises InputError where that is no whole number."""
        counts = self.stages.batches, self.stages.segments, self.generators, self.trainers
        scaled = [count * gpus // self.gpus for count in counts]
        if any(count * gpus % self.gpus for count in counts) or min(scaled) < 1:
            raise InputError(
                f"--gpus {gpus}: {self.name} is made of {self.gpus} GPUs, expected a multiple of its parts"
            )
        batches, segments, generators, trainers = scaled
        stages = replace(self.stages, batches=batches, segments=segments)
        return replace(self, stages=stages, generators=generators, trainers=trainers)

    def rate(self, setup: Setup, server_gb_s: float) -> float:
        """Environment steps per second."""
        per_host = -(-self.generators * HOST_GPUS // self.gpus) if setup.per_host else 1
        transport = Servers(
            setup,
            request_bytes=self.request_bytes,
            segment_reads=self.stages.steps + 1,
            pullers=-(-self.generators // per_host),
            bytes_per_ms=server_gb_s * 1e6,
            way=self.stages.way,
        )
        upload = 0.0 if setup.background else setup.weights / transport.bytes_per_ms
        found = simulate(
            replace(self.stages, publish=self.stages.publish + upload),
            [WorkConserving(1, 0.0) for _ in range(self.generators)],
            self.trainers,
            max_staleness=self.max_staleness,
            updates=UPDATES,
            warm_up=WARM_UP,
            transport=transport,
        )
        return found.steps_per_s


def of_profile(name: str, slower: float = 1.0) -> Shape:
    """A profile's own placement, by its options."""
    config = settings.load([CONFIGS / "base.yaml", profile_file(name)], slow(name, slower))
    profile = Profile.of(config)
    if profile.on_device:
        raise InputError(f"--profile {name}: its simulators compute on the generators' devices; choose another one")
    stages = profile.stages(FULL)
    times = profile.chunk_time(np.random.default_rng(0), profile.rows, 20_000)
    stages = replace(stages, chunk=lognormal(float(times.mean()), float(times.std())))
    options = config.environment.options
    request_bytes = profile.rows * len(options.get("cameras", [""])) * 3 * int(options.get("image_size", 224)) ** 2
    devices = len(config.policy.options["trainer_devices"])
    return Shape(name, stages, config.generators.count, devices, request_bytes, config.flow.max_staleness)


def of_metrics(run: str, runs_dir: Path) -> Shape:
    """A run's placement and costs, by its metrics."""
    config, records = of_run(run, None, runs_dir)
    costs = measured_costs.measured(records, config)
    at = measured_costs.Placement(config.simulators.count, config.generators.count, costs.devices)
    stages = costs.stages(config, at)
    return Shape(run, stages, at.generators, at.trainers, costs.request_bytes, config.flow.max_staleness)


def slow(name: str, factor: float) -> list[str]:
    """Overrides that make all emulated times so much longer, for machines whose cores are few."""
    if factor == 1.0:
        return []
    config = settings.load([CONFIGS / "base.yaml", profile_file(name)])
    times = [("environment", key) for key in ("step_ms", "reset_ms")]
    times += [("policy", key) for key in ("batch_ms", "row_ms", "sample_ms", "optimiser_step_ms", "load_ms")]
    found = []
    for section, key in times:
        options = getattr(config, section).options
        if key in options:
            found.append(f"{section}.options.{key}={factor * options[key]}")
    return found


@click.command()
@click.option("--profile", "name", metavar="NAME", default="libero-pi05", show_default=True, help="What is scaled.")
@click.option(
    "--run", "run_name", metavar="NAME", help="Instead: the placement and the costs of a run, by its metrics."
)
@click.option("--runs", "runs_dir", type=click.Path(path_type=Path), default=Path("runs"), help="Folder of runs.")
@click.option("--gpus", multiple=True, type=click.IntRange(min=2), help=f"Default: {', '.join(map(str, GPUS))}.")
@click.option("--server-gb-s", default=SERVER_GB_S, show_default=True, help="Bytes that one Redis moves, 10⁹ per s.")
@click.option("--request-kb", type=float, help="Observations of a request. Default: as profile or run have them.")
@click.option("--weights-gb", default=WEIGHTS_GB, show_default=True, help="Of the whole model.")
@click.option("--delta", default=DELTA, show_default=True, help="Part of them that a delta has.")
@click.option("--adapter-mb", default=ADAPTER_MB, show_default=True, help="Of adapters that travel alone.")
@click.option("--validate", is_flag=True, help="Real emulated runs of these sizes, beside the model; few GPUs.")
@click.option("--slower", default=1.0, show_default=True, help="All emulated times so much longer, in both.")
@click.option("--repeats", type=click.IntRange(min=1), default=1, show_default=True, help="Real runs of each size.")
@click.option("--updates", type=click.IntRange(min=1), default=4, show_default=True, help="Updates measured in each.")
@output_option("Folder of JSON and plot.")
def scale(
    name: str,
    run_name: str | None,
    runs_dir: Path,
    gpus: tuple[int, ...],
    server_gb_s: float,
    request_kb: float | None,
    weights_gb: float,
    delta: float,
    adapter_mb: float,
    validate: bool,
    slower: float,
    repeats: int,
    updates: int,
    output: Path,
) -> None:
    """Environment steps per second on 8 to 256 GPUs, by the model, and what servers, partitions and weights change."""
    folder = output_folder(output)
    if validate:
        validation(name, gpus or (4, 8, 16), slower, repeats, updates, folder)
        return
    shape = of_profile(name, slower) if run_name is None else of_metrics(run_name, runs_dir)
    if request_kb is not None:
        shape = replace(shape, request_bytes=1000 * request_kb)
    sizes = gpus or GPUS
    rows = setups(weights_gb, delta, adapter_mb)
    rates = [[shape.on(size).rate(setup, server_gb_s) for size in sizes] for setup in rows]
    ideal = rates[0][0] / sizes[0]  # of one GPU
    shares = [[rate / size / ideal for rate, size in zip(found, sizes, strict=True)] for found in rates]
    moved = ideal / shape.stages.env_steps * shape.request_bytes * (3 * (shape.stages.steps + 1) - 1) / 1e6
    click.echo(
        f"{shape.name}: {number(ideal)} environment steps/s per GPU, {moved:.1f} MB/s of observations per GPU, so that "
        f"one server of {server_gb_s:g} GB/s is full at {1000 * server_gb_s / moved:.0f} GPUs"
    )
    lines = [
        [setup.name, *(f"{share:.2f}" for share in found), ends_at(sizes, found)]
        for setup, found in zip(rows, shares, strict=True)
    ]
    header = ["efficiency on GPUs", *map(str, sizes), f"less than {ENDS:g} from"]
    click.echo(f"\n{table(header, lines)}")
    write_json(
        folder / FILES["json"],
        {
            "profile": shape.name,
            "gpus": list(sizes),
            "server_gb_s": server_gb_s,
            "weights_gb": weights_gb,
            "delta": delta,
            "adapter_mb": adapter_mb,
            "request_bytes": shape.request_bytes,
            "rows": [
                {**asdict(setup), "steps_per_s": rate, "efficiency": share}
                for setup, rate, share in zip(rows, rates, shares, strict=True)
            ],
        },
    )
    draw(shape.name, sizes, [setup.name for setup in rows], shares, folder / FILES["plot"])
    click.echo(f"\n{folder / FILES['json']}, {folder / FILES['plot']}")


def ends_at(sizes: Sequence[int], shares: Sequence[float]) -> str:
    """The first size at which it is no longer efficient: from there on the next row is needed."""
    return next((str(size) for size, share in zip(sizes, shares, strict=True) if share < ENDS), "–")


def validation(name: str, sizes: Sequence[int], slower: float, repeats: int, updates: int, folder: Path) -> None:
    """Real runs of some sizes on emulated devices, all else real, beside the model. They are on one host, so that no
    observation goes through the server: the model has no transport here either."""
    shape = of_profile(name, slower)
    runs: dict[int, list[Measured]] = {size: [] for size in sizes}
    files, overrides = [CONFIGS / "base.yaml", profile_file(name)], slow(name, slower)
    with Signals() as signals:
        try:
            for _ in range(repeats):
                for size in sizes:
                    over = emulated(shape, files, size)
                    runs[size].append(measure(files, over, overrides, signals, updates=updates, warm_up=2))
                    click.echo(f"{size} devices: {number(runs[size][-1].steps_per_s)} environment steps/s", err=True)
        except Interrupted as exc:
            raise click.Abort from exc
    found, about = [], {"machine": machine(), "profile": name, "slower": slower, "updates": updates}
    for size in sizes:
        predicted = shape.on(size).rate(Setup("", partitions=0), SERVER_GB_S)
        rate = Spread.of([run.steps_per_s for run in runs[size]])
        cores = sum(sum(run.cpu_s.values()) / run.cpu_window_s for run in runs[size]) / len(runs[size])
        found.append([str(size), number(predicted), str(rate), ratio(rate.median, predicted), f"{cores:.2f}"])
    click.echo(table(["devices", "model", "measured", "÷ model", "cores"], found))
    write_json(
        folder / "scale-validation.json",
        {**about, "runs": {str(size): [run.plain() for run in runs[size]] for size in sizes}},
    )


def emulated(shape: Shape, files: Sequence[Path], size: int) -> dict[str, Any]:
    """What to merge over a profile so that it is of that size."""
    config, at = settings.load(files), shape.on(size)
    over = overlay(config, FULL, at.generators, at.trainers)
    batches = config.simulators.env_batches
    if at.stages.batches % batches:
        raise InputError(
            f"--gpus {size}: {at.stages.batches} batches, expected a multiple of {batches}, of a simulator"
        )
    over["simulators"] = {"count": at.stages.batches // batches}
    over["trainer"] = {**over["trainer"], "segments_per_update": at.stages.segments}
    return over


def draw(name: str, sizes: Sequence[int], rows: Sequence[str], shares: Sequence[Sequence[float]], file: Path) -> None:
    """Efficiency over GPUs, one line per setup."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(7.5, 4.2))
    # A + has the colour of what it adds to.
    colors, markers = itertools.cycle((GREY, BLACK, ORANGE, BLUE, GREEN)), itertools.cycle("osv^Dxp*")
    color = ""
    for row, found in zip(rows, shares, strict=True):
        color = color if row.startswith("+") else next(colors)
        panel.plot(sizes, found, color=color, linewidth=1, marker=next(markers), markersize=4, label=row)
    panel.set_xscale("log", base=2)
    panel.set_xticks(list(sizes), [str(size) for size in sizes])
    panel.set_ylim(0, 1.08)
    panel.set_xlabel("GPUs")
    panel.set_ylabel("efficiency")
    panel.set_title(f"{name}, by the model", fontsize=9)
    panel.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
