"""A pretrained model's folder, looked at before it is loaded, which takes minutes: what is missing is told in one line.

    config.json             says what model it is
    model.safetensors       or the parts that model.safetensors.index.json names
    tokenizer.json          of the `tokenizers` package
    processor_config.json   among others the statistics of the robot's data: state_mean, state_std, actions_mean, …

Statistics may also come from a file of their own: the same names in JSON, or `meta/stats.json` of a LeRobotDataset.
Those of an OpenVLA are ranges by the data set's name: `norm_stats` in config.json, or dataset_statistics.json.
"""

from __future__ import annotations

import difflib
import json
import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError

CONFIG, WEIGHTS, TOKENIZER, PROCESSOR = "config.json", "model.safetensors", "tokenizer.json", "processor_config.json"
INDEX = "model.safetensors.index.json"
_OTHERS = (".json", ".txt", ".model", ".jinja", ".py")
_LONGEST_HEADER = 100_000_000  # bytes; safetensors' own bound
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


@dataclass(frozen=True, slots=True)
class ActionRange:
    """What -1 and 1 of a normalised action stand for, f32[A]; where `scaled` bool[A] is not set, for themselves."""

    low: np.ndarray
    high: np.ndarray
    scaled: np.ndarray

    def check(self, specification: Specification, source: str) -> None:
        """Raises InputError if it is that of another robot."""
        if len(self.low) != specification.action_dims:
            raise InputError(
                f"{source}: statistics of {len(self.low)} action dims, but the environment has "
                f"{specification.action_dims}; give those of this robot in policy.options.statistics"
            )


def check_folder(folder: Path, *architectures: str) -> None:
    """Raises InputError unless the folder holds a whole model of one of these, as config.json names them."""
    if not folder.is_dir():
        raise InputError(f"policy.options.checkpoint is {str(folder)!r}, no such folder; give a pretrained model's")
    config = read_json(folder / CONFIG)
    found = config.get("model_type")
    if found is None and config.get("type") in architectures:
        raise InputError(
            f"{folder / CONFIG}: is LeRobot's, expected that of transformers; write it anew with save_pretrained of "
            "the model's config class in transformers, the weights may stay"
        )
    if found not in architectures:
        raise InputError(
            f"{folder / CONFIG}: model_type is {found!r:.60}, expected "
            f"{' or '.join(map(repr, architectures))}; give such a model, or another "
            "policy.name"
        )
    for file in [*weight_files(folder), folder / TOKENIZER]:
        if not file.is_file():
            raise InputError(f"{folder}: lacks {file.name}, expected a whole model; copy the folder anew")


def weight_files(folder: Path) -> list[Path]:
    """The parts of a model, as its index names them. Raises InputError."""
    parts = read_json(folder / INDEX).get("weight_map") if (folder / INDEX).is_file() else {"": WEIGHTS}
    if not isinstance(parts, dict) or not parts:
        raise InputError(f"{folder / INDEX}: has no weight_map, expected the names of its parts; copy the folder anew")
    return [folder / name for name in sorted({str(part) for part in parts.values()})]


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """The shape of each weight, by its name, from the first bytes of the files. Raises InputError."""
    shapes: dict[str, list[int]] = {}
    for file in weight_files(folder):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, _LONGEST_HEADER)))
            shapes |= {name: about["shape"] for name, about in header.items() if name != "__metadata__"}
        except (OSError, ValueError, RecursionError, struct.error, TypeError, KeyError, AttributeError) as exc:
            raise InputError(f"{file}: cannot be read, expected safetensors; copy the folder anew") from exc
    return shapes


def copy_others(folder: Path, into: Path) -> None:
    """What is beside a model's weights, such as tokenizers and preprocessors; what is there already stays."""
    for file in folder.iterdir():
        if file.is_file() and file.suffix in _OTHERS and file.name != INDEX and not (into / file.name).exists():
            shutil.copyfile(file, into / file.name)


