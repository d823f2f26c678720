"""`vla-stream bench peers`: environment steps per second beside sample-factory, training included.

The same environments (pixels.py), network, samples per update and epochs; a run of each in turn. Ours is an ordinary
run of peers.yaml; sample-factory runs in a Python environment of its own, and without that, ours runs alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from live import ACCOUNT_S, LOOK_S, Interrupted, Measured, Window, cpu_by_process, measure, scratch_folder
from pipeline import line
from pixels import ACTIONS, SHAPE, Pixels
from pixels_parts import Conv
from report import Spread, machine, number, output_folder, output_option, ratio, table, write_json

from vla_stream.broker.lanes import SHM_ROOT
from vla_stream.broker.server import MALLOC_ENVIRONMENT
from vla_stream.cli.signals import Signals
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import RunFailed
from workers.processes import has_exited, kill_group, log_tail

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "peers.yaml"
PYTHON = HERE.parents[1] / ".sample-factory" / "bin" / "python"
SETUP = "tools/setup-sample-factory"
PROGRAM = HERE / "peers_sample_factory.py"
FILE = "peers.json"

ENVIRONMENTS, STEP_MS, SAMPLES = 32, 5.0, 1024  # in all; of a step; per update
IDEAL = ENVIRONMENTS * 1000 / STEP_MS
OURS, PEER = "vla-stream", "sample-factory"
SILENT_S, END_S = 120.0, 20.0  # without a training step, starting included; from the last one to its end

# The fastest of what was tried (README.md). What it does by default and we do not is off.
ARGUMENTS = (
    *("--device=cpu", "--async_rl=True", "--num_workers=16", "--num_envs_per_worker=2", "--worker_num_splits=2"),
    *("--policy_workers_per_policy=1", "--set_workers_cpu_affinity=False", "--env_frameskip=1"),
    *("--rollout=32", f"--batch_size={SAMPLES // 4}", "--num_batches_per_epoch=4", "--num_epochs=1"),
    "--num_batches_to_accumulate=4",
    *("--use_rnn=False", "--encoder_conv_architecture=convnet_simple", "--nonlinearity=relu"),
    *("--normalize_input=False", "--normalize_returns=False", "--obs_subtract_mean=128", "--obs_scale=128"),
    *("--with_wandb=False", "--save_every_sec=100000", "--experiment=peers"),
)
_TRAINED = re.compile(r"trained (\d+) environment steps at (\d+\.\d+)$")


@dataclass(slots=True)
class Row:
    """One framework, and what it gave."""

    name: str
    measure: Callable[[Signals], Measured]
    runs: list[Measured] = field(default_factory=list)

    @property
    def rate(self) -> Spread:
        return Spread.of([run.steps_per_s for run in self.runs])

    @property
    def cpu_ms(self) -> Spread:
        """Per environment step, of all processes."""
        return Spread.of([1000 * sum(r.cpu_s.values()) / (r.steps_per_s * r.cpu_window_s) for r in self.runs])


@click.command()
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each, interleaved.")
@click.option(
    "--updates", type=click.IntRange(min=1), default=20, show_default=True, help="Updates measured in each run."
)
@click.option("--warm-up", type=click.IntRange(min=1), default=3, show_default=True, help="Updates before them.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override in our config, peers.yaml.")
@click.option(
    "--argument", "arguments", metavar="--KEY=VALUE", multiple=True, help="Override among sample-factory's arguments."
)
@output_option("Folder of the JSON.")
def peers(
    repeats: int, updates: int, warm_up: int, overrides: tuple[str, ...], arguments: tuple[str, ...], output: Path
) -> None:
    """Environment steps per second beside sample-factory: 32 environments of 5 ms, training included."""
    file = output_folder(output) / FILE
    rows = [Row(OURS, lambda signals: measure_ours(overrides, signals, updates, warm_up))]
    if missing := why_no_peer():
        click.echo(missing, err=True)
    else:
        rows.append(Row(PEER, lambda signals: measure_peer(arguments, signals, updates, warm_up)))
    floor_ms = compute_floor_ms()
    about = {"machine": machine(), "repeats": repeats, "updates": updates, "warm_up": warm_up, "floor_ms": floor_ms}
    about |= {"set": list(overrides), "arguments": [*ARGUMENTS, *arguments]}
    interrupted = False
    try:
        with Signals() as signals:
            for repeat in range(repeats):
                for row in rows:
                    row.runs.append(row.measure(signals))
                    click.echo(f"{row.name} · run {repeat + 1}/{repeats}: {line(row.runs[-1])}", err=True)
                    write_json(file, {**about, "rows": [_plain(row) for row in rows]})
    except Interrupted:
        interrupted = True
    if any(row.runs for row in rows):
        click.echo(f"\n{show(rows, floor_ms, os.cpu_count() or 1)}\n\n{file}")
    if interrupted:
        raise click.Abort


def why_no_peer() -> str | None:
    """What to do, where sample-factory is not there."""
    if PYTHON.is_file():
        return None
    return f"{PEER}: {PYTHON.parents[1]} is not there, so ours runs alone; {SETUP} installs it"


# ---- the two frameworks


def measure_ours(overrides: Sequence[str], signals: Signals, updates: int, warm_up: int) -> Measured:
    """An ordinary run. Raises Interrupted, RunFailed, InputError."""
    with _python_path():
        return measure([CONFIG], {}, overrides, signals, updates=updates, warm_up=warm_up)


@contextlib.contextmanager
def _python_path() -> Iterator[None]:
    """This folder for workers, who import pixels.py and pixels_parts.py from it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *([before] if before else [])])
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def measure_peer(
    arguments: Sequence[str],
    signals: Signals,
    updates: int,
    warm_up: int,
    program: Sequence[str] = (str(PYTHON), str(PROGRAM)),
) -> Measured:
    """The same of sample-factory. Raises Interrupted, RunFailed."""
    with scratch_folder() as scratch:
        log = scratch / "sample-factory.log"
        # It ends once it has trained more than this.
        steps = (warm_up + updates) * SAMPLES - 1
        ours = [f"--train_dir={scratch}", f"--train_for_env_steps={steps}"]
        # Threads and memory as our workers have them: without the latter, training took half as long again.
        environment = {"OMP_NUM_THREADS": "1", **MALLOC_ENVIRONMENT, **os.environ, "PYTHONPATH": str(HERE)}
        with log.open("wb") as said:
            process = subprocess.Popen(
                [*program, *ARGUMENTS, *arguments, *ours],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        family: set[int] = set()
        try:
            return _follow(process, log, signals, updates, warm_up, family)
        finally:
            family |= cpu_by_process(process.pid).keys()
            kill_group(process)
            process.wait()
            # The memory that its processes share is left behind when it is killed, and now and then when it ends.
            for file in (file for pid in family for file in SHM_ROOT.glob(f"torch_{pid}_*")):
                file.unlink(missing_ok=True)


def _follow(
    process: subprocess.Popen[bytes], log: Path, signals: Signals, updates: int, warm_up: int, family: set[int]
) -> Measured:
    """family: gets the process ids of all that it starts."""
    window = Window()
    heard_s = next_look_s = time.monotonic()
    heard: list[tuple[int, float]] = []
    while len(heard) < warm_up + updates:
        ended = has_exited(process)  # asked first: what it said before its end is read below
        trained = [step for step in map(trained_by, log.read_text(errors="replace").splitlines()) if step]
        now_s = time.monotonic()
        heard_s = now_s if len(trained) > len(heard) else heard_s
        heard = trained
        if len(heard) >= warm_up and (now_s >= next_look_s or len(heard) >= warm_up + updates):
            next_look_s = now_s + ACCOUNT_S
            window.look()
            family |= cpu_by_process(process.pid).keys()
        if signals.asked:
            raise Interrupted
        if (ended and len(heard) < warm_up + updates) or now_s > heard_s + SILENT_S:
            what = f"ended after {len(heard)}" if ended else f"is silent for {SILENT_S:g} s after {len(heard)}"
            said = " / ".join(log_tail(log)[-3:]) or "it said nothing"
            raise RunFailed(f"{PEER}: {what} of {warm_up + updates} training steps: {said} (kept: {log})")
        time.sleep(LOOK_S)
    end_s = time.monotonic() + END_S
    while not has_exited(process) and time.monotonic() < end_s:
        time.sleep(LOOK_S)
    (first, began_s), (last, ended_s) = heard[warm_up - 1], heard[warm_up + updates - 1]
    cpu_s = {PEER if role == "other" else role: round(spent, 3) for role, spent in window.cpu_s.items()}
    return Measured(
        steps_per_s=(last - first) / (ended_s - began_s),
        updates=updates,
        seconds=ended_s - began_s,
        load=window.load,
        others=window.others,
        cpu_window_s=window.seconds,
        cpu_s=cpu_s,
        figures={},
    )


def trained_by(line: str) -> tuple[int, float] | None:
    """Environment steps that were trained so far, and when, from a line that says so."""
    found = _TRAINED.match(line)
    return (int(found[1]), float(found[2])) if found else None


# ---- what the cores allow


def compute_floor_ms() -> dict[str, float]:
    """CPU milliseconds per environment step that no framework can avoid on one core of this machine: the environment's
    own (most of it is what waking from its sleep costs), one decision in a batch of 16, one way there and back through
    the network in a batch of 256."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        environment = Pixels(STEP_MS)
        environment.reset(seed=0)
        policy = Conv(Conv.Options(), Specification({"front": SHAPE[1:]}, 1, ACTIONS), 1)
        few, many = _observations(16), _observations(256)
        actions = np.zeros((256, 1, ACTIONS), np.float32)

        def train() -> None:
            evaluation = policy.evaluate(many, actions, {})
            policy.zero_grad()
            (evaluation.logprobs.sum() + evaluation.values.sum()).backward()

        return {
            "environment": _cpu_ms(lambda: environment.step(0), 100),
            "decision": _cpu_ms(lambda: policy.act(few, np.arange(16, dtype=np.uint64)), 20) / 16,
            "training": _cpu_ms(train, 4) / 256,
        }
    finally:
        torch.set_num_threads(threads)


def _observations(rows: int) -> Observations:
    images = np.random.default_rng(0).integers(0, 256, (rows, *SHAPE[1:], SHAPE[0]), np.uint8)
    return Observations({"front": images}, np.zeros((rows, 1), np.float32), ["Pixels-v0"] * rows)


def _cpu_ms(what: Callable[[], object], times: int) -> float:
    what()  # the first one makes ready
    began_s = time.process_time()
    for _ in range(times):
        what()
    return 1000 * (time.process_time() - began_s) / times


# ---- the table


def show(rows: Sequence[Row], floor_ms: dict[str, float], cores: int) -> str:
    """The table, the limits and the CPU by role."""
    limit = min(IDEAL, 1000 * cores / sum(floor_ms.values()))
    shown = [row for row in rows if row.runs]
    peer = next((row.rate.median for row in shown if row.name == PEER), None)
    header = ["framework", "environment steps/s", "÷ ideal", "÷ cores", f"÷ {PEER}", "CPU ms each", "load", "others"]
    lines = [
        [
            row.name,
            str(row.rate),
            ratio(row.rate.median, IDEAL),
            ratio(row.rate.median, limit),
            ratio(row.rate.median, peer),
            str(row.cpu_ms),
            f"{Spread.of([run.load for run in row.runs]).median:.1f}",
            f"{Spread.of([run.others for run in row.runs]).median:.2f}",
        ]
        for row in shown
    ]
    least = ", ".join(f"{name} {ms:.2f}" for name, ms in floor_ms.items())
    roles = sorted({role for row in shown for run in row.runs for role in run.cpu_s})
    cpu = [[row.name, *(_cpu_ms_of(row, role) for role in roles)] for row in shown]
    return (
        f"{table(header, lines)}\n"
        f"ideal: {ENVIRONMENTS} environments ÷ {STEP_MS:g} ms = {number(IDEAL)}; cores: {number(limit)}, what {cores} "
        f"of them allow at CPU ms per step of {least}\n"
        "others: cores that other programs kept busy\n\n"
        f"{table(['CPU ms per step', *roles], cpu)}"
    )


def _cpu_ms_of(row: Row, role: str) -> str:
    spent = [1000 * run.cpu_s.get(role, 0.0) / (run.steps_per_s * run.cpu_window_s) for run in row.runs]
    return f"{Spread.of(spent).median:.3f}"


def _plain(row: Row) -> dict[str, Any]:
    return {"name": row.name, "runs": [run.plain() for run in row.runs]}
