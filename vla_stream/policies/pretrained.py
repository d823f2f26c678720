"""A pretrained model's folder, looked at before it is loaded, which takes minutes: what is missing is told in one line.

    config.json             says what model it is
    model.safetensors       or the parts that model.safetensors.index.json names
    tokenizer.json          of the `tokenizers` package
    processor_config.json   among others the statistics of the robot's data: state_mean, state_std, actions_mean, …

Statistics may also come from a file of their own: the same names in JSON, or `meta/stats.json` of a LeRobotDataset.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError

CONFIG, WEIGHTS, TOKENIZER, PROCESSOR = "config.json", "model.safetensors", "tokenizer.json", "processor_config.json"
_INDEX = "model.safetensors.index.json"
_SMALLEST_STD = 1e-4  # a number that varies less is a constant: dividing by its deviation would only amplify noise


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean and standard deviation of the state f32[S] and of the actions f32[A] that a model was trained on."""

    state_mean: np.ndarray
    state_std: np.ndarray
    action_mean: np.ndarray
    action_std: np.ndarray

    def check(self, specification: Specification, source: str) -> None:
        """Raises InputError if they are those of another robot."""
        for what, mean, expected in (
            ("state", self.state_mean, specification.state_dims),
            ("action", self.action_mean, specification.action_dims),
        ):
            if len(mean) != expected:
                raise InputError(
                    f"{source}: statistics of {len(mean)} {what} dims, but the environment has {expected}; "
                    "give those of this robot in policy.options.statistics"
                )


def check_folder(folder: Path, architecture: str) -> None:
    """Raises InputError unless the folder holds a whole model of this architecture, as config.json names it."""
    if not folder.is_dir():
        raise InputError(f"policy.options.checkpoint is {str(folder)!r}, no such folder; give a pretrained model's")
    config = _read(folder / CONFIG)
    found = config.get("model_type")
    if found is None and config.get("type") == architecture:
        raise InputError(
            f"{folder / CONFIG}: is LeRobot's, expected that of transformers; write it anew with save_pretrained of "
            "the model's config class in transformers, the weights may stay"
        )
    if found != architecture:
        raise InputError(
            f"{folder / CONFIG}: model_type is {found!r:.60}, expected {architecture!r}; give such a model, or another "
            "policy.name"
        )
    parts = _read(folder / _INDEX).get("weight_map") if (folder / _INDEX).is_file() else {"": WEIGHTS}
    if not isinstance(parts, dict) or not parts:
        raise InputError(f"{folder / _INDEX}: has no weight_map, expected the names of its parts; copy the folder anew")
    for name in [*sorted({str(part) for part in parts.values()}), TOKENIZER]:
        if not (folder / name).is_file():
            raise InputError(f"{folder}: lacks {name}, expected a whole model; copy the folder anew")


def read_statistics(file: Path) -> Statistics:
    """From processor_config.json, or another of the forms above. Raises InputError."""
    data = _read(file)
    if isinstance(data.get("action"), dict):  # a LeRobotDataset's
        state, action = data.get("observation.state"), data["action"]
        names = ("observation.state.mean", "observation.state.std", "action.mean", "action.std")
        state = state if isinstance(state, dict) else {}
        values = [state.get("mean"), state.get("std"), action.get("mean"), action.get("std")]
    else:
        names = ("state_mean", "state_std", "actions_mean", "actions_std")
        values = [data.get(name) for name in names]
    arrays = [_vector(file, name, value) for name, value in zip(names, values, strict=True)]
    for mean, std in ((0, 1), (2, 3)):
        if len(arrays[mean]) != len(arrays[std]):
            raise InputError(
                f"{file}: {names[mean]} has {len(arrays[mean])} numbers and {names[std]} {len(arrays[std])}, expected "
                "as many; give another in policy.options.statistics"
            )
    return Statistics(arrays[0], constants_kept(arrays[1]), arrays[2], constants_kept(arrays[3]))


def constants_kept(std: np.ndarray) -> np.ndarray:
    """Standard deviations to divide by: 1 for what does not vary."""
    return np.where(std < _SMALLEST_STD, 1.0, std).astype(np.float32)


def _vector(file: Path, name: str, value: object) -> np.ndarray:
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not numbers or not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers):
        raise InputError(
            f"{file}: {name} is {value!r:.60}, expected a list of numbers; give a file with the statistics of the "
            "robot's data in policy.options.statistics"
        )
    return np.array(numbers, dtype=np.float32)


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        reason = getattr(exc, "strerror", None) or "not JSON"
        raise InputError(f"{file}: cannot be read ({reason}), expected JSON; copy the folder anew") from exc
    if not isinstance(data, dict):
        raise InputError(f"{file}: holds {type(data).__name__}, expected a mapping; copy the folder anew")
    return data
