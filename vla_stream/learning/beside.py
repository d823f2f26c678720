"""On a GPU: passes that need weights and no gradient run beside the gradients that are still being computed.

In one stream they would wait for those, and the host with them: what it launches next would then come too late. On
other devices nothing is changed. Never run on a GPU so far.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Beside:
    """A second stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._weights: torch.cuda.Event | None = None

    def weights_moved(self) -> None:
        """To be called after each change of the weights: later passes wait for it."""
        if self._stream is not None:
            self._weights = torch.cuda.current_stream(self._stream.device).record_event()

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """What is launched in here needs nothing of the device's own stream but the weights; its results are read on
        the host before it is left."""
        if self._stream is None:
            yield
            return
        if self._weights is not None:
            self._stream.wait_event(self._weights)
        with torch.cuda.stream(self._stream):
            yield
