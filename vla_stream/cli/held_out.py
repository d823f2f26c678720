"""An evaluation as a run of its own, `<run>.eval`: simulators and generators as in any run, weights of one checkpoint
after the other, and an evaluator in the trainer's place (workers/evaluator.py)."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vla_stream.broker.connection import UNREACHABLE
from vla_stream.cli.folder import RunFolder
from vla_stream.cli.launch import Launch, server_for
from vla_stream.cli.options import explained
from vla_stream.cli.signals import Signals
from vla_stream.config import EVALUATION, MAX_SEED, Config, Trainer, validate
from vla_stream.errors import InputError, PlayedInVain, RunFailed
from vla_stream.evaluation import Plan

if TYPE_CHECKING:
    from vla_stream.cli.progress import Progress
    from workers.evaluator import Evaluator
    from workers.worker import Worker

PLAYERS = ("simulator", "generator")
POLL_S = 0.05
WORD_S = 1.0  # between two lines of progress
SESSIONS = 3  # of one evaluation: a server that loses everything again and again is no place for it

Take = Callable[[Path, "Evaluator"], None]
Refuse = Callable[[Path, InputError], None]


def config_for(
    config: Config,
    *,
    whole_batch: bool,
    episodes: int,
    seed: int,
    sample: bool,
    replace: Mapping[str, str],
    beside: bool,
) -> Config:
    """The config of an evaluation's run: whole episodes, one slot's rows in each inference, so that what a seed plays
    depends on nothing but the config. beside: as small as `evaluation` says; else as large as a training run.

    Raises InputError."""
    if seed + episodes > MAX_SEED:
        raise InputError(f"--seed {seed}: expected at most {MAX_SEED - episodes}, so that all seeds are numbers")
    simulators, generators, evaluation = config.simulators, config.generators, config.evaluation
    # A slot of such a backend cannot begin alone, nor be given out again alone.
    merged = simulators.slots if whole_batch else 1
    rows = simulators.envs_per_slot * merged
    data = config.model_dump(mode="json")
    data["name"] = config.name.partition(EVALUATION)[0] + EVALUATION
    data["simulators"] |= {
        "count": 0,  # said below, once the tickets are counted
        "slots": simulators.slots // merged,
        "envs_per_slot": rows,
        "segment": "episode",
    }
    data["generators"] |= {
        "batching": "deadline",
        "max_batch_size": rows,
        "max_wait_ms": 0.0,
        "padded_sizes": [],
        "threads": 1,
    }
    data |= {"algorithm": {}, "tracking": {}, "updates": 1, "held_out": {"sample": sample, "replace": dict(replace)}}
    data |= {"trainer": {"segments_per_update": 1}, "allocation": None}
    data["flow"] |= {"max_staleness": 0, "stale_limit": None, "order": "arrival"}
    data["evaluation"] |= {"episodes": episodes, "seed": seed, "every": 0}
    played = validate(data, "evaluation")
    tickets = len(Plan.of(played).parts)
    wanted = evaluation.simulators if beside else max(1, simulators.count)
    batches = simulators.env_batches
    if config.environment.tasks:
        # Each task needs a batch; so many serve whatever is dealt to them.
        needed = sum(task.batches for task in config.environment.tasks.values())
        batches = max(batches, -(-needed // wanted))
        count = wanted
    else:
        count = min(wanted, -(-tickets // (batches * played.simulators.slots)))
    served = min(evaluation.generators if beside else max(1, generators.count), tickets)
    return played.model_copy(
        update={
            "simulators": played.simulators.model_copy(update={"count": count, "env_batches": batches}),
            "generators": played.generators.model_copy(update={"count": served}),
            "trainer": Trainer(segments_per_update=tickets),
        }
    )


class Places:
    """The checkpoints to evaluate: those that were given, or as lines of a stream, until it ends."""

    def __init__(self, given: Sequence[Path]) -> None:
        self._waiting, self._ended = deque(given), True

    def follow(self, lines: Iterator[str]) -> None:
        """More of them come from there."""
        self._ended = False
        threading.Thread(target=self._read, args=(lines,), name="places", daemon=True).start()

    def _read(self, lines: Iterator[str]) -> None:
        for line in lines:
            if line.strip():
                self._waiting.append(Path(line.strip()))
        self._ended = True

    @property
    def over(self) -> bool:
        """There are none, and none will come."""
        return self._ended and not self._waiting

    def next(self) -> Path | None:
        """None: none now."""
        return self._waiting.popleft() if self._waiting else None

    def give_back(self, place: Path) -> None:
        """It is to be evaluated once more."""
        self._waiting.appendleft(place)


class Words:
    """A display: what is told goes to stderr, since programs read what `eval` prints."""

    def tell(self, text: str, details: Sequence[str] = ()) -> None:
        for line in (text, *details):
            with contextlib.suppress(OSError):
                print(line, file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        """What there is to see is told."""

    def close(self) -> None:
        """Nothing is open."""


def play(config: Config, url: str | None, places: Places, take: Take, refuse: Refuse, *, inline: bool) -> None:
    """Evaluate all `places`; `take` hears of each, `refuse` of one that is no checkpoint of this policy.

    Raises RunFailed, InputError."""
    folder, words = RunFolder.open_evaluation(config), Words()
    try:
        for session in range(SESSIONS):
            with Signals() as signals, server_for(url, folder.logs) as (where, server), explained(where):
                try:
                    with Launch(folder.config, where, server, signals, words, resume=False) as launch:
                        folder.write_url(where)
                        _Session(launch, places, take, refuse).run(inline=inline)
                        return
                except PlayedInVain as exc:
                    if session == SESSIONS - 1:
                        raise
                    words.tell(f"{exc}; the evaluation begins anew")
    finally:
        folder.close()


class _Session:
    """One life of the run on its server."""

    def __init__(self, launch: Launch, places: Places, take: Take, refuse: Refuse) -> None:
        self.launch, self.places, self.take, self.refuse = launch, places, take, refuse
        self.evaluator: Evaluator | None = None
        self.place: Path | None = None
        self._told, self._next_word_s = 0, 0.0

    def run(self, *, inline: bool) -> None:
        try:
            if inline:
                with self.launch.signals.raised():
                    self._run_inline()
            else:
                self._run_workers()
        finally:
            if self.place is not None:
                self.places.give_back(self.place)
            self.launch.read_metrics()

    def _run_workers(self) -> None:
        launch, config = self.launch, self.launch.config
        launch.launch_workers(PLAYERS)
        # Only now: they start while this process imports torch.
        from workers.worker import Worker

        worker = Worker("evaluator", "evaluator-0", secrets.token_hex(8), config.name, launch.url)
        worker.claim()
        try:
            while not self._over:
                launch.watch()
                state = launch.beat()
                if launch.signals.asked:
                    raise click.Abort
                if state is not None and state.desired in ("draining", "stopped"):
                    raise RunFailed(f"the evaluation is {state.desired}, as somebody asked for")
                # The launcher waits for the server, and starts it again where it is its own.
                with contextlib.suppress(*UNREACHABLE):
                    worker.beat()
                    if not self._step(worker, int(1000 * POLL_S)):
                        time.sleep(POLL_S)
        finally:
            worker.release()
            worker.client.close()

    def _run_inline(self) -> None:
        from workers.inline import Actors

        actors = Actors(self.launch.config, self.launch.url)
        try:
            actors.open()
            worker = actors.worker("evaluator")
            actors.make_generator()
            while not self._over:
                self.launch.beat()
                actors.step()
                self._step(worker, None)
        finally:
            actors.close()

    @property
    def _over(self) -> bool:
        return self.place is None and self.places.over

    def _step(self, worker: Worker, block_ms: int | None) -> bool:
        """True when there is more to do at once."""
        if self.evaluator is None:
            specification = self.launch.flow.specification()
            if specification is None:
                return False
            from workers.evaluator import Evaluator

            worker.state = "running"
            self.evaluator = Evaluator(worker, self.launch.config, specification)
        if self.place is None:
            self.place = self.places.next()
            if self.place is None:
                return False
            self._told = 0
            try:
                self.evaluator.begin(self.place)
            except InputError as exc:
                place, self.place = self.place, None
                self.refuse(place, exc)
                return True
            except UNREACHABLE:  # it is begun again when the server is back
                self.places.give_back(self.place)
                self.place = None
                raise
        self.evaluator.step(block_ms)
        self._tell_progress(self.evaluator)
        if self.evaluator.done:
            place, self.place = self.place, None
            self.take(place, self.evaluator)
        return block_ms is not None

    def _tell_progress(self, evaluator: Evaluator) -> None:
        played, in_all = evaluator.played, self.launch.config.evaluation.episodes
        if played > self._told and (time.monotonic() >= self._next_word_s or played == in_all):
            self._told, self._next_word_s = played, time.monotonic() + WORD_S
            self.launch.display.tell(f"episode {played}/{in_all}")
