"""The way of the weights, from a trainer's memory to a generator's."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from own_server import own_server

from vla_stream.broker.connection import UNREACHABLE, connect
from vla_stream.broker.scripts import Scripts
from vla_stream.streams.keys import Keys
from vla_stream.streams.weights import WeightsManifest
from workers.models import WeightsReader, publish_chunks, to_bytes


def test_f26_weights_that_are_too_large_for_one_value_arrive_in_chunks(tmp_path: Path) -> None:
    # Redis's own limit is 512 MB, and what exceeds it costs the connection; here it is 4 MB.
    state = {"body": torch.arange(2_000_000, dtype=torch.float32), "head": torch.ones(3)}
    data = to_bytes(state)
    with (
        own_server(tmp_path, ["--proto-max-bulk-len", "4mb"]) as port,
        contextlib.closing(connect(f"redis://127.0.0.1:{port}/0", name="test")) as client,
    ):
        with pytest.raises(UNREACHABLE):
            client.set("vla:{big}:whole", data)
        keys, buried = Keys("big"), []
        manifest, chunks = WeightsManifest.describe(1, 0, 1, data)
        publish_chunks(Scripts(client), keys, manifest, chunks, 60.0)
        client.xadd(keys.weights, manifest.to_fields())  # type: ignore[arg-type]
        reader = WeightsReader(client, keys, lambda *letter: buried.append(letter))
        reader.poll()
        arrived = reader.newest()
    assert not buried and arrived is not None and arrived.version == 1
    assert all(torch.equal(arrived.state[name], tensor) for name, tensor in state.items())
