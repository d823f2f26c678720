"""Behaviour cloning: the mediocre warm start that reinforcement learning improves, by fixed counts and seeds.

Demonstrations are executed with noise and labelled without, so that they also show how to come back to the path
(noise injection as in DART, arXiv 1703.09327). Scenes pre-train the perception, where environment and policy can.

Shape suffixes: N samples, H actions per chunk, A action dims.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from vla_stream.config import Pretrain
from vla_stream.environments.protocol import EnvironmentBatch, Expert, Grounding, Observations, Specification
from vla_stream.errors import InputError
from vla_stream.policies.protocol import GroundedPolicy, NormalisedPolicy, Policy
from vla_stream.seeds import derive

_FORMAT = "vla-stream demonstrations 1"
_SCENES = "scenes."

Progress = Callable[[str, int, int], None]
"""Called with the stage's name, what is done, and of how much."""


class Demonstrated(Protocol):
    """N moments of demonstrated episodes, wherever they lie.

    state: f32[N, S]. episodes: how many there were; successes: how many of them succeeded, None where nobody knows.
    """

    @property
    def state(self) -> np.ndarray: ...

    @property
    def episodes(self) -> int: ...

    @property
    def successes(self) -> int | None: ...

    def __len__(self) -> int:
        """N."""

    def take(self, rows: np.ndarray) -> tuple[Observations, np.ndarray, np.ndarray]:
        """Of these moments: observations, actions f32[n, H, A], valid bool[n, H], as Demonstrations has them."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """N moments of demonstrated episodes, in memory.

    observations  what was seen, N rows
    actions       f32[N, H, A]: the expert's answers at that moment and the H-1 next ones, without the noise
    valid         bool[N, H]: False after the episode's end
    episodes      how many there were; successes: how many of them succeeded
    """

    observations: Observations
    actions: np.ndarray
    valid: np.ndarray
    episodes: int
    successes: int

    def __len__(self) -> int:
        return len(self.observations)

    @property
    def state(self) -> np.ndarray:
        return self.observations.state

    def take(self, rows: np.ndarray) -> tuple[Observations, np.ndarray, np.ndarray]:
        """See Demonstrated."""
        return self.observations.take(rows), self.actions[rows], self.valid[rows]

    @classmethod
    def concatenate(cls, parts: Sequence[Demonstrations]) -> Self:
        """Those of several tasks, in order."""
        return cls(
            Observations.concatenate([part.observations for part in parts]),
            np.concatenate([part.actions for part in parts]),
            np.concatenate([part.valid for part in parts]),
            sum(part.episodes for part in parts),
            sum(part.successes for part in parts),
        )


@dataclass(frozen=True, slots=True)
class Scenes:
    """N scenes, and where in the image the named object is: targets f32[N, 2], see Grounding."""

    observations: Observations
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.observations)

    @classmethod
    def concatenate(cls, parts: Sequence[Scenes]) -> Self:
        """Those of several tasks, in order."""
        observations = Observations.concatenate([part.observations for part in parts])
        return cls(observations, np.concatenate([part.targets for part in parts]))


def collect_demonstrations(
    batch: EnvironmentBatch,
    episodes: int,
    action_noise: float,
    chunk: int,
    seed: int,
    progress: Progress | None = None,
) -> Demonstrations:
    """Let the environment's expert act in `episodes` episodes; the result does not depend on the batch's rows.

    action_noise: standard deviation of the noise on executed actions, in the action range's units.
    Raises InputError if the environment has no expert, or if no episode succeeded.
    """
    if not isinstance(batch, Expert):
        raise InputError(
            f"pretrain: environment {type(batch).__name__} has no expert_actions(), which demonstrations need; "
            "remove the section pretrain, or set pretrain.demos or pretrain.data"
        )
    recorded = []
    for first, rows in _waves(episodes, batch):
        recorded += _demonstrate(batch, batch, first, rows, action_noise, seed)
        if progress:
            progress("demonstrations", len(recorded), episodes)
    successes = sum(episode.success for episode in recorded)
    if not successes:
        raise InputError(
            f"pretrain: none of {episodes} demonstrations succeeded, expected at least one; lower pretrain.action_noise"
        )
    windows = [_windows(np.stack(episode.labels), chunk) for episode in recorded]
    return Demonstrations(
        Observations.concatenate([observation for episode in recorded for observation in episode.observations]),
        np.concatenate([actions for actions, _ in windows]),
        np.concatenate([valid for _, valid in windows]),
        episodes,
        successes,
    )


def collect_scenes(batch: EnvironmentBatch, count: int, seed: int, progress: Progress | None = None) -> Scenes:
    """First observations of `count` episodes with their targets. Raises InputError if there is no Grounding."""
    if not isinstance(batch, Grounding):
        raise InputError(
            f"pretrain: environment {type(batch).__name__} has no grounding_targets(), which grounding needs; "
            "set pretrain.grounding_scenes to 0"
        )
    everyone = np.ones(batch.rows, dtype=bool)
    observations, targets = [], []
    for first, rows in _waves(count, batch):
        seeds = _seeds("scene", seed, first, rows, batch.rows)
        observations.append(batch.reset(everyone, seeds).take(range(rows)))
        targets.append(batch.grounding_targets()[:rows])
        if progress:
            progress("scenes", first + rows, count)
    return Scenes(Observations.concatenate(observations), np.concatenate(targets))


def warm_start(
    policy: Policy,
    demonstrations: Demonstrated,
    scenes: Scenes | None,
    pretrain: Pretrain,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Train `policy` in place: first its perception on the scenes, then its actions on the demonstrations.

    Deterministic for equal arguments, initial weights and one thread. Returns the mean losses of the last tenth of the
    steps. Raises InputError if there are scenes and the policy has no grounding_loss.
    """
    metrics = {"demonstrations": float(len(demonstrations))}
    if demonstrations.successes is not None:
        metrics["expert_success"] = demonstrations.successes / demonstrations.episodes
    if isinstance(policy, NormalisedPolicy):
        state = demonstrations.state.astype(np.float64)
        policy.set_state_statistics(state.mean(0).astype(np.float32), state.std(0).astype(np.float32))
    parameters = [parameter for group in policy.parameter_groups().values() for parameter in group]
    if scenes is not None and pretrain.grounding_steps:
        if not isinstance(policy, GroundedPolicy):
            raise InputError(
                f"pretrain: policy {type(policy).__name__} has no grounding_loss(); set pretrain.grounding_scenes to 0"
            )
        grounded, known = policy, scenes
        grounding = torch.optim.Adam(parameters, lr=pretrain.grounding_learning_rate)
        metrics["grounding_loss"] = _train(
            grounding,
            lambda rows: grounded.grounding_loss(known.observations.take(rows), known.targets[rows]),
            _minibatches(len(known), pretrain.batch, pretrain.grounding_steps, derive("grounding", pretrain.seed)),
            pretrain.grounding_steps,
            progress=progress,
            stage="grounding",
        )
    metrics["imitation_loss"] = _train(
        torch.optim.AdamW(parameters, lr=pretrain.learning_rate),
        lambda rows: policy.imitation_loss(*demonstrations.take(rows)),
        _minibatches(len(demonstrations), pretrain.batch, pretrain.steps, derive("cloning", pretrain.seed)),
        pretrain.steps,
        progress=progress,
        stage="cloning",
    )
    return metrics


