"""OpenVLA-OFT (arXiv 2502.19645) with words for actions: OpenVLA that says a whole chunk in one pass.

    <s> image prompt, H·A placeholders, </s> ─ Llama, everything sees everything ─ all words

The placeholders are zeros. A word depends on what is seen only, not on the words beside it, so the chunk's log-prob is
a sum of independent ones. Checkpoints with a regression head (L1) have no log-probs: only those that were fine-tuned
on words (`use_l1_regression False`) can be trained by a policy gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_stream.policies.openvla import OpenVla, Prefix, choose, positions


class OpenVlaOft(OpenVla):
    """The policy. Its options are those of openvla."""

    def _say(self, prefix: Prefix, normal: Tensor | None, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        outputs = self._all_at_once(prefix)
        logits = self.network.action_logits(outputs)
        return logits, choose(logits, normal, temperature), outputs[:, 0]

    def _outputs(self, prefix: Prefix, bins: Tensor) -> Tensor:
        return self._all_at_once(prefix)

    def _all_at_once(self, prefix: Prefix) -> Tensor:
        """Llama's outputs [B, H·A, W] where the words are said."""
        rows, length = prefix.mask.shape
        words = self._chunk * self._specification.action_dims
        end = torch.full((rows, 1), self.network.sizes.text.eos_token_id, device=prefix.mask.device)
        with self.autocast():
            after = F.pad(self.network.language.embed_tokens(end), (0, 0, words, 0))
            there = F.pad(prefix.mask, (0, words + 1), value=True)
            outcome = self.network.language(
                inputs_embeds=torch.cat([prefix.embeddings, after], dim=1),
                attention_mask=there[:, None, None, :].expand(-1, 1, there.shape[1], -1),
                position_ids=positions(prefix.mask, words + 1),
                use_cache=False,
            )
        # As in OpenVLA, the word after a token is said by that token.
        outputs: Tensor = outcome.last_hidden_state[:, length - 1 : length - 1 + words]
        return outputs.to(self.action_low.dtype)
