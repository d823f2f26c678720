"""A run over three hosts and a fourth one: TLS and a user per role, a cable that is pulled, simulators that join."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from own_hosts import Host, own_hosts
from own_server import DEPLOY, PASSWORD, debian_server, deployed_options

from vla_stream.broker.connection import Client, connect
from vla_stream.flow import Flow
from vla_stream.streams import presence
from vla_stream.streams.keys import Keys

PORT = 6379
CUT_S = 20.0  # longer than any deadline of a command, and than two leases
UPDATES = 40
DEADLINE_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Site:
    """Redis and trainer on C, generators on B, simulators on A; D has nothing to do yet."""

    folder: Path
    hosts: dict[str, Host]
    admin: Client
    run: str

    @property
    def flow(self) -> Flow:
        return Flow(self.admin, Keys(self.run))

    def url(self, host: str, user: str) -> str:
        address = self.hosts[host].middle if host != "C" else "127.0.0.1"
        return f"rediss://{user}:{PASSWORD.format(user)}@{address}:{PORT}/0?ssl_ca_certs={self.folder / 'server.crt'}"

    def start(self, host: str, user: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self.folder / f"{host}-{user}.log"
        return self.hosts[host].vla_stream(log, self.url(host, user), *arguments, "--run", self.run)

    def update(self) -> int:
        state = self.flow.state()
        return 0 if state is None else state.update

    def wait_for(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not in time\n{self.logs()}"
            time.sleep(0.05)

    def simulators(self) -> list[str]:
        """Those that have sent something."""
        workers = presence.alive(self.admin, Keys(self.run))
        return [worker.id for worker in workers if worker.role == "simulator" and worker.progress]

    def seconds_per_update(self, updates: int) -> float:
        """From one update's end to that of another."""
        first = self.update() + 1
        self.wait_for(lambda: self.update() >= first, "an update")
        began_s = time.monotonic()
        self.wait_for(lambda: self.update() >= first + updates, "updates")
        return (time.monotonic() - began_s) / updates

    def logs(self) -> str:
        paths = [*self.folder.glob("*.log"), *self.folder.glob("runs/*/logs/*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in paths)


@pytest.fixture
def site(tmp_path: Path, run_name: str) -> Iterator[Site]:
    with own_hosts("C", "A", "B", "D") as made:
        hosts = {host.name: host for host in made}
        names = ",".join(["IP:127.0.0.1", *(f"IP:{host.middle}" for host in made[1:])])
        key, certificate = tmp_path / "server.key", tmp_path / "server.crt"
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=C"]
        command += ["-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
        options = ["--port", "0", "--tls-port", str(PORT), "--bind", "0.0.0.0", "--tls-auth-clients", "no"]
        options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file"]
        options += [str(certificate), "--unixsocket", str(tmp_path / "redis.sock"), *deployed_options(tmp_path)]
        log = tmp_path / "redis.log"
        hosts["C"].start([debian_server(tmp_path), DEPLOY / "redis.conf", *options], log)
        deadline_s = time.monotonic() + 60
        while not (tmp_path / "redis.sock").exists():
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        url = f"unix://{tmp_path / 'redis.sock'}?username=admin&password={PASSWORD.format('admin')}"
        with contextlib.closing(connect(url, name="admin")) as admin:
            yield Site(tmp_path, hosts, admin, run_name)


def test_a_run_over_three_hosts_survives_a_cut_cable_and_a_fourth_host_makes_it_faster(site: Site) -> None:
    config = {
        "updates": UPDATES,
        "environment": {"name": "tabletop", "max_steps": 16, "options": {"step_delay_ms": 100}},
        "policy": {"name": "tiny", "chunk": 4},
        "simulators": {"count": 0, "slots": 1, "envs_per_slot": 2, "segment": {"steps": 4}},
        "generators": {"count": 0, "max_batch_size": 8, "max_wait_ms": 5},
        "trainer": {"segments_per_update": 4, "epochs": 1, "critic_warmup_updates": 0},
        "flow": {"lease_s": 9.0},
        "evaluation": {"episodes": 0},
    }
    (site.folder / "config.yaml").write_text(json.dumps(config))
    trainer = site.start("C", "launcher", "run", "config.yaml", "--plain")
    site.wait_for(lambda: site.flow.state() is not None, "the run")
    # Url and name are all that is told to the other hosts.
    pools = [site.start("B", "generator", "generators"), site.start("A", "simulator", "simulators", "-n", "2")]
    site.wait_for(lambda: site.update() >= 2, "two updates")

    site.hosts["B"].pull_cable()
    pulled_at = site.update()
    time.sleep(CUT_S)
    stood_at = site.update()
    site.hosts["B"].plug_cable()
    assert stood_at <= pulled_at + 3, (
        "without a generator there is data for the updates that were paid for, and no more"
    )
    site.wait_for(lambda: site.update() >= stood_at + 2, "updates after the cable was plugged in again")

    alone_s = site.seconds_per_update(3)
    pools.append(site.start("D", "simulator", "simulators", "-n", "4"))
    site.wait_for(lambda: len(site.simulators()) == 6, "simulators of the fourth host")
    together_s = site.seconds_per_update(6)
    assert alone_s > 1.2 * together_s, (alone_s, together_s)

    assert trainer.wait(DEADLINE_S) == 0, site.logs()
    shown = (site.folder / "C-launcher.log").read_text()
    for pool in pools:
        assert pool.wait(120) == 0, site.logs()
    last = [json.loads(line) for line in (site.folder / f"runs/{site.run}/metrics.jsonl").read_text().splitlines()]
    books = next(record for record in reversed(last) if "balance" in record)
    assert books["balance"] == 0 and books["trained"] == 4 * UPDATES, books
    assert [books[name] for name in ("expired", "aborted", "poisoned", "lost_with_server", "refused")] == [0] * 5, books
    assert books["dead_letters"] == 0 and "error" not in shown.lower(), shown
