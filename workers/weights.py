"""The way of the weights: the trainer's side, which uploads versions and lets old ones go, and the generators' side,
which makes them ready in the background, so that taking them over between two batches costs next to nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from vla_stream.broker.connection import Client
from vla_stream.broker.queue import Entry
from vla_stream.broker.scripts import PUT_CHUNK, Scripts
from vla_stream.broker.tail import Tail, newest_entries
from vla_stream.errors import BadMessage
from vla_stream.policies.protocol import Policy
from vla_stream.streams import deltas
from vla_stream.streams.keys import Keys
from vla_stream.streams.weights import ENTRIES_KEPT, WeightsManifest

UNCOMMITTED_CHUNKS_S = 3600.0
OLD_CHUNKS_S = 60.0  # a generator that is loading them has so long to finish

# safetensors' words; what is not among them cannot be published by the release of torch that we require.
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}


# ---- the trainer's side


@dataclass(frozen=True, slots=True)
class Upload:
    """One version on its way: full bytes, and the chunks that travel, which may be a delta."""

    manifest: WeightsManifest
    chunks: list[bytes]
    data: bytes


class WeightsWriter:
    """What a trainer has published, and what the server keeps of it. Holds one copy of the newest version's bytes."""

    def __init__(self, client: Client, scripts: Scripts, keys: Keys, base_every: int) -> None:
        self.client, self.scripts, self.keys, self.base_every = client, scripts, keys, base_every
        self.data = b""  # of the newest version
        self._chain: list[WeightsManifest] = []  # the newest base and all its deltas

    def describe(self, version: int, update: int, epoch: int, data: bytes, *, full: bool = False) -> Upload:
        """`data` as a version: a delta to the one before where that pays, a base when one is due, or with `full`."""
        due = full or not self._chain or len(self._chain) >= self.base_every
        previous = None if due else (self._chain[-1], self.data)
        return Upload(*WeightsManifest.describe(version, update, epoch, data, previous), data)

    def upload(self, upload: Upload) -> None:
        """All chunks. They expire unless the version is committed (`keep`)."""
        manifest = upload.manifest
        for index, chunk in enumerate(upload.chunks):
            key = self.keys.weight_chunk(manifest.version, manifest.epoch, index)
            self.scripts.call(PUT_CHUNK, [key], [chunk, int(UNCOMMITTED_CHUNKS_S * 1000)])

    def keep(self, upload: Upload) -> None:
        """After the commit: its chunks stay; if it is a base, all older ones go in a minute. May be repeated."""
        manifest = upload.manifest
        old = self._chain if manifest.after == 0 else []
        with self.client.pipeline(transaction=False) as pipe:
            for key in self._chunk_keys([manifest]):
                pipe.persist(key)
            for key in self._chunk_keys(old):
                pipe.pexpire(key, int(OLD_CHUNKS_S * 1000))
            pipe.execute()
        self._chain = [manifest] if manifest.after == 0 else [*self._chain, manifest]
        self.data = upload.data

    def adopt(self) -> None:
        """Before taking over: what earlier trainers left must not stay for ever; it goes after the next base."""
        left: list[WeightsManifest] = []
        for manifest in self._published():
            left = [manifest] if manifest.after == 0 else [*left, manifest]
        known = {(manifest.version, manifest.epoch) for manifest in left}
        self._chain = [m for m in self._chain if (m.version, m.epoch) not in known] + left

    def missing(self) -> str:
        """What the server has lost of that which a generator needs that joins now; empty when nothing."""
        there = {(manifest.version, manifest.digest) for manifest in self._published()}
        for manifest in self._chain:
            if (manifest.version, manifest.digest) not in there:
                return f"the entry of weights {manifest.version}"
        keys = list(self._chunk_keys(self._chain))
        with self.client.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.strlen(key)
            sizes = pipe.execute()
        wanted = sum(manifest.size_bytes for manifest in self._chain)
        lost = sum(size == 0 for size in sizes)
        return f"{max(lost, 1)} of {len(keys)} chunks of weights" if sum(sizes) != wanted else ""

    def _published(self) -> list[WeightsManifest]:
        manifests = []
        for entry in newest_entries(self.client, self.keys.weights, ENTRIES_KEPT):
            try:
                manifests.append(WeightsManifest.from_fields(entry.fields))
            except BadMessage:
                continue  # the generators tell about those
        return manifests

    def _chunk_keys(self, manifests: list[WeightsManifest]) -> list[str]:
        return [
            self.keys.weight_chunk(manifest.version, manifest.epoch, index)
            for manifest in manifests
            for index in range(len(manifest.chunk_digests))
        ]


