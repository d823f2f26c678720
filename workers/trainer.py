"""The trainer: takes segments, updates the policy, publishes weights, commits.

`step()` reads what has arrived, gives the learner what the next update will consume, and once that is B segments, does
the update: train → upload chunks → commit (one script: weights entry, new update, segments gone) → checkpoint. Whatever
crashes in between is repeated by the next trainer, whose epoch fences this one off.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from vla_stream import tasks
from vla_stream.broker.connection import UNREACHABLE
from vla_stream.config import CHECKPOINTS, Config
from vla_stream.environments.protocol import Specification
from vla_stream.errors import BadMessage, Hopeless, InputError, NoSuchRun, RunFailed
from vla_stream.evaluation import wilson_interval
from vla_stream.learning import checkpoint, cloning
from vla_stream.learning.ranks import Alone
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import Learner, LearnerState, UpdateResult
from vla_stream.policies.protocol import Policy
from vla_stream.streams import presence
from vla_stream.streams.specification import specification_to_json
from vla_stream.streams.trajectories import Trajectory
from workers import history, ranks, records
from workers.intake import Held, Intake
from workers.lane_choice import admit
from workers.models import await_specification, load_demonstrations, make_policy
from workers.outcomes import TaskOutcomes
from workers.weights import Upload, WeightsWriter, to_bytes
from workers.worker import BLOCK_S, Worker, run_process

SAY_WAITING_S = 20.0
RETRY_CHECKPOINT_S = 5.0
MOST_NUMERIC_DIFFERENCE = 0.1  # of log-probs of equal weights: bf16, padding and kernels make less
TIMED_UPDATES = 10  # by which streaming costs are known; more of it would only keep the device waiting
FIRST = f"{0:06d}"  # the checkpoint of the first weights, which is kept: the KL to them may be asked for


class Trainer:
    """The trainer; of several ranks, rank 0."""

    def __init__(
        self, worker: Worker, config: Config, specification: Specification, learner: Learner | ranks.Leader
    ) -> None:
        self.worker, self.config, self.specification, self.learner = worker, config, specification, learner
        self.client, self.flow, self.meter = worker.client, worker.flow, worker.meter
        self.intake = Intake(worker, config, specification)
        self.folder = config.run_dir / CHECKPOINTS
        self.update, self.version, self.epoch = 0, 0, 0
        self.generation = ""  # of the server's life in which this trainer took the run over
        self.outcomes = TaskOutcomes(config)
        self._added: dict[str, Held] = {}  # given to the learner for the next update, at most B: not refused any more
        self._adding_s = 0.0  # what that took
        self._fit, self._timed = (0, 0.0), 0  # see _stage_costs
        self._before: LearnerState | None = None  # the next update, if that is to be recorded
        self._kept: dict[str, Trajectory] = {}  # by entry: trained, and not yet in a durable checkpoint
        self._weights = WeightsWriter(self.client, self.flow.scripts, worker.keys, config.trainer.weights_base_every)
        self._trained = self._skipped = 0
        self._skipped_in_a_row = 0
        self._numerics_differ = False
        self._checkpointed = -1
        self._score: float | None = None  # of the newest policies whose training episodes have ended
        self._retry_checkpoint_s = math.inf
        self._waiting_since_s = time.monotonic()
        self._next_miss_s = 0.0

    @property
    def done(self) -> bool:
        """All updates of the config are committed."""
        return self.update >= self.config.updates

    def start(self) -> None:
        """Load the newest checkpoint (or make the first), take the run over, publish its weights as a new version."""
        found, warnings = checkpoint.newest(self.folder)
        for warning in warnings:
            self.worker.say("checkpoint", warning)
        trained = skipped = 0
        if found is not None:
            self.learner.load_state(LearnerState(found.update, found.policy, found.optimiser))
            self.update, self.version, self._checkpointed = found.update, found.version, found.update
            trained, skipped = (found.meta[counter] for counter in checkpoint.COUNTERS)
            self.intake.remember(history.trained_tickets(self.config.run_dir, found.update))
        self._take_over(trained, skipped)
        if self._checkpointed != self.update:
            self._save_checkpoint()
        self._remember_what_is_before()
        self.recover()

    def start_anew(self) -> None:
        """The server lost everything, and the launcher made the run's flow again: what was published is lost, these
        weights are not, and they go out under a version of their own."""
        self._begin_anew()
        for trajectory in [*(held.trajectory for held in self._held.values()), *self._kept.values()]:
            self.intake.remove_payloads(trajectory)
        lost = len(self._held)
        self._held.clear()
        self._kept.clear()
        self._take_over(self._trained, self._skipped)
        self.worker.say(
            "taken over", f"the server lost the run; it goes on at update {self.update}, {lost} segments less"
        )
        self.recover()

    def _take_over(self, trained: int, skipped: int, data: bytes | None = None) -> None:
        """Raise the epoch, and publish these weights, or `data`, as a base. trained, skipped: counters of the lineage
        that goes on."""
        state = self.flow.state()
        if state is None:
            raise NoSuchRun(f"run {self.worker.keys.run}: not on this server; start it with `vla-stream run`")
        # The server may remember an older version than we do, or than our predecessor published.
        self.version = max(self.version, state.version, history.last_version(self.config.run_dir, self.worker.say)) + 1
        self.epoch = self.intake.epoch = state.epoch + 1
        self._weights.adopt()
        weights = self._describe_weights(to_bytes(self.learner.weights()) if data is None else data, full=True)
        self._weights.upload(weights)
        fields, last_ticket = weights.manifest.to_fields(), max(self.intake.lineage, default=0)
        self.flow.resume(state.epoch, self.update, self.version, trained, skipped, fields, last_ticket)
        self._weights.keep(weights)
        self.generation = state.generation
        books = self.flow.books()
        self._trained, self._skipped = books.outcomes["trained"], books.outcomes["skipped"]
        if (self._trained, self._skipped) != (trained, skipped):
            self._save_checkpoint()  # its counters are those of this server's books
        if state.update > self.update:
            again = "the segments kept for it" if self._keeping else "new segments"
            lost = state.update - self.update
            self.worker.say("rolled back", f"{lost} updates after checkpoint {self.update} are repeated with {again}")
        self.worker.version, self.worker.progress = self.version, self.update

    def recover(self) -> None:
        """At start and after each reconnect: what an earlier trainer or a lost reply left pending."""
        self.intake.recover(self._others)

    def step(self, block_ms: int | None) -> bool:
        """Read what has arrived, then the update if all its segments are in; True when one was committed."""
        if self.done:
            return False
        if time.monotonic() > self._retry_checkpoint_s:
            self._save_checkpoint()
        self._collect(block_ms)
        self.intake.refuse_stale(self.version)
        self._add(self.config.trainer.segments_per_update)
        if len(self._added) < self.config.trainer.segments_per_update:
            self._miss()
            self._name_what_is_missing()
            return False
        self._collect(None)  # while the device computes
        self._update()
        return True

    def close(self) -> None:
        """Leave a checkpoint of the last update."""
        if self._checkpointed != self.update:
            self._save_checkpoint()

    @property
    def _keeping(self) -> bool:
        return self.config.trainer.ack == "checkpoint"

    # ---- taking segments

    def _collect(self, block_ms: int | None) -> None:
        # In ticket order everything that is outstanding may come before what this update needs; else it is only read
        # so far ahead that the next update can begin at once.
        trainer, have = self.config.trainer, len(self._held) + len(self._added)
        count = trainer.segments_per_update
        in_order = self.config.flow.order == "ticket"
        limit = count * (1 + self.config.flow.max_staleness) if in_order else count + trainer.prefetch_segments
        if limit > have:
            self.intake.collect(limit - have, block_ms if in_order or have < count else None, self._others)

    @property
    def _others(self) -> set[str]:
        """Entries that were taken, beside those that are held."""
        return {held.entry.id for held in self._added.values()} | self._kept.keys()

    @property
    def _held(self) -> dict[str, Held]:
        return self.intake.held

    def _begin_next(self) -> None:
        """In streaming, something for the device to compute while an update's weights are encoded and sent. Nothing
        here asks Redis: the update at hand is not committed yet."""
        follows = self.config.trainer.update == "streaming" and self.config.flow.order == "arrival"
        # A checkpoint would forget what is begun.
        if follows and self._held and not self._checkpoint_due:
            oldest = next(iter(self._held.values()))
            if not self.intake.is_stale(oldest, self.version):
                try:
                    self._add(self.learner.rank_count)
                except Exception:
                    self._begin_anew()  # the update at hand comes first; the next step meets it again

    def _add(self, most: int) -> None:
        """Give the learner those held segments that the next update is sure to consume, in its order, until it has
        `most`; the rest waits, since π_prox and V must come from the weights that an update starts with."""
        count = self.config.trainer.segments_per_update
        self.learner.version = self.version
        members = list(self._held)
        if members and self.config.flow.order == "ticket":
            members = [member for member in self.flow.ready_in_order(count) if member not in self._added]
        for member in members:
            if len(self._added) == most or member not in self._held:
                break
            started_s = time.monotonic()
            # In streaming this is the training itself.
            with self.meter.busy("add"):
                self._give(self._held[member].segment)
            self._adding_s += time.monotonic() - started_s
            self._added[member] = self._held.pop(member)

    def _give(self, segment: Segment) -> None:
        """In streaming, of the first updates one segment of every rank is timed alone, from an idle device until it has
        computed it: not the first, which is computed while the update before is published."""
        count = self.learner.rank_count
        # With this one the ranks have their second segments, and train them.
        timed = self.config.trainer.update == "streaming" and len(self._added) == 2 * count - 1
        if not timed or self._timed == TIMED_UPDATES:
            self.learner.add(segment)
            return
        self._timed += 1
        self.learner.settle()
        started_s = time.monotonic()
        self.learner.add(segment)
        self.learner.settle()
        self._fit = count * int(segment.valid.sum()), time.monotonic() - started_s

    def _begin_anew(self) -> None:
        """The next update begins anew: what the learner has of it is forgotten, and its segments are held as before."""
        self.learner.discard()
        self.intake.held = self._added | self._held
        self._added, self._adding_s = {}, 0.0

    def _miss(self) -> None:
        """Segments that were published and whose entries are gone must not count as outstanding for ever; and where the
        entry of the weights is gone, a generator that starts would wait for the next update, which may wait for it."""
        if time.monotonic() < self._next_miss_s:
            return
        self._next_miss_s = time.monotonic() + self.config.flow.lease_s
        for member in self.flow.miss(self.epoch, [*self._held, *self._added]):
            self.worker.say("poisoned", f"segment {member}: somebody removed its entry from the stream")
        self._mend_weights()

    def _mend_weights(self) -> None:
        """Weights that a generator could not get any more would end the run: they are published anew, as a base."""
        lost, state = self._weights.missing(), self.flow.state()
        ours = self.epoch, self.generation, self.version
        if not lost or state is None or (state.epoch, state.generation, state.version) != ours:
            return  # where another trainer has taken over, or the server lost more than weights, others see to it
        if self._kept:
            self._save_checkpoint()  # taking over releases what was kept for one
            if self._kept:
                return  # the disk is full: it is tried again
        data = self._weights.data

        def take_over() -> bool:
            self._take_over(self._trained, self._skipped, data)
            return True

        # As a whole: half of it, and the server has another epoch than this trainer.
        if not self.worker.patiently(take_over):
            raise RunFailed("told to end while Redis was unreachable and its weights were published anew")
        self.worker.say("weights", f"{lost} is gone from the server; they are published anew as version {self.version}")

    # ---- updating

    def _update(self) -> None:
        chosen, before = list(self._added.values()), self._before
        started_s = time.monotonic() - self._adding_s
        waited_s = started_s - self._waiting_since_s
        staleness = [self.version - held.trajectory.version for held in chosen]
        finishing_s = time.monotonic()
        with self.worker.long_step("updating"), self.meter.busy("update"):
            result = self.learner.finish(self.version)
            computing_s = time.monotonic()
            self.learner.settle()
        settled_s = time.monotonic()
        stage_costs = self._stage_costs(result, settled_s - finishing_s, settled_s - computing_s)
        self._note_skip(result, chosen)
        self._note_numerics(result)
        with self.meter.busy("publish"):
            data = to_bytes(self.learner.weights())
        encoding_s = time.monotonic() - settled_s
        self.version += 1
        self.update += 1
        self._adding_s, self._added = 0.0, {}
        self._remember_what_is_before()
        self._begin_next()
        committing_s = time.monotonic()
        with self.meter.busy("publish"):
            weights_bytes = self._commit(chosen, data, skipped=result.skipped is not None)
        trained = sum(int(held.segment.executed.sum()) for held in chosen)
        for held in chosen:
            self.outcomes.add(held.segment.ticket, held.trajectory.episodes)
        outcomes = self.outcomes.summary(self.version)
        if "success" in outcomes:
            # Surely at least as good: a rate of few episodes would stay the best for ever.
            self._score, _ = wilson_interval(
                round(outcomes["success"] * outcomes["episodes"]), int(outcomes["episodes"])
            )
        sample = {
            "update": self.update,
            "version": self.version,
            "trained_env_steps": trained,
            "samples": result.samples,
            "staleness": sum(staleness) / len(staleness),
            "staleness_max": max(staleness),
            "above_eta": sum(s > self.config.flow.max_staleness for s in staleness) / len(staleness),
            **{f"staleness[{s}]": float(number) for s, number in Counter(staleness).items()},
            "skipped": float(result.skipped is not None),
            "update_s": time.monotonic() - started_s - self._adding_s,  # without the next one's beginning
            "wait_s": waited_s,
            "publish_s": encoding_s + time.monotonic() - committing_s,
            "weights_mb": weights_bytes / 1e6,
            **stage_costs,
            **outcomes,
            **result.metrics,
        }
        members = [held.trajectory.member for held in self._in_order(chosen)]
        history.note_update(self.config.run_dir, self.update, self.version, self.epoch, result.skipped, members)
        self.worker.patiently(lambda: self.worker.emit("update", sample))
        if before is not None:
            self._record(before, chosen, result)
        if self._checkpoint_due:
            self._save_checkpoint()
        self._waiting_since_s = self.intake.last_data_s = time.monotonic()
        self._adding_s = 0.0

    @property
    def _checkpoint_due(self) -> bool:
        """After this update."""
        return self.done or self.update % self.config.trainer.checkpoint_every == 0

    def _stage_costs(self, result: UpdateResult, took_s: float, settled_s: float) -> dict[str, float]:
        """For cli/costs.py. `fit_s`: what the devices took to train `fit_samples`; `pass_s`: what the passes without
        gradients took before, in buffered mode; `step_s`: an optimiser step, seen as what is left to compute after the
        last one (on a CPU nothing is: there steps are a part of `fit_s`). `apart`: devices compute while their process
        goes on. took_s: to finish the update, of which the last `settled_s` were such waiting."""
        learner = self.learner
        costs = {"devices": float(learner.devices), "ranks": float(learner.rank_count), "apart": float(learner.apart)}
        if self.config.trainer.update == "buffered":
            steps = result.metrics.get("optimiser_steps", 0.0)
            self._fit = result.samples, max(0.0, took_s - steps * settled_s)
            costs["pass_s"] = self._adding_s
        samples, fit_s = self._fit
        return costs | {"step_s": settled_s, "fit_samples": float(samples), "fit_s": fit_s}

    def _note_skip(self, result: UpdateResult, chosen: list[Held]) -> None:
        if result.skipped is None:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += not result.harmless
        members = ", ".join(held.trajectory.member for held in chosen[:8])
        self.worker.say("skipped", f"update {self.update + 1} changed nothing ({result.skipped}); segments {members}")
        if self._skipped_in_a_row >= self.config.trainer.max_skipped_in_a_row:
            raise Hopeless(
                f"{self._skipped_in_a_row} updates in a row were skipped, last: {result.skipped}; "
                f"checkpoint {self._checkpointed} is the last good one; lower trainer.learning_rate"
            )

    def _note_numerics(self, result: UpdateResult) -> None:
        """Told when it begins: importance weights are then wrong, and the policy learns worse without another sign."""
        difference = result.metrics.get("act_evaluate_difference", 0.0)
        if difference > MOST_NUMERIC_DIFFERENCE and not self._numerics_differ:
            self.worker.say(
                "numerics",
                f"update {self.update + 1}: log-probs of generators and trainer differ by {difference:.2g} under the "
                f"same weights, expected at most {MOST_NUMERIC_DIFFERENCE}; compare act and evaluate of the policy",
            )
        self._numerics_differ = difference > MOST_NUMERIC_DIFFERENCE

    def _commit(self, chosen: list[Held], data: bytes, *, skipped: bool) -> int:
        """Returns the bytes of the weights that travelled."""
        weights = self._describe_weights(data)

        def publish() -> str:
            self._weights.upload(weights)
            consumed = [held.consumed for held in chosen]
            fields = weights.manifest.to_fields()
            answer = self.flow.commit(
                self.epoch, self.update - 1, self.version, consumed, fields, skipped=skipped, keep=self._keeping
            )
            if answer != "missing":
                self._weights.keep(weights)
            return answer

        # After a lost reply the script answers `repeat`: trying again is harmless, giving up would lose an update.
        # `missing`: the server lost the run. The update stands in our memory, and `start_anew` publishes it.
        answer = self.worker.patiently(publish)
        if answer is None:
            raise RunFailed(f"told to end while Redis was unreachable; update {self.update} is void")
        if answer == "missing":
            self.worker.look_again()
        self.intake.remember([held.trajectory.segment.ticket for held in chosen])
        self._trained += 0 if skipped else len(chosen)
        self._skipped += len(chosen) if skipped else 0
        self.worker.version, self.worker.progress = self.version, self.update
        # The update stands: from here on nothing may raise, else its segments or its checkpoint would be lost.
        for held in chosen:
            if self._keeping and answer != "missing":
                self._kept[held.entry.id] = held.trajectory
            else:
                with contextlib.suppress(*UNREACHABLE):
                    self.intake.remove_payloads(held.trajectory)
        return sum(map(len, weights.chunks))

    def _remember_what_is_before(self) -> None:
        every = self.config.trainer.record_every
        self._before = self.learner.state() if every and (self.update + 1) % every == 0 else None

    def _record(self, before: LearnerState, chosen: list[Held], result: UpdateResult) -> None:
        """What an update was made of, for `replay`; the run goes on without it where the disk does not take it."""
        folder, version = self.config.run_dir / records.RECORDS, self.version - 1
        trained = [(held.trajectory, held.segment) for held in self._in_order(chosen)]
        try:
            records.write(folder, version, self.specification, before, trained, result)
            records.prune(folder, self.config.trainer.keep_records)
        except (OSError, BadMessage) as exc:
            self.worker.say("record", f"update {self.update} is not recorded whole: {exc}")

    def _in_order(self, chosen: list[Held]) -> list[Held]:
        """In which they were trained."""
        if self.config.trainer.update == "streaming":
            return chosen
        return sorted(chosen, key=lambda held: held.trajectory.segment.ticket)

    def _describe_weights(self, data: bytes, *, full: bool = False) -> Upload:
        history.note_version(self.config.run_dir, self.version)
        return self._weights.describe(self.version, self.update, self.epoch, data, full=full)

    def _save_checkpoint(self) -> None:
        self._begin_anew()  # what is begun of the next update belongs to no checkpoint
        state = self.learner.state()
        meta: dict[str, object] = {
            "run": self.config.name,
            "trained": self._trained,
            "skipped": self._skipped,
            "score": self._score,
        }
        meta["specification"] = specification_to_json(self.specification)  # an export needs no simulator
        try:
            with self.meter.busy("checkpoint"):
                checkpoint.save(self.folder, self.update, self.version, state.policy, state.optimiser, meta)
        except OSError as exc:
            # A full disk must not end a run that could go on for hours (F47).
            then = "tried again until it works, and its segments are kept" if self._kept else "the run goes on without"
            self.worker.say("checkpoint", f"{self.folder}: not written ({exc.strerror or exc}); {then}")
            self._retry_checkpoint_s = time.monotonic() + RETRY_CHECKPOINT_S if self._kept else math.inf
            return
        self._checkpointed, self._retry_checkpoint_s = self.update, math.inf
        try:
            # With evaluations beside the run these choose the best one.
            if self._score is not None and not self.config.evaluation.every:
                best = checkpoint.best(self.folder)
                if best is None or self._score >= best[1]:
                    checkpoint.mark(self.folder, checkpoint.BEST, self.update)
            protected = {FIRST, *checkpoint.protected(self.folder)}
            checkpoint.prune(self.folder, self.config.trainer.keep_checkpoints, protected=protected)
        except OSError as exc:
            self.worker.say("checkpoint", f"{self.folder}: old ones not removed ({exc.strerror or exc}); remove them")
        if self._kept:
            # A crash here leaves them to the next trainer, whose `resume` sees that this checkpoint holds them.
            released = self.worker.patiently(lambda: self.flow.release(self.epoch, self.update))
            # None of them: another trainer has taken over, and they may be its own.
            for trajectory in self._kept.values() if released else ():
                with contextlib.suppress(*UNREACHABLE):
                    self.intake.remove_payloads(trajectory)
            self._kept.clear()

    def _name_what_is_missing(self) -> None:
        if time.monotonic() - self.intake.last_data_s < SAY_WAITING_S:
            return
        self.intake.last_data_s = time.monotonic()
        if self.worker.desired != "running":
            return
        alive = {worker.role for worker in presence.alive(self.client, self.worker.keys)}
        missing = [role for role in ("simulator", "generator") if role not in alive]
        reason = (
            f"no {' and no '.join(missing)} is alive" if missing else "all roles are alive; see `vla-stream status`"
        )
        if not missing and self.config.environment.tasks and (waiting := self.flow.waiting_tickets()):
            names = sorted({tasks.task_of(self.config.environment, ticket) for ticket in waiting})
            reason = f"tickets of {', '.join(names)} wait; attach simulators, of which each has a task by its number"
        self.worker.say("waiting", f"trainer has no data for {SAY_WAITING_S:g} s: {reason}")


def make_learner(
    config: Config,
    specification: Specification,
    device: torch.device,
    tell: Callable[[str], None],
    meet: Callable[[], Alone] = Alone,
) -> Learner:
    """Policy and optimiser before the first update: from `policy.init_from`, by pre-training, or random. meet: called
    when the policy is ready, for the ranks that it is to be trained by.

    A checkpoint of the run itself is not looked at here. Raises InputError."""
    policy = make_policy(config, specification, device)
    needs_start = checkpoint.newest_place(config.run_dir / CHECKPOINTS) is None
    demonstrations = scenes = None
    if config.pretrain is not None and (needs_start or config.imitates):
        demonstrations, scenes = load_demonstrations(config, specification)
    if needs_start and config.policy.init_from is not None:
        load_policy(policy, config.policy.init_from)
    elif needs_start and config.pretrain is not None and demonstrations is not None:
        started_s = time.monotonic()
        figures = cloning.warm_start(policy, demonstrations, scenes, config.pretrain)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        tell(f"warm start in {time.monotonic() - started_s:.1f} s: {shown}")
    reference = None
    if config.algorithm.reference_kl_coefficient > 0:
        reference = make_policy(config, specification, device)
        if needs_start:
            reference.load_state_dict(policy.state_dict())
        else:
            load_policy(reference, config.run_dir / CHECKPOINTS / FIRST)
    kept = demonstrations if config.imitates else None
    return Learner(policy, config.algorithm, config.trainer, config.seed, device, reference, kept, ranks=meet())


def load_policy(policy: Policy, folder: Path) -> None:
    """The policy of a checkpoint folder, without its optimiser. Raises InputError."""
    state: dict[str, Tensor] = dict(checkpoint.load(folder).policy)
    try:
        policy.load_state_dict(state)
    except (RuntimeError, KeyError) as exc:
        reason = " ".join(str(exc).split())[:300]
        raise InputError(f"{folder}: its weights belong to another policy ({reason}); use that one's config") from exc


def serve(worker: Worker, config: Config) -> None:
    """The main loop of a trainer process: until all updates are done, or drained."""
    torch.set_num_threads(config.trainer.threads)
    # What is published in another /dev/shm is no other trainer's either: it is refused, so there is no wait for it.
    admit(worker)
    specification = await_specification(worker)
    if specification is None:
        return
    begins = not checkpoint.places(config.run_dir / CHECKPOINTS)
    with contextlib.ExitStack() as stack:
        with worker.long_step("warm start" if begins and config.pretrain is not None else "loading"):
            learner = stack.enter_context(ranks.learner(worker, config, specification, make_learner))
        trainer = Trainer(worker, config, specification, learner)
        worker.patiently(trainer.start)
        worker.state = "running"
        while not trainer.done and not worker.draining:
            worker.patiently(worker.beat)
            if worker.generation not in ("", trainer.generation):
                worker.patiently(trainer.start_anew)
            worker.patiently(lambda: trainer.step(int(BLOCK_S * 1000 / 4)), trainer.recover)
        trainer.close()


def main() -> None:
    run_process("trainer", serve)


if __name__ == "__main__":
    main()
