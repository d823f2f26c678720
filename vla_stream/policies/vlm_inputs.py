"""What a vision-language model is given: cameras as one square size, sentences as token ids of one length.

One length, so that a row does not depend on what is said to others in its batch, and compiled shapes stay few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vla_stream.environments.protocol import Specification
from vla_stream.errors import InputError


def chosen_cameras(chosen: Sequence[str] | None, specification: Specification) -> list[str]:
    """Those of the option `cameras`, or all. Raises InputError for one that is not there, or if there is none."""
    cameras = list(specification.cameras if chosen is None else chosen)
    unknown = [camera for camera in cameras if camera not in specification.cameras]
    if unknown or not cameras:
        known = ", ".join(specification.cameras) or "none"
        raise InputError(
            f"policy.options.cameras: {unknown[0] if unknown else 'no camera'}, expected one or more of the "
            f"environment's: {known}; choose of these, or another environment"
        )
    return cameras


def fit_images(images: Tensor, size: int) -> Tensor:
    """From [B, h, w, 3] in 0 … 255 to [B, 3, size, size] in [-1, 1]: as large as fits, in the middle, on black."""
    pixels = images.permute(0, 3, 1, 2) / 255
    height, width = pixels.shape[-2:]
    if (height, width) != (size, size):
        scale = size / max(height, width)
        fitted = max(1, round(height * scale)), max(1, round(width * scale))
        pixels = F.interpolate(pixels, fitted, mode="bicubic", antialias=True).clamp(0, 1)
        above, left = (size - fitted[0]) // 2, (size - fitted[1]) // 2
        pixels = F.pad(pixels, (left, size - fitted[1] - left, above, size - fitted[0] - above))
    return pixels * 2 - 1


def stretch_images(images: Tensor, size: int) -> Tensor:
    """From [B, h, w, 3] in 0 … 255 to [B, 3, size, size] in [0, 1], whatever their proportions."""
    pixels = images.permute(0, 3, 1, 2) / 255
    if pixels.shape[-2:] != (size, size):
        pixels = F.interpolate(pixels, (size, size), mode="bicubic", antialias=True).clamp(0, 1)
    return pixels


def crop_centre(pixels: Tensor, share: float) -> Tensor:
    """The middle of square images [B, 3, size, size], `share` of their area, at the same size again."""
    size, half = pixels.shape[-1], share**0.5
    line = torch.linspace(-half, half, size, dtype=pixels.dtype, device=pixels.device)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), dim=-1)
    return F.grid_sample(pixels, grid.expand(len(pixels), -1, -1, -1), align_corners=True)


def for_paligemma(sentence: str) -> str:
    """As openpi writes it for PaliGemma: no underscore or line end within, one at the end."""
    return sentence.strip().replace("_", " ").replace("\n", " ") + "\n"


class Prompts:
    """Sentences as token ids, by a tokenizer of the `tokenizers` package.

    first: ids before the text (images, start of text); words: tokens of the text that are read; padding: its id;
    write: the text of a sentence; end: how each ends, which is kept where the text is too long; last: ids after it all
    """

    def __init__(
        self,
        tokenizer: Any,
        first: Sequence[int],
        words: int,
        padding: int,
        write: Callable[[str], str] = for_paligemma,
        end: str = "",
        last: Sequence[int] = (),
    ) -> None:
        self._tokenizer, self._words, self._padding, self._write = tokenizer, words, padding, write
        self._first, self._last = list(first), list(last)
        self._end = len(self._ids(end))
        self._cached = lru_cache(maxsize=4096)(self._encode)

    def __call__(self, sentences: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids i64[B, N], and 1 where there is one, 0 where there is padding: i64[B, N]."""
        ids, mask = zip(*(self._cached(sentence) for sentence in sentences), strict=True)
        return np.array(ids), np.array(mask)

    def save(self, file: Path) -> None:
        """The tokenizer, as tokenizer.json."""
        self._tokenizer.save(str(file))

    def _encode(self, sentence: str) -> tuple[list[int], list[int]]:
        ids = self._ids(self._write(sentence))
        if len(ids) > self._words:
            ids = ids[: self._words - self._end] + ids[len(ids) - self._end :]
        missing = self._words - len(ids)
        mask = [1] * (len(self._first) + len(ids)) + [0] * missing + [1] * len(self._last)
        return [*self._first, *ids, *[self._padding] * missing, *self._last], mask

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
