"""π0.5 (arXiv 2504.16054) as LeRobot has it: a PaliGemma that also reads the state, as numbers in its sentence, and an
action expert whose norms depend on the time.

    images ─ SigLIP ──────┐
    words, state in bins ─┴ PaliGemma ─ keys and values, once per observation ┐
    x at time t ─ action expert ──────────────────────────────────────────────┴ velocity ─ x at t − δ, K times

Without `checkpoint` it is a random network of 160 k parameters, the same each time, for tests.

# B rows, N prefix tokens, S state dims, C actions of the network, D padded action dims
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field
from torch import nn

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.policies import lerobot, networks
from vla_stream.policies.flow_policy import Sizes
from vla_stream.policies.vlm_inputs import Prompts

_SPECIAL = ("<pad>", "<eos>", "<bos>")  # 0, 1, 2, as in Gemma
_PAD, _BOS = 0, 2
_STATE_BINS = 256  # of -1 … 1
_TINY_IMAGE = 32


class Pi05(lerobot.LeRobotPolicy):
    """The policy: the network, preprocessing, a value head, and log-probs."""

    label = "pi05"

    class Options(lerobot.LeRobotOptions):
        """Options of `policy.options` when `policy.name` is pi05."""

        kind = "pi05"

        words: int = Field(default=200, ge=2, description="Tokens of instruction and state that are read.")

    def __init__(self, options: Pi05.Options, specification: Specification, chunk: int) -> None:
        """Raises InputError for an environment or a chunk that the network or the statistics do not fit."""
        from lerobot.policies.pi05 import modeling_pi05
        from lerobot.policies.pi05.configuration_pi05 import PI05Config

        with ExitStack() as stack:
            if options.checkpoint is None:
                stack.enter_context(_tiny_sizes(modeling_pi05))
                config = PI05Config(device="cpu", chunk_size=chunk, n_action_steps=chunk)
                config.image_resolution = (_TINY_IMAGE, _TINY_IMAGE)
                lerobot.tiny_features(config, specification)
                tokenizer = networks.byte_tokenizer(networks.byte_tokens(_SPECIAL))
            else:
                config = lerobot.read_config(PI05Config, options.checkpoint)
                assert options.vlm is not None  # as Options asks for beside a checkpoint
                tokenizer = lerobot.tokenizer(options.vlm)
            config.dtype, config.compile_model, config.gradient_checkpointing = "float32", False, False
            config.train_expert_only = config.freeze_vision_encoder = options.train != "all"
            width = modeling_pi05.get_gemma_config(config.action_expert_variant).width
            # The state is text: any number of dims is read.
            sizes = Sizes(config.chunk_size, config.max_action_dim, specification.state_dims, width)
            super().__init__(options, specification, chunk, sizes, config)
            # Minutes: what can be wrong has been looked at before.
            self.policy = _build(modeling_pi05.PI05Policy, config, options.checkpoint)
        self._prompts = Prompts(tokenizer, (_BOS,), options.words, _PAD, str)
        model = self.policy.model
        both = model.paligemma_with_expert
        language, expert = both.paligemma.model.language_model, both.gemma_expert.model
        for part in (language, expert):
            part.config._attn_implementation = "eager"  # as LeRobot's own sampling has it
        # Keys and values are all that the expert sees of the last layer.
        last = language.layers[-1]
        for part in (
            last.self_attn.q_proj,
            last.self_attn.o_proj,
            last.mlp,
            last.post_attention_layernorm,
            language.norm,
        ):
            part.requires_grad_(False)
        adapted = lerobot.projections(self.policy, (language, expert), (last.self_attn.q_proj,))
        always = (model.action_in_proj, model.action_out_proj, model.time_mlp_in, model.time_mlp_out)
        self.close_lerobot(options, adapted, always)

    def _prefix(self, observations: Observations) -> lerobot.Prefix:
        from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d

        ids, mask = map(self.host, self._prompts(self._sentences(observations)))
        model = self.policy.model
        with self.autocast():
            images, present = self.policy._preprocess_images(self._images(observations))
            embeddings, there, turns = model.embed_prefix(images, present, ids, mask.bool())
            _, cache = model.paligemma_with_expert.forward(
                attention_mask=prepare_attention_masks_4d(make_att_2d_masks(there, turns)),
                position_ids=there.cumsum(dim=1) - 1,
                past_key_values=None,
                inputs_embeds=[embeddings, None],
                use_cache=True,
            )
        return lerobot.Prefix(cache, there)

    def _sentences(self, observations: Observations) -> list[str]:
        """As openpi writes task and state for π0.5."""
        state = (observations.state - self.state_mean.cpu().numpy()) / self.state_std.cpu().numpy()
        bins = np.digitize(state, np.linspace(-1, 1, _STATE_BINS + 1)[:-1]) - 1
        tasks = [sentence.strip().replace("_", " ").replace("\n", " ") for sentence in observations.instruction]
        return [
            f"Task: {task}, State: {' '.join(map(str, row))};\nAction: " for task, row in zip(tasks, bins, strict=True)
        ]


def _build(cls: Any, config: Any, folder: Path | None) -> Any:
    with networks.always_the_same():
        policy = cls(config)
        for module in policy.modules():
            # LeRobot begins with expert layers that add nothing: a test of what they do would see nothing.
            if getattr(module, "cond_dim", None) is not None:
                nn.init.normal_(module.dense.weight, std=0.05)
    # They make words, of which there are none.
    policy.model.paligemma_with_expert.paligemma.lm_head = nn.Identity()
    policy.model.paligemma_with_expert.gemma_expert.lm_head = nn.Identity()
    if folder is not None:
        lerobot.load_weights(policy, folder)
    return policy


@contextmanager
def _tiny_sizes(module: Any) -> Iterator[None]:
    """LeRobot's classes know two sizes; within, all that they make is tiny."""
    tokens = len(networks.byte_tokens(_SPECIAL))
    made = {
        name: getattr(module, name) for name in ("PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")
    }
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}

    def paligemma(config: Any) -> Any:
        config.text_config.vocab_size = config.image_token_id = config._vocab_size = tokens
        for name, value in (vision | {"patch_size": 8, "projection_dim": 64}).items():
            setattr(config.vision_config, name, value)
        config.projection_dim = 64
        return made["PaliGemmaForConditionalGenerationWithPiGemma"](config=config)

    def gemma(config: Any) -> Any:
        config.vocab_size = tokens
        return made["PiGemmaForCausalLM"](config=config)

    sizes = {"gemma_2b": (64, 128), "gemma_300m": (32, 64)}  # of the language model and the expert

    def layers(variant: str) -> Any:
        width, inner = sizes[variant]
        return module.GemmaConfig(width=width, depth=2, mlp_dim=inner, num_heads=2, num_kv_heads=1, head_dim=32)

    with ExitStack() as stack:
        for name, value in (
            ("PaliGemmaForConditionalGenerationWithPiGemma", paligemma),
            ("PiGemmaForCausalLM", gemma),
            ("get_gemma_config", layers),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield
