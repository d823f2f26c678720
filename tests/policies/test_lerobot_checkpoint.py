"""A folder as LeRobot saves it: what of it is wrong is one line; its statistics, however it normalises by them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError
from vla_stream.plugins import POLICIES, load_class, parse_options
from vla_stream.policies import lerobot_checkpoint
from vla_stream.policies.lerobot import image_keys
from vla_stream.policies.pi05 import Pi05
from vla_stream.policies.smolvla import SmolVla

STATE = {"mean": [1.0, 2.0], "std": [2.0, 0.0], "min": [-1.0, 0.0], "max": [3.0, 8.0], "q01": [0.0, 1.0]}
ACTION = {"mean": [0.5], "std": [4.0], "min": [-2.0], "max": [2.0], "q01": [-1.0], "q99": [3.0]}
STATE |= {"q99": [2.0, 5.0]}
STATISTICS = {"observation.state": STATE, "action": ACTION}


def write(folder: Path, modes: dict[str, str] | None = None, kind: str = "smolvla") -> Path:
    folder.mkdir()
    modes = modes or {"STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    (folder / "config.json").write_text(json.dumps({"type": kind, "normalization_mapping": modes}))
    flat = {
        f"{name}.{key}": np.array(value, np.float32) for name, part in STATISTICS.items() for key, value in part.items()
    }
    save_file(flat, folder / "step_5.safetensors")
    steps = [{"registry_name": "rename"}, {"registry_name": "normalizer_processor", "state_file": "step_5.safetensors"}]
    (folder / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
    save_file({"model.x": np.zeros(3, np.float32)}, folder / "model.safetensors")
    vlm = folder / "vlm"
    vlm.mkdir()
    (vlm / "tokenizer.json").write_text("{}")
    (vlm / "config.json").write_text(json.dumps({"model_type": "smolvlm"}))
    return folder


def options(cls: Any, folder: Path, **more: Any) -> Any:
    return parse_options(cls, {"checkpoint": str(folder), "vlm": str(folder / "vlm"), **more}, "policy.options")


@pytest.mark.timeout(180)
def test_a_whole_folder_is_taken_without_lerobot_or_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path / "policy")
    code = (
        "import sys\nfrom pathlib import Path\nfrom vla_stream.policies.smolvla import SmolVla\n"
        "folder = Path(sys.argv[1])\nSmolVla.Options(checkpoint=folder, vlm=folder / 'vlm')\n"
        "print([name for name in ('lerobot', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("mode", "state", "action"),
    [
        ("MEAN_STD", ([1.0, 2.0], [2.0, 1.0]), ([0.5], [4.0])),  # what does not vary is not divided by
        ("MIN_MAX", ([1.0, 4.0], [2.0, 4.0]), ([0.0], [2.0])),
        ("QUANTILES", ([1.0, 3.0], [1.0, 2.0]), ([1.0], [2.0])),
        ("IDENTITY", ([0.0, 0.0], [1.0, 1.0]), ([0.0], [1.0])),
    ],
)
@pytest.mark.parametrize("source", ["its own", "a data set's"])
def test_statistics_are_a_shift_and_a_scale_of_each_way_to_normalise(
    tmp_path: Path, mode: str, state: Any, action: Any, source: str
) -> None:
    folder = write(tmp_path / "policy", {"STATE": mode, "ACTION": mode})
    file = None
    if source == "a data set's":
        (folder / "policy_preprocessor.json").unlink()
        file = tmp_path / "stats.json"
        file.write_text(json.dumps(STATISTICS))
    found, told = lerobot_checkpoint.read_statistics(folder, file)
    np.testing.assert_array_equal([found.state_mean, found.state_std], state)
    np.testing.assert_array_equal([found.action_mean, found.action_std], action)
    assert told == str(file or folder / "step_5.safetensors")
    with pytest.raises(InputError, match="statistics of 2 state dims, but the environment has 8"):
        found.check(Specification({"front": (8, 8)}, state_dims=8, action_dims=1), told)


def damage(folder: Path, how: str) -> None:
    match how:
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "cut off":
            (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:20])
        case "another kind":
            (folder / "config.json").write_text('{"type": "act"}')
        case "no statistics":
            (folder / "step_5.safetensors").unlink()
        case "old":
            (folder / "policy_preprocessor.json").unlink()
        case "unknown mode":
            (folder / "config.json").write_text('{"type": "smolvla", "normalization_mapping": {"STATE": "RANK"}}')
        case "no quantiles":
            save_file({"action.mean": np.zeros(1, np.float32)}, folder / "step_5.safetensors")
        case "no tokenizer":
            (folder / "vlm" / "tokenizer.json").unlink()
        case "another vlm":
            (folder / "vlm" / "config.json").write_text('{"model_type": "gemma"}')


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("no weights", r"lacks model\.safetensors, expected a whole policy; copy the folder anew"),
        ("cut off", r"model\.safetensors: cannot be read, expected safetensors"),
        ("another kind", r"type is 'act', expected 'smolvla' as LeRobot writes it"),
        ("no statistics", r"names no file of statistics that is there.*give policy\.options\.statistics"),
        ("old", r"lacks policy_preprocessor\.json, expected that of LeRobot 0\.4 or newer; give policy\.options"),
        ("unknown mode", r"observation\.state is normalised by RANK, expected one of MEAN_STD, MIN_MAX"),
        ("no quantiles", r"observation\.state\.mean is None, expected a list of numbers"),
        ("no tokenizer", r"policy\.options\.vlm is .*which has no tokenizer\.json; give the folder of the vision"),
        ("another vlm", r"model_type is 'gemma', expected 'smolvlm'"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_line(tmp_path: Path, how: str, told: str) -> None:
    folder = write(tmp_path / "policy")
    damage(folder, how)
    with pytest.raises(InputError, match=told) as refused:
        options(SmolVla, folder)
    assert "\n" not in str(refused.value)


def test_a_checkpoint_asks_for_its_vision_language_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "policy", kind="pi05")
    with pytest.raises(InputError, match=r"policy\.options: vlm.*the folder of the vision-language model") as refused:
        parse_options(Pi05, {"checkpoint": str(folder)}, "policy.options")
    assert "\n" not in str(refused.value)
    (folder / "vlm" / "config.json").unlink()  # π0.5 needs the tokenizer alone
    assert options(Pi05, folder).words == 200


def test_compile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="compile"):
        parse_options(SmolVla, {"compile": True}, "policy.options")


def test_cameras_take_the_checkpoints_names_in_its_order() -> None:
    known = ["observation.images.top", "observation.images.wrist", "observation.images.empty_camera_0"]
    assert image_keys(dict.fromkeys(known), ["front"]) == known[:1]
    assert image_keys(dict.fromkeys(known), ["front", "hand"]) == known[:2]
    with pytest.raises(InputError, match=r"3 cameras, but the checkpoint knows 2 \(top, wrist\); choose as many"):
        image_keys(dict.fromkeys(known), ["front", "hand", "side"])


def test_without_lerobot_it_is_told_what_to_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_class(POLICIES, "smolvla") is SmolVla and load_class(POLICIES, "pi05") is Pi05
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"run tools/setup lerobot, and set policy\.python to \.venvs/lerobot/bin"):
        SmolVla.check_installed()
