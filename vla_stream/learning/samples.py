"""From a segment to training samples: one pass without gradients gives π_prox, V and with them the advantages; which
chunk steps become samples, and what each is worth, the algorithm says.

Legend of shape suffixes: T chunk steps, k rows of one slot, N samples (valid chunk steps of one row), H actions per
chunk, A action dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_stream import config
from vla_stream.environments.protocol import Observations
from vla_stream.learning.advantages import successor_values
from vla_stream.learning.algorithms import RECIPES, Rollout, looks_first
from vla_stream.learning.losses import element_mask, to_elements
from vla_stream.learning.ranks import ALONE, Alone, Passes
from vla_stream.learning.segments import Segment


@dataclass(frozen=True, slots=True)
class Rows:
    """N rows of observations that stay where they are until `gather` copies them, once, to where they are read: images
    are nearly all of the bytes that an update moves.

    sources observations, which must agree on cameras and shapes; source, row: i64[N] which of them, and which of its
    """

    sources: Sequence[Observations]
    source: np.ndarray
    row: np.ndarray

    def __len__(self) -> int:
        return len(self.row)

    def take(self, index: np.ndarray) -> Rows:
        """The given rows, in the given order."""
        return Rows(self.sources, self.source[index], self.row[index])

    def gather(self) -> Observations:
        """All of them in one piece; there is at least one."""
        places = list(zip(self.source.tolist(), self.row.tolist(), strict=True))
        images = {}
        for camera, like in self.sources[0].images.items():
            images[camera] = np.empty((len(places), *like.shape[1:]), dtype=like.dtype)
            for image, (source, row) in zip(images[camera], places, strict=True):
                image[:] = self.sources[source].images[camera][row]
        state = np.stack([self.sources[source].state[row] for source, row in places])
        return Observations(images, state, [self.sources[source].instruction[row] for source, row in places])

    @classmethod
    def concatenate(cls, parts: Sequence[Rows]) -> Rows:
        """All rows of `parts`, in order."""
        firsts = np.cumsum([0, *(len(part.sources) for part in parts)])
        source = np.concatenate([part.source + first for part, first in zip(parts, firsts[:-1], strict=True)])
        return cls([each for part in parts for each in part.sources], source, np.concatenate([p.row for p in parts]))


@dataclass(frozen=True, slots=True)
class Samples:
    """N chunk steps on the host: observations and arrays for `Policy.evaluate`, tensors for the losses.

    executed bool[N, H]; versions i64[N]; values, and as in `algorithms.Credit` advantages, returns, weights, shares
    f32[N]; f32[N, H, A]: log-probs behaviour, proximal and reference (behaviour's where there is no such policy)
    """

    observations: Rows
    actions: np.ndarray
    extras: Mapping[str, np.ndarray]
    executed: Tensor
    behaviour: Tensor
    proximal: Tensor
    reference: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor
    shares: Tensor
    versions: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def take(self, index: np.ndarray) -> Samples:
        """The given samples, in the given order."""
        rows = torch.from_numpy(index)
        return Samples(
            self.observations.take(index),
            self.actions[index],
            {name: array[index] for name, array in self.extras.items()},
            *(tensor[rows] for tensor in self.tensors()),
        )

    def without_inputs(self) -> Samples:
        """What is left to describe once the policy has seen them: observations are most of the memory."""
        return Samples.without_any(self.tensors())

    @classmethod
    def without_any(cls, tensors: Sequence[Tensor]) -> Samples:
        """The same, from `tensors`."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(Rows((), nothing, nothing), nothing, {}, *tensors)

    @classmethod
    def concatenate(cls, parts: Sequence[Samples]) -> Samples:
        """All samples of `parts`, in order."""
        return cls(
            Rows.concatenate([part.observations for part in parts]),
            np.concatenate([part.actions for part in parts]),
            {name: np.concatenate([part.extras[name] for part in parts]) for name in parts[0].extras},
            *(torch.cat(tensors) for tensors in zip(*(part.tensors() for part in parts), strict=True)),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """All but the inputs, each [N, …]."""
        return (
            self.executed,
            self.behaviour,
            self.proximal,
            self.reference,
            self.values,
            self.advantages,
            self.returns,
            self.weights,
            self.shares,
            self.versions,
        )


class _Look(NamedTuple):
    """What the weights say that an update starts with: proximal f32[N, H, A] of the N chunk steps to train, whose
    observations these are; values and successors f32[T, k] (see `algorithms.Rollout`)."""

    observations: Rows
    proximal: Tensor
    values: Tensor
    successors: Tensor


class Contribution(NamedTuple):
    """The samples of one segment, made by this rank or, then without inputs, by another."""

    ticket: int
    samples: Samples
    own: bool = True


def make_samples(
    policy: Passes,
    segment: Segment,
    algorithm: config.Algorithm,
    most_rows: int,
    reference: Passes | None = None,
    ranks: Alone = ALONE,
) -> Samples:
    """The samples of one segment by the policy's current weights, evaluated at most `most_rows` at a time. Several
    ranks do it in step, each with a segment of its own."""
    recipe = RECIPES[algorithm.name]
    # Indexing is numpy's: it takes a fraction of torch's time on arrays as small as these.
    trained = recipe.trained(segment).numpy()
    if looks_first(algorithm):
        look = _look(policy, segment, trained, most_rows, ranks, critic=algorithm.has_critic)
    else:
        none = torch.zeros(trained.shape)
        observations = Rows(segment.observations, *np.nonzero(trained))
        look = _Look(observations, torch.from_numpy(segment.logprobs[trained]), none, none)
    actions, extras = segment.actions[trained], {name: array[trained] for name, array in segment.extras.items()}
    executed, behaviour = (torch.from_numpy(array[trained]) for array in (segment.executed, segment.logprobs))
    reference_logprobs = behaviour
    if reference is not None:
        reference_logprobs, _ = _evaluate(reference, segment, look.observations, actions, extras, most_rows, ranks)
    log_ratios = np.zeros(trained.shape, dtype=np.float32)
    log_ratios[trained] = to_elements(look.proximal - behaviour, executed, "chunk").numpy()
    elements = element_mask(torch.from_numpy(segment.executed), actions.shape[-1], algorithm.granularity)
    credit = recipe.credit(
        algorithm,
        Rollout(
            torch.from_numpy(segment.rewards),
            torch.from_numpy(segment.terminated),
            torch.from_numpy(segment.truncated),
            torch.from_numpy(trained),
            elements.reshape(*trained.shape, -1).sum(-1),
            torch.from_numpy(log_ratios),
            look.values,
            look.successors,
        ),
    )
    values, advantages, returns, weights, shares = (
        torch.from_numpy(tensor.numpy()[trained]) for tensor in (look.values, *credit)
    )
    return Samples(
        observations=look.observations,
        actions=actions,
        extras=extras,
        executed=executed,
        behaviour=behaviour,
        proximal=look.proximal,
        reference=reference_logprobs,
        values=values,
        advantages=advantages,
        returns=returns,
        weights=weights,
        shares=shares,
        versions=torch.from_numpy(np.repeat(segment.versions[:, None], segment.rows, axis=1)[trained]),
    )


def _look(
    policy: Passes, segment: Segment, trained: np.ndarray, most_rows: int, ranks: Alone, *, critic: bool
) -> _Look:
    """One pass without gradients over the chunk steps to train and, for a critic, over those observations beside them
    whose value bootstraps a return: those that close the segment without having ended, and those before the reset of
    truncated rows."""
    steps, rows = segment.steps, segment.rows
    needed = np.zeros((steps + 1, rows), dtype=bool)
    needed[:-1] |= trained
    final, final_index = (segment.final, segment.final_index) if critic else (None, segment.final_index[:0])
    if critic:
        bootstraps = trained & ~segment.terminated
        bootstraps[final_index[:, 0], final_index[:, 1]] = False
        needed[1:] |= bootstraps
    t, row = np.nonzero(needed)
    on_grid = len(t)
    source, source_row, sources = t, row, list(segment.observations)
    if final is not None:
        sources.append(final)
        source = np.concatenate([t, np.full(len(final_index), steps + 1)])
        source_row = np.concatenate([row, np.arange(len(final_index))])
        t, row = np.concatenate([t, final_index[:, 0]]), np.concatenate([row, final_index[:, 1]])
    observations = Rows(sources, source, source_row)
    # An observation without a decision of its own is evaluated with a neighbour's: only its value is used.
    decision = (np.minimum(t, steps - 1), row)
    extras = {name: array[decision] for name, array in segment.extras.items()}
    actions = segment.actions[decision]
    logprobs, values = _evaluate(policy, segment, observations, actions, extras, most_rows, ranks)
    grid_values = np.zeros((steps + 1, rows), dtype=np.float32)
    grid_values[needed] = values[:on_grid].numpy()
    grid = torch.from_numpy(grid_values)
    successors = successor_values(grid[:-1], grid[-1], values[on_grid:], torch.from_numpy(final_index))
    # np.nonzero and boolean indexing both go through [T, k] in time order, so these rows line up with `[trained]`.
    chosen = np.nonzero(np.concatenate([trained, np.zeros((1, rows), dtype=bool)])[needed])[0]
    return _Look(observations.take(chosen), torch.from_numpy(logprobs.numpy()[chosen]), grid[:-1], successors)


def why_not_trainable(samples: Samples, ticket: int) -> str | None:
    """Why nothing can be learnt from an update with these samples of segment `ticket`; None if all is well."""
    executed = samples.executed.numpy()
    if not executed.any(-1).all():
        return f"a valid chunk step of segment {ticket} has no executed action"
    for name, array in (
        ("behaviour log-prob", samples.behaviour.numpy()[executed]),
        ("proximal log-prob", samples.proximal.numpy()[executed]),
        ("reference log-prob", samples.reference.numpy()[executed]),
        ("value", samples.values.numpy()),
        ("return", samples.returns.numpy()),
    ):
        if not np.isfinite(array).all():
            return f"a {name} of segment {ticket} is not finite"
    return None


def spare(segment: Segment) -> Samples:
    """One sample that teaches nothing, for a rank that has none while others have: its first row."""
    one = torch.zeros(1)
    nothing = torch.zeros(1, *segment.actions.shape[2:])
    return Samples(
        Rows(segment.observations, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)),
        segment.actions[0, :1],
        {name: array[0, :1] for name, array in segment.extras.items()},
        *(torch.zeros(1, segment.actions.shape[2], dtype=torch.bool), nothing, nothing, nothing),
        *(one, one, one, one, one, torch.zeros(1, dtype=torch.int64)),
    )


def of_all_ranks(own: Sequence[Contribution], ranks: Alone) -> list[Contribution]:
    """Those of all ranks, by ticket. Each rank has as many, at least one."""
    found = list(own) if ranks.count == 1 else []
    if ranks.count > 1:
        tickets, lengths = (
            torch.tensor(numbers) for numbers in zip(*((each.ticket, len(each.samples)) for each in own), strict=True)
        )
        fields = zip(*(each.samples.tensors() for each in own), strict=True)
        gathered = ranks.gather([tickets, lengths, *map(torch.cat, fields)])
        for rank, (tickets, lengths, *tensors) in enumerate(gathered):
            if rank == ranks.rank:
                found += own
                continue
            cut = zip(*(torch.split(tensor, lengths.tolist()) for tensor in tensors), strict=True)
            found += [
                Contribution(ticket, Samples.without_any(each), own=False)
                for ticket, each in zip(tickets.tolist(), cut, strict=True)
            ]
    return sorted(found, key=lambda each: each.ticket)


def parts(index: np.ndarray, most: int, ranks: Alone = ALONE) -> Iterator[np.ndarray]:
    """`index` in as few parts of at most `most` as there can be, their sizes as equal as can be; on all ranks as many,
    of which some may be empty."""
    count = ranks.most(-(-len(index) // most))
    if count:
        yield from np.array_split(index, count)


def _evaluate(
    policy: Passes,
    segment: Segment,
    observations: Rows,
    actions: np.ndarray,
    extras: Mapping[str, np.ndarray],
    most_rows: int,
    ranks: Alone,
) -> tuple[Tensor, Tensor]:
    """Log-probs f32[N, H, A] and values f32[N] on the host, without gradients."""
    logprobs, values = [torch.zeros(0, *actions.shape[1:])], [torch.zeros(0)]
    with torch.no_grad():
        for index in parts(np.arange(len(actions)), most_rows, ranks):
            if not len(index):
                one = spare(segment)
                policy.evaluate(one.observations.gather(), one.actions, one.extras)
                continue
            part = {name: array[index] for name, array in extras.items()}
            evaluation = policy.evaluate(observations.take(index).gather(), actions[index], part)
            logprobs.append(evaluation.logprobs.float().cpu())
            values.append(evaluation.values.float().cpu())
    return torch.cat(logprobs), torch.cat(values)
