"""`vla-stream bench weights`: what a new version costs a generator and the server, beside a blocking reload.

Versions are made by torch's Adam and travel by the library's own writer and reader through a real server. While a
generator is measured nothing else of the benchmark runs: making a version, waiting for it, and reloading take turns.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
from report import Spread, machine, number, output_folder, output_option, table, write_json
from torch import Tensor, nn

from vla_stream.broker.connection import Client, connect
from vla_stream.broker.scripts import Scripts
from vla_stream.broker.server import EmbeddedServer
from vla_stream.errors import RunFailed
from vla_stream.streams.keys import Keys
from vla_stream.streams.weights import ENTRIES_KEPT, WeightsManifest
from workers.weights import Places, WeightsReader, WeightsWriter, to_bytes

FILE = "weights.json"
WIDTH = 512  # of a layer, which then has 6.3 MB in bf16
STD = 0.02  # of the first weights, as transformers are initialised
ARRIVAL_DEADLINE_S = 120.0
# What the optimiser updates: the bf16 weights themselves, as our trainer does with a bf16 policy; or a float32 copy,
# whose rounding is published, as others do. The latter changes more places.
OPTIMISERS = ("bf16", "float32 copy")


class Net(nn.Module):
    """A transformer's encoder in bf16."""

    def __init__(self, mb: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True)
        layer_mb = sum(parameter.numel() for parameter in layer.parameters()) * 2 / 1e6
        self.body = nn.TransformerEncoder(layer, max(1, round(mb / layer_mb)), enable_nested_tensor=False)
        self.to(torch.bfloat16).eval().requires_grad_(False)
        for parameter in self.parameters():
            parameter.copy_(torch.randn(parameter.shape) * STD)

    def infer(self) -> float:
        """One batch of one observation of four tokens; returns the milliseconds it took."""
        started_s = time.monotonic()
        with torch.inference_mode():
            self.body(torch.zeros(1, 4, WIDTH, dtype=torch.bfloat16))
        return (time.monotonic() - started_s) * 1000


@dataclass
class Figures:
    """Of all versions; ms, bytes, shares of the full bytes and of the elements."""

    stall_ms: list[float] = field(default_factory=list)
    reload_ms: list[float] = field(default_factory=list)
    arrival_ms: list[float] = field(default_factory=list)
    batch_ms: list[float] = field(default_factory=list)
    batch_meanwhile_ms: list[float] = field(default_factory=list)
    full_bytes: int = 0
    join_cpu_ms: float = 0.0
    delta_bytes: dict[str, list[int]] = field(default_factory=dict)


