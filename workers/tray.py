"""Where a generator's next batch lies while it fills: observations are read from /dev/shm straight to their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vla_stream.broker.codec import ALIGNMENT, layout
from vla_stream.broker.lanes import PayloadReader
from vla_stream.environments.protocol import Observations
from vla_stream.errors import BadMessage
from vla_stream.streams.obs_requests import ObsRequest
from vla_stream.streams.observations import checked_observations, unpack_observations

STATE, IMAGE = "state", "image."


class Tray:
    """Room for `rows` rows of one shape, that of the first observations which come."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._arrays: dict[str, np.ndarray] = {}  # by their names in a packet
        self._landed: list[Observations] = []
        self._filled = 0

    def another(self) -> Tray:
        """An empty one like it. What lies in this one stays there."""
        tray = Tray(self.rows)
        tray._arrays = {name: np.empty_like(array) for name, array in self._arrays.items()}
        return tray

    def read(self, reader: PayloadReader, request: ObsRequest) -> Observations:
        """What a request shows, in the next rows if it has a place here. Raises what `reader.read` does, BadMessage."""
        if request.payload is None and (landed := self._land(reader, request.ref, request.n)) is not None:
            return landed
        data = request.payload if request.payload is not None else reader.read(request.ref)
        observations = unpack_observations(data, request.n)
        if not self._arrays:
            shown = {IMAGE + camera: image for camera, image in observations.images.items()}
            for name, array in (shown | {STATE: observations.state}).items():
                self._arrays[name] = np.empty((self.rows, *array.shape[1:]), array.dtype)
        return observations

    def joined(self, parts: Sequence[Observations], size: int) -> Observations:
        """These parts as one, padded to `size` rows: any valid input will do, so by the last one. Without a copy where
        they lie here one after the other, and no other part has to give way to the padding."""
        rows = sum(map(len, parts))
        here = len(parts) <= len(self._landed) and all(a is b for a, b in zip(parts, self._landed, strict=False))
        if not here or (rows < size and len(parts) < len(self._landed)):
            padding = [parts[-1].take([-1] * (size - rows))] if size > rows else []
            return Observations.concatenate([*parts, *padding])
        for array in self._arrays.values():
            array[rows:size] = array[rows - 1]
        images = {name.removeprefix(IMAGE): array[:size] for name, array in self._arrays.items() if name != STATE}
        sentences = [sentence for part in parts for sentence in part.instruction]
        return Observations(images, self._arrays[STATE][:size], sentences + sentences[-1:] * (size - rows))

    def _land(self, reader: PayloadReader, reference: str, rows: int) -> Observations | None:
        """None where they have no place here: not in /dev/shm, of other shapes, or more than there is room."""
        views: dict[str, np.ndarray] = {}
        meta: dict[str, Any] = {}

        def arrange(head: bytes, packet_bytes: int) -> tuple[int, list[memoryview]] | None:
            try:
                described, found = layout(head, packet_bytes)
            except BadMessage:
                return None  # damaged, or too many words for a look at its head: the plain way tells
            if sorted(name for name, *_ in described) != sorted(self._arrays):
                return None
            places: list[memoryview] = []
            for name, dtype, shape, _ in described:
                ours = self._arrays[name]
                if ours.dtype != dtype or shape != (rows, *ours.shape[1:]):
                    return None
                view = views[name] = ours[self._filled : self._filled + rows]
                places.append(view.reshape(-1).view(np.uint8).data)
                places.append(memoryview(bytearray(-view.nbytes % ALIGNMENT)))
            meta.update(found)
            return described[0][3], places

        if not self._arrays or self._filled + rows > self.rows or not reader.read_into(reference, arrange):
            return None
        observations = checked_observations(views, meta, rows)
        self._landed.append(observations)
        self._filled += rows
        return observations