def write_statistics(statistics: Statistics, file: Path) -> None:
    """Into processor_config.json, whose other entries stay."""
    data = read_json(file) if file.is_file() else {}
    for name, numbers in (
        ("state_mean", statistics.state_mean),
        ("state_std", statistics.state_std),
        ("actions_mean", statistics.action_mean),
        ("actions_std", statistics.action_std),
    ):
        data[name] = numbers.tolist()
    file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_statistics(file: Path) -> Statistics:
    """From processor_config.json, or another of the forms above. Raises InputError."""
    data = read_json(file)
    if isinstance(data.get("action"), dict):  # a LeRobotDataset's
        state, action = data.get("observation.state"), data["action"]
        names = ("observation.state.mean", "observation.state.std", "action.mean", "action.std")
        state = state if isinstance(state, dict) else {}
        values = [state.get("mean"), state.get("std"), action.get("mean"), action.get("std")]
    else:
        names = ("state_mean", "state_std", "actions_mean", "actions_std")
        values = [data.get(name) for name in names]
    arrays = [vector(file, name, value) for name, value in zip(names, values, strict=True)]
    for mean, std in ((0, 1), (2, 3)):
        if len(arrays[mean]) != len(arrays[std]):
            raise InputError(
                f"{file}: {names[mean]} has {len(arrays[mean])} numbers and {names[std]} {len(arrays[std])}, expected "
                "as many; give another in policy.options.statistics"
            )
    return Statistics(arrays[0], constants_kept(arrays[1]), arrays[2], constants_kept(arrays[3]))


def read_action_range(file: Path, robot: str | None) -> ActionRange:
    """From config.json or dataset_statistics.json: that of the data set `robot`, or of the only one there is. Raises
    InputError."""
    data = read_json(file)
    sets = data.get("norm_stats") if "norm_stats" in data or file.name == CONFIG else data
    if not isinstance(sets, dict) or not sets:
        raise InputError(f"{file}: has no norm_stats, expected statistics; give a file in policy.options.statistics")
    name = robot or (next(iter(sets)) if len(sets) == 1 else "")
    if name not in sets:
        near = difflib.get_close_matches(name, sets, n=1)
        some = ", ".join(sorted(sets)[:5]) + (", …" if len(sets) > 5 else "")
        raise InputError(
            f"{file}: has no statistics of {name!r}, of {len(sets)} data sets; "
            f"{f'did you mean {near[0]}?' if near else f'set policy.options.robot to one of {some}'}"
        )
    about = sets[name].get("action") if isinstance(sets[name], dict) else None
    about = about if isinstance(about, dict) else {}
    low, high = (vector(file, f"{name}.action.{bound}", about.get(bound)) for bound in ("q01", "q99"))
    mask = about.get("mask", [True] * len(low))
    if not isinstance(mask, list) or not len(low) == len(high) == len(mask):
        raise InputError(
            f"{file}: q01, q99 and mask of {name} differ in length; give others in policy.options.statistics"
        )
    return ActionRange(low, high, np.array(mask, dtype=bool))


def constants_kept(std: np.ndarray) -> np.ndarray:
    """Standard deviations to divide by: 1 for what does not vary."""
    return np.where(std < _SMALLEST_STD, 1.0, std).astype(np.float32)


def vector(file: Path, name: str, value: object) -> np.ndarray:
    """A list of numbers read from the file, f32[n]. Raises InputError."""
    numbers = value if isinstance(value, Sequence) and not isinstance(value, str) else []
    if not numbers or not all(isinstance(number, int | float) and np.isfinite(number) for number in numbers):
        raise InputError(
            f"{file}: {name} is {value!r:.60}, expected a list of numbers; give a file with the statistics of the "
            "robot's data in policy.options.statistics"
        )
    return np.array(numbers, dtype=np.float32)


def read_json(file: Path) -> dict[str, Any]:
    """A mapping from a file. Raises InputError."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        reason = getattr(exc, "strerror", None) or "not JSON"
        raise InputError(f"{file}: cannot be read ({reason}), expected JSON; copy the folder anew") from exc
    if not isinstance(data, dict):
        raise InputError(f"{file}: holds {type(data).__name__}, expected a mapping; copy the folder anew")
    return data
