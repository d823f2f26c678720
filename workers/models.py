"""What generators and the trainer share: the policy's construction, its device, and the way of its weights."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load, save
from torch import Tensor

from vla_stream import plugins
from vla_stream.broker.connection import Client
from vla_stream.broker.queue import Entry
from vla_stream.broker.scripts import PUT_CHUNK, Scripts
from vla_stream.broker.tail import Tail, newest_entries
from vla_stream.config import Config
from vla_stream.environments.protocol import Specification
from vla_stream.errors import BadMessage, InputError
from vla_stream.policies.protocol import Policy
from vla_stream.streams.keys import Keys
from vla_stream.streams.weights import ENTRIES_KEPT, WeightsManifest
from workers.worker import Worker

SAY_WAITING_S = 10.0


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of the weights, decoded. digest: that of the manifest, for replies."""

    version: int
    digest: str
    state: Mapping[str, Tensor]


class WeightsReader:
    """Brings the newest weights. `poll` may run in a thread of its own; `newest` and `wait` are for the others."""

    def __init__(self, client: Client, keys: Keys, bury: Callable[[str, Entry, str], None]) -> None:
        self.client, self.keys, self._bury = client, keys, bury
        self.device = torch.device("cpu")
        self._tail = Tail(client, keys.weights)
        self._unseen: list[Entry] = []  # kept until fetched: a broken connection must not lose a version
        self._newest: Weights | None = None
        self._arrived = threading.Condition()

    def poll(self, block_ms: int | None = None) -> None:
        """Look for newer entries and fetch the newest that is whole; a damaged one is buried (F27)."""
        # Newest wins: what lies between the last look and now is skipped.
        self._unseen += self._tail.read(ENTRIES_KEPT, None if self._unseen else block_ms)
        for entry in reversed(self._unseen):
            try:
                manifest = WeightsManifest.from_fields(entry.fields)
                data = manifest.assemble(lambda index, of=manifest: self._chunk(of, index))  # type: ignore[misc]
            except BadMessage as exc:
                self._bury(self._tail.stream, entry, str(exc))
                continue
            if data is not None:  # else its chunks are gone, so a newer version exists
                self._arrive(manifest, data)
                break
        self._unseen = []

    def _arrive(self, manifest: WeightsManifest, data: bytes) -> None:
        state = {name: tensor.to(self.device, non_blocking=True) for name, tensor in load(data).items()}
        with self._arrived:
            self._newest = Weights(manifest.version, manifest.digest, state)
            self._arrived.notify_all()

    def _chunk(self, manifest: WeightsManifest, index: int) -> bytes | None:
        chunk = self.client.get(self.keys.weight_chunk(manifest.version, manifest.epoch, index))
        return chunk if isinstance(chunk, bytes) else None

    def newest(self) -> Weights | None:
        return self._newest

    def wait(self, seconds: float) -> None:
        """Until newer weights arrive, or the time is over."""
        with self._arrived:
            self._arrived.wait(seconds)


def publish_chunks(
    scripts: Scripts, keys: Keys, manifest: WeightsManifest, chunks: list[bytes], lifetime_s: float
) -> None:
    """Upload all chunks of one version. They expire unless the version is committed (`keep_chunks`)."""
    for index, chunk in enumerate(chunks):
        key = keys.weight_chunk(manifest.version, manifest.epoch, index)
        scripts.call(PUT_CHUNK, [key], [chunk, int(lifetime_s * 1000)])


def keep_chunks(
    client: Client, keys: Keys, manifest: WeightsManifest, previous: WeightsManifest | None, keep_s: float
) -> None:
    """After the commit: the new version's chunks stay, the previous one's go after `keep_s`."""
    with client.pipeline(transaction=False) as pipe:
        for index in range(len(manifest.chunk_digests)):
            pipe.persist(keys.weight_chunk(manifest.version, manifest.epoch, index))
        for index in range(len(previous.chunk_digests) if previous else 0):
            assert previous is not None
            pipe.pexpire(keys.weight_chunk(previous.version, previous.epoch, index), int(keep_s * 1000))
        pipe.execute()


def newest_manifest(client: Client, keys: Keys) -> WeightsManifest | None:
    """Of the weights that an earlier trainer left, if any: their chunks must not stay for ever."""
    for entry in newest_entries(client, keys.weights, 1):
        with contextlib.suppress(BadMessage):
            return WeightsManifest.from_fields(entry.fields)
    return None


def to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """A state dict as safetensors bytes."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})


def await_specification(worker: Worker) -> Specification | None:
    """The run's shapes, once the first simulator announced them; None when told to end before."""
    next_word_s = time.monotonic() + SAY_WAITING_S
    worker.state = "waiting for a simulator to announce its shapes"
    while not worker.draining:
        worker.patiently(worker.beat)
        specification = worker.patiently(worker.flow.specification)
        if specification is not None:
            worker.state = "loading"
            return specification
        if time.monotonic() > next_word_s:
            next_word_s = time.monotonic() + 6 * SAY_WAITING_S
            worker.say("waiting", f"{worker.role} waits for a simulator: none has announced its shapes yet")
        time.sleep(0.1)
    return None


def make_policy(config: Config, specification: Specification, device: torch.device) -> Policy:
    """The configured policy, freshly initialised. Raises InputError.

    A warm start's own seed decides its first weights too: the same one for every seed of the run."""
    cls = plugins.load_class(plugins.POLICIES, config.policy.name)
    options = plugins.parse_options(cls, config.policy.options, "policy.options")
    torch.manual_seed(config.seed if config.pretrain is None else config.pretrain.seed)
    policy: Policy = cls(options, specification, config.policy.chunk)
    if isinstance(policy, torch.nn.Module):
        policy.to(device).eval()
    return policy


def torch_device(name: str) -> torch.device:
    """`auto` is cuda where there is one, else cpu. Raises InputError for what this host does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # Without CUDA in the build torch fails an assertion.
    except (RuntimeError, AssertionError) as exc:
        raise InputError(
            f"device is {name!r}, which torch cannot use here; set trainer.device, generators.device or --device "
            "to cpu or auto"
        ) from exc
    return device