def save_demonstrations(path: Path, demonstrations: Demonstrations, scenes: Scenes | None, environment: str) -> None:
    """One safetensors file with JSON metadata, written under another name first: a crash leaves no half file."""
    sentences = sorted(set(demonstrations.observations.instruction))
    if scenes is not None:
        sentences = sorted({*sentences, *scenes.observations.instruction})
    tensors = _tensors("", demonstrations.observations, sentences)
    tensors |= {"actions": demonstrations.actions, "valid": demonstrations.valid}
    if scenes is not None:
        tensors |= _tensors(_SCENES, scenes.observations, sentences) | {_SCENES + "targets": scenes.targets}
    about = {
        "format": _FORMAT,
        "environment": environment,
        "chunk": int(demonstrations.actions.shape[1]),
        "episodes": demonstrations.episodes,
        "successes": demonstrations.successes,
        "scenes": 0 if scenes is None else len(scenes),
        "sentences": sentences,
    }
    partial = path.with_name(path.name + ".partial")
    path.parent.mkdir(parents=True, exist_ok=True)
    # safetensors writes the memory as it lies, so every array has to be contiguous.
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(contiguous, partial, metadata={"demonstrations": json.dumps(about)})
    partial.replace(path)


def load_demonstrations(
    path: Path, environment: str, chunk: int, specification: Specification
) -> tuple[Demonstrations, Scenes | None]:
    """Read a file of `save_demonstrations`. Raises InputError if it was made for something else."""
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get("demonstrations", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, json.JSONDecodeError) as exc:
        raise InputError(f"{path}: cannot read the demonstrations ({exc}); make them with vla-stream demos") from exc
    if about.get("format") != _FORMAT:
        raise InputError(f"{path}: format is {about.get('format')!r}, expected {_FORMAT!r}; make it anew")
    observations = _observations("", tensors, about["sentences"])
    checks = {
        "environment.name": (about["environment"], environment),
        "policy.chunk": (about["chunk"], chunk),
        "cameras": ({camera: image.shape[1:3] for camera, image in observations.images.items()}, specification.cameras),
        "state dims": (tensors["state"].shape[1], specification.state_dims),
        "action dims": (tensors["actions"].shape[2], specification.action_dims),
    }
    for subject, (got, expected) in checks.items():
        if got != expected:
            raise InputError(f"{path}: {subject} is {got}, but this run has {expected}; make the file with its config")
    demonstrations = Demonstrations(
        observations, tensors["actions"], tensors["valid"], about["episodes"], about["successes"]
    )
    if not about["scenes"]:
        return demonstrations, None
    return demonstrations, Scenes(_observations(_SCENES, tensors, about["sentences"]), tensors[_SCENES + "targets"])


