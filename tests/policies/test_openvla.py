"""OpenVLA and OpenVLA-OFT: folders in the published layout, against that network written out in plain torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.plugins import POLICIES, load_class, parse_options
from vla_stream.policies import networks, openvla, openvla_network
from vla_stream.policies.openvla import OpenVla
from vla_stream.policies.openvla_oft import OpenVlaOft
from vla_stream.policies.protocol import Policy
from vla_stream.policies.vlm_inputs import crop_centre

ROBOT = Specification({"front": (48, 48), "wrist": (24, 40)}, state_dims=8, action_dims=3)
CHUNK = 2
WORDS = CHUNK * ROBOT.action_dims
BOTH = pytest.mark.parametrize("cls", [OpenVla, OpenVlaOft], ids=["openvla", "oft"])

pytestmark = pytest.mark.timeout(180)  # transformers takes long to import where the disk or the machine is busy


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(cls: type[OpenVla], specification: Specification = ROBOT, chunk: int = CHUNK, **options: Any) -> OpenVla:
    torch.manual_seed(0)
    return cls(parse_options(cls, options, "policy.options"), specification, chunk).eval()


def look(rows: int, specification: Specification = ROBOT) -> Observations:
    random = np.random.default_rng(0)
    images = {
        camera: random.integers(0, 256, (rows, *size, 3), dtype=np.uint8)
        for camera, size in specification.cameras.items()
    }
    state = random.standard_normal((rows, specification.state_dims)).astype(np.float32)
    return Observations(images, state, [f"touch the {'red ' * row}Cube" for row in range(rows)])


def keys(rows: int) -> np.ndarray:
    return np.arange(100, 100 + rows, dtype=np.uint64)


# --- a folder as it was published, with small sizes and random weights

SIZE, PATCH, WIDE, DEPTH = 16, 4, 64, 3
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MEANS, STDS = [[0.48, 0.46, 0.41], [0.5, 0.5, 0.5]], [[0.23, 0.22, 0.22], [0.5, 0.5, 0.5]]
RANGE = {"q01": [-2.0, 0.0, 1.0], "q99": [2.0, 0.5, 1.0], "mask": [True, True, False], "mean": [0.0] * 3}
TOKENS = ["<unk>", "<s>", "</s>", "▁"]


def published_weights(vocabulary: int) -> dict[str, Tensor]:
    """By the names of timm's ViTs within PrismaticVisionBackbone, its projector, and LlamaForCausalLM."""
    random = torch.Generator().manual_seed(1)
    result: dict[str, Tensor] = {}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        result[name] = around + 0.15 * torch.randn(shape, generator=random)

    def linear(name: str, inputs: int, outputs: int) -> None:
        add(f"{name}.weight", outputs, inputs)
        add(f"{name}.bias", outputs)

    def norm(name: str, width: int) -> None:
        add(f"{name}.weight", width, around=1.0)
        add(f"{name}.bias", width)

    count = (SIZE // PATCH) ** 2
    for encoder, hidden in (("featurizer", 4 * WIDE), ("fused_featurizer", 100)):
        prefix = f"vision_backbone.{encoder}."
        add(prefix + "patch_embed.proj.weight", WIDE, 3, PATCH, PATCH)
        add(prefix + "patch_embed.proj.bias", WIDE)
        add(prefix + "pos_embed", 1, count, WIDE)
        if encoder == "featurizer":
            add(prefix + "cls_token", 1, 1, WIDE)
            add(prefix + "reg_token", 1, 4, WIDE)
        for block in range(DEPTH):
            norm(f"{prefix}blocks.{block}.norm1", WIDE)
            linear(f"{prefix}blocks.{block}.attn.qkv", WIDE, 3 * WIDE)
            linear(f"{prefix}blocks.{block}.attn.proj", WIDE, WIDE)
            norm(f"{prefix}blocks.{block}.norm2", WIDE)
            linear(f"{prefix}blocks.{block}.mlp.fc1", WIDE, hidden)
            linear(f"{prefix}blocks.{block}.mlp.fc2", hidden, WIDE)
            if encoder == "featurizer":
                add(f"{prefix}blocks.{block}.ls1.scale_factor", WIDE, around=1.0)
                add(f"{prefix}blocks.{block}.ls2.scale_factor", WIDE, around=1.0)
        norm(prefix + "norm", WIDE)
    add("vision_backbone.fused_featurizer.attn_pool.latent", 1, 1, WIDE)  # of no use here, but there
    linear("projector.fc1", 2 * WIDE, 8 * WIDE)
    linear("projector.fc2", 8 * WIDE, TEXT["hidden_size"])
    linear("projector.fc3", TEXT["hidden_size"], TEXT["hidden_size"])
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    language = LlamaForCausalLM(LlamaConfig(**TEXT, vocab_size=vocabulary, initializer_range=0.3))
    return result | {f"language_model.{name}": tensor for name, tensor in language.state_dict().items()}


def publish(folder: Path) -> Path:
    folder.mkdir()
    tokens = networks.byte_tokens(TOKENS)
    vocabulary = len(tokens) + 256
    config = {
        "model_type": "openvla",
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
        "use_fused_vision_backbone": True,
        "image_resize_strategy": "resize-naive",
        "n_action_bins": 256,
        "pad_token_id": vocabulary,
        "pad_to_multiple_of": 64,
        "text_config": {"model_type": "llama", "vocab_size": vocabulary + 64, "torch_dtype": "bfloat16"} | TEXT,
        "norm_stats": {"my_robot": {"action": RANGE}, "bridge_orig": {"action": RANGE | {"q01": [0.0, 0.0, 0.0]}}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    pixels = [{"mean": mean, "std": std, "inplace": False} for mean, std in zip(MEANS, STDS, strict=True)]
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"means": [[0.1] * 3] * 2, "stds": STDS} | {"tvf_normalize_params": pixels})
    )
    networks.byte_tokenizer(tokens).save(str(folder / "tokenizer.json"))
    weights = published_weights(vocabulary + 64)
    parts = {name: f"model-0000{1 + (index % 2)}-of-00002.safetensors" for index, name in enumerate(weights)}
    for part in set(parts.values()):
        held = {name: tensor.contiguous() for name, tensor in weights.items() if parts[name] == part}
        save_file(held, folder / part, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    return folder


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("published") / "openvla")