def to_bytes(state: Mapping[str, Tensor]) -> bytes:
    """A state dict as safetensors bytes."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})


# ---- the generators' side

Letters = Sequence[tuple[Entry, str]]  # damaged entries, each with the reason


@dataclass(frozen=True, slots=True)
class Weights:
    """One version of the weights, decoded. digest: that of the manifest, for replies."""

    version: int
    digest: str
    state: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Whole:
    """The full bytes of one version, u8[bytes], and its tensors as views into them. Never changed: deltas are applied
    to a copy."""

    manifest: WeightsManifest
    data: np.ndarray
    views: Mapping[str, Tensor]


class Places:
    """The tensors of a generator's policy, and how new ones take their place."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._like = {name: tensor for name, tensor in policy.state_dict().items() if isinstance(tensor, Tensor)}
        self._exchangeable = _exchangeable(policy) if isinstance(policy, nn.Module) else {}
        cuda = {tensor.device for tensor in self._like.values() if tensor.is_cuda}
        self._streams = [torch.cuda.Stream(device) for device in cuda]  # type: ignore[no-untyped-call]

    def make_ready(self, views: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of `views` on the policy's devices and in its dtypes. For a thread in the background."""
        # Not run on a GPU yet. Streams of their own: inference does not queue behind these copies.
        with contextlib.ExitStack() as streams:
            for stream in self._streams:
                streams.enter_context(torch.cuda.stream(stream))
            state = {name: self._copy(name, view) for name, view in views.items()}
        for stream in self._streams:
            stream.synchronize()
        return state

    def _copy(self, name: str, view: Tensor) -> Tensor:
        like = self._like.get(name)
        if like is None:
            return view.clone()
        source = view.pin_memory() if like.is_cuda else view
        return source.to(like.device, like.dtype, non_blocking=like.is_cuda, copy=True)

    def differ(self, state: Mapping[str, Tensor]) -> bool:
        """Whether these are of another policy, by their names or shapes."""
        like = self._like
        return like.keys() != state.keys() or any(like[name].shape != tensor.shape for name, tensor in state.items())

    def take(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """The policy has these weights from now on; returns what it had, for somebody else to let go of."""
        slots = self._exchangeable
        if slots.keys() != state.keys() or any(slots[name].shape != tensor.shape for name, tensor in state.items()):
            self._policy.load_state_dict(state)
            return []
        return [slots[name].exchange(tensor) for name, tensor in state.items()]


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a module keeps one tensor. Looked up each time: a policy may set its buffers to other tensors."""

    owner: dict[str, Any]
    key: str

    @property
    def shape(self) -> torch.Size:
        shape: torch.Size = self.owner[self.key].shape
        return shape

    def exchange(self, tensor: Tensor) -> Tensor:
        old: Tensor = self.owner[self.key]
        if isinstance(old, nn.Parameter):
            # The parameter stays the same object, for whoever else refers to it.
            data, old.data = old.data, tensor
            return data
        self.owner[self.key] = tensor
        return old


def _exchangeable(policy: nn.Module) -> dict[str, _Slot]:
    """Its slots by their names in its state dict; none where a part of it loads in a way of its own."""
    slots = {}
    for prefix, module in policy.named_modules(remove_duplicate=False):
        of = type(module)
        own = of.load_state_dict, of._load_from_state_dict, of.state_dict, of._save_to_state_dict
        torchs = (
            *(nn.Module.load_state_dict, nn.Module._load_from_state_dict),
            *(nn.Module.state_dict, nn.Module._save_to_state_dict),
        )
        hooks = (
            *(module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks),
            *(module._state_dict_hooks, module._state_dict_pre_hooks),
        )
        if own != torchs or any(hooks):
            return {}
        for owner in (module._parameters, module._buffers):
            for key, tensor in owner.items():
                if tensor is not None and key not in module._non_persistent_buffers_set:
                    slots[f"{prefix}.{key}" if prefix else key] = _Slot(owner, key)
    return slots


class WeightsReader:
    """Brings the newest weights. `poll` may run in a thread of its own; `newest` and `wait` are for the others."""

    def __init__(self, client: Client, keys: Keys, bury: Callable[[str, Letters], None], places: Places) -> None:
        self.client, self.keys, self._bury, self._places = client, keys, bury, places
        self._tail = Tail(client, keys.weights)
        self._unseen: list[Entry] = []  # kept until fetched: a broken connection must not lose a version
        self._links: dict[int, tuple[Entry, WeightsManifest]] = {}  # by version: the newest entries of the stream
        self._whole: _Whole | None = None
        self._newest: Weights | None = None
        self._arrived = threading.Condition()
        self.retired: object = None  # weights of no more use: it takes milliseconds to let go of them, so `poll` does

    def poll(self, block_ms: int | None = None) -> None:
        """Look for newer entries and fetch the newest that is whole; a damaged one is buried (F27)."""
        # Newest wins: what lies between the last look and now is skipped, but for the deltas on the way.
        self._unseen += self._tail.read(ENTRIES_KEPT, None if self._unseen else block_ms)
        self.retired = None
        fresh, damaged = [], []
        for entry in self._unseen:
            try:
                manifest = WeightsManifest.from_fields(entry.fields)
            except BadMessage as exc:
                damaged.append((entry, str(exc)))
                continue
            self._links.pop(manifest.version, None)
            self._links[manifest.version] = entry, manifest
            fresh.append(manifest)
        for manifest in reversed(fresh):
            whole = self._fetch(manifest)
            if whole is not None:
                self._arrive(whole)
                break
        self._unseen = []
        if damaged:
            self._bury(self._tail.stream, damaged)
        for version in list(self._links)[:-ENTRIES_KEPT]:
            del self._links[version]

    def newest(self) -> Weights | None:
        return self._newest

    def wait(self, seconds: float) -> None:
        """Until newer weights arrive, or the time is over."""
        with self._arrived:
            self._arrived.wait(seconds)

    def _fetch(self, manifest: WeightsManifest) -> _Whole | None:
        """These weights, by deltas to those that are here or to the newest base; None when a part is missing."""
        links = self._way(manifest)
        if not links:
            return None
        payloads = []
        for link in links:
            payload = self._payload(link)
            if payload is None:
                return None
            payloads.append(payload)
        try:
            return self._build(links, payloads)
        except BadMessage as exc:
            if links[0].after:
                self._whole = None  # what is here may be what is wrong: again, from the base
                return self._fetch(manifest)
            self._drop(manifest, str(exc))
            return None

    def _way(self, manifest: WeightsManifest) -> list[WeightsManifest]:
        """What to apply, oldest first: deltas, the first of them to the weights that are here, or a base and its
        deltas. Empty when one of them is unknown, damaged or gone."""
        if manifest.version not in self._links:
            return []
        links = [manifest]
        here = self._whole and (self._whole.manifest.version, self._whole.manifest.digest)
        while links[0].after and (links[0].after, links[0].after_digest) != here:
            _, earlier = self._links.get(links[0].after, (None, None))
            if earlier is None or earlier.digest != links[0].after_digest:
                return []
            links.insert(0, earlier)
        return links

    def _payload(self, manifest: WeightsManifest) -> bytearray | None:
        """Its chunks; None when one is damaged or gone, and then no way leads over it any more."""
        try:
            payload = manifest.assemble(lambda index: self._chunk(manifest, index))
        except BadMessage as exc:
            self._drop(manifest, str(exc))
            return None
        if payload is None:  # a newer base exists, or will
            del self._links[manifest.version]
        return payload

    def _build(self, links: list[WeightsManifest], payloads: list[bytearray]) -> _Whole:
        """Raises BadMessage unless the outcome is what the last of the links promises, bit for bit."""
        if links[0].after:
            assert self._whole is not None
            data = self._whole.data.copy()
        else:
            data = np.frombuffer(payloads.pop(0), dtype=np.uint8)
        for payload in payloads:
            deltas.apply(data.data, payload)
        if payloads:
            links[-1].verify(data.data)
        return _Whole(links[-1], data, tensors(data))

    def _arrive(self, whole: _Whole) -> None:
        manifest = whole.manifest
        state = self._places.make_ready(whole.views)
        self._whole = whole
        with self._arrived:
            self._newest = Weights(manifest.version, manifest.digest, state)
            self._arrived.notify_all()

    def _drop(self, manifest: WeightsManifest, reason: str) -> None:
        entry, _ = self._links[manifest.version]
        self._bury(self._tail.stream, [(entry, reason)])
        del self._links[manifest.version]

    def _chunk(self, manifest: WeightsManifest, index: int) -> bytes | None:
        chunk = self.client.get(self.keys.weight_chunk(manifest.version, manifest.epoch, index))
        return chunk if isinstance(chunk, bytes) else None


def tensors(data: np.ndarray) -> dict[str, Tensor]:
    """The tensors of safetensors bytes u8[bytes], as views into them. Raises BadMessage."""
    views = {}
    for item in deltas.layout(data.data):
        dtype, count = DTYPES.get(item.dtype), math.prod(item.shape)
        if dtype is None or count * dtype.itemsize != item.stop - item.start:
            raise BadMessage(f"tensor {item.name} is {item.dtype} {list(item.shape)} in {item.stop - item.start} bytes")
        flat = (
            torch.frombuffer(data, dtype=dtype, count=count, offset=item.start) if count else torch.empty(0).to(dtype)
        )
        views[item.name] = flat.reshape(item.shape)
    return views
