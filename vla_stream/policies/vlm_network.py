"""Vision-language models of transformers, from a folder or tiny: what each family wants to be given.

A model of another family needs two things here: in `read_config` a small one, for tests, and in `eyes` how it takes
images. transformers is imported late: it takes seconds.

# B rows, n cameras, s side of an image
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vla_stream.errors import InputError
from vla_stream.policies import networks, pretrained

Family = Literal["smolvlm", "paligemma", "qwen2_5_vl"]  # as config.json names them
FAMILIES = get_args(Family)

Trained = Literal["all", "lora"]

_SPECIAL = ("<pad>", "<eos>", "<bos>", "<image>", "<image starts>", "<image ends>", "<video>")
_PAD, _EOS, _BOS, _IMAGE, _STARTS, _ENDS, _VIDEO = range(len(_SPECIAL))
# Qwen's pixels, as its processor normalises them.
_QWEN_MEAN, _QWEN_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class Eyes:
    """How a model takes images: their side, the token ids of one, and what it is given besides ids and mask: from
    pixels [B, n, 3, s, s] in [-1, 1], token ids i64[B, N] and mask i64[B, N]."""

    size: int
    image_ids: list[int]
    inputs: Callable[[Tensor, Tensor, Tensor], dict[str, Tensor]]


def read_config(folder: Path | None, family: Family) -> Any:
    """A model's config: that of a folder which pretrained.py checked, or of a tiny one of the family."""
    from transformers import AutoConfig

    if folder is not None:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    tokens = {"vocab_size": len(networks.byte_tokens(_SPECIAL)), "pad_token_id": _PAD}
    ends = {"eos_token_id": _EOS, "bos_token_id": _BOS}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    text = heads | tokens | ends | {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1}
    vision = heads | {"hidden_size": 32, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
    match family:
        case "smolvlm":
            parts = {
                "text_config": text | {"model_type": "llama", "num_key_value_heads": 1},
                "vision_config": vision | {"model_type": "smolvlm_vision", "initializer_range": 0.1},
                "scale_factor": 2,
            }
        case "paligemma":
            parts = {
                "text_config": text | {"model_type": "gemma", "num_key_value_heads": 1, "head_dim": 32},
                "vision_config": vision | {"model_type": "siglip_vision_model", "vision_use_head": False},
                "projection_dim": 64,
            }
        case "qwen2_5_vl":
            axes = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
            parts = {
                "text_config": text
                | {"model_type": "qwen2_5_vl_text", "num_key_value_heads": 1, "rope_parameters": axes},
                "vision_config": {"depth": 2, "num_heads": 2, "hidden_size": 32, "intermediate_size": 64}
                | {"patch_size": 8, "window_size": 32, "out_hidden_size": 64, "fullatt_block_indexes": [1]},
                "vision_start_token_id": _STARTS,
                "vision_end_token_id": _ENDS,
                "video_token_id": _VIDEO,
            }
    return AutoConfig.for_model(family, image_token_id=_IMAGE, **parts)


def build(config: Any, folder: Path | None) -> Any:
    """The model without its language head, with the weights of the folder, or with random ones, always the same. Raises
    InputError for missing weights."""
    from transformers import AutoModel

    if folder is None:
        with networks.always_the_same():
            return AutoModel.from_config(config)
    # float32 also where they were saved in bfloat16: there the steps of a small learning rate would round to nothing.
    network, about = AutoModel.from_pretrained(
        folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    lost = sorted(about["missing_keys"])
    if lost:
        raise InputError(f"{folder}: lacks {len(lost)} weights, first {lost[0]}, expected a whole model; copy it anew")
    return network


def tokenizer(folder: Path | None) -> Any:
    """The folder's, or one whose tokens are bytes."""
    from tokenizers import Tokenizer

    if folder is not None:
        return Tokenizer.from_file(str(folder / pretrained.TOKENIZER))
    return networks.byte_tokenizer(networks.byte_tokens(_SPECIAL))


def choose_trained(network: nn.Module, trained: Trained, rank: int) -> None:
    """Set requires_grad of all parameters. Adapters come to all linear layers."""
    if trained == "all":
        return
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    network.requires_grad_(False)
    networks.add_adapters(network, linear, rank)


def eyes(config: Any, image_size: int | None) -> Eyes:
    """How a model of this config takes images; image_size where it takes any. Raises InputError."""
    vision, image = config.vision_config, config.image_token_id
    match config.model_type:
        case "smolvlm":
            patches = (vision.image_size // vision.patch_size // config.scale_factor) ** 2

            def for_smolvlm(pixels: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
                return {"pixel_values": pixels, "position_ids": _positions(mask)}

            found = Eyes(vision.image_size, [image] * patches, for_smolvlm)
        case "paligemma":
            patches = (vision.image_size // vision.patch_size) ** 2

            def for_paligemma(pixels: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
                # Its positions begin with 1, and what has the type 0 sees each other both ways.
                seen = {"position_ids": _positions(mask) + 1, "token_type_ids": torch.zeros_like(ids)}
                return {"pixel_values": pixels.flatten(0, 1)} | seen

            found = Eyes(vision.image_size, [image] * patches, for_paligemma)
        case "qwen2_5_vl":
            size, merged = image_size or 224, vision.patch_size * vision.spatial_merge_size
            if size % merged:
                raise InputError(
                    f"policy.options.image_size is {size}, expected a multiple of {merged}, which this model can cut "
                    f"into patches; give {max(1, round(size / merged)) * merged}"
                )
            grid = size // vision.patch_size
            ids_of_one = [config.vision_start_token_id, *[image] * (size // merged) ** 2, config.vision_end_token_id]

            def for_qwen(pixels: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
                images = pixels.flatten(0, 1)
                grids = torch.tensor([[1, grid, grid]], device=images.device).expand(len(images), -1)
                return {
                    "pixel_values": _qwen_patches(images, vision),
                    "image_grid_thw": grids,
                    "mm_token_type_ids": (ids == image).int(),
                }

            found = Eyes(size, ids_of_one, for_qwen)
        case other:
            raise InputError(f"model_type is {other!r:.60}, expected one of {', '.join(FAMILIES)}; add it to eyes()")
    if image_size not in (None, found.size):
        raise InputError(
            f"policy.options.image_size is {image_size}, but this model takes {found.size}; leave it out, or choose a "
            "model that takes any"
        )
    return found


def _positions(mask: Tensor) -> Tensor:
    """Positions i64[B, N] from 0: padding takes none."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def _qwen_patches(images: Tensor, vision: Any) -> Tensor:
    """Images [B, 3, s, s] in [-1, 1] as rows of numbers, one for each patch, in the order in which they are merged. A
    still image is repeated where a film would have further frames."""
    mean, std = (images.new_tensor(numbers)[:, None, None] for numbers in (_QWEN_MEAN, _QWEN_STD))
    patch, merge = vision.patch_size, vision.spatial_merge_size
    count = images.shape[-1] // (patch * merge)
    cells = ((images + 1) / 2 - mean).div(std).reshape(-1, 3, count, merge, patch, count, merge, patch)
    ordered = cells.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    frames = ordered.expand(*[-1] * 6, vision.temporal_patch_size, -1, -1)
    return frames.reshape(len(images) * (count * merge) ** 2, -1)
