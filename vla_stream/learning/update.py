"""One update of the policy: segments are added one by one, then it is finished.

Buffered: adding a segment is a pass without gradients, finishing is epochs × minibatches.
Streaming: adding a segment computes its gradient at once, so that training overlaps the rollout, and finishing is the
one optimiser step with all of them (or the last of `optimiser_steps`, each with an equal share of the segments).
Which loss that is, the algorithm says (algorithms.py); demonstrations may be imitated beside it.

Several ranks (ranks.py) make one update together, each with its part of the segments: what divides, normalises, ends or
skips it is the same as if one had them all, and so is the result, up to rounding.

In both, π_prox and V of all segments are those of the weights that the update starts with. Without that, later shares
would never be clipped: on the quick start four steps per update then took success from .48 to 0 in 20 updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

import numpy as np
import torch
from torch import Tensor

from vla_stream import config, seeds
from vla_stream.errors import InputError
from vla_stream.learning import objective
from vla_stream.learning.advantages import RunningMoments, normalise
from vla_stream.learning.beside import Beside
from vla_stream.learning.cloning import Demonstrated
from vla_stream.learning.ranks import ALONE, Alone
from vla_stream.learning.samples import (
    Contribution,
    Samples,
    make_samples,
    of_all_ranks,
    parts,
    spare,
    why_not_trainable,
)
from vla_stream.learning.segments import Segment
from vla_stream.policies.protocol import ManyDevices, Policy

# Adam's ε of CleanRL's PPO instead of torch's 1e-8: tiny gradients are not blown up to full steps.
ADAM_EPSILON = 1e-5
RUNNING_MOMENTS = "running moments of advantages"  # among the optimiser's state, whose other names hold a slash


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What one update did. `skipped` says why it changed nothing (None: it trained); metrics are then empty.

    harmless: it was skipped without a fault, as when the rows of every group succeeded: nothing is to be learnt."""

    update: int
    samples: int
    skipped: str | None
    metrics: Mapping[str, float] = field(default_factory=dict)
    harmless: bool = False


@dataclass(frozen=True, slots=True)
class LearnerState:
    """All that a checkpoint needs: updates done, the policy's state dict, and the optimiser as flat named tensors, in
    streaming with the running moments."""

    updates_done: int
    policy: dict[str, Tensor]
    optimiser: dict[str, Tensor]


_Snapshot = tuple[list[tuple[torch.nn.Parameter, Tensor]], dict[Tensor, dict[str, Tensor]]]


@dataclass(slots=True)
class _Begun:
    """The next update as far as its segments are here.

    segments   this rank's, as they came; newest: the last of them as it came
    problem    why it will change nothing
    enough     its policy has moved as far as it may: `algorithm.max_kl`
    before     weights and moments before its first optimiser step, once there was one: the step may turn out to be void
    gradients  in streaming, of the segments since the last optimiser step
    losses     of the same, each with its ticket: they are read when that step waits for the device anyway
    """

    tally: objective.Tally
    gradients: objective.GradientSums
    segments: list[Contribution] = field(default_factory=list)
    newest: Segment | None = None
    problem: str | None = None
    enough: bool = False
    before: _Snapshot | None = None
    losses: list[tuple[int, Tensor]] = field(default_factory=list)


_NOTHING = {
    "ppo": "no valid chunk step in any segment",
    "appo": "no valid chunk step in any segment",
    "grpo": "all groups have equal returns",
    "rloo": "all groups have equal returns",
    "rft": "no row succeeded",
}


class _NotFinite(Exception):
    """Ends an update half-way; the caller restores the weights."""


