"""Hosts of a test's own on one machine: a network namespace each, with a /dev/shm and a name of its own.

They know nothing of each other but what comes through a cable to the host in the middle, which a test may pull out.
Needs root and Debian's iproute2.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SHM_MIB = 256


@dataclass
class Host:
    """One of them. `address` is what it is called in the middle, `middle` what it calls the host in the middle."""

    name: str
    namespace: str
    cable: str
    address: str
    middle: str
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, command: Sequence[str | Path], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """A process there; its group is its own, what it prints goes to `log`."""
        # The mount is this process's and its children's, and goes with the last of them.
        there = f'mount -t tmpfs -o size={SHM_MIB}m none /dev/shm && hostname {self.name} && exec "$@"'
        words = [
            "nsenter",
            f"--net=/run/netns/{self.namespace}",
            "unshare",
            "--mount",
            "--uts",
            "sh",
            "-c",
            there,
            "sh",
        ]
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*words, *map(str, command)],
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def vla_stream(self, log: Path, url: str, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start([sys.executable, "-m", "vla_stream.cli.main", *arguments], log, VLA_STREAM_REDIS=url)

    def pull_cable(self) -> None:
        ip("-n", self.namespace, "link", "set", self.cable, "down")

    def plug_cable(self) -> None:
        ip("-n", self.namespace, "link", "set", self.cable, "up")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"ip {' '.join(words)}: {done.stderr.strip()}; hosts of a test's own need root and iproute2")


@contextlib.contextmanager
def own_hosts(*names: str) -> Iterator[list[Host]]:
    """Hosts with these names, the first of them in the middle; with them goes whatever was started there."""
    if shutil.which("ip") is None:
        pytest.fail("ip is not on PATH; run tools/setup dev, or: apt-get install iproute2")
    token = secrets.token_hex(3)
    made: list[Host] = []
    try:
        for number, name in enumerate(names):
            namespace, cable = f"vla-{token}-{number}", f"v{token}{number}"
            ip("netns", "add", namespace)
            made.append(Host(name, namespace, cable, f"10.77.{number}.2", f"10.77.{number}.1"))
            ip("-n", namespace, "link", "set", "lo", "up")
        hub = made[0].namespace
        for host in made[1:]:
            far = f"{host.cable}m"
            ip("-n", host.namespace, "link", "add", host.cable, "type", "veth", "peer", "name", far, "netns", hub)
            ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.cable)
            ip("-n", hub, "address", "add", f"{host.middle}/24", "dev", far)
            ip("-n", hub, "link", "set", far, "up")
            ip("-n", host.namespace, "link", "set", host.cable, "up")
        yield made
    finally:
        for host in made:
            for process in host.started:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
