"""Vision-language models with an action head, of each family: what they are given, and what is made of their output."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.plugins import POLICIES, load_class, parse_options
from vla_stream.policies import vlm_network
from vla_stream.policies.protocol import NormalisedPolicy, Policy
from vla_stream.policies.vlm import Vlm

ROBOT = Specification({"front": (48, 48), "wrist": (24, 40)}, state_dims=8, action_dims=3)
CHUNK = 2
FAMILIES = pytest.mark.parametrize("family", ["smolvlm", "paligemma", "qwen2_5_vl"])
HEADS = pytest.mark.parametrize("head", ["gaussian", "binned"])

pytestmark = pytest.mark.timeout(180)  # transformers takes long to import where the disk or the machine is busy


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(specification: Specification = ROBOT, seed: int = 0, **options: Any) -> Vlm:
    torch.manual_seed(seed)
    if options.get("family") == "qwen2_5_vl":
        options = {"image_size": 32} | options
    return Vlm(parse_options(Vlm, options, "policy.options"), specification, CHUNK).eval()


def look(rows: int) -> Observations:
    random = np.random.default_rng(0)
    images = {
        camera: random.integers(0, 256, (rows, *size, 3), dtype=np.uint8) for camera, size in ROBOT.cameras.items()
    }
    state = random.standard_normal((rows, ROBOT.state_dims)).astype(np.float32)
    return Observations(images, state, [f"touch the {'red ' * row}cube" for row in range(rows)])


def keys(rows: int) -> np.ndarray:
    return np.arange(100, 100 + rows, dtype=np.uint64)


def test_it_offers_the_protocols_under_its_name_and_its_options_are_read_without_transformers() -> None:
    assert load_class(POLICIES, "vlm") is Vlm
    policy = make()
    assert isinstance(policy, Policy) and isinstance(policy, NormalisedPolicy)
    code = "import sys\nfrom vla_stream.policies.vlm import Vlm\nVlm.Options()\nprint('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# --- what a model is given


@FAMILIES
def test_padding_changes_nothing(family: str) -> None:
    observations = look(1)
    length = len("touch the cube\n")
    exact, padded = make(family=family, words=length), make(family=family, words=length + 20)
    np.testing.assert_allclose(padded.act(observations, None).actions, exact.act(observations, None).actions, atol=1e-5)


@FAMILIES
def test_each_camera_and_what_is_said_changes_the_action_and_what_stands_beside_it_does_not(family: str) -> None:
    policy, observations = make(family=family), look(1).take([0, 0, 0, 0])
    images = {camera: image.copy() for camera, image in observations.images.items()}
    images["front"][1] = 255 - images["front"][1]
    images["wrist"][2] = 255 - images["wrist"][2]
    said = ["touch the cube", "touch the cube", "touch the cube", "push the cube"]
    actions = policy.act(Observations(images, observations.state, said), None).actions
    for row in (1, 2, 3):
        assert np.abs(actions[row] - actions[0]).max() > 1e-4
    said[1] = "put it into the drawer on the left"
    again = policy.act(Observations(images, observations.state, said), None).actions
    np.testing.assert_allclose(again[[0, 2, 3]], actions[[0, 2, 3]], atol=1e-6)


def test_qwens_patches_and_positions_are_those_of_transformers_own_processing() -> None:
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    policy = make(family="qwen2_5_vl", image_size=48)
    picture = look(1).images["front"][0]
    processor = Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 48 * 48, "longest_edge": 48 * 48}
    )
    expected = processor(Image.fromarray(picture), return_tensors="pt")
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None, None] / 127.5 - 1
    ids, mask = map(torch.from_numpy, policy._prompts(["touch"]))
    got = policy._eyes.inputs(pixels, ids, mask)
    torch.testing.assert_close(got["pixel_values"], expected["pixel_values"], atol=1e-5, rtol=1e-5)
    assert got["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
    assert int(got["mm_token_type_ids"].sum()) == 2 * 9  # two cameras, patches merged by four


# --- log-probs


def test_a_gaussians_log_prob_is_that_of_the_action_in_the_unit_range() -> None:
    wide = Specification(ROBOT.cameras, 8, 3, action_low=0.0, action_high=10.0)
    policy = make(wide, initial_std=0.25, temperature=2.0)
    act, mean = policy.act(look(3), keys(3)), policy.act(look(3), None).actions
    deviations = (act.actions - mean) / 5 / 0.5
    np.testing.assert_allclose(act.logprobs, -(deviations**2) / 2 - math.log(0.5 * math.sqrt(2 * math.pi)), atol=1e-4)
    entropy = policy.evaluate(look(3), act.actions, act.extras).entropy.detach()
    np.testing.assert_allclose(entropy, math.log(0.5) + 0.5 * math.log(2 * math.pi * math.e), atol=1e-5)
    narrow = make(wide, min_std=0.3, initial_std=0.1)
    assert float(narrow._std(1.0).detach()[0]) == pytest.approx(0.3)


def test_a_bins_log_prob_is_that_of_its_softmax_and_its_action_the_middle_of_the_bin() -> None:
    policy = make(head="binned", temperature=0.7)
    act = policy.act(look(2), keys(2))
    with torch.no_grad():
        logits, _ = policy._decide(look(2))
    expected = torch.log_softmax(logits / 0.7, dim=-1)
    bins = act.extras["bins"].astype(np.int64)
    for place in np.ndindex(2, CHUNK, 3):
        assert act.logprobs[place] == pytest.approx(float(expected[place][bins[place]]), abs=1e-4)
        assert act.actions[place] == pytest.approx(-1 + (2 * min(bins[place], 254) + 1) / 255, abs=1e-6)


@HEADS
def test_temperatures_scale_the_noise_of_training_and_of_evaluation(head: str) -> None:
    observations = look(1).take([0] * 60)
    spread = [
        float(make(head=head, temperature=temperature).act(observations, keys(60)).actions.std(0).mean())
        for temperature in (0.003, 0.5)
    ]
    assert spread[0] < 0.3 * spread[1]
    still, drawing = make(head=head), make(head=head, evaluation_temperature=1.0)
    same = still.act(observations, None).actions
    assert np.abs(same - same[0]).max() < 1e-5
    drawn = drawing.act(look(2), None).actions
    np.testing.assert_array_equal(drawn, drawing.act(look(2), None).actions)
    assert np.abs(drawn - still.act(look(2), None).actions).max() > 0.01


# --- what is trained


@FAMILIES
def test_computing_layers_again_gives_the_same_gradients(family: str) -> None:
    plain, again = (make(family=family, train="all", gradient_checkpointing=again) for again in (False, True))
    act = plain.act(look(2), keys(2))
    for policy in (plain, again):
        policy.evaluate(look(2), act.actions, act.extras).logprobs.sum().backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name, atol=1e-4, rtol=1e-4)


def test_only_adapters_and_heads_travel() -> None:
    policy = make(lora_rank=4)
    own = {"base_digest", "state_mean", "state_std", "log_std"}
    names = policy.state_dict().keys()
    assert all("lora_" in name or "_head." in name for name in names - own)
    for part in ("vision_model", "connector", "text_model"):
        assert any(f"network.{part}" in name for name in names)


@HEADS
@pytest.mark.parametrize("train", ["all", "lora"])
def test_imitation_can_be_learned_and_counts_valid_steps_only(head: str, train: str) -> None:
    policy, observations = make(head=head, train=train), look(4)
    actions = np.tile(np.array([0.5, -0.5, 0.2], np.float32), (4, CHUNK, 1))
    valid = np.ones((4, CHUNK), dtype=bool)
    valid[:, 1:] = False
    optimiser = torch.optim.Adam(policy.parameter_groups()["policy"], lr=3e-3)
    before = float(policy.imitation_loss(observations, actions, valid).detach())
    for _ in range(40):
        loss = policy.imitation_loss(observations, actions, valid)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.1 * before
    np.testing.assert_allclose(policy.act(observations, None).actions[:, 0], actions[:, 0], atol=0.1)
    assert float(policy.imitation_loss(observations, actions, valid & False).detach()) == 0.0


def test_the_warm_start_sets_the_statistics_of_the_state_and_they_are_used() -> None:
    policy, plain = make(), make()
    mean, std = np.full(8, 100.0, np.float32), np.full(8, 50.0, np.float32)
    std[3] = 0.0
    policy.set_state_statistics(mean, std)
    observations = look(2)
    far = observations.state * np.where(std == 0, 1, std) + mean
    shifted = Observations(observations.images, far.astype(np.float32), observations.instruction)
    np.testing.assert_allclose(policy.act(shifted, None).actions, plain.act(observations, None).actions, atol=1e-3)


# --- folders


def saved(folder: Path, family: str) -> Path:
    """As transformers saves a model with its language head, and a tokenizer beside it."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(3)
    config = vlm_network.read_config(None, family)  # type: ignore[arg-type]
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    vlm_network.tokenizer(None).save(str(folder / "tokenizer.json"))
    return folder


