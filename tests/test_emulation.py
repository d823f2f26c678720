"""Emulated devices: times add up exactly, and one computes at a time, across processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vla_stream import emulation
from vla_stream.emulation import Claim, Devices, Stream
from vla_stream.errors import InputError

WORKER = """
import sys, time
from pathlib import Path
from vla_stream.emulation import Devices
names, folder, seconds, count = sys.argv[1].split(","), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
devices = Devices(names, folder)
print("ready", flush=True)
sys.stdin.readline()
start = time.monotonic()
for _ in range(count):
    devices.compute(seconds)
print(start, time.monotonic(), flush=True)
"""


def worker(names: str, folder: Path, seconds: float, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, names, str(folder), str(seconds), str(count)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def run_together(*processes: subprocess.Popen[str]) -> float:
    """Seconds from the first start to the last end."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    times = [tuple(map(float, process.communicate(timeout=30)[0].split())) for process in processes]
    return max(end for _, end in times) - min(start for start, _ in times)


def test_the_mean_error_of_a_time_is_below_a_fifth_of_a_millisecond(tmp_path: Path) -> None:
    devices, count, seconds = Devices(["gpu"], tmp_path), 200, 0.003
    start_s = time.monotonic()
    for _ in range(count):
        devices.compute(seconds)
    error_ms = (time.monotonic() - start_s - count * seconds) / count * 1000
    assert 0 <= error_ms < 0.2


def test_late_wake_ups_do_not_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = emulation.sleep_until
    monkeypatch.setattr(emulation, "sleep_until", lambda deadline_s: exact(deadline_s + 0.004))
    devices, count, seconds = Devices([], tmp_path), 20, 0.01
    start_s = time.monotonic()
    for _ in range(count):
        devices.compute(seconds)
    # One late wake-up is left of twenty, and the host's own.
    assert 0.004 <= time.monotonic() - start_s - count * seconds < 0.04


def test_a_computation_begins_when_it_was_asked_for(tmp_path: Path) -> None:
    start_s = time.monotonic()
    time.sleep(0.05)
    Devices(["gpu"], tmp_path).compute(0.1, asked_s=start_s)
    assert 0.1 <= time.monotonic() - start_s < 0.145


def test_a_stream_computes_in_order_while_its_process_goes_on(tmp_path: Path) -> None:
    stream, start_s = Stream(Devices(["gpu"], tmp_path)), time.monotonic()
    stream.wait()  # for nothing
    for _ in range(3):
        stream.launch(0.1)
    assert time.monotonic() - start_s < 0.1
    stream.wait()
    # Launched together, they follow one another without a gap.
    assert 0.3 <= time.monotonic() - start_s < 0.345


def test_one_process_at_a_time_computes_on_a_device_and_no_time_is_lost_between_them(tmp_path: Path) -> None:
    took_s = run_together(*(worker("gpu", tmp_path, 0.004, 50) for _ in range(2)))
    assert 0.4 <= took_s < 0.6


def test_different_devices_compute_at_the_same_time(tmp_path: Path) -> None:
    took_s = run_together(*(worker(name, tmp_path, 0.01, 30) for name in ("a", "b", "c")))
    assert 0.3 <= took_s < 0.6


def test_several_devices_are_held_together_and_in_any_order_without_a_deadlock(tmp_path: Path) -> None:
    took_s = run_together(*(worker(names, tmp_path, 0.004, 25) for names in ("a,b", "b,a", "b,c", "a,c")))
    assert 0.4 <= took_s < 0.6


def test_a_device_whose_owner_was_killed_is_free_again(tmp_path: Path) -> None:
    owner = worker("gpu", tmp_path, 60.0, 1)
    assert owner.stdin is not None
    owner.stdin.write("go\n")
    owner.stdin.flush()
    probe = os.open(tmp_path / "gpu", os.O_RDWR)
    deadline_s = time.monotonic() + 10
    while not _is_locked(probe):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    os.close(probe)
    start_s = time.monotonic()
    Devices(["gpu"], tmp_path).compute(0.01)
    assert time.monotonic() - start_s < 1


def test_a_time_left_by_an_earlier_boot_does_not_block_a_device(tmp_path: Path) -> None:
    (tmp_path / "gpu").write_bytes(emulation._TIME.pack(time.monotonic() + 1e6))
    start_s = time.monotonic()
    Devices(["gpu"], tmp_path).compute(0.01)
    assert time.monotonic() - start_s < 1


def test_no_time_takes_no_lock(tmp_path: Path) -> None:
    devices, other = Devices(["gpu"], tmp_path), Devices(["gpu"], tmp_path)
    with other._locked():
        devices.compute(0.0)


def test_each_claims_another_name_and_the_last_one_too_many_is_told(tmp_path: Path) -> None:
    first, second = (Claim(["0", "1"], "generator", tmp_path) for _ in range(2))
    assert (first.name, second.name) == ("0", "1")
    assert Claim(["0"], "simulator", tmp_path).name == "0"  # one of each role
    with pytest.raises(InputError, match="each of 0, 1 has its generator already; name more of them"):
        Claim(["0", "1"], "generator", tmp_path)
    del first
    assert Claim(["0", "1"], "generator", tmp_path).name == "0"
    two = [Claim(["2", "2"], "generator", tmp_path) for _ in range(2)]
    assert [claim.name for claim in two] == ["2", "2"]


def test_users_do_not_share_devices_by_default() -> None:
    assert emulation.default_folder().name.endswith(f"-{os.getuid()}")


def _is_locked(file: int) -> bool:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
