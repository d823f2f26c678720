"""Edge trainer → generators: `weights`, newest wins.

Delivery: all chunks first, then the entry, which the script COMMIT or RESUME adds together with the update: the entry
is the commit. Chunks are immutable. Most versions are deltas to the one before; the first of a lineage, and every so
many, is full: the base. Kept are the newest base, all its deltas, and whatever was needed in the last minute. A reader
applies the deltas that it lacks; one that misses a chunk starts again from the newest base.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vla_stream.broker.codec import Fields, digest_of, seal, unseal
from vla_stream.errors import BadMessage
from vla_stream.streams import deltas

SCHEMA = 3
CHUNK_BYTES = 2 * 1024 * 1024  # 2 MiB chunks moved 96 MB two to four times faster than one blob (F26)
ENTRIES_KEPT = 32  # at least config's trainer.weights_base_every: a base and all its deltas
MAX_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """One version of the weights: safetensors bytes, or a delta (deltas.py) to those of an earlier version, in chunks.

    version  only grows; update: commits of the lineage it belongs to; epoch: of the trainer that wrote it
    digest   xxh3 of the full bytes, also where the chunks are a delta; chunk_digests: of each chunk
    after    the version that the delta is to be applied to, and its digest; 0 and none where the chunks are full

    Example, as redis-cli shows it: version 12 · update 11 · epoch 1 · bytes 52230 · chunks 1 · after 11 ·
    after_digest 03… · weights_digest 9a…
    """

    version: int
    update: int
    epoch: int
    size_bytes: int
    digest: str
    chunk_digests: tuple[str, ...]
    after: int = 0
    after_digest: str = ""

    @classmethod
    def describe(
        cls, version: int, update: int, epoch: int, data: bytes, previous: tuple[WeightsManifest, bytes] | None = None
    ) -> tuple[WeightsManifest, list[bytes]]:
        """The manifest of `data` and its chunks: a delta to `previous`, a version and its bytes, where that pays."""
        # What fits into one chunk is fetched by one command either way.
        delta = deltas.encode(previous[1], data) if previous and len(data) > CHUNK_BYTES else None
        payload = data if delta is None else delta
        chunks = [payload[start : start + CHUNK_BYTES] for start in range(0, len(payload), CHUNK_BYTES)]
        after, after_digest = (previous[0].version, previous[0].digest) if previous and delta is not None else (0, "")
        digests = tuple(digest_of(chunk) for chunk in chunks)
        return cls(version, update, epoch, len(payload), digest_of(data), digests, after, after_digest), chunks

    def to_fields(self) -> dict[bytes, bytes]:
        fields: dict[str, str | bytes | int | float] = {
            "version": self.version,
            "update": self.update,
            "epoch": self.epoch,
            "bytes": self.size_bytes,
            "chunks": len(self.chunk_digests),
            "after": self.after,
            "after_digest": self.after_digest,
            "weights_digest": self.digest,
            "chunk_digests": ",".join(self.chunk_digests),
        }
        return seal(SCHEMA, fields)

    @classmethod
    def from_fields(cls, raw: Mapping[bytes, bytes]) -> WeightsManifest:
        """Raises BadMessage."""
        fields: Fields = unseal(SCHEMA, raw)
        size = fields.integer("bytes", 1, MAX_BYTES)
        digests = tuple(fields.text("chunk_digests", 1 << 24).split(","))
        if len(digests) != -(-size // CHUNK_BYTES) or len(digests) != fields.integer("chunks"):
            raise BadMessage(f"{len(digests)} chunk digests for {size} bytes, expected {-(-size // CHUNK_BYTES)}")
        version, update, epoch = (fields.integer(name) for name in ("version", "update", "epoch"))
        # A delta leads from an older version, so that following them back comes to an end.
        after, after_digest = fields.integer("after", 0, max(version - 1, 0)), fields.text("after_digest", 16)
        digest = fields.text("weights_digest", 16)
        return cls(version, update, epoch, size, digest, digests, after, after_digest)

    def assemble(self, chunk: Callable[[int], bytes | None]) -> bytearray | None:
        """The bytes of all chunks, or None when one is gone (a newer base exists then). Raises BadMessage."""
        payload = bytearray()
        for index, digest in enumerate(self.chunk_digests):
            part = chunk(index)
            if part is None:
                return None
            if digest_of(part) != digest:
                raise BadMessage(f"weights {self.version}: chunk {index} does not match its digest")
            payload += part
        if len(payload) != self.size_bytes:
            raise BadMessage(f"weights {self.version}: {len(payload)} bytes do not match the manifest")
        if not self.after:
            self.verify(payload)
        return payload

    def verify(self, data: deltas.Data) -> None:
        """That `data`, full bytes, are these weights bit for bit. Raises BadMessage."""
        if digest_of(data) != self.digest:
            raise BadMessage(f"weights {self.version}: {len(data)} bytes do not match the manifest")