@FAMILIES
@pytest.mark.parametrize("from_folder", [True, False])
def test_a_policy_that_is_written_out_is_a_whole_model_and_acts_as_before(
    family: str, from_folder: bool, tmp_path: Path
) -> None:
    from transformers import AutoModel

    options: dict[str, Any] = {"train": "lora", "image_size": 32}
    options |= {"checkpoint": str(saved(tmp_path / "model", family))} if from_folder else {"family": family}
    policy, observations = make(**options), look(3)
    policy.set_state_statistics(np.full(ROBOT.state_dims, 0.5, np.float32), np.full(ROBOT.state_dims, 2.0, np.float32))
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape))
    acted = policy.act(observations, None)
    written = tmp_path / "written"
    written.mkdir()
    policy.write(written)
    again = make(checkpoint=str(written), train="all", image_size=32, seed=9)
    after = again.act(observations, None)
    np.testing.assert_allclose(after.actions, acted.actions, atol=1e-4)
    np.testing.assert_allclose(after.values, acted.values, atol=1e-4)
    loaded = AutoModel.from_pretrained(written, local_files_only=True).state_dict()
    ours = again.network.state_dict()
    assert loaded.keys() == ours.keys() and all(torch.equal(loaded[name], tensor) for name, tensor in ours.items())


