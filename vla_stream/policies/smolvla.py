"""SmolVLA (arXiv 2506.01844) as LeRobot has it: the lower layers of a SmolVLM, and an action expert that looks at their
keys and values while it denoises.

    images ─ SigLIP ─┐
    words, state ────┴ SmolVLM ─ keys and values, once per observation ┐
    x at time t ─ action expert ───────────────────────────────────────┴ velocity ─ x at t − δ, K times

Without `checkpoint` it is a random network of 240 k parameters, the same each time, for tests.

# B rows, N prefix tokens, C actions of the network, D padded action dims
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.policies import lerobot, networks
from vla_stream.policies.flow_policy import Sizes, padded
from vla_stream.policies.vlm_inputs import Prompts

_SPECIAL = {  # what SmolVLM's processor asks a tokenizer for, and the names of the tokens
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
_PAD = "<pad>"
_TINY_IMAGE = 32


class SmolVla(lerobot.LeRobotPolicy):
    """The policy: the network, preprocessing, a value head, and log-probs."""

    label = "smolvla"

    class Options(lerobot.LeRobotOptions):
        """Options of `policy.options` when `policy.name` is smolvla."""

        kind = "smolvla"
        vlm_kind = "smolvlm"

    def __init__(self, options: SmolVla.Options, specification: Specification, chunk: int) -> None:
        """Raises InputError for an environment or a chunk that the network or the statistics do not fit."""
        from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

        if options.checkpoint is None:
            config = SmolVLAConfig(device="cpu", chunk_size=chunk, n_action_steps=chunk, num_vlm_layers=2)
            config.resize_imgs_with_padding = (_TINY_IMAGE, _TINY_IMAGE)
            lerobot.tiny_features(config, specification)
        else:
            config = lerobot.read_config(SmolVLAConfig, options.checkpoint)
        config.load_vlm_weights = config.compile_model = False
        config.train_expert_only = config.freeze_vision_encoder = options.train != "all"
        config.train_state_proj = True
        with _vlm_folder(options.vlm if options.checkpoint else None) as vlm:
            config.vlm_model_name = str(vlm)
            width = int(_hidden_size(vlm) * config.expert_width_multiplier)
            sizes = Sizes(config.chunk_size, config.max_action_dim, config.max_state_dim, width)
            super().__init__(options, specification, chunk, sizes, config)
            # Minutes: what can be wrong has been looked at before.
            self.policy = _build(config, options.checkpoint)
            tokenizer = lerobot.tokenizer(vlm)
        self._prompts = Prompts(tokenizer, (), options.words, 0, _sentence)
        model = self.policy.model
        language, expert = model.vlm_with_expert.get_vlm_model().text_model, model.vlm_with_expert.lm_expert
        # Keys and values are all that the expert sees of the last layer.
        adapted = lerobot.projections(self.policy, (language, expert), (language.layers[-1].self_attn.q_proj,))
        always = (model.action_in_proj, model.action_out_proj, model.action_time_mlp_in, model.action_time_mlp_out)
        self.close_lerobot(options, adapted, (*always, model.state_proj))

    def _prefix(self, observations: Observations) -> lerobot.Prefix:
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        ids, mask = map(self.host, self._prompts(observations.instruction))
        state = padded(self._normalised_state(observations), self._config.max_state_dim)
        model = self.policy.model
        with self.autocast():
            images, present = self.policy.prepare_images(self._images(observations))
            embeddings, there, turns = model.embed_prefix(images, present, ids, mask.bool(), state=state)
            _, cache = model.vlm_with_expert.forward(
                attention_mask=make_att_2d_masks(there, turns),
                position_ids=there.cumsum(dim=1) - 1,
                past_key_values=None,
                inputs_embeds=[embeddings, None],
                use_cache=True,
            )
        return lerobot.Prefix(cache, there)


@contextmanager
def _vlm_folder(given: Path | None) -> Iterator[Path]:
    """The folder that LeRobot reads the vision-language model's config from: one is made for a tiny model."""
    if given is not None:
        yield given
        return
    from transformers import (
        PreTrainedTokenizerFast,
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
        SmolVLMVideoProcessor,
    )

    tokens = networks.byte_tokens([_PAD, *_SPECIAL.values()])
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    language = {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": tokens.index(_PAD)}
    vision = {"model_type": "smolvlm_vision", "image_size": _TINY_IMAGE, "patch_size": 8}
    config = SmolVLMConfig(
        text_config=layers | language | {"hidden_size": 64, "intermediate_size": 128, "vocab_size": len(tokens)},
        vision_config=layers | vision | {"hidden_size": 32, "intermediate_size": 64},
        scale_factor=2,
        image_token_id=tokens.index(_SPECIAL["image_token"]),
        pad_token_id=tokens.index(_PAD),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=networks.byte_tokenizer(tokens), pad_token=_PAD, extra_special_tokens=_SPECIAL
    )
    with TemporaryDirectory(prefix="vla-stream-") as folder:
        config.save_pretrained(folder)
        SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(folder)
        yield Path(folder)


def _build(config: Any, folder: Path | None) -> Any:
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    with networks.always_the_same():
        policy = SmolVLAPolicy(config)
    if folder is not None:
        lerobot.load_weights(policy, folder)
    return policy


def _hidden_size(vlm: Path) -> int:
    from transformers import AutoConfig

    size: int = AutoConfig.from_pretrained(vlm, local_files_only=True).text_config.hidden_size
    return size


def _sentence(text: str) -> str:
    """As LeRobot gives it to SmolVLA."""
    return text if text.endswith("\n") else text + "\n"
