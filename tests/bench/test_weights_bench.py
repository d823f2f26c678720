"""The weights benchmark: both ways carry the same bits, and its figures are those of the versions it made."""

from __future__ import annotations

import json
from pathlib import Path

import click.testing
import pytest
import torch
import weights

from vla_stream.errors import RunFailed


def test_stalls_reloads_and_deltas_of_every_version_are_told(tmp_path: Path) -> None:
    arguments = ["--mb", "6", "--updates", "2", "--output", str(tmp_path)]
    result = click.testing.CliRunner().invoke(weights.weights, arguments, catch_exceptions=False)
    figures = json.loads((tmp_path / "weights.json").read_text())
    assert len(figures["stall_ms"]) == len(figures["reload_ms"]) == 2 * 2, "two optimisers, two updates"
    assert figures["full_bytes"] > 6e6
    for optimiser in weights.OPTIMISERS:
        assert len(figures["delta_bytes"][optimiser]) == 2
        assert all(0 < size < 0.1 * figures["full_bytes"] for size in figures["delta_bytes"][optimiser])
    assert "equal bit for bit" in result.output


def test_a_version_that_differs_from_its_full_one_fails_the_benchmark() -> None:
    torch.manual_seed(0)
    one, other = weights.Net(6), weights.Net(6)
    other.load_state_dict(one.state_dict())
    weights._same_bits(one, other, 3)
    with torch.no_grad():
        next(iter(other.parameters())).view(torch.int16).bitwise_xor_(1)
    with pytest.raises(RunFailed, match=r"version 3 by deltas differs .* in body\.layers\.0"):
        weights._same_bits(one, other, 3)


def test_updates_change_the_weights_that_are_published_by_at_most_the_learning_rate() -> None:
    for optimiser in weights.OPTIMISERS:
        torch.manual_seed(0)
        net = weights.Net(6)
        before = next(net.parameters()).float().clone()
        first, second = weights.versions(net, optimiser, 1e-3, 1)
        after = next(net.parameters()).float()
        assert first != second and len(first) == len(second)
        assert 0 < (after - before).abs().max() < 2e-3
