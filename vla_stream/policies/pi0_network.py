"""transformers' PI0ForConditionalGeneration: from a checkpoint, or tiny; and which of its parameters are trained.

transformers and tokenizers are imported late: they take seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from vla_stream.errors import InputError
from vla_stream.policies import networks, pretrained

ARCHITECTURE = "pi0"  # as config.json names it

Trained = Literal["all", "expert", "lora"]

_SPECIAL = ("<pad>", "<eos>", "<bos>")  # 0, 1, 2, as in Gemma


def read_config(folder: Path | None, chunk: int) -> Any:
    """A PI0Config: that of a folder which pretrained.py checked, or of the tiny network for such chunks."""
    from transformers import PI0Config

    if folder is not None:
        return PI0Config.from_pretrained(folder, local_files_only=True)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    language = layers | {"num_key_value_heads": 1, "head_dim": 32}  # both share keys and values
    tokens = len(networks.byte_tokens(_SPECIAL))
    return PI0Config(
        vlm_config={
            "model_type": "paligemma",
            "image_token_id": tokens,
            "projection_dim": 64,
            "text_config": language
            | {"model_type": "gemma", "hidden_size": 64, "intermediate_size": 128, "vocab_size": tokens},
            "vision_config": layers
            | {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64}
            | {"image_size": 32, "patch_size": 8, "vision_use_head": False},
        },
        dit_config=language | {"model_type": "gemma", "hidden_size": 32, "intermediate_size": 64},
        chunk_size=chunk,
    )


def build(config: Any, folder: Path | None) -> Any:
    """The network with the weights of the folder, or with random ones, always the same. Raises InputError for missing
    weights."""
    from transformers import PI0ForConditionalGeneration

    if folder is None:
        with networks.always_the_same():
            return PI0ForConditionalGeneration(config)
    # float32 also where they were saved in bfloat16: there the steps of a small learning rate would round to nothing.
    network, about = PI0ForConditionalGeneration.from_pretrained(
        folder, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    lost = sorted(about["missing_keys"])
    if lost:
        raise InputError(f"{folder}: lacks {len(lost)} weights, first {lost[0]}, expected a whole π0; copy it anew")
    return network


def tokenizer(folder: Path | None) -> Any:
    """The folder's, or one whose tokens are bytes."""
    from tokenizers import Tokenizer

    if folder is not None:
        return Tokenizer.from_file(str(folder / pretrained.TOKENIZER))
    return networks.byte_tokenizer(networks.byte_tokens(_SPECIAL))


def choose_trained(network: Any, trained: Trained, lora_rank: int) -> None:
    """Set requires_grad of all the network's parameters; adds the adapters where they are what is trained.

    Never trained are the eight tensors that no gradient can reach: keys and values are all that the action expert sees
    of the language model's last layer."""
    language, expert = network.model.vlm.language_model, network.model.dit
    last = language.layers[-1]
    unseen = [last.self_attn.q_proj, last.self_attn.o_proj, last.mlp, last.post_attention_layernorm, language.norm]
    network.requires_grad_(trained == "all")
    if trained == "lora":
        layers = [module for part in (language, expert) for module in part.modules()]
        places = [
            name
            for name, module in network.named_modules()
            if name.endswith(("q_proj", "v_proj")) and module in layers and module not in unseen
        ]
        networks.add_adapters(network, places, lora_rank)
    network.embed_action_time.requires_grad_(True)
    network.action_out_proj.requires_grad_(True)
    if trained == "expert":
        expert.requires_grad_(True)
    for part in [*unseen, expert.embed_tokens]:
        part.requires_grad_(False)
