"""OpenVLA's network (arXiv 2406.09246) of transformers' parts: from a folder in the published layout, or tiny.

    image ─ DINOv2 with registers ─┐
          ─ SigLIP ────────────────┴ side by side ─ projector ─ Llama ─ head

Both encoders end with their second-to-last block, without a last norm. The published weights were made with timm, whose
names `places` maps to ours. transformers is imported late: it takes seconds.

# B rows, P patches of all images, N tokens, W width of Llama
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from vla_stream.errors import InputError
from vla_stream.policies import networks, pretrained
from vla_stream.policies.action_tokens import BINS

ARCHITECTURE = "openvla"  # as config.json names it
PREPROCESSOR = "preprocessor_config.json"

Trained = Literal["all", "lora"]

_HEADS = 16  # of both encoders: the one thing that neither config.json nor the weights tell
_ENCODERS = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
_SPACE = "▁"
_SPECIAL = ("<unk>", "<s>", "</s>", _SPACE)  # the first three as in Llama
_TINY_PADDING = 60  # ids beyond the vocabulary
_TINY_MEANS = ((0.485, 0.456, 0.406), (0.5, 0.5, 0.5))  # ImageNet's for DINOv2, as timm has them
_TINY_STDS = ((0.229, 0.224, 0.225), (0.5, 0.5, 0.5))

# Where timm's blocks have what; the parts of one weight are equal and in this order.
_DINO_BLOCK = {
    "norm1": ["norm1"],
    "attn.qkv": ["attention.q_proj", "attention.k_proj", "attention.v_proj"],
    "attn.proj": ["attention.o_proj"],
    "norm2": ["norm2"],
    "mlp.fc1": ["mlp.fc1"],
    "mlp.fc2": ["mlp.fc2"],
}
_SIGLIP_BLOCK = {
    "norm1": ["layer_norm1"],
    "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.proj": ["self_attn.out_proj"],
    "norm2": ["layer_norm2"],
    "mlp.fc1": ["mlp.fc1"],
    "mlp.fc2": ["mlp.fc2"],
}
_LLAMA_LAYER = [
    "input_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    "post_attention_layernorm",
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
]
_DINO, _SIGLIP, _LLAMA = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer.", "language_model."
_DINO_POSITIONS = "dino.embeddings.position_embeddings"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the network is made of: configs of its parts, V, the side of its images, and mean and std [3] of each."""

    dino: Any
    siglip: Any
    text: Any
    vocabulary: int
    image_size: int
    padding: int
    pixel_means: Sequence[Sequence[float]]
    pixel_stds: Sequence[Sequence[float]]

    @property
    def patches(self) -> int:
        """Of one image."""
        side: int = self.image_size // self.dino.patch_size
        return side**2


class OpenVlaNetwork(nn.Module):
    """The network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        from transformers import Dinov2WithRegistersModel, LlamaModel, SiglipVisionModel

        self.sizes = sizes
        self.dino: Any = Dinov2WithRegistersModel(sizes.dino)
        self.dino.layernorm = nn.Identity()
        self.dino.embeddings.mask_token = None
        self.siglip: Any = SiglipVisionModel(sizes.siglip)
        self.siglip.post_layernorm = nn.Identity()
        self.language: Any = LlamaModel(sizes.text)
        width, seen = sizes.text.hidden_size, sizes.dino.hidden_size + sizes.siglip.hidden_size
        self.projector = nn.Sequential()
        self.projector.add_module("fc1", nn.Linear(seen, 4 * seen))
        self.projector.add_module("act1", nn.GELU())
        self.projector.add_module("fc2", nn.Linear(4 * seen, width))
        self.projector.add_module("act2", nn.GELU())
        self.projector.add_module("fc3", nn.Linear(width, width))
        self.lm_head = nn.Linear(width, sizes.text.vocab_size, bias=False)
        self.pixel_means: Tensor
        self.pixel_stds: Tensor
        for name, numbers in (("pixel_means", sizes.pixel_means), ("pixel_stds", sizes.pixel_stds)):
            self.register_buffer(name, torch.tensor(numbers)[:, None, :, None, None], persistent=False)

    def see(self, images: Sequence[Tensor]) -> Tensor:
        """Embeddings [B, P, W] of images [B, 3, size, size] in [0, 1], one after the other."""
        pixels = torch.cat(list(images))
        for_dino, for_siglip = (pixels - self.pixel_means) / self.pixel_stds
        first = self.dino(for_dino).last_hidden_state[:, 1 + self.sizes.dino.num_register_tokens :]
        both = torch.cat([first, self.siglip(for_siglip).last_hidden_state], dim=-1)
        embeddings: Tensor = self.projector(both)
        return torch.cat(embeddings.chunk(len(images)), dim=1)

    def action_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., 256] of the bins, the first bin first, from Llama's output [..., W]."""
        last = self.sizes.vocabulary
        # The first bin is the last token. In full precision, since log-probs are differences of large numbers.
        weight = self.lm_head.weight[last - BINS : last].flip(0)
        return F.linear(hidden.to(weight.dtype), weight)


