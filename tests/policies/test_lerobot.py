"""SmolVLA and π0.5 in LeRobot's own environment: tiny ones of the real architecture, against LeRobot's way to run them.

What is asserted here is computed there, by short programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from simulator_interpreters import answer, interpreter

from vla_stream.config import validate
from vla_stream.environments.protocol import Specification
from workers import policy_apart

pytestmark = [pytest.mark.lerobot, pytest.mark.timeout(600)]  # torch and transformers are imported in each test

TABLE = Specification({"front": (48, 48)}, state_dims=8, action_dims=3)
TWO_CAMERAS = Specification({"base": (64, 64), "hand": (17, 30)}, state_dims=11, action_dims=7)

PROLOGUE = """
import contextlib
import torch
from pathlib import Path
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.plugins import POLICIES, load_class, parse_options
from vla_stream.errors import InputError

SPECIFICATION = Specification({"front": (48, 40), "hand": (30, 30)}, 6, 3)
torch.set_num_threads(1)

def make(name, **options):
    cls = load_class(POLICIES, name)
    torch.manual_seed(0)  # of the value head
    with contextlib.redirect_stdout(sys.stderr):
        return cls(parse_options(cls, options, "policy.options"), SPECIFICATION, 4).eval()

def look(rows):
    random = np.random.default_rng(7)
    images = {
        camera: random.integers(0, 256, (rows, *size, 3), dtype=np.uint8)
        for camera, size in SPECIFICATION.cameras.items()
    }
    state = random.standard_normal((rows, 6)).astype(np.float32)
    return Observations(images, state, [f"touch the {'red ' * row}cube" for row in range(rows)])

def keys(rows):
    return np.arange(100, 100 + rows, dtype=np.uint64)
"""


@pytest.mark.parametrize("name", ["smolvla", "pi05"])
@pytest.mark.parametrize(
    ("specification", "options"),
    [
        (TABLE, {}),
        (TWO_CAMERAS, {"train": "all", "noise": "learned", "gradient_checkpointing": True}),
        (TWO_CAMERAS, {"train": "lora", "lora_rank": 4, "gradient_checkpointing": True}),
        (TABLE, {"precision": "bfloat16"}),
    ],
    ids=["as it is", "all", "lora", "bfloat16"],
)
def test_it_keeps_the_protocol(name: str, specification: Specification, options: dict[str, Any]) -> None:
    config = validate(
        {
            "environment": {"name": "tabletop", "max_steps": 40},
            "policy": {"name": name, "chunk": 4, "python": str(interpreter("lerobot")), "options": options},
            "trainer": {"segments_per_update": 8},
        }
    )
    report = policy_apart.try_out(config, specification)
    assert report.problems == {}
    assert any("log-probs of act and evaluate differ by" in note for note in report.notes)


SAMPLING = {
    # As LeRobot's own pipeline gives it to the policy: the sentence with a line end, its tokens, no padding.
    "smolvla": """
    from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS, OBS_STATE
    ids = [policy._prompts._tokenizer.encode(observations.instruction[row] + "\\n").ids]
    batch[OBS_STATE] = torch.from_numpy(observations.state[row : row + 1])
    policy.policy.config.num_steps = 4
""",
    # A state in bins: floor((x + 1) * 128).
    "pi05": """
    from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
    bins = " ".join(str(int(np.clip(np.floor((x + 1) * 128), -1, 255))) for x in observations.state[row])
    text = f"Task: {observations.instruction[row]}, State: {bins};\\nAction: "
    ids = [[2, *policy._prompts._tokenizer.encode(text).ids]]
    policy.policy.config.num_inference_steps = 4
""",
}


@pytest.mark.parametrize("name", ["smolvla", "pi05"])
def test_without_keys_the_actions_are_those_of_lerobots_own_sampling(name: str, tmp_path: Path) -> None:
    code = f"""
