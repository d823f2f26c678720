"""Metrics in TensorBoard, Weights & Biases and Prometheus: what arrives there, and that none of them ends a run."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from own_server import free_port
from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
from tensorboardX.record_writer import masked_crc32c  # type: ignore[import-untyped]

from vla_stream.cli import trackers
from vla_stream.cli.samples import Record
from vla_stream.cli.trackers import Trackers
from vla_stream.config import Config, load
from vla_stream.errors import InputError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SECOND: Record = {"time": 1.0, "seconds": 1.0, "worker": "generator-0", "role": "generator", "kind": "second"}
UPDATE: Record = {
    "time": 2.0,
    "worker": "trainer-0",
    "role": "trainer",
    "kind": "update",
    "update": 7.0,
    "version": 8.0,
}


def config(tmp_path: Path, **tracking: object) -> Config:
    base = load([QUICKSTART], [f"runs_dir={tmp_path}", "name=tracked"])
    return Config.model_validate({**base.model_dump(), "tracking": tracking})


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def made(told: list[str]) -> Iterator[Trackers]:
    opened = Trackers(told.append)
    yield opened
    opened.close()


def events(folder: Path) -> dict[str, tuple[int, float]]:
    """Name -> (step, value) of the scalars in an event file; its records have lengths and checksums around them."""
    (file,) = folder.iterdir()
    data, found = file.read_bytes(), {}
    while data:
        length = int.from_bytes(data[:8], "little")
        assert int.from_bytes(data[8:12], "little") == masked_crc32c(data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
        data = data[16 + length :]
    return found


def scrape(port: int) -> list[str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return [line for line in answer.read().decode().splitlines() if not line.startswith("#")]


def test_tensorboard_has_each_update_with_where_the_time_went(made: Trackers, tmp_path: Path) -> None:
    made.open(config(tmp_path, tensorboard=True))
    made.add([{**SECOND, "busy.infer": 0.25, "env_steps": 3.0}])
    made.add([{**UPDATE, "success": 0.5, "loss": float("nan")}])
    made.close()
    found = events(tmp_path / "tracked" / "tensorboard")
    assert found["update/success"] == (7, 0.5) and found["time/generator.work"] == (7, 0.25)
    assert "update/loss" not in found and "update/version" not in found


def test_weights_and_biases_offline_keeps_a_run_in_the_runs_folder(
    made: Trackers, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    made.open(config(tmp_path, wandb="robots"))
    made.add([{**UPDATE, "success": 0.5}])
    made.close()
    (kept,) = (tmp_path / "tracked" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"update/success" in kept.read_bytes() and told == []


def test_prometheus_sums_counters_and_buckets_and_shows_the_last_gauges(made: Trackers, tmp_path: Path) -> None:
    port = free_port()
    made.open(config(tmp_path, prometheus_port=port))
    counted: Record = {**SECOND, "requests": 5.0, "bytes.shm": 1e6, "memory_mb": 90.0, "age_ms[5]": 3.0}
    made.add([counted, {**counted, "age_ms[2]": 1.0, "age_ms[inf]": 2.0, "memory_mb": 95.0}])
    made.add([{**UPDATE, "success": 0.5}])
    labels = 'role="generator",run="tracked",worker="generator-0"'
    part = 'part="",'
    lines = scrape(port)
    assert {
        f"vla_stream_requests_total{{{part}{labels}}} 10.0",
        f'vla_stream_bytes_total{{part="shm",{labels}}} 2e+06',
        f"vla_stream_memory_mb{{{part}{labels}}} 95.0",
        f'vla_stream_age_ms_histogram_bucket{{le="1",{labels}}} 0.0',
        f'vla_stream_age_ms_histogram_bucket{{le="2",{labels}}} 1.0',
        f'vla_stream_age_ms_histogram_bucket{{le="5",{labels}}} 7.0',
        f'vla_stream_age_ms_histogram_bucket{{le="+Inf",{labels}}} 9.0',
        'vla_stream_update_success{part="",role="trainer",run="tracked",worker="trainer-0"} 0.5',
        'vla_stream_update_update{part="",role="trainer",run="tracked",worker="trainer-0"} 7.0',
    } <= set(lines)
    assert not [line for line in lines if "seconds" in line or "_time" in line]


def test_records_of_strangers_do_not_break_a_scrape(made: Trackers, tmp_path: Path, told: list[str]) -> None:
    port = free_port()
    made.open(config(tmp_path, prometheus_port=port))
    made.add([{"kind": "second", "age_ms[x]": 1.0, "[": 2.0, 'a"b\n': 3.0, "a.b": 1.0, "a_b": 2.0, "worker": 'w"\\\n'}])
    made.add([{"kind": "second", "a": 1.0, "worker": "w"}, {"kind": "update", "update": 1.0, "staleness[0]": 2.0}])
    assert scrape(port) and told == []


def test_a_port_that_is_taken_and_a_package_that_lacks_are_said_before_anything_starts(
    made: Trackers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"tracking.prometheus_port: {port} cannot be opened .*another one"):
            made.open(config(tmp_path, prometheus_port=port))
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    lacking = r"tracking.tensorboard: the package tensorboardX is not installed; pip install 'vla-stream\[tracking\]'"
    with pytest.raises(InputError, match=lacking):
        made.open(config(tmp_path, tensorboard=True, wandb="robots"))
    trackers.check_installed(config(tmp_path))


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(
    made: Trackers, tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    made.open(config(tmp_path, prometheus_port=port, tensorboard=True))

    def full(self: object, records: Sequence[Record]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trackers.TensorBoard, "add", full)
    for _ in range(2):
        assert made.add(iter([{**UPDATE, "success": 0.5}]))[0]["success"] == 0.5
    assert told == [
        "TensorBoard: OSError: [Errno 28] No space left on device; no more metrics go there, the run goes on"
    ]
    assert any("update_success" in line for line in scrape(port))