def tiny_sizes() -> Sizes:
    """Those of a random network of 250 k parameters with all the parts."""
    from transformers import Dinov2WithRegistersConfig, LlamaConfig, SiglipVisionConfig

    vision = {"image_size": 32, "patch_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vocabulary = len(networks.byte_tokens(_SPECIAL)) + BINS
    return Sizes(
        dino=Dinov2WithRegistersConfig(**vision, hidden_size=32, initializer_range=0.1),
        siglip=SiglipVisionConfig(
            **vision, hidden_size=32, intermediate_size=64, hidden_act="gelu", vision_use_head=False
        ),
        text=LlamaConfig(
            **{"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64, "intermediate_size": 128},
            vocab_size=vocabulary + _TINY_PADDING,
            initializer_range=0.1,
        ),
        vocabulary=vocabulary,
        image_size=32,
        padding=vocabulary,
        pixel_means=_TINY_MEANS,
        pixel_stds=_TINY_STDS,
    )


def check_folder(folder: Path) -> None:
    """Raises InputError unless the folder holds a whole OpenVLA. Reads no weights, and needs no transformers."""
    pretrained.check_folder(folder, ARCHITECTURE)
    config, file = pretrained.read_json(folder / pretrained.CONFIG), folder / pretrained.CONFIG
    for name, expected, default in (
        ("timm_model_ids", _ENCODERS, None),
        ("n_action_bins", BINS, BINS),
        ("image_resize_strategy", "resize-naive", "resize-naive"),
    ):
        if config.get(name, default) != expected:
            raise InputError(
                f"{file}: {name} is {config.get(name, default)!r:.80}, expected {expected!r}; give such an OpenVLA"
            )
    text = config.get("text_config")
    if not isinstance(text, dict) or not all(
        isinstance(number, int) for number in (text.get("vocab_size"), config.get("pad_to_multiple_of", 64))
    ):
        raise InputError(f"{file}: has no text_config with a vocab_size, expected an OpenVLA's; copy the folder anew")
    _pixel_statistics(folder)
    shapes = pretrained.weight_shapes(folder)
    lost = sorted(places(shapes).keys() - shapes.keys())
    if lost:
        raise InputError(
            f"{folder}: lacks {len(lost)} weights, first {lost[0]}, expected a whole OpenVLA; copy it anew"
        )


def read_sizes(folder: Path) -> Sizes:
    """Those of a folder that `check_folder` looked at."""
    from transformers import Dinov2WithRegistersConfig, LlamaConfig, SiglipVisionConfig

    config, shapes = pretrained.read_json(folder / pretrained.CONFIG), pretrained.weight_shapes(folder)
    blocks = {prefix: _count(shapes, prefix + "blocks.") - 1 for prefix in (_DINO, _SIGLIP)}

    def vision(prefix: str) -> dict[str, int]:
        width, _, _, patch = shapes[prefix + "patch_embed.proj.weight"]
        side = round(shapes[prefix + "pos_embed"][1] ** 0.5)
        return {
            "hidden_size": width,
            "patch_size": patch,
            "image_size": side * patch,
            "num_hidden_layers": blocks[prefix],
            "num_attention_heads": _HEADS,
        }

    dino, siglip = vision(_DINO), vision(_SIGLIP)
    if dino["image_size"] != siglip["image_size"] or dino["patch_size"] != siglip["patch_size"]:
        raise InputError(f"{folder}: its two image encoders see other images, expected the same; give another OpenVLA")
    means, stds = _pixel_statistics(folder)
    hidden = {prefix: shapes[prefix + "blocks.0.mlp.fc1.weight"][0] for prefix in (_DINO, _SIGLIP)}
    text = LlamaConfig.from_dict(config["text_config"])
    return Sizes(
        dino=Dinov2WithRegistersConfig(
            **dino, mlp_ratio=hidden[_DINO] // dino["hidden_size"], num_register_tokens=shapes[_DINO + "reg_token"][1]
        ),
        # timm's SigLIP has the exact GELU, that of transformers an approximation.
        siglip=SiglipVisionConfig(
            **siglip, intermediate_size=hidden[_SIGLIP], hidden_act="gelu", vision_use_head=False
        ),
        text=text,
        vocabulary=text.vocab_size - config.get("pad_to_multiple_of", 64),
        image_size=dino["image_size"],
        padding=config.get("pad_token_id", text.pad_token_id),
        pixel_means=means,
        pixel_stds=stds,
    )


def build(sizes: Sizes, folder: Path | None) -> OpenVlaNetwork:
    """The network with the weights of the folder, or with random ones, always the same. Raises InputError."""
    if folder is None:
        with networks.always_the_same():
            return OpenVlaNetwork(sizes)
    from transformers.initialization import no_init_weights

    with no_init_weights():
        network = OpenVlaNetwork(sizes)
    _load(network, folder)
    return network


def tokenizer(folder: Path | None) -> Any:
    """The folder's, or one whose tokens are bytes."""
    from tokenizers import Tokenizer

    if folder is not None:
        return Tokenizer.from_file(str(folder / pretrained.TOKENIZER))
    return networks.byte_tokenizer(networks.byte_tokens(_SPECIAL))


def space_token(tokens: Any) -> int:
    """The id of the space that stands between prompt and actions. Raises InputError."""
    found: int | None = tokens.token_to_id(_SPACE)
    if found is None:
        raise InputError(f"{pretrained.TOKENIZER}: has no token {_SPACE}, expected Llama's; copy the folder anew")
    return found


def choose_trained(network: OpenVlaNetwork, trained: Trained, rank: int) -> None:
    """Set requires_grad of all parameters. Adapters come to all linear layers but the head."""
    if trained == "all":
        return
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]
    network.requires_grad_(False)
    networks.add_adapters(network, linear, rank)


def places(shapes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Published name -> our names, to which equal parts of that weight go, for all that the network needs. shapes: the
    names that there are, which tell how deep the network is."""

    def modules(published: str, ours: Mapping[str, list[str]]) -> dict[str, list[str]]:
        return {
            f"{published}{name}.{kind}": [f"{place}.{kind}" for place in found]
            for name, found in ours.items()
            for kind in ("weight", "bias")
        }

    result = modules("projector.", {name: [f"projector.{name}"] for name in ("fc1", "fc2", "fc3")})
    result |= modules(_DINO, {"patch_embed.proj": ["dino.embeddings.patch_embeddings.projection"]})
    result |= modules(_SIGLIP, {"patch_embed.proj": ["siglip.embeddings.patch_embedding"]})
    result[_DINO + "cls_token"] = ["dino.embeddings.cls_token"]
    result[_DINO + "reg_token"] = ["dino.embeddings.register_tokens"]
    result[_DINO + "pos_embed"] = [_DINO_POSITIONS]
    result[_SIGLIP + "pos_embed"] = ["siglip.embeddings.position_embedding.weight"]
    # At least one, so that what is missing is named where there is none; the last block is not run.
    for block in range(max(1, _count(shapes, _DINO + "blocks.") - 1)):
        ours = f"dino.encoder.layer.{block}."
        result |= modules(f"{_DINO}blocks.{block}.", _within(ours, _DINO_BLOCK))
        for number in (1, 2):
            result[f"{_DINO}blocks.{block}.ls{number}.scale_factor"] = [f"{ours}layer_scale{number}.lambda1"]
    for block in range(max(1, _count(shapes, _SIGLIP + "blocks.") - 1)):
        result |= modules(f"{_SIGLIP}blocks.{block}.", _within(f"siglip.encoder.layers.{block}.", _SIGLIP_BLOCK))
    for layer in range(max(1, _count(shapes, _LLAMA + "model.layers."))):
        for name in _LLAMA_LAYER:
            result[f"{_LLAMA}model.layers.{layer}.{name}.weight"] = [f"language.layers.{layer}.{name}.weight"]
    for name in ("embed_tokens", "norm"):
        result[f"{_LLAMA}model.{name}.weight"] = [f"language.{name}.weight"]
    result[_LLAMA + "lm_head.weight"] = ["lm_head.weight"]
    return result


def write(network: OpenVlaNetwork, source: Path, folder: Path) -> None:
    """A folder in the published layout, file by file as the one that the network came from: weights that it does not
    have, those of the last blocks, are that one's. Adapters are merged before."""
    ours = dict(network.named_parameters())
    known = places(pretrained.weight_shapes(source))
    for file in pretrained.weight_files(source):
        with safe_open(file, framework="pt") as weights:
            about = weights.metadata()
            state = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
        for name in state.keys() & known.keys():
            parts = [ours[place].detach().cpu() for place in known[name] if place in ours]
            if len(parts) == len(known[name]):
                if known[name] == [_DINO_POSITIONS]:
                    parts = [parts[0][:, 1:]]  # timm adds none to the class token
                state[name] = torch.cat(parts).reshape(state[name].shape).contiguous()
        save_file(state, folder / file.name, metadata=about)
    if (source / pretrained.INDEX).is_file():
        shutil.copyfile(source / pretrained.INDEX, folder / pretrained.INDEX)
    pretrained.copy_others(source, folder)


def _load(network: OpenVlaNetwork, folder: Path) -> None:
    ours = dict(network.named_parameters())
    known, missing = places(pretrained.weight_shapes(folder)), set(ours)
    with torch.no_grad():
        for file in pretrained.weight_files(folder):
            with safe_open(file, framework="pt") as weights:
                for name in sorted(known.keys() & set(weights.keys())):
                    parts = weights.get_tensor(name).chunk(len(known[name]))
                    for place, part in zip(known[name], parts, strict=False):
                        if place == _DINO_POSITIONS:
                            # timm adds none to the class token.
                            part = F.pad(part, (0, 0, 1, 0))
                        if place not in ours or part.numel() != ours[place].numel():
                            raise InputError(
                                f"{file}: {name} has the shape {list(part.shape)}, which does not fit config.json; "
                                "copy the folder anew"
                            )
                        ours[place].copy_(part.reshape(ours[place].shape))
                        missing.discard(place)
    if missing:
        raise InputError(
            f"{folder}: has no weights for {len(missing)} places, first {min(missing)}, which does not fit "
            "config.json; copy the folder anew"
        )


def _within(prefix: str, block: Mapping[str, list[str]]) -> dict[str, list[str]]:
    return {name: [prefix + place for place in found] for name, found in block.items()}


def _count(names: Mapping[str, Any], prefix: str) -> int:
    """How many numbered parts there are, by the largest number."""
    numbers = [name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)]
    return max((int(number) + 1 for number in numbers if number.isdecimal()), default=0)


def _pixel_statistics(folder: Path) -> tuple[list[list[float]], list[list[float]]]:
    """Mean and std of each encoder's pixels, as the folder's own preprocessing has them. Raises InputError."""
    file = folder / PREPROCESSOR
    about = pretrained.read_json(file)
    used = about.get("tvf_normalize_params") or []  # these are what it used, rounded to bfloat16 in the published ones
    try:
        pairs = used or [{"mean": mean, "std": std} for mean, std in zip(about["means"], about["stds"], strict=True)]
        numbers = torch.tensor([[pair["mean"], pair["std"]] for pair in pairs], dtype=torch.float64)
        if numbers.shape != (2, 2, 3) or not (numbers[:, 1] > 0).all():
            raise ValueError
    except (KeyError, TypeError, ValueError) as exc:
        raise InputError(
            f"{file}: has no mean and std of 3 channels for each of 2 encoders, expected an OpenVLA's; copy the folder "
            "anew"
        ) from exc
    return numbers[:, 0].tolist(), numbers[:, 1].tolist()