@pytest.fixture
def own(published: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    folder = tmp_path / "openvla"
    folder.mkdir()
    for file in published.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


class Published:
    """What the published code computes, for one row, without padding and without a cache."""

    def __init__(self, folder: Path) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.weights = {k: v for part in folder.glob("*.safetensors") for k, v in load_file(part).items()}
        config = json.loads((folder / "config.json").read_text())
        self.vocabulary = config["text_config"]["vocab_size"] - config["pad_to_multiple_of"]
        self.language = LlamaForCausalLM(LlamaConfig(**TEXT, vocab_size=config["text_config"]["vocab_size"]))
        llama = {k.removeprefix("language_model."): v for k, v in self.weights.items() if k.startswith("language")}
        self.language.load_state_dict(llama)
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def encoder(self, name: str, image: Tensor) -> Tensor:
        """The second-to-last block's output for the patches of an image [3, size, size]."""
        w, prefix = self.weights, f"vision_backbone.{name}."
        x = F.conv2d(image[None], w[prefix + "patch_embed.proj.weight"], w[prefix + "patch_embed.proj.bias"], PATCH)
        x = x.flatten(2).transpose(1, 2) + w[prefix + "pos_embed"]
        extra = [w[prefix + kind] for kind in ("cls_token", "reg_token") if prefix + kind in w]
        x = torch.cat([*extra, x], dim=1)
        for block in range(DEPTH - 1):
            at = f"{prefix}blocks.{block}."
            scale = [w.get(f"{at}ls{n}.scale_factor", torch.ones(())) for n in (1, 2)]
            y = F.layer_norm(x, (WIDE,), w[at + "norm1.weight"], w[at + "norm1.bias"], eps=1e-6)
            q, k, v = self.linear(at + "attn.qkv", y).view(1, -1, 3, 16, WIDE // 16).permute(2, 0, 3, 1, 4)
            attended = torch.softmax(q @ k.transpose(-1, -2) / (WIDE // 16) ** 0.5, dim=-1) @ v
            x = x + scale[0] * self.linear(at + "attn.proj", attended.transpose(1, 2).flatten(2))
            y = F.layer_norm(x, (WIDE,), w[at + "norm2.weight"], w[at + "norm2.bias"], eps=1e-6)
            x = x + scale[1] * self.linear(at + "mlp.fc2", F.gelu(self.linear(at + "mlp.fc1", y)))
        return x[:, sum(part.shape[1] for part in extra) :]

    def prompt(self, images: list[np.ndarray], sentence: str) -> Tensor:
        """Embeddings of start of text, patches, and the prompt with the empty word that it ends with."""
        text = f"In: What action should the robot take to {sentence.lower()}?\nOut:"
        ids = torch.tensor([[1, *self.tokenizer.encode(text, add_special_tokens=False).ids, 3]])
        patches = []
        for array in images:
            image = torch.from_numpy(array).permute(2, 0, 1).float()[None] / 255
            image = F.interpolate(image, (SIZE, SIZE), mode="bicubic", antialias=True).clamp(0, 1)[0]
            seen = [
                self.encoder(name, (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])
                for name, mean, std in zip(("featurizer", "fused_featurizer"), MEANS, STDS, strict=True)
            ]
            x = F.gelu(self.linear("projector.fc1", torch.cat(seen, dim=-1)))
            patches.append(self.linear("projector.fc3", F.gelu(self.linear("projector.fc2", x))))
        text = self.language.model.embed_tokens(ids)
        return torch.cat([text[:, :1], *patches, text[:, 1:]], dim=1)

    def greedy(self, prompt: Tensor) -> tuple[list[int], Tensor]:
        """Word by word, the likeliest of the action tokens; and the logits of all of these."""
        ids: list[int] = []
        logits = []
        for _ in range(WORDS):
            said = self.language.model.embed_tokens(torch.tensor([ids], dtype=torch.long))
            logits.append(self.language(inputs_embeds=torch.cat([prompt, said], dim=1)).logits[0, -1])
            start = self.vocabulary - 256
            ids.append(start + int(logits[-1][start : start + 256].argmax()))
        return ids, torch.stack(logits)

    def at_once(self, prompt: Tensor) -> tuple[list[int], Tensor]:
        """OFT's: zeros for the words, then the end of text; each token sees all."""
        end = self.language.model.embed_tokens(torch.tensor([[2]]))
        embeddings = torch.cat([prompt, torch.zeros(1, WORDS, prompt.shape[-1]), end], dim=1)
        everything = torch.ones(1, 1, embeddings.shape[1], embeddings.shape[1], dtype=torch.bool)
        whole = self.language(inputs_embeds=embeddings, attention_mask=everything).logits[0]
        logits, start = whole[prompt.shape[1] - 1 : prompt.shape[1] - 1 + WORDS], self.vocabulary - 256
        return (logits[:, start : start + 256].argmax(-1) + start).tolist(), logits


@BOTH
@pytest.mark.parametrize("cameras", [None, ["wrist", "front"]], ids=["first camera", "two cameras"])
def test_a_folder_says_what_the_published_network_says(
    published: Path, cls: type[OpenVla], cameras: list[str] | None
) -> None:
    policy = make(cls, checkpoint=str(published), robot="my_robot", cameras=cameras, temperature=1.5, words=99)
    reference, observations = Published(published), look(3)
    act = policy.act(observations, None)
    with torch.no_grad():
        evaluation = policy.evaluate(observations, act.actions, act.extras)
    for row in range(3):
        with torch.no_grad():
            images = [observations.images[camera][row] for camera in cameras or ["front"]]
            prompt = reference.prompt(images, observations.instruction[row])
            ids, logits = reference.at_once(prompt) if cls is OpenVlaOft else reference.greedy(prompt)
        assert act.extras["tokens"][row].flatten().tolist() == ids
        start = reference.vocabulary - 256
        over_actions = torch.log_softmax(logits[:, start : start + 256] / 1.5, dim=-1)
        expected = over_actions[torch.arange(WORDS), torch.tensor(ids) - start]
        np.testing.assert_allclose(act.logprobs[row].flatten(), expected, atol=2e-4)
        np.testing.assert_allclose(evaluation.logprobs[row].flatten(), expected, atol=2e-4)
        entropy = -(over_actions.exp() * over_actions).sum(-1)
        np.testing.assert_allclose(evaluation.entropy[row].flatten(), entropy, atol=2e-4)
        edges = np.linspace(-1, 1, 256)
        said = ((edges[1:] + edges[:-1]) / 2)[np.clip(reference.vocabulary - 1 - np.array(ids), 0, 254)]
        said = said.reshape(CHUNK, 3)
        expected_actions = np.stack([4 * (said[:, 0] + 1) / 2 - 2, 0.5 * (said[:, 1] + 1) / 2, said[:, 2]], axis=1)
        np.testing.assert_allclose(act.actions[row], expected_actions, atol=1e-6)


def test_statistics_may_lie_beside_the_weights_or_come_from_a_file_of_their_own(own: Path, tmp_path: Path) -> None:
    other = {"mine": {"action": {"q01": [5.0] * 3, "q99": [6.0, 7.0, 8.0]}, "proprio": {}}}
    (own / "dataset_statistics.json").write_text(json.dumps(other))
    policy = make(OpenVla, checkpoint=str(own))
    assert policy.action_low.tolist() == [5.0] * 3 and policy.action_high.tolist() == [6.0, 7.0, 8.0]
    assert policy.action_scaled.all()
    (tmp_path / "else.json").write_text(json.dumps({"a": {"action": RANGE}, "b": other["mine"]}))
    policy = make(OpenVla, checkpoint=str(own), statistics=str(tmp_path / "else.json"), robot="a")
    assert policy.action_low.tolist() == [-2.0, 0.0, 1.0] and policy.action_scaled.tolist() == [True, True, False]


@pytest.mark.parametrize("cls", [OpenVla, OpenVlaOft])
def test_a_policy_that_is_written_out_is_a_whole_published_folder_and_acts_as_before(
    published: Path, cls: type[OpenVla], tmp_path: Path
) -> None:
    policy, observations = make(cls, checkpoint=str(published), robot="my_robot"), look(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape))
    acted = policy.act(observations, None)
    written = tmp_path / "written"
    written.mkdir()
    policy.write(written)
    assert {file.name for file in written.iterdir()} == {f.name for f in published.iterdir()} | {"heads.safetensors"}
    again = make(cls, checkpoint=str(written), robot="my_robot")
    after = again.act(observations, None)
    np.testing.assert_allclose(after.actions, acted.actions, atol=1e-5)
    np.testing.assert_allclose(after.values, acted.values, atol=1e-4)
    for part in published.glob("*.safetensors"):
        before, now = load_file(part), load_file(written / part.name)
        assert before.keys() == now.keys() and all(before[name].shape == now[name].shape for name in before)
        moved = {name for name in before if not torch.equal(before[name], now[name])}
        assert moved and not any("blocks.2." in name or name.endswith("embed_tokens.weight") for name in moved)


def test_the_tiny_network_has_no_published_layout(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no published layout"):
        make(OpenVla).write(tmp_path)


def test_weights_saved_in_bfloat16_are_float32_here(own: Path) -> None:
    for part in own.glob("*.safetensors"):
        save_file({name: tensor.bfloat16() for name, tensor in load_file(part).items()}, part)
    policy = make(OpenVla, checkpoint=str(own), robot="my_robot", train="all")
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def lose(folder: Path, part_of_name: str, replacement: Callable[[Tensor], Tensor] | None = None) -> None:
    for part in folder.glob("*.safetensors"):
        state = load_file(part)
        for name in [name for name in state if part_of_name in name]:
            tensor = state.pop(name)
            if replacement is not None:
                state[name] = replacement(tensor)
        save_file(state, part)


def spoil(folder: Path, how: str) -> None:
    config = folder / "config.json"
    match how:
        case "no folder":
            folder.rename(folder.with_name("elsewhere"))
        case "config" | "tokenizer" | "preprocessor_config":
            (folder / f"{how}.json").unlink()
        case "weights":
            (folder / "model-00002-of-00002.safetensors").unlink()
        case "half weights":
            (folder / "model-00002-of-00002.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{")
        case "another architecture":
            rewrite(config, model_type="pi0")
        case "other encoders":
            rewrite(config, timm_model_ids=["vit_so400m_patch14_siglip_224"])
        case "other bins":
            rewrite(config, n_action_bins=512)
        case "letterbox":
            rewrite(config, image_resize_strategy="letterbox")
        case "no text":
            rewrite(config, text_config={})
        case "pixels":
            rewrite(folder / "preprocessor_config.json", tvf_normalize_params=[{"mean": [0.5], "std": [0.5]}])
        case "a lost block":
            lose(folder, "fused_featurizer.blocks.1.mlp")
        case "no encoder":
            lose(folder, ".featurizer.")
        case "no statistics":
            rewrite(config, norm_stats=None)
        case "half statistics":
            rewrite(config, norm_stats={"my_robot": {"action": {"q01": [0.0]}}})
        case "uneven statistics":
            rewrite(config, norm_stats={"my_robot": {"action": RANGE | {"q01": [0.0]}}})


@BOTH
@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("no folder", "openvla', no such folder; give a pretrained model's"),
        ("config", "config.json: cannot be read (No such file or directory), expected JSON"),
        ("tokenizer", "openvla: lacks tokenizer.json, expected a whole model"),
        ("preprocessor_config", "preprocessor_config.json: cannot be read (No such file or directory)"),
        ("weights", "openvla: lacks model-00002-of-00002.safetensors, expected a whole model"),
        ("half weights", "model-00002-of-00002.safetensors: cannot be read, expected safetensors"),
        ("another architecture", "config.json: model_type is 'pi0', expected 'openvla'"),
        ("other encoders", "config.json: timm_model_ids is ['vit_so400m_patch14_siglip_224'], expected ['vit_large"),
        ("other bins", "config.json: n_action_bins is 512, expected 256"),
        ("letterbox", "image_resize_strategy is 'letterbox', expected 'resize-naive'"),
        ("no text", "config.json: has no text_config with a vocab_size"),
        ("pixels", "preprocessor_config.json: has no mean and std of 3 channels for each of 2 encoders"),
        ("a lost block", "lacks 4 weights, first vision_backbone.fused_featurizer.blocks.1.mlp.fc1.bias"),
        ("no encoder", "lacks 19 weights, first vision_backbone.featurizer.blocks.0.attn.proj.bias"),
        ("no statistics", "config.json: has no norm_stats, expected statistics"),
        ("half statistics", "config.json: my_robot.action.q99 is None, expected a list of numbers"),
        ("uneven statistics", "config.json: q01, q99 and mask of my_robot differ in length"),
    ],
)
def test_a_folder_that_is_no_whole_openvla_is_told_in_one_line_before_it_is_loaded(
    own: Path, cls: type[OpenVla], how: str, line: str
) -> None:
    spoil(own, how)
    with pytest.raises(InputError) as caught:
        parse_options(cls, {"checkpoint": str(own), "robot": "my_robot"}, "policy.options")
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("robot", "line"),
    [
        (None, "no statistics of '', of 2 data sets; set policy.options.robot to one of bridge_orig, my_robot"),
        ("bridge", "has no statistics of 'bridge', of 2 data sets; did you mean bridge_orig?"),
    ],
)
def test_statistics_of_another_robot_are_told_in_one_line(published: Path, robot: str | None, line: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_options(OpenVla, {"checkpoint": str(published), "robot": robot}, "policy.options")
    assert line in str(caught.value) and "\n" not in str(caught.value)


@BOTH
@pytest.mark.parametrize(
    ("specification", "line"),
    [
        (Specification(ROBOT.cameras, 8, 4), "statistics of 3 action dims, but the environment has 4"),
        (Specification({}, 8, 3), "policy.options.cameras: no camera, expected one or more"),
    ],
)
def test_an_environment_that_does_not_fit_is_told_in_one_line_and_the_weights_are_not_even_read(
    published: Path, cls: type[OpenVla], specification: Specification, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(openvla_network, "build")
    with pytest.raises(InputError) as caught:
        make(cls, specification, checkpoint=str(published), robot="my_robot")
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "line"),
    [
        (
            "layers.0.mlp.up_proj",
            lambda tensor: tensor[:-1],
            "mlp.up_proj.weight has the shape [63, 32], which does not",
        ),
        ("layers.1.", None, "has no weights for 9 places, first language.layers.1.input_layernorm.weight, which does"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_told_in_one_line(own: Path, name: str, change: Any, line: str) -> None:
    lose(own, name, change)
    with pytest.raises(InputError) as caught:
        make(OpenVla, checkpoint=str(own), robot="my_robot")
    assert line in str(caught.value) and "\n" not in str(caught.value)


# --- the protocol, and what is said


def test_they_offer_the_protocol_under_their_names() -> None:
    assert load_class(POLICIES, "openvla") is OpenVla and load_class(POLICIES, "openvla_oft") is OpenVlaOft
    assert isinstance(make(OpenVla), Policy)


def test_options_are_read_without_transformers() -> None:
    code = (
        "import sys\nfrom vla_stream.policies.openvla_oft import OpenVlaOft\nOpenVlaOft.Options()\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@BOTH
def test_what_is_seen_and_said_changes_the_words_and_what_stands_beside_it_does_not(cls: type[OpenVla]) -> None:
    policy, observations = make(cls), look(1).take([0, 0])
    said = Observations(observations.images, observations.state, ["touch the red cube", "touch the blue cube"])
    act = policy.act(said, None)
    assert np.abs(act.logprobs[0] - act.logprobs[1]).max() > 1e-3
    longer = Observations(said.images, said.state, ["touch the red cube", "put it into the drawer on the left"])
    np.testing.assert_array_equal(policy.act(longer, None).logprobs[0], act.logprobs[0])
    black = Observations({name: image * 0 for name, image in said.images.items()}, said.state, said.instruction)
    assert np.abs(policy.act(black, None).logprobs - act.logprobs).max() > 1e-3


def test_of_a_prompt_that_is_too_long_the_end_is_read() -> None:
    policy = make(OpenVla, words=60)
    (ids,), (mask,) = policy._prompts(["touch the cube " * 9])
    names = {token: name for name, token in policy._prompts._tokenizer.get_vocab().items()}
    text = "".join(names[token] for token in ids)
    assert len(ids) == 62 and mask.all()
    assert text == "<s>In:ĠWhatĠactionĠshouldĠtheĠrobotĠtakeĠtoĠtouchĠtheĠcub?ĊOut:▁"


def test_only_a_word_that_is_said_later_depends_on_one_that_was_said_and_with_oft_none_does() -> None:
    for cls, others in ((OpenVla, [2, 3, 4, 5]), (OpenVlaOft, [])):
        policy, observations = make(cls), look(1)
        act = policy.act(observations, keys(1))
        changed = act.extras["tokens"].copy()
        changed[0, 0, 1] = policy._vocabulary - 1 - (policy._vocabulary - 1 - changed[0, 0, 1] + 100) % 256
        one, two = (
            policy.evaluate(observations, act.actions, {"tokens": t}).logprobs.detach().numpy().flatten()
            for t in (act.extras["tokens"], changed)
        )
        assert [n for n in range(WORDS) if abs(one[n] - two[n]) > 1e-5 and n != 1] == others


@BOTH
def test_words_are_drawn_at_the_temperature_of_training(cls: type[OpenVla]) -> None:
    observations, count = look(1).take([0] * 400), 400
    for temperature in (0.3, 2.0):
        policy = make(cls, Specification(ROBOT.cameras, 8, 1), 1, temperature=temperature)
        with torch.no_grad():
            policy.network.lm_head.weight.mul_(8)
            logits = policy.network.action_logits(
                policy._outputs(policy._prefix(look(1)), torch.zeros(1, 1, dtype=torch.long))
            )[0, 0]
        act = policy.act(observations, keys(count))
        probabilities = torch.softmax(logits / temperature, dim=-1)
        chosen = policy._vocabulary - 1 - act.extras["tokens"].flatten()
        np.testing.assert_allclose(act.logprobs.flatten(), probabilities.log()[chosen], atol=1e-4)
        share, likeliest = (chosen == int(logits.argmax())).mean(), float(probabilities.max())
        assert share == pytest.approx(likeliest, abs=4 * (likeliest * (1 - likeliest) / count) ** 0.5)


@BOTH
def test_evaluation_takes_the_likeliest_word_or_draws_by_what_it_sees(cls: type[OpenVla]) -> None:
    observations = look(4)
    likeliest = make(cls).act(observations, None)
    assert likeliest.logprobs.max() < 0
    drawing = make(cls, evaluation_temperature=1.0)
    drawn, again = (drawing.act(observations, None).extras["tokens"] for _ in range(2))
    np.testing.assert_array_equal(drawn, again)
    assert (drawn != likeliest.extras["tokens"]).any(axis=(1, 2)).all()
    moved = Observations(observations.images, observations.state + 1, observations.instruction)
    assert (drawing.act(moved, None).extras["tokens"] != drawn).any(axis=(1, 2)).all()
    np.testing.assert_array_equal(
        make(cls, evaluation_temperature=1e-4).act(observations, None).extras["tokens"], likeliest.extras["tokens"]
    )


def test_the_middle_nine_tenths_of_an_image_are_looked_at_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A ramp from -1 to 1 between the centres of the outermost pixels: of its middle only that part is left.
    ramp = torch.linspace(-1, 1, 32, dtype=torch.float64).expand(1, 3, 32, 32)
    torch.testing.assert_close(crop_centre(ramp, 0.9), 0.9**0.5 * ramp)
    torch.testing.assert_close(crop_centre(ramp.mT, 0.9), 0.9**0.5 * ramp.mT)
    cropped = []
    monkeypatch.setattr(openvla, "crop_centre", lambda image, share: cropped.append(share) or image)
    for centre_crop, expected in ((False, []), (True, [0.9, 0.9])):
        make(OpenVlaOft, centre_crop=centre_crop, cameras=["front", "wrist"]).act(look(2), None)
        assert cropped == expected


# --- what is trained


@BOTH
def test_the_value_moves_no_action_and_its_gradient_ends_at_its_head(cls: type[OpenVla]) -> None:
    policy, observations = make(cls, train="all"), look(3)
    act = policy.act(observations, keys(3))
    policy.evaluate(observations, act.actions, act.extras).values.sum().backward()
    with_gradient = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in policy.named_parameters() if name.startswith("value_head.")}


def test_only_adapters_and_the_value_travel_and_they_land_on_their_own_base_only() -> None:
    policy, twin = make(OpenVlaOft, lora_rank=4), make(OpenVlaOft, lora_rank=4)
    state = policy.state_dict()
    own = {"base_digest", "action_low", "action_high", "action_scaled"}
    assert all("lora_" in name or name.startswith("value_head.") for name in state.keys() - own)
    for part in ("dino", "siglip", "projector", "language"):
        assert any(part in name for name in state)
    assert not any("lm_head" in name for name in state)
    twin.load_state_dict(state)
    with pytest.raises(InputError, match="another base"):
        twin.load_state_dict(state | {"base_digest": state["base_digest"] + 1})


@BOTH
def test_computing_layers_again_gives_the_same_gradients(cls: type[OpenVla]) -> None:
    plain, again = make(cls, train="all"), make(cls, train="all", gradient_checkpointing=True)
    observations = look(3)
    act = plain.act(observations, keys(3))
    for policy in (plain, again):
        policy.evaluate(observations, act.actions, act.extras).logprobs.sum().backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_low_precision_is_near_and_halves_what_is_not_trained() -> None:
    exact, rough = make(OpenVlaOft), make(OpenVlaOft, precision="bfloat16")
    assert rough.low_precision and not exact.low_precision
    observations = look(4)
    act = exact.act(observations, keys(4))
    with torch.no_grad():
        theirs = rough.evaluate(observations, act.actions, act.extras).logprobs.numpy()
    assert 1e-5 < np.abs(act.logprobs - theirs).max() < 0.2
    trained = {parameter.dtype for parameter in rough.parameters() if parameter.requires_grad}
    assert trained == {torch.float32}
    assert rough.network.language.layers[0].mlp.up_proj.base_layer.weight.dtype == torch.bfloat16
    assert rough.network.lm_head.weight.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # of the compiler's own packages
@BOTH
def test_a_compiled_network_says_the_same(cls: type[OpenVla], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: whole(module, backend="aot_eager"))
    plain, compiled = make(cls), make(cls, compile=True)
    ours, theirs = plain.act(look(4), keys(4)), compiled.act(look(4), keys(4))
    np.testing.assert_array_equal(theirs.extras["tokens"], ours.extras["tokens"])
    np.testing.assert_allclose(theirs.logprobs, ours.logprobs, atol=1e-4)


@BOTH
def test_imitation_can_be_learned_and_counts_valid_steps_only(cls: type[OpenVla]) -> None:
    wide = Specification(ROBOT.cameras, 8, 3, action_low=0.0, action_high=10.0)
    policy, observations = make(cls, wide, train="all"), look(4)
    actions = np.tile(np.array([7.5, 2.5, 6.0], np.float32), (4, CHUNK, 1))
    valid = np.ones((4, CHUNK), dtype=bool)
    valid[:, 1:] = False
    optimiser = torch.optim.Adam(policy.parameter_groups()["policy"], lr=3e-3)
    before = float(policy.imitation_loss(observations, actions, valid).detach())
    for _ in range(30):
        loss = policy.imitation_loss(observations, actions, valid)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.2 * before
    np.testing.assert_allclose(policy.act(observations, None).actions[:, 0], actions[:, 0], atol=10 / 255)
    assert float(policy.imitation_loss(observations, actions, valid & False).detach()) == 0.0