class Learner:
    """Owns the policy and its optimiser. Call `add` per segment as they come, then `finish`. Each of several ranks has
    one: all call the same methods, `add` as often.

    version         of the current weights: to be set before the first `add` of an update
    reference       what `algorithm.reference_kl_coefficient` needs: the policy that the run began with
    demonstrations  what `algorithm.imitation_coefficient` needs
    rank_count      so many segments make one `add`: see workers/ranks.py
    """

    rank_count = 1

    def __init__(
        self,
        policy: Policy,
        algorithm: config.Algorithm,
        trainer: config.Trainer,
        seed: int,
        device: torch.device | str = "cpu",
        reference: Policy | None = None,
        demonstrations: Demonstrated | None = None,
        ranks: Alone = ALONE,
    ) -> None:
        self.policy = policy
        self.algorithm = algorithm
        self.trainer = trainer
        self.seed = seed
        self.device = torch.device(device)
        self.reference, self.demonstrations = reference, demonstrations
        self.updates_done = 0
        self.version = 0
        self._ranks = ranks
        self._begun = self._nothing_begun()
        self._beside = Beside(self.device if ranks.beside else torch.device("cpu"))
        self._streaming = trainer.update == "streaming"
        self._share = trainer.segments_per_update // trainer.optimiser_steps
        self._moments = RunningMoments()
        self._normalises = algorithm.has_critic and algorithm.normalise_advantages
        self._warmup_updates = trainer.warmup_updates if algorithm.has_critic else 0
        if isinstance(policy, torch.nn.Module):
            policy.to(self.device).eval()
        self._passes = ranks.prepare(policy)
        self._reference_passes = None if reference is None else ranks.prepare(reference)
        groups = policy.parameter_groups()
        self._policy_parameters, self._value_parameters = list(groups["policy"]), list(groups["value"])
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in policy.named_parameters()}
        self._optimiser = torch.optim.Adam(
            [
                {"params": self._policy_parameters, "lr": trainer.learning_rate},
                {"params": self._value_parameters, "lr": trainer.critic_learning_rate},
            ],
            eps=ADAM_EPSILON,
        )
        self._beside.weights_moved()
        self._rates = [float(group["lr"]) for group in self._optimiser.param_groups]

    @property
    def warming_up(self) -> bool:
        """Whether the next update trains the value head only."""
        return self.updates_done < self._warmup_updates

    def add(self, segment: Segment) -> None:
        """Take one segment of the next update: π_prox, V and advantages by the weights that it starts with. In
        streaming its gradients too, and an optimiser step when it completes a share that is not the last.

        Each segment is evaluated alone, so that the result does not depend on which segments arrived before it.
        """
        begun = self._begun
        with self._as_it_started(), self._beside.passes():
            most_rows = self.trainer.minibatch_samples
            looks = self._passes, segment, self.algorithm, most_rows, self._reference_passes
            samples = make_samples(*looks, self._ranks)
        kept = samples.without_inputs() if self._streaming else samples
        begun.segments.append(Contribution(segment.ticket, kept))
        begun.newest = segment
        begun.problem = self._ranks.first(begun.problem or why_not_trainable(samples, segment.ticket))
        if begun.problem is None and self._streaming and not begun.enough:
            try:
                self._accumulate(samples, segment.ticket)
                there = len(begun.segments) * self._ranks.count
                if there % self._share == 0 and there < self.trainer.segments_per_update:
                    begun.before = begun.before or self._snapshot()
                    self._step_with_sums()
            except _NotFinite as exc:
                begun.problem = str(exc)

    def finish(self, version: int) -> UpdateResult:
        """Make the update of all segments added. In buffered mode what they are, not the order they came in, decides
        the result; in streaming the order decides which share a segment is in, and the rounding.

        `version` is that of the current weights, before this update. A loss or gradient that is not finite leaves
        weights and optimiser as they were.
        """
        number, begun = self.updates_done, self._begun
        found = of_all_ranks(begun.segments, self._ranks)
        ordered = [each.samples for each in found]
        count = sum(len(samples) for samples in ordered)
        problem = begun.problem or (None if count else _NOTHING[self.algorithm.name])
        harmless = begun.problem is None and not count and not self.algorithm.has_critic
        metrics: dict[str, float] = {}
        if problem is None:
            try:
                if self._streaming:
                    self._step_with_sums()
                    if self._normalises:
                        self._moments = self._moments.after(torch.cat([samples.advantages for samples in ordered]))
                else:
                    begun.before = self._snapshot()
                    self._optimise(found)
                metrics = begun.tally.metrics() | objective.describe(ordered, self.algorithm, version)
            except _NotFinite as exc:
                problem = str(exc)
        if problem is not None:
            self._restore()
        self._optimiser.zero_grad()
        self._begun = self._nothing_begun()
        self.updates_done += 1
        return UpdateResult(number, count, problem, metrics, harmless)

    @property
    def devices(self) -> int:
        """On which all ranks together train."""
        return self._ranks.count * (self.policy.training_devices if isinstance(self.policy, ManyDevices) else 1)

    @property
    def apart(self) -> bool:
        """Whether they compute while this process goes on."""
        return self.device.type == "cuda" or isinstance(self.policy, ManyDevices)

    def settle(self) -> None:
        """Wait until the device has computed all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.policy.state_dict()  # a policy whose device is none of torch's waits in there

    def discard(self) -> None:
        """Forget the segments added, and what they did to the weights: the next update begins anew."""
        self._restore()
        self._begun = self._nothing_begun()

    def weights(self) -> dict[str, Tensor]:
        """What is published, on the host; on rank 0 alone. Not copied where that is where the weights are."""
        return {name: self._ranks.whole(tensor) for name, tensor in self.policy.state_dict().items()}

    def state(self) -> LearnerState:
        """The state to checkpoint, copied to the host; on rank 0 alone. Call it between two updates: after `finish` or
        `discard`."""
        optimiser = {
            f"{self._names[parameter]}/{entry}": self._ranks.whole(value).clone()
            for parameter, entries in self._optimiser.state.items()
            for entry, value in entries.items()
        }
        if self._streaming:
            optimiser[RUNNING_MOMENTS] = torch.tensor(astuple(self._moments), dtype=torch.float64)
        return LearnerState(
            self.updates_done,
            {name: tensor.clone() for name, tensor in self.weights().items()},
            optimiser,
        )

    def load_state(self, state: LearnerState | None) -> None:
        """Go on from a checkpoint; None, on other ranks: from that of rank 0. Raises InputError, before anything is
        changed, if it belongs to another policy."""
        if state is not None:
            self._check_fit(state)
        parameters = {name: parameter for parameter, name in self._names.items()}

        def beside(key: str) -> Tensor | None:
            name, _, entry = key.rpartition("/")
            # Adam keeps its step count on the host, its moments beside the parameter.
            return None if key == RUNNING_MOMENTS or entry == "step" else parameters[name]

        share = self._ranks.share
        done = share(None if state is None else {"": torch.tensor(state.updates_done)}, lambda _: None)
        policy = share(None if state is None else state.policy, self.policy.state_dict().get)
        optimiser = share(None if state is None else state.optimiser, beside)
        running = optimiser.pop(RUNNING_MOMENTS, None)
        moments: dict[Tensor, dict[str, Tensor]] = {}
        for key, value in optimiser.items():
            name, _, entry = key.rpartition("/")
            moments.setdefault(parameters[name], {})[entry] = value.clone()
        self.policy.load_state_dict(policy)
        self._beside.weights_moved()
        self._optimiser.state.clear()
        self._optimiser.state.update(moments)
        self._moments = RunningMoments() if running is None else RunningMoments(*running.tolist())
        self._begun = self._nothing_begun()
        self.updates_done = int(done[""])

    def _check_fit(self, state: LearnerState) -> None:
        """Raises InputError for the checkpoint of another policy."""
        current = self.policy.state_dict()
        for name in sorted(current.keys() | state.policy.keys()):
            got = tuple(state.policy[name].shape) if name in state.policy else "nothing"
            expected = tuple(current[name].shape) if name in current else "nothing"
            if got != expected:
                raise InputError(
                    f"checkpoint: {name} holds {got}, expected {expected}; "
                    "use the policy options that the checkpoint was made with"
                )
        names = set(self._names.values())
        for key in state.optimiser:
            name, _, _ = key.rpartition("/")
            if key != RUNNING_MOMENTS and name not in names:
                raise InputError(
                    f"checkpoint: optimiser state of {name}, expected only trained parameters; "
                    "use the policy options that the checkpoint was made with"
                )

    def _optimise(self, found: Sequence[Contribution]) -> None:
        """Epochs × minibatches, one optimiser step each. Raises _NotFinite."""
        raw = torch.cat([each.samples.advantages for each in found])
        advantages = normalise(raw) if self._normalises else raw
        # A minibatch is drawn from the samples of all ranks, and each rank passes those of its own.
        own = np.concatenate([np.full(len(each.samples), each.own) for each in found])
        samples, advantages = Samples.concatenate([each.samples for each in found if each.own]), advantages[own]
        places = np.cumsum(own) - 1
        tally = self._begun.tally
        for epoch in range(self.trainer.epochs):
            generator = np.random.default_rng(seeds.derive("minibatches", self.seed, self.updates_done, epoch))
            for index in parts(generator.permutation(len(own)), self.trainer.minibatch_samples):
                place = f"epoch {epoch + 1}, optimiser step {tally.optimiser_steps + 1}"
                with self._draws(epoch, tally.optimiser_steps):
                    terms, sums = self._evaluate(samples, places[index[own[index]]], advantages)
                terms, loss = objective.of_all_ranks(terms, self._ranks)
                if not torch.isfinite(loss):
                    raise _NotFinite(f"the loss is {loss.item()} in {place}")
                tally.add(sums)
                if self._moved_enough():
                    return
                self._optimiser.zero_grad()
                # Only these leaves get a gradient, and Adam leaves parameters without one alone, moments included:
                # while the critic warms up the policy's loss reaches nothing.
                self._ranks.backward(objective.mean(terms), self._stepped)
                tally.stepped(self._step(place))

    def _accumulate(self, samples: Samples, ticket: int) -> None:
        """Add the gradients of a segment's loss to the sums; nothing here waits for the device."""
        begun = self._begun
        advantages = self._moments.scale(samples.advantages) if self._normalises else samples.advantages
        for index in parts(np.arange(len(samples)), self.trainer.minibatch_samples, self._ranks):
            with self._draws(ticket, int(index[0]) if len(index) else -1):
                terms, sums = self._evaluate(samples, index, advantages)
            begun.losses.append((ticket, torch.stack([term.total.detach() for term in terms.values()]).sum()))
            begun.gradients.add(terms, self._stepped)
            begun.tally.add(sums)

    def _step_with_sums(self) -> None:
        """One optimiser step with all gradients since the last one. Raises _NotFinite."""
        begun = self._begun
        if not begun.gradients:
            return  # a share without a valid chunk step
        values = torch.stack([loss for _, loss in begun.losses]).tolist()
        losses = zip(begun.losses, values, strict=True)
        bad = (f"the loss is {value} in segment {ticket}" for (ticket, _), value in losses if not np.isfinite(value))
        problem = self._ranks.first(next(bad, None))
        if problem is not None:
            raise _NotFinite(problem)
        begun.losses = []
        if self._moved_enough():
            begun.enough = True
            begun.gradients = objective.GradientSums(self._ranks)
            return
        self._optimiser.zero_grad()
        for parameter, gradient in begun.gradients.means().items():
            parameter.grad = gradient
        begun.gradients = objective.GradientSums(self._ranks)
        begun.tally.stepped(self._step(f"optimiser step {begun.tally.optimiser_steps + 1}"))

    def _evaluate(
        self, samples: Samples, index: np.ndarray, advantages_N: Tensor
    ) -> tuple[objective.Terms, dict[str, Tensor]]:
        """What these of the samples give; of none, where only other ranks have some, nothing, by the same passes."""
        algorithm = self.algorithm.at(self.updates_done)
        part, advantages = samples.take(index), advantages_N[torch.from_numpy(index)]
        if not len(index):
            assert self._begun.newest is not None
            part, advantages = spare(self._begun.newest), torch.zeros(1)
        found = objective.evaluate(self._passes, algorithm, part, advantages, self.device, self.version)
        return found if len(index) else objective.nothing(*found)

    def _nothing_begun(self) -> _Begun:
        return _Begun(objective.Tally(self._ranks), objective.GradientSums(self._ranks))

    @contextlib.contextmanager
    def _draws(self, *place: int) -> Iterator[None]:
        """In here what a policy draws from torch depends on the place in the run alone, so that replay draws it too."""
        rank = (self._ranks.rank,) if self._ranks.rank else ()
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(seeds.derive("losses", self.seed, self.updates_done, *place, *rank))
            yield

    def _moved_enough(self) -> bool:
        most = self.algorithm.max_kl if "max_kl" in self.algorithm.used else None
        return most is not None and self._begun.tally.kl_since_step() > most

    @property
    def _stepped(self) -> list[torch.nn.Parameter]:
        """The parameters that the next update trains."""
        value = self._value_parameters if self.algorithm.has_critic else []
        return value if self.warming_up else self._policy_parameters + value

    def _step(self, place: str) -> float:
        """One optimiser step with the gradients of all ranks, and those of the demonstrations; returns their norm.
        Raises _NotFinite."""
        decay = self.trainer.learning_rate_decay
        for group, rate in zip(self._optimiser.param_groups, self._rates, strict=True):
            group["lr"] = rate if decay is None else rate * decay.factor(self.updates_done)
        if self.algorithm.imitation_coefficient > 0 and not self.warming_up:
            self._imitate()
        self._ranks.reduce(self._stepped)
        norm = self._ranks.clip(self._stepped, self.trainer.max_grad_norm)
        if not np.isfinite(norm):
            raise _NotFinite(f"the gradient's norm is {norm} in {place}")
        self._optimiser.step()
        self._beside.weights_moved()
        return norm

    def _imitate(self) -> None:
        """Add the gradient of the behaviour-cloning loss of some demonstrations, others in each optimiser step."""
        known = self.demonstrations
        assert known is not None
        tally, size = self._begun.tally, min(self.trainer.minibatch_samples, len(known))
        seed = seeds.derive("imitation", self.seed, self.updates_done, tally.optimiser_steps)
        drawn = np.random.default_rng(seed).choice(len(known), size, replace=False)
        own = drawn[self._ranks.rank :: self._ranks.count]
        with self._draws(-1, tally.optimiser_steps):
            observations, actions, valid = known.take(own if len(own) else drawn[:1])
            loss = self._passes.imitation_loss(observations, actions, valid)
        # A mean over the valid elements of this rank's rows, of which the mean over all ranks' is to be made.
        count = float(valid.sum()) if len(own) else 0.0
        share = count / max(1.0, float(self._ranks.total(torch.tensor(count))))
        tally.imitated(self._ranks.total(share * loss))
        scaled = self.algorithm.imitation_coefficient * share * loss
        gradients = self._ranks.gradients(scaled, self._policy_parameters, again=False)
        for parameter, gradient in zip(self._policy_parameters, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    @contextlib.contextmanager
    def _as_it_started(self) -> Iterator[None]:
        """The policy with the weights that the update began with."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for parameter, weight in self._begun.before[0] if self._begun.before is not None else []:
            self._ranks.exchange(parameter, weight)

    def _snapshot(self) -> _Snapshot:
        trained = self._policy_parameters + self._value_parameters
        moments = {
            parameter: {entry: value.clone() for entry, value in entries.items()}
            for parameter, entries in self._optimiser.state.items()
        }
        return [(parameter, parameter.detach().clone()) for parameter in trained], moments

    def _restore(self) -> None:
        if self._begun.before is None:
            return
        weights, moments = self._begun.before
        with torch.no_grad():
            for parameter, value in weights:
                parameter.copy_(value)
        self._beside.weights_moved()
        self._optimiser.state.clear()
        self._optimiser.state.update(moments)