@FAMILIES
def test_a_folders_weights_are_the_networks(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", family)
    from transformers import AutoModelForImageTextToText

    policy = make(checkpoint=str(folder), image_size=32, train="all", family="smolvlm", seed=1)
    expected = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True).model.state_dict()
    ours = policy.network.state_dict()
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(ours[name], tensor), name
    tiny = make(family=family, train="all")
    assert not torch.equal(next(iter(tiny.network.state_dict().values())), next(iter(ours.values())))


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("another", "model_type is 'llava', expected 'smolvlm' or 'paligemma' or 'qwen2_5_vl'; give such a model"),
        ("no weights", "lacks model.safetensors, expected a whole model"),
        ("no tokenizer", "lacks tokenizer.json, expected a whole model"),
    ],
)
def test_a_folder_that_holds_no_such_model_is_told_in_one_line(tmp_path: Path, how: str, line: str) -> None:
    folder = saved(tmp_path / "model", "smolvlm")
    if how == "another":
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llava"}))
    else:
        (folder / {"no weights": "model.safetensors", "no tokenizer": "tokenizer.json"}[how]).unlink()
    with pytest.raises(InputError) as caught:
        parse_options(Vlm, {"checkpoint": str(folder)}, "policy.options")
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_a_file_lacks_are_told_in_one_line(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "smolvlm")
    state = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in state.items() if "connector" not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 weights, first connector\..*, expected a whole model"):
        make(checkpoint=str(folder))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"family": "qwen2_5_vl", "image_size": 40}, "image_size is 40, expected a multiple of 16"),
        ({"family": "smolvlm", "image_size": 48}, "image_size is 48, but this model takes 32"),
        ({"cameras": ["left"]}, "left, expected one or more of the environment's: front, wrist"),
    ],
)
def test_images_that_do_not_fit_are_told_in_one_line(options: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        make(**options)
    assert line in str(caught.value) and "\n" not in str(caught.value)
