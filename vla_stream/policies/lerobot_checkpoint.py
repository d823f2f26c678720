"""A policy's folder as LeRobot saves it, looked at before it is loaded: what is missing is told in one line.

    config.json               its type, sizes, cameras, and how state and actions are normalised
    model.safetensors
    policy_preprocessor.json  names among others the file with the statistics of the robot's data

Statistics may also come from `meta/stats.json` of a LeRobotDataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from vla_stream.errors import InputError
from vla_stream.policies import pretrained

PREPROCESSOR = "policy_preprocessor.json"
_NORMALISER = "normalizer_processor"  # registry_name of the step with the statistics
_STATE, _ACTION = "observation.state", "action"

# What of a number's distribution becomes -1 and 1; but for mean and deviation, which become 0 and 1.
_RANGES = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}
_MEAN_STD, _IDENTITY = "MEAN_STD", "IDENTITY"


def check(folder: Path, kind: str) -> None:
    """Raises InputError unless the folder holds a whole policy of this type."""
    if not folder.is_dir():
        raise InputError(f"policy.options.checkpoint is {str(folder)!r}, no such folder; give one that LeRobot saved")
    found = pretrained.read_json(folder / pretrained.CONFIG).get("type")
    if found != kind:
        raise InputError(
            f"{folder / pretrained.CONFIG}: type is {found!r:.60}, expected {kind!r} as LeRobot writes it; give such a "
            "policy, or another policy.name"
        )
    if not (folder / pretrained.WEIGHTS).is_file():
        raise InputError(f"{folder}: lacks {pretrained.WEIGHTS}, expected a whole policy; copy the folder anew")
    pretrained.weight_shapes(folder)


def check_backbone(folder: Path, kind: str | None) -> None:
    """Raises InputError unless the folder has a tokenizer, and a model's config of this type if one is needed."""
    for name in (pretrained.TOKENIZER, *([pretrained.CONFIG] if kind else [])):
        if not (folder / name).is_file():
            raise InputError(
                f"policy.options.vlm is {str(folder)!r}, which has no {name}; give the folder of the vision-language "
                "model that the policy was made from, without its weights"
            )
    if kind:
        found = pretrained.read_json(folder / pretrained.CONFIG).get("model_type")
        if found != kind:
            raise InputError(
                f"{folder / pretrained.CONFIG}: model_type is {found!r:.60}, expected {kind!r}; give another folder in "
                "policy.options.vlm"
            )


def read_statistics(folder: Path, file: Path | None) -> tuple[pretrained.Statistics, str]:
    """As shift and scale, whatever the policy normalises by: those of the file, else of its own; and where they are
    from. Raises InputError."""
    modes = pretrained.read_json(folder / pretrained.CONFIG).get("normalization_mapping")
    modes = modes if isinstance(modes, dict) else {}
    source = _own_file(folder) if file is None else file
    known = _from_json(source) if source.suffix == ".json" else _from_safetensors(source)
    state = _shift_and_scale(known, _STATE, str(modes.get("STATE", _MEAN_STD)), source)
    action = _shift_and_scale(known, _ACTION, str(modes.get("ACTION", _MEAN_STD)), source)
    return pretrained.Statistics(*state, *action), str(source)


def _own_file(folder: Path) -> Path:
    file = folder / PREPROCESSOR
    if not file.is_file():
        raise InputError(
            f"{folder}: lacks {PREPROCESSOR}, expected that of LeRobot 0.4 or newer; give policy.options.statistics, "
            "for example meta/stats.json of the data set that it was trained on"
        )
    steps = pretrained.read_json(file).get("steps")
    names = [
        step.get("state_file")
        for step in (steps if isinstance(steps, list) else [])
        if isinstance(step, dict) and step.get("registry_name") == _NORMALISER
    ]
    if not names or not isinstance(names[0], str) or not (folder / names[0]).is_file():
        raise InputError(
            f"{file}: names no file of statistics that is there, expected a step {_NORMALISER}; give "
            "policy.options.statistics, for example meta/stats.json of the data set that it was trained on"
        )
    return folder / names[0]


def _from_json(file: Path) -> Mapping[str, Mapping[str, Any]]:
    data = pretrained.read_json(file)
    return {name: about for name, about in data.items() if isinstance(about, dict)}


def _from_safetensors(file: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        flat = load_file(file)
    except (OSError, ValueError, SafetensorError) as exc:
        raise InputError(f"{file}: cannot be read ({exc}), expected safetensors; copy the folder anew") from exc
    known: dict[str, dict[str, Any]] = {}
    for name, array in flat.items():
        feature, _, statistic = name.rpartition(".")
        known.setdefault(feature, {})[statistic] = array.tolist()
    return known


def _shift_and_scale(
    known: Mapping[str, Mapping[str, Any]], feature: str, mode: str, source: Path
) -> tuple[np.ndarray, np.ndarray]:
    about = known.get(feature, {})

    def of(name: str) -> np.ndarray:
        return pretrained.vector(source, f"{feature}.{name}", about.get(name))

    if mode == _MEAN_STD:
        shift, scale = of("mean"), of("std")
    elif mode in _RANGES:
        low, high = (of(name) for name in _RANGES[mode])
        if len(low) != len(high):
            raise InputError(f"{source}: the range of {feature} has two lengths, expected one; give another file")
        shift, scale = (low + high) / 2, (high - low) / 2
    elif mode == _IDENTITY:
        shift = np.zeros_like(of("mean"))
        scale = shift + 1
    else:
        known_modes = ", ".join((_MEAN_STD, *_RANGES, _IDENTITY))
        raise InputError(
            f"{source}: {feature} is normalised by {mode}, expected one of {known_modes}; use another policy"
        )
    if len(shift) != len(scale):
        raise InputError(f"{source}: mean and std of {feature} differ in length; give policy.options.statistics")
    return shift, pretrained.constants_kept(scale)
