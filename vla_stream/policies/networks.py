"""What making a network of transformers has in common. transformers, tokenizers and peft are imported late: they take
seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_TINY_SEED = 0


@contextmanager
def always_the_same() -> Iterator[None]:
    """Random weights made within are the same each time, and nothing else draws other numbers for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_TINY_SEED)
        yield


def byte_tokens(special: Sequence[str]) -> list[str]:
    """Names of the tokens of a tiny network: special ones, then one for each byte."""
    from tokenizers import pre_tokenizers

    return [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]


def byte_tokenizer(tokens: Sequence[str]) -> Any:
    """A tokenizer with these tokens, whose texts are tokens of one byte each."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def add_adapters(network: nn.Module, places: Sequence[str], rank: int) -> None:
    """Low-rank adapters (arXiv 2106.09685) at the linear layers of these names; they are then all that is trained."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(places))
    inject_adapter_in_model(config, network)


def merge_adapters(network: nn.Module) -> None:
    """Add low-rank adapters to the weights beside which they are, and take them away."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(network.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, child = name.rpartition(".")
            setattr(network.get_submodule(parent), child, module.get_base_layer())


def halve_frozen(network: nn.Module) -> None:
    """Linear layers that are not trained take half the memory, where they would be rounded at every use anyway."""
    for module in network.modules():
        if isinstance(module, nn.Linear) and not any(parameter.requires_grad for parameter in module.parameters()):
            module.to(torch.bfloat16)


def layers(network: nn.Module) -> list[nn.Module]:
    """Those of all encoders and decoders in it, as transformers marks them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
