"""The benchmark beside sample-factory: our side really runs, the other side's lines are read, the table's figures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import peers
import pytest
from live import Interrupted, Measured
from pixels import SHAPE
from pixels_parts import Conv

from vla_stream import config as settings
from vla_stream.broker.lanes import SHM_ROOT
from vla_stream.cli.signals import Signals
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import RunFailed

# What a run of 30 November 2026 said, colours and all.
CAPTURED = """\
\x1b[36m[2026-11-30 19:43:29,835][24242] Signal inference workers to resume experience collection... (15 times)\x1b[0m
trained 15360 environment steps at 1796067809.835
\x1b[36m[2026-11-30 19:43:29,845][24295] Updated weights for policy 0, policy_version 15 (0.0008)\x1b[0m
trained 16384 environment steps at 1796067810.822
"""
# Takes sample-factory's place: three training steps in the time of one, then what is asked for.
FAKE = """
import sys, time
start_s = time.time()
for step in range(1, 4):
    print(f"trained {step * 1024} environment steps at {start_s + step * 0.5:.3f}", flush=True)
    time.sleep(0.05)
"""

HOLD = """
import os
if not os.fork():
    open(f"/dev/shm/torch_{os.getpid()}_{os.getppid()}", "w").close()
time.sleep(60)
"""


def measured(rate: float, **cpu_s: float) -> Measured:
    return Measured(rate, 4, 2.0, load=1.5, others=0.25, cpu_window_s=2.0, cpu_s=cpu_s, figures={})


def with_fake(more: str, updates: int, signals: Any) -> Measured:
    return peers.measure_peer([], signals, updates, 1, program=(sys.executable, "-c", FAKE + more))


def test_both_sides_have_the_same_environments_and_samples_per_update_and_decide_at_every_step() -> None:
    config = settings.load([peers.CONFIG])
    simulators, argument = config.simulators, dict(word.removeprefix("--").split("=") for word in peers.ARGUMENTS)
    rows = config.slots_in_all * simulators.envs_per_slot
    assert rows == int(argument["num_workers"]) * int(argument["num_envs_per_worker"]) == peers.ENVIRONMENTS
    samples = config.trainer.segments_per_update * config.segment_steps * simulators.envs_per_slot
    assert samples == int(argument["batch_size"]) * int(argument["num_batches_per_epoch"]) == peers.SAMPLES
    assert config.policy.chunk == int(argument["env_frameskip"]) == 1
    assert config.trainer.epochs == int(argument["num_epochs"]) == 1 and config.trainer.critic_warmup_updates == 0


def test_a_training_step_of_sample_factory_is_read_from_the_line_that_tells_of_it() -> None:
    steps = [peers.trained_by(line) for line in CAPTURED.splitlines()]
    assert steps == [None, (15360, 1796067809.835), None, (16384, 1796067810.822)]


def test_its_rate_is_of_the_steps_after_the_warm_up() -> None:
    with Signals() as signals:
        run = with_fake("", 2, signals)
    assert run.steps_per_s == pytest.approx(1024 / 0.5, rel=0.01) and run.seconds == pytest.approx(1.0, abs=0.01)
    assert set(run.cpu_s) <= {peers.PEER, "bench", "redis"}


@pytest.mark.timeout(20)
def test_sample_factory_that_fails_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # its log is kept
    with Signals() as signals, pytest.raises(RunFailed, match=r"ended after 3 of 6 training steps: .*no such env"):
        with_fake("sys.exit('no such env')", 5, signals)


def test_ctrl_c_ends_it_and_leaves_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(peers, "kill_group", lambda process: (ended.append(process.pid), os.killpg(process.pid, 9)))

    class Once:
        @property
        def asked(self) -> bool:
            """Once it holds shared memory, as sample-factory does."""
            return bool(held())

    def held() -> list[Path]:
        mine = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        return [file for pid in [*mine, *ended] for file in SHM_ROOT.glob(f"torch_*_{pid}")]

    with pytest.raises(Interrupted):
        with_fake(HOLD, 5, Once())
    assert ended and not Path(f"/proc/{ended[0]}").exists() and held() == []


@pytest.mark.timeout(170)
def test_without_sample_factory_ours_runs_alone_and_one_line_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PYTHON", tmp_path / "none" / "bin" / "python")
    small = ["simulators.env_batches=1", "simulators.envs_per_slot=4", "simulators.segment.steps=2"]
    small += ["trainer.segments_per_update=1"]
    arguments = [word for override in small for word in ("--set", override)]
    arguments += ["--repeats", "1", "--updates", "3", "--warm-up", "1", "--output", str(tmp_path)]
    result = click.testing.CliRunner().invoke(peers.peers, arguments, catch_exceptions=False)
    told = result.stderr.splitlines()[0]
    assert told.startswith("sample-factory: ") and told.endswith("tools/setup-sample-factory installs it")
    (row,) = json.loads((tmp_path / "peers.json").read_text())["rows"]
    (run,) = row["runs"]
    # 3 updates of one segment of 2 steps of 4 rows; a batch of environments in pairs takes 10 ms per step at least.
    assert run["steps_per_s"] * run["seconds"] == pytest.approx(3 * 2 * 4)
    assert 0 < run["steps_per_s"] < 4 / 0.010
    assert "vla-stream" in result.stdout and "PYTHONPATH" not in os.environ


def test_the_table_holds_shares_of_both_limits_and_the_ratio_of_medians() -> None:
    ours, peer = (peers.Row(name, lambda signals: measured(0.0)) for name in (peers.OURS, peers.PEER))
    ours.runs = [measured(rate, simulator=0.4, trainer=1.2) for rate in (800.0, 640.0, 1000.0)]
    peer.runs = [measured(rate, **{peers.PEER: 1.6}) for rate in (400.0, 320.0, 500.0)]
    lines = peers.show([ours, peer], {"environment": 0.25, "decision": 0.25, "training": 0.75}, 2).splitlines()
    # Two cores at 1.25 ms allow 1,600.
    assert lines[2].split()[:6] == ["vla-stream", "800", "(640…1,000)", "0.125", "0.500", "2.000"]
    assert lines[3].split()[:6] == ["sample-factory", "400", "(320…500)", "0.062", "0.250", "1.000"]
    assert lines[2].split()[6:] == ["1.00", "(0.80…1.25)", "1.5", "0.25"]
    assert "6,400" in lines[4] and "1,600" in lines[4]
    assert lines[-2].split() == ["vla-stream", "0.000", "0.250", "0.750"]


def test_the_floor_counts_every_part_that_no_framework_can_avoid() -> None:
    floor_ms = peers.compute_floor_ms()
    assert set(floor_ms) == {"environment", "decision", "training"} and min(floor_ms.values()) > 0
    assert floor_ms["training"] > floor_ms["decision"]


def test_the_network_gives_recorded_actions_the_log_probs_that_they_were_made_with() -> None:
    policy = Conv(Conv.Options(), Specification({"front": SHAPE[1:]}, 1, 4), 1)
    images = np.random.default_rng(0).integers(0, 256, (5, *SHAPE[1:], 3), np.uint8)
    observations = Observations({"front": images}, np.zeros((5, 1), np.float32), ["Pixels-v0"] * 5)
    act = policy.act(observations, np.arange(5, dtype=np.uint64))
    evaluation = policy.evaluate(observations, act.actions, act.extras)
    assert act.actions.shape == (5, 1, 4) and np.unique(act.actions).size == 20
    np.testing.assert_allclose(evaluation.logprobs.detach().numpy(), act.logprobs, atol=1e-5)
    np.testing.assert_allclose(evaluation.values.detach().numpy(), act.values, atol=1e-5)
    groups = policy.parameter_groups()
    assert {id(each) for group in groups.values() for each in group} == {id(each) for each in policy.parameters()}
    # So many has sample-factory's encoder, `convnet_simple` with a layer of 512.
    assert sum(each.numel() for each in (*policy.convolutions.parameters(), *policy.hidden.parameters())) == 1_161_952
