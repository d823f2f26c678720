"""From a segment to training samples: one pass without gradients gives π_prox, V and with them the advantages.

Legend of shape suffixes: T chunk steps, k rows of one slot, N samples (valid chunk steps of one row), H actions per
chunk, A action dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_stream import config
from vla_stream.environments.protocol import Observations
from vla_stream.learning.advantages import gae, successor_values
from vla_stream.learning.segments import Segment
from vla_stream.policies.protocol import Policy


@dataclass(frozen=True, slots=True)
class Samples:
    """N valid chunk steps on the host: observations and arrays for `Policy.evaluate`, tensors for the losses.

    executed bool[N, H]; behaviour, proximal f32[N, H, A] log-probs; values, advantages, returns f32[N]; versions i64[N]
    """

    observations: Observations
    actions: np.ndarray
    extras: Mapping[str, np.ndarray]
    executed: Tensor
    behaviour: Tensor
    proximal: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    versions: Tensor

    def __len__(self) -> int:
        return len(self.values)

    def take(self, index: np.ndarray) -> Samples:
        """The given samples, copied, in the given order."""
        rows = torch.from_numpy(index)
        return Samples(
            self.observations.take(index),
            self.actions[index],
            {name: array[index] for name, array in self.extras.items()},
            *(tensor[rows] for tensor in self._tensors()),
        )

    def without_inputs(self) -> Samples:
        """What is left to describe once the policy has seen them: observations are most of the memory."""
        nothing = np.empty(0, dtype=np.float32)
        return dataclasses.replace(self, observations=Observations({}, nothing, []), actions=nothing, extras={})

    @classmethod
    def concatenate(cls, parts: Sequence[Samples]) -> Samples:
        """All samples of `parts`, in order."""
        return cls(
            Observations.concatenate([part.observations for part in parts]),
            np.concatenate([part.actions for part in parts]),
            {name: np.concatenate([part.extras[name] for part in parts]) for name in parts[0].extras},
            *(torch.cat(tensors) for tensors in zip(*(part._tensors() for part in parts), strict=True)),
        )

    def _tensors(self) -> tuple[Tensor, ...]:
        return (
            self.executed,
            self.behaviour,
            self.proximal,
            self.values,
            self.advantages,
            self.returns,
            self.versions,
        )


def make_samples(policy: Policy, segment: Segment, algorithm: config.Algorithm, most_rows: int) -> Samples:
    """The samples of one segment by the policy's current weights, evaluated at most `most_rows` at a time.

    Evaluated are the valid chunk steps and, beside them, only the observations whose value bootstraps a return: those
    that close the segment without having ended, and those before the reset of truncated rows.
    """
    steps, rows = segment.steps, segment.rows
    final_t, final_row = segment.final_index[:, 0], segment.final_index[:, 1]
    bootstraps = segment.valid & ~segment.terminated
    bootstraps[final_t, final_row] = False
    needed = np.zeros((steps + 1, rows), dtype=bool)
    needed[:-1] |= segment.valid
    needed[1:] |= bootstraps
    t, row = np.nonzero(needed)
    on_grid = len(t)
    observations = Observations.concatenate(segment.observations).take(t * rows + row)
    if segment.final is not None:
        observations = Observations.concatenate([observations, segment.final])
        t, row = np.concatenate([t, final_t]), np.concatenate([row, final_row])
    # An observation without a decision of its own is evaluated with a neighbour's: only its value is used.
    decision = (np.minimum(t, steps - 1), row)
    actions = segment.actions[decision]
    extras = {name: array[decision] for name, array in segment.extras.items()}
    logprobs, values = _evaluate(policy, observations, actions, extras, most_rows)

    grid = torch.zeros(steps + 1, rows)
    grid[torch.from_numpy(needed)] = values[:on_grid]
    valid = torch.from_numpy(segment.valid)
    advantages = gae(
        torch.from_numpy(segment.rewards),
        grid[:-1],
        successor_values(grid[:-1], grid[-1], values[on_grid:], torch.from_numpy(segment.final_index)),
        torch.from_numpy(segment.terminated),
        torch.from_numpy(segment.truncated),
        valid,
        algorithm.gamma,
        algorithm.gae_lambda,
    )[valid]
    # np.nonzero and boolean indexing both go through [T, k] in time order, so these rows line up with `[valid]`.
    chosen = np.nonzero(np.concatenate([segment.valid, np.zeros((1, rows), dtype=bool)])[needed])[0]
    old_values = grid[:-1][valid]
    return Samples(
        observations=observations.take(chosen),
        actions=actions[chosen],
        extras={name: array[chosen] for name, array in extras.items()},
        executed=torch.from_numpy(segment.executed)[valid],
        behaviour=torch.from_numpy(segment.logprobs)[valid],
        proximal=logprobs[torch.from_numpy(chosen)],
        values=old_values,
        advantages=advantages,
        returns=advantages + old_values,
        versions=torch.from_numpy(segment.versions)[:, None].expand(-1, rows)[valid],
    )


def why_not_trainable(samples: Samples, ticket: int) -> str | None:
    """Why nothing can be learnt from an update with these samples of segment `ticket`; None if all is well."""
    if not samples.executed.any(-1).all():
        return f"a valid chunk step of segment {ticket} has no executed action"
    for name, tensor in (
        ("behaviour log-prob", samples.behaviour[samples.executed]),
        ("proximal log-prob", samples.proximal[samples.executed]),
        ("value", samples.values),
        ("return", samples.returns),
    ):
        if not torch.isfinite(tensor).all():
            return f"a {name} of segment {ticket} is not finite"
    return None


def parts(index: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """`index` in as few parts of at most `most` as there can be, their sizes as equal as can be."""
    if len(index):
        yield from np.array_split(index, -(-len(index) // most))


def _evaluate(
    policy: Policy, observations: Observations, actions: np.ndarray, extras: Mapping[str, np.ndarray], most_rows: int
) -> tuple[Tensor, Tensor]:
    """Log-probs f32[N, H, A] and values f32[N] on the host, without gradients."""
    logprobs, values = [torch.zeros(0, *actions.shape[1:])], [torch.zeros(0)]
    with torch.no_grad():
        for index in parts(np.arange(len(actions)), most_rows):
            part = {name: array[index] for name, array in extras.items()}
            evaluation = policy.evaluate(observations.take(index), actions[index], part)
            logprobs.append(evaluation.logprobs.float().cpu())
            values.append(evaluation.values.float().cpu())
    return torch.cat(logprobs), torch.cat(values)