class Generator:
    """A policy, and the thread that brings its weights."""

    def __init__(self, client: Client, keys: Keys, mb: float) -> None:
        self.policy = Net(mb)
        self.places = Places(self.policy)  # type: ignore[arg-type]
        self.reader = WeightsReader(client, keys, _refuse, self.places)
        self.version = 0

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """Weights arrive beside this thread, as in a generator process."""
        stop = threading.Event()

        def bring() -> None:
            while not stop.is_set():
                self.reader.poll(200)

        thread = threading.Thread(target=bring, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def serve_until(self, version: int, figures: Figures) -> None:
        """Infer until `version` is here, then take it over."""
        started_s = time.monotonic()
        while True:
            newest = self.reader.newest()
            if newest is not None and newest.version == version:
                break
            if time.monotonic() - started_s > ARRIVAL_DEADLINE_S:
                raise RunFailed(f"bench weights: version {version} did not arrive in {ARRIVAL_DEADLINE_S:g} s")
            figures.batch_meanwhile_ms.append(self.policy.infer())
        arrived_s = time.monotonic()
        self.reader.retired = self.places.take(newest.state)
        figures.stall_ms.append((time.monotonic() - arrived_s) * 1000)
        figures.arrival_ms.append((arrived_s - started_s) * 1000)
        self.version = version
        figures.batch_ms += [self.policy.infer() for _ in range(3)]

    def reload(self) -> float:
        """The other way: everything between two batches, all weights, copied into the policy's; milliseconds."""
        started_s = time.monotonic()
        self.reader.poll()
        newest = self.reader.newest()
        assert newest is not None
        self.policy.load_state_dict(newest.state)
        self.version = newest.version
        return (time.monotonic() - started_s) * 1000


class Publisher:
    """A trainer's side of one run."""

    def __init__(self, client: Client, keys: Keys, base_every: int) -> None:
        self.client, self.keys = client, keys
        self.writer = WeightsWriter(client, Scripts(client), keys, base_every)

    def publish(self, version: int, data: bytes) -> WeightsManifest:
        upload = self.writer.describe(version, version, 1, data)
        self.writer.upload(upload)
        fields: Any = upload.manifest.to_fields()
        self.client.xadd(self.keys.weights, fields, maxlen=ENTRIES_KEPT, approximate=False)
        self.writer.keep(upload)
        return upload.manifest


def versions(net: Net, optimiser: str, learning_rate: float, count: int) -> Iterator[bytes]:
    """The first weights, and those after each of `count` updates by gradients of normal noise."""
    published = list(net.parameters())
    trained = [p.float() if optimiser == "float32 copy" else p for p in published]
    trained = [nn.Parameter(tensor) if tensor.is_leaf else tensor for tensor in trained]
    adam = torch.optim.Adam(trained, lr=learning_rate)
    yield to_bytes(net.state_dict())
    for _ in range(count):
        for tensor in trained:
            tensor.grad = torch.randn(tensor.shape, dtype=tensor.dtype)
        adam.step()
        with torch.no_grad():
            for parameter, tensor in zip(published, trained, strict=True):
                parameter.copy_(tensor)
        yield to_bytes(net.state_dict())


def measure(mb: float, updates: int, learning_rate: float, tell: Any) -> Figures:
    figures = Figures()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vla-stream-bench-")))
        server = stack.enter_context(EmbeddedServer.start(folder))

        def client() -> Client:
            return stack.enter_context(contextlib.closing(connect(server.url, name="bench", block_s=1.0)))

        for optimiser in OPTIMISERS:
            torch.manual_seed(0)
            keys, full_keys = Keys(f"bench-{optimiser[:4]}"), Keys(f"bench-{optimiser[:4]}-full")
            # The base once, and deltas ever after, so that each update's is seen.
            deltas, full = Publisher(client(), keys, ENTRIES_KEPT), Publisher(client(), full_keys, 1)
            background, blocking = Generator(client(), keys, mb), Generator(client(), full_keys, mb)
            sizes = figures.delta_bytes[optimiser] = []
            for index, data in enumerate(versions(Net(mb), optimiser, learning_rate, updates)):
                version = index + 1
                manifest = full.publish(version, data)
                figures.full_bytes = manifest.size_bytes
                seen = figures if index else Figures()  # the first is the start of a generator
                seen.reload_ms.append(blocking.reload())
                delta = deltas.publish(version, data)
                with background.background():
                    background.serve_until(version, seen)
                _same_bits(background.policy, blocking.policy, version)
                if delta.digest != manifest.digest:
                    raise RunFailed(f"bench weights: version {version} has two digests")
                if delta.after:
                    sizes.append(delta.size_bytes)
                elif index:
                    raise RunFailed(
                        f"bench weights: update {index} was not worth a delta; see vla_stream/streams/deltas.py"
                    )
                tell(optimiser, index, updates)
            late = Generator(client(), keys, mb)
            began_s = time.process_time()
            late.reload()
            figures.join_cpu_ms = (time.process_time() - began_s) * 1000
            _same_bits(late.policy, blocking.policy, version)
    return figures


def _same_bits(one: nn.Module, other: nn.Module, version: int) -> None:
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    wrong = [name for (name, a), b in pairs if not torch.equal(_bits(a), _bits(b))]
    if wrong:
        raise RunFailed(
            f"bench weights: version {version} by deltas differs from the full one in {', '.join(wrong[:5])}"
        )


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _refuse(_stream: str, _entry: object, reason: str) -> None:
    raise RunFailed(f"bench weights: {reason}")


def show(figures: Figures) -> str:
    stall, reload = Spread.of(figures.stall_ms), Spread.of(figures.reload_ms)
    rows = [
        ["blocking reload, ms", str(reload), "1"],
        ["stall per version in the background, ms", str(stall), f"1/{reload.median / stall.median:.0f}"],
        ["from the entry to being ready, ms", str(Spread.of(figures.arrival_ms)), ""],
        ["batch while weights arrive, ms", str(Spread.of(figures.batch_meanwhile_ms)), ""],
        ["batch otherwise, ms", str(Spread.of(figures.batch_ms)), ""],
        ["full, bytes", f"{figures.full_bytes:,}", "100 %"],
    ]
    for optimiser, sizes in figures.delta_bytes.items():
        # Adam's first step moves every weight by the whole learning rate, later ones by less.
        shares = Spread.of([100 * size / figures.full_bytes for size in sizes])
        first = 100 * sizes[0] / figures.full_bytes
        rows.append([f"delta of Adam on {optimiser}, bytes", f"{Spread.of(sizes).median:,.0f}", f"{shares} %"])
        rows.append(["    the first update's", f"{sizes[0]:,}", f"{number(first)} %"])
        rows.append(["    the last update's", f"{sizes[-1]:,}", f"{number(100 * sizes[-1] / figures.full_bytes)} %"])
    rows.append([f"joining after {len(sizes)} deltas, CPU ms", number(figures.join_cpu_ms), ""])
    return table(["", "median (range)", "of the first, of full"], rows)


@click.command()
@click.option(
    "--mb", type=click.FloatRange(min=5), default=100.0, show_default=True, help="Size of the weights, 10⁶ bytes."
)
@click.option(
    "--updates", type=click.IntRange(1, ENTRIES_KEPT - 1), default=24, show_default=True, help="Versions measured."
)
@click.option("--learning-rate", type=click.FloatRange(min=0), default=1e-5, show_default=True, help="Adam's.")
@output_option("Folder of the JSON.")
def weights(mb: float, updates: int, learning_rate: float, output: Path) -> None:
    """A generator's stall per version and the bytes of a delta, beside a blocking reload of all weights."""
    torch.set_num_threads(1)
    folder = output_folder(output)
    about = {**machine(), "mb": mb, "updates": updates, "learning_rate": learning_rate}

    def tell(optimiser: str, done: int, of: int) -> None:
        click.echo(f"Adam on {optimiser}: version {done + 1} of {of + 1}", err=True)

    figures = measure(mb, updates, learning_rate, tell)
    write_json(folder / FILE, {**about, **asdict(figures)})
    click.echo(show(figures))
    click.echo(f"\nload {', '.join(map(str, machine()['load']))}; deltas and full weights are equal bit for bit")
    click.echo(str(folder / FILE))


if __name__ == "__main__":
    weights()
