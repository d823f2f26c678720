"""Images that are drawn when somebody reads them: a frame costs a simulator far more than a step, and a policy looks at
one per action chunk."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from vla_stream.errors import EnvironmentFailed


class LateImages(Mapping[str, np.ndarray]):
    """{camera: u8[B, height, width, 3]} of one moment, all drawn at the first look, which must be before `expire`.

    simulator: its name, for the error of a look that comes too late."""

    def __init__(
        self, simulator: str, cameras: Collection[str], draw: Callable[[], Mapping[str, np.ndarray]] | None
    ) -> None:
        self._simulator, self._cameras, self._draw = simulator, cameras, draw
        self._images: Mapping[str, np.ndarray] | None = None

    def expire(self) -> None:
        """The simulator moves on: what was not looked at is gone."""
        self._draw = None

    def __getitem__(self, camera: str) -> np.ndarray:
        if camera not in self._cameras:
            raise KeyError(camera)
        if self._images is None:
            if self._draw is None:
                raise EnvironmentFailed(
                    f"{self._simulator}: an image is read after the next step or reset; read it before"
                )
            self._images = self._draw()
        return self._images[camera]

    def __iter__(self) -> Iterator[str]:
        return iter(self._cameras)

    def __len__(self) -> int:
        return len(self._cameras)