policy, observations = make("{name}"), look(3)
act = policy.act(observations, None)
differences = []
for row in range(3):
    batch = {{
        "observation.images." + camera: torch.from_numpy(image[row : row + 1]).permute(0, 3, 1, 2) / 255
        for camera, image in observations.images.items()
    }}
{SAMPLING[name]}
    batch[OBS_LANGUAGE_TOKENS] = torch.tensor(ids)
    batch[OBS_LANGUAGE_ATTENTION_MASK] = torch.ones(1, len(ids[0]), dtype=torch.bool)
    noise = torch.from_numpy(act.extras["chain"][row : row + 1, 0])
    expected = policy.policy.predict_action_chunk(batch, noise=noise)
    differences.append(float(np.abs(expected[:, :4, :3].numpy() - act.actions[row : row + 1]).max()))
tell([differences, float(np.abs(act.actions).max())])
"""
    differences, size = answer("lerobot", PROLOGUE + code, tmp_path)
    assert max(differences) < 1e-5 < 0.01 < size


VLM = {
    "smolvla": """
import shutil
from vla_stream.policies.smolvla import _vlm_folder
with _vlm_folder(None) as source:
    shutil.copytree(source, vlm)
context = contextlib.nullcontext()
""",
    # LeRobot knows π0.5 in two sizes only.
    "pi05": """
from lerobot.policies.pi05 import modeling_pi05
from vla_stream.policies.pi05 import _tiny_sizes
vlm.mkdir()
made._prompts._tokenizer.save(str(vlm / "tokenizer.json"))
context = _tiny_sizes(modeling_pi05)
""",
}


@pytest.mark.parametrize("name", ["smolvla", "pi05"])
def test_a_folder_that_lerobot_saved_acts_as_the_policy_it_was_saved_from(name: str, tmp_path: Path) -> None:
    code = f"""
import json
from safetensors.numpy import load_file, save_file
made, folder, vlm = make("{name}"), Path(sys.argv[1]).parent / "saved", Path(sys.argv[1]).parent / "vlm"
made.policy.save_pretrained(folder)
values = {{"mean": 0.5, "std": 2.0, "q01": -1.5, "q99": 2.5}}  # both ways: x = 0.5 + 2 y
statistics = {{
    f"{{feature}}.{{key}}": np.full(dims, value, np.float32)
    for feature, dims in (("observation.state", 6), ("action", 3)) for key, value in values.items()
}}
save_file(statistics, folder / "normalizer.safetensors")
steps = [{{"registry_name": "normalizer_processor", "state_file": "normalizer.safetensors"}}]
(folder / "policy_preprocessor.json").write_text(json.dumps({{"steps": steps}}))
{VLM[name]}
told = {{}}
with context:
    options = {{"checkpoint": str(folder), "vlm": str(vlm)}}
    loaded, observations = make("{name}", **options), look(2)
    moved = Observations(observations.images, observations.state * 2 + 0.5, observations.instruction)
    with torch.no_grad():
        made.value_head.load_state_dict(loaded.value_head.state_dict())
    one, two = made.act(observations, keys(2)), loaded.act(moved, keys(2))
    told["actions"] = float(np.abs(one.actions * 2 + 0.5 - two.actions).max())
    told["logprobs"] = float(np.abs(one.logprobs - two.logprobs).max())
    told["values"] = float(np.abs(one.values - two.values).max())
    weights = load_file(folder / "model.safetensors")
    lost = next(name for name in sorted(weights) if "expert" in name and "q_proj" in name)
    save_file({{name: x for name, x in weights.items() if name != lost}}, folder / "model.safetensors")
    try:
        make("{name}", **options)
    except InputError as exc:
        told["refused"], told["lost"] = str(exc), lost
tell(told)
"""
    told = answer("lerobot", PROLOGUE + code, tmp_path)
    assert max(told["actions"], told["logprobs"], told["values"]) < 1e-5
    assert f"lacks 1 weights, first {told['lost']}, " in told["refused"] and "\n" not in told["refused"]
