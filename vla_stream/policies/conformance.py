"""Does a policy keep the protocol? Asked about a few rows, and answered with the first thing wrong of each kind.

`vla-stream check` runs this on a class of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from safetensors.torch import load, save

from vla_stream.environments.conformance import NotConforming, Report, run_checks
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.policies.protocol import Act, Evaluation, LowPrecision, Policy

_ROWS = 8
_LOGPROB_LIMIT = 1e-4  # per element, in float32
_ACTION_LIMIT = 1e-4
_CHUNK_LIMIT = 0.1  # mean over chunks of the absolute difference; in low precision
_PERTURBATION = 0.02
_WORDS = ("pick up the red cube", "open the drawer", "push it to the left, slowly", "")


def check_policy(
    make: Callable[[], Policy], specification: Specification, chunk: int, observations: Observations | None = None
) -> Report:
    """make: a new policy of the class for these shapes, with the options to be checked; it is called twice.

    observations: what to ask about, 8 rows or more; default: noise."""
    seen = _noise(specification) if observations is None else observations.take(range(_ROWS))
    checks = (shapes, noise_keys, logprobs, batch_composition, gradients, inputs_kept, saving)
    return run_checks(checks, _Subject(make, specification, chunk, seen))


@dataclass
class _Subject:
    make: Callable[[], Policy]
    specification: Specification
    chunk: int
    observations: Observations

    @cached_property
    def policy(self) -> Policy:
        """Its trained parameters moved a little, by numbers that are always the same: what begins as zero (adapters,
        a last layer) would hide what is behind it."""
        policy = self.new()
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for group in policy.parameter_groups().values():
                for parameter in group:
                    noise = torch.randn(parameter.shape, generator=random) * _PERTURBATION
                    parameter.add_(noise.to(parameter))
        return policy

    def new(self) -> Policy:
        policy = self.make()
        if isinstance(policy, torch.nn.Module):
            policy.eval()
        return policy

    @property
    def low_precision(self) -> bool:
        return isinstance(self.policy, LowPrecision) and self.policy.low_precision

    def act(self, rows: np.ndarray | None = None, keys: np.ndarray | None = None) -> Act:
        """Of the given rows, all by default, with their own keys or the given ones."""
        rows = np.arange(_ROWS) if rows is None else rows
        return self.policy.act(self.observations.take(rows), _KEYS[rows] if keys is None else keys)

    def evaluate(self, act: Act, rows: np.ndarray | None = None) -> Evaluation:
        """The given rows of `act`, whose own rows are all of them."""
        rows = np.arange(_ROWS) if rows is None else rows
        extras = {name: array[rows] for name, array in act.extras.items()}
        return self.policy.evaluate(self.observations.take(rows), act.actions[rows], extras)


_KEYS = np.array([2**63 + 12345 * n for n in range(_ROWS)], dtype=np.uint64)


def shapes(subject: _Subject) -> None:
    """Arrays and tensors of the specified shapes, float32, finite, with a row for each row."""
    if not isinstance(subject.policy, Policy):
        raise NotConforming("it lacks a part of Policy, see policies/protocol.py")
    act = subject.act()
    elements = (_ROWS, subject.chunk, subject.specification.action_dims)
    for name, array, shape in (
        ("actions", act.actions, elements),
        ("logprobs", act.logprobs, elements),
        ("values", act.values, (_ROWS,)),
    ):
        if not isinstance(array, np.ndarray) or array.shape != shape or array.dtype != np.float32:
            got = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise NotConforming(f"act: {name} are {got}, expected float32{list(shape)}")
        if not np.isfinite(array).all():
            raise NotConforming(f"act: {name} hold NaN or infinity")
    for name, array in act.extras.items():
        if not isinstance(array, np.ndarray) or array.ndim < 1 or len(array) != _ROWS or array.dtype == object:
            raise NotConforming(f"act: extra {name} has no row for each of {_ROWS} rows, expected a plain array")
    evaluation = subject.evaluate(act)
    for name, tensor, expected in (
        ("logprobs", evaluation.logprobs, elements),
        ("entropy", evaluation.entropy, elements),
        ("values", evaluation.values, (_ROWS,)),
    ):
        if tensor.shape != expected:
            raise NotConforming(f"evaluate: {name} are {list(tensor.shape)}, expected {list(expected)}")
        if not torch.isfinite(tensor).all():
            raise NotConforming(f"evaluate: {name} hold NaN or infinity")


def noise_keys(subject: _Subject) -> None:
    """Equal keys give equal actions, others give others; without keys there is one answer."""
    act = subject.act()
    if not np.array_equal(act.actions, subject.act().actions):
        raise NotConforming("the same keys give other actions; draw all noise from the rows' keys, see row_noise")
    same = subject.observations.take([0] * _ROWS)
    drawn = subject.policy.act(same, _KEYS).actions
    if any(np.array_equal(drawn[0], other) for other in drawn[1:]):
        raise NotConforming("two keys give the same actions for one observation; draw the noise from the keys")
    mode = subject.policy.act(same, None).actions
    if not np.array_equal(mode, subject.policy.act(same, None).actions):
        raise NotConforming("without keys the actions differ from call to call, expected the mode")
    if _gap(mode, mode[:1]) > _ACTION_LIMIT and not subject.low_precision:
        raise NotConforming("without keys equal rows get different actions, expected the mode for each")


def logprobs(subject: _Subject) -> str:
    """The log-probs and values of act are those of evaluate."""
    act = subject.act()
    with torch.no_grad():
        evaluation = subject.evaluate(act)
    difference = np.abs(act.logprobs - _array(evaluation.logprobs))
    per_chunk = np.abs((act.logprobs - _array(evaluation.logprobs)).sum((1, 2))).mean()
    if subject.low_precision:
        if per_chunk > _CHUNK_LIMIT:
            raise NotConforming(
                f"log-probs of act and evaluate differ by {per_chunk:.3g} per chunk, expected at most {_CHUNK_LIMIT}"
            )
    elif difference.max() > _LOGPROB_LIMIT:
        raise NotConforming(
            f"log-probs of act and evaluate differ by {difference.max():.3g}, expected at most {_LOGPROB_LIMIT}; put "
            "what evaluate needs into the extras"
        )
    again = _gap(act.values, _array(evaluation.values))
    if again > _LOGPROB_LIMIT * (1 + np.abs(act.values).max()) and not subject.low_precision:
        raise NotConforming(f"values of act and evaluate differ by {again:.3g}, expected the same weights and inputs")
    return f"log-probs of act and evaluate differ by {difference.max():.2g} at most, by {per_chunk:.2g} per chunk"


def batch_composition(subject: _Subject) -> str:
    """What a row gets does not depend on who else is in its batch."""
    act, rows = subject.act(), np.array([5, 2, 7])
    alone = subject.act(rows)
    worst = _gap(alone.actions, act.actions[rows])
    with torch.no_grad():
        together, apart = subject.evaluate(act), subject.evaluate(act, rows)
    worst_logprob = _gap(_array(apart.logprobs), _array(together.logprobs)[rows])
    scale = 1 + np.abs(act.actions).max()
    if not subject.low_precision:
        if worst > _ACTION_LIMIT * scale:
            raise NotConforming(
                f"three rows alone get actions that differ by {worst:.3g} from those in a batch of {_ROWS}, expected "
                "the same; use nothing of other rows (batch norm, padding to the longest)"
            )
        if worst_logprob > _LOGPROB_LIMIT * (1 + np.abs(act.logprobs).max()):
            raise NotConforming(
                f"three rows alone get log-probs that differ by {worst_logprob:.3g} from those in a batch of {_ROWS}"
            )
    return f"in another batch actions differ by {worst:.2g} at most, log-probs by {worst_logprob:.2g}"


def gradients(subject: _Subject) -> None:
    """A gradient reaches all that is trained, and all that is trained is in one group."""
    policy = subject.policy
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    grouped = [parameter for group in policy.parameter_groups().values() for parameter in group]
    if policy.parameter_groups().keys() != {"policy", "value"}:
        raise NotConforming(f"parameter groups are {sorted(policy.parameter_groups())}, expected policy and value")
    if len({id(parameter) for parameter in grouped}) != len(grouped):
        raise NotConforming("a parameter is twice in parameter_groups(), expected each once")
    left_out = [
        name for name, p in policy.named_parameters() if p.requires_grad and not any(p is other for other in grouped)
    ]
    if left_out:
        raise NotConforming(f"{left_out[0]} requires a gradient but is in no parameter group; add or freeze it")
    for parameter in grouped:
        parameter.grad = None
        if not parameter.requires_grad:
            raise NotConforming(f"{names[id(parameter)]} is in a parameter group but requires no gradient")
    evaluation = subject.evaluate(subject.act())
    random = torch.Generator().manual_seed(1)
    weights = torch.randn(evaluation.logprobs.shape, generator=random).to(evaluation.logprobs)
    loss = (weights * evaluation.logprobs).sum() + evaluation.values.square().sum() + evaluation.entropy.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    for parameter in grouped:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or not gradient.any():
            raise NotConforming(
                f"{names[id(parameter)]} gets no gradient of log-probs, entropy and values; freeze it, or use it"
            )
        if not torch.isfinite(gradient).all():
            raise NotConforming(f"the gradient of {names[id(parameter)]} is not finite")


def inputs_kept(subject: _Subject) -> None:
    """act and evaluate change nothing that they are given, nor what they returned before; evaluate repeats itself."""
    given = subject.observations
    before = given.take(range(_ROWS))
    act = subject.policy.act(given, _KEYS)
    returned = {"actions": act.actions, "logprobs": act.logprobs, "values": act.values, **act.extras}
    copies = {name: array.copy() for name, array in returned.items()}
    with torch.no_grad():
        first = _array(subject.policy.evaluate(given, act.actions, act.extras).logprobs)
        second = _array(subject.policy.evaluate(given, act.actions, act.extras).logprobs)
    subject.act(keys=_KEYS + np.uint64(1))
    for name, array in returned.items():
        if not np.array_equal(array, copies[name]):
            raise NotConforming(f"{name} of an earlier act changed afterwards; return new arrays")
    same = np.array_equal(given.state, before.state) and list(given.instruction) == list(before.instruction)
    if not same or not all(np.array_equal(image, before.images[camera]) for camera, image in given.images.items()):
        raise NotConforming("the observations were written to; work on copies")
    if not np.array_equal(first, second):
        raise NotConforming("evaluate differs from call to call; both methods run in eval mode, without dropout")


def saving(subject: _Subject) -> None:
    """Weights saved as safetensors and loaded into a new policy give the same output."""
    # As weights are published: safetensors refuses tensors that share memory, as tied weights do.
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in subject.policy.state_dict().items()}
    names: dict[int, str] = {}
    for name, tensor in state.items():
        other = names.setdefault(tensor.data_ptr(), name)
        if other != name and tensor.numel():
            raise NotConforming(
                f"{other} and {name} are two names of one tensor, which cannot be published; leave one out of "
                "state_dict()"
            )
    data = save(state)
    twin, keys = subject.new(), _KEYS
    before = twin.act(subject.observations, keys)
    twin.load_state_dict(load(data))
    expected, got = subject.act(), twin.act(subject.observations, keys)
    if np.array_equal(before.actions, expected.actions):
        raise NotConforming("moving the trained parameters does not change the actions; are they the ones that act?")
    for name in ("actions", "logprobs", "values"):
        gap = _gap(getattr(got, name), getattr(expected, name))
        if gap > 0:
            raise NotConforming(
                f"after saving and loading {name} differ by {gap:.3g}; state_dict() must hold all that decides them"
            )


def _gap(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max())


def _array(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().cpu().numpy()
    return array


def _noise(specification: Specification) -> Observations:
    random = np.random.default_rng(0)
    images = {
        camera: random.integers(0, 256, (_ROWS, *size, 3), dtype=np.uint8)
        for camera, size in specification.cameras.items()
    }
    state = random.standard_normal((_ROWS, specification.state_dims)).astype(np.float32)
    return Observations(images, state, [_WORDS[row % len(_WORDS)] for row in range(_ROWS)])