@dataclass(slots=True)
class _Episode:
    """One episode while it is being recorded."""

    observations: list[Observations]
    labels: list[np.ndarray]
    success: bool = False


def _demonstrate(
    batch: EnvironmentBatch, expert: Expert, first: int, rows: int, action_noise: float, seed: int
) -> list[_Episode]:
    """Episodes first … first + rows - 1 in the batch's first rows, at the same time."""
    everyone = np.ones(batch.rows, dtype=bool)
    specification = batch.specification
    noise = [np.random.default_rng(derive("demonstration noise", seed, first + row)) for row in range(rows)]
    observations = batch.reset(everyone, _seeds("demonstration", seed, first, rows, batch.rows))
    running = np.arange(batch.rows) < rows
    recorded = [_Episode([], []) for _ in range(rows)]
    while running.any():
        labels = expert.expert_actions()
        executed = labels.copy()
        for row in map(int, np.flatnonzero(running)):
            recorded[row].observations.append(observations.take([row]))
            recorded[row].labels.append(np.array(labels[row]))
            executed[row] += action_noise * noise[row].standard_normal(specification.action_dims, dtype=np.float32)
        executed = executed.clip(specification.action_low, specification.action_high)
        result = batch.step(executed, everyone if batch.whole_batch else running)
        for row in map(int, np.flatnonzero(running & result.success)):
            recorded[row].success = True
        running &= ~(result.terminated | result.truncated)
        observations = result.observations
    return recorded


def _windows(labels: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """From one episode's labels [n, A]: at each moment the next `chunk` ones [n, H, A], and which exist [n, H]."""
    index = np.arange(len(labels))[:, None] + np.arange(chunk)
    valid = index < len(labels)
    actions = labels[np.minimum(index, len(labels) - 1)] * valid[:, :, None]
    return actions.astype(np.float32), valid


def _train(
    optimiser: torch.optim.Optimizer,
    loss_of: Callable[[np.ndarray], Tensor],
    minibatches: Iterator[np.ndarray],
    steps: int,
    *,
    progress: Progress | None,
    stage: str,
) -> float:
    """`steps` gradient steps with the learning rate falling linearly to zero; the mean loss of the last tenth."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: 1 - step / steps)
    last: list[float] = []
    for step, rows in enumerate(minibatches, start=1):
        loss = loss_of(rows)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        if step > steps - max(1, steps // 10):
            last.append(float(loss.detach()))
        if progress and (step % 50 == 0 or step == steps):
            progress(stage, step, steps)
    return float(np.mean(last))


def _minibatches(samples: int, size: int, steps: int, seed: int) -> Iterator[np.ndarray]:
    """`steps` index arrays: passes over all samples in random order, cut into minibatches across their borders."""
    random = np.random.default_rng(seed)
    order = np.empty(0, dtype=np.int64)
    for _ in range(steps):
        while len(order) < size:
            order = np.concatenate([order, random.permutation(samples)])
        yield order[:size]
        order = order[size:]


def _tensors(prefix: str, observations: Observations, sentences: list[str]) -> dict[str, np.ndarray]:
    """Observations as named arrays; a sentence becomes its number i32 in `sentences`."""
    images = {f"{prefix}images.{camera}": image for camera, image in observations.images.items()}
    numbers = np.array([sentences.index(sentence) for sentence in observations.instruction], dtype=np.int32)
    return images | {prefix + "state": observations.state, prefix + "instruction": numbers}


def _observations(prefix: str, tensors: dict[str, np.ndarray], sentences: list[str]) -> Observations:
    """The inverse of `_tensors`."""
    start = prefix + "images."
    images = {name.removeprefix(start): array for name, array in tensors.items() if name.startswith(start)}
    instruction = [sentences[number] for number in tensors[prefix + "instruction"]]
    return Observations(images, tensors[prefix + "state"], instruction)


def _waves(episodes: int, batch: EnvironmentBatch) -> Iterator[tuple[int, int]]:
    """(first episode, number of episodes) of each round in which the batch's rows run together."""
    for first in range(0, episodes, batch.rows):
        yield first, min(batch.rows, episodes - first)


def _seeds(purpose: str, seed: int, first: int, rows: int, size: int) -> np.ndarray:
    """Reset seeds u64[size] of episodes first … first + rows - 1; the rows beyond repeat the last one."""
    return np.array([derive(purpose, seed, first + min(row, rows - 1)) for row in range(size)], dtype=np.uint64)
