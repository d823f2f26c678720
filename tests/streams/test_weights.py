"""Edge trainer → generators: a version of the weights arrives whole and proven, or not at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save

from vla_stream.broker.codec import digest_of, seal
from vla_stream.errors import BadMessage
from vla_stream.streams.weights import CHUNK_BYTES, SCHEMA, WeightsManifest

DATA = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 5)
MANIFEST, CHUNKS = WeightsManifest.describe(12, 11, 1, DATA)


NEXT = save({"w": np.zeros(CHUNK_BYTES, np.uint16)})
DELTA, DELTA_CHUNKS = WeightsManifest.describe(13, 12, 1, NEXT, (replace(MANIFEST, version=12), NEXT))


def resealed(**changes: str | int | None) -> dict[bytes, bytes]:
    fields = {name.decode(): v for name, v in MANIFEST.to_fields().items() if name not in {b"schema", b"digest"}}
    return seal(SCHEMA, {name: value for name, value in (fields | changes).items() if value is not None})


def test_a_manifest_comes_back_equal_and_its_chunks_give_the_weights() -> None:
    returned = WeightsManifest.from_fields(MANIFEST.to_fields())
    assert returned == MANIFEST
    assert returned.assemble(CHUNKS.__getitem__) == DATA


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_weights_of_any_size_travel(size: int) -> None:
    manifest, chunks = WeightsManifest.describe(1, 0, 1, DATA[:size])
    assert all(len(chunk) <= CHUNK_BYTES for chunk in chunks)
    assert WeightsManifest.from_fields(manifest.to_fields()).assemble(chunks.__getitem__) == DATA[:size]


def test_a_manifest_reads_in_redis_cli_as_documented() -> None:
    fields = MANIFEST.to_fields()
    del fields[b"digest"], fields[b"chunk_digests"]
    assert fields == {
        b"version": b"12",
        b"update": b"11",
        b"epoch": b"1",
        b"bytes": b"%d" % len(DATA),
        b"chunks": b"3",
        b"weights_digest": digest_of(DATA).encode(),
        b"after": b"0",
        b"after_digest": b"",
        b"schema": b"3",
    }


def test_a_delta_names_the_version_and_the_digest_that_it_follows() -> None:
    assert (DELTA.after, DELTA.after_digest, DELTA.digest) == (12, MANIFEST.digest, digest_of(NEXT))
    assert WeightsManifest.from_fields(DELTA.to_fields()) == DELTA
    assert DELTA.assemble(DELTA_CHUNKS.__getitem__) == b"".join(DELTA_CHUNKS) and DELTA.size_bytes < 100


def test_a_missing_chunk_means_that_a_newer_base_exists() -> None:
    assert MANIFEST.assemble(lambda index: None if index == 2 else CHUNKS[index]) is None


def test_f27_a_damaged_chunk_is_refused_by_number() -> None:
    with pytest.raises(BadMessage, match="weights 12: chunk 1 does not match its digest"):
        MANIFEST.assemble(lambda index: CHUNKS[index][:-1] + b"x" if index == 1 else CHUNKS[index])


def test_f27_chunks_in_another_order_are_refused() -> None:
    with pytest.raises(BadMessage, match="chunk 0"):
        MANIFEST.assemble(lambda index: CHUNKS[2 - index])


@pytest.mark.parametrize("change", [{"digest": "0" * 16}, {"size_bytes": len(DATA) - 1}], ids=str)
def test_f27_good_chunks_that_are_not_the_announced_whole_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(BadMessage, match="do not match the manifest"):
        replace(MANIFEST, **change).assemble(CHUNKS.__getitem__)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": 2}, "3 chunk digests"),
        ({"bytes": CHUNK_BYTES}, "expected 1"),
        ({"bytes": 0}, "field bytes is 0"),
        ({"bytes": 1 << 50}, "field bytes is"),
        ({"chunk_digests": ""}, "1 chunk digests"),
        ({"weights_digest": None}, "lacks the field weights_digest"),
        ({"weights_digest": "0" * 17}, "field weights_digest has 17 bytes"),
        ({"version": -1}, "field version is -1"),
        ({"after": 12}, "field after is 12, expected 0 to 11"),
        ({"after": None}, "lacks the field after"),
    ],
    ids=str,
)
def test_f27_a_wrong_field_is_refused_by_name(changes: dict[str, str | int | None], message: str) -> None:
    with pytest.raises(BadMessage, match=message):
        WeightsManifest.from_fields(resealed(**changes))


def test_f27_another_schema_and_any_damage_are_refused() -> None:
    fields = MANIFEST.to_fields()
    with pytest.raises(BadMessage, match="schema"):
        WeightsManifest.from_fields(fields | {b"schema": b"99"})
    for name in fields:
        with pytest.raises(BadMessage):
            WeightsManifest.from_fields(fields | {name: fields[name] + b"0"})
