"""robomimic's HDF5 files, which LIBERO and RoboCasa publish, as a Source: data/demo_N/{obs/KEY, actions, …}.

A key is looked for in obs/ first, then beside it. The sentence is that of the demonstration (ep_meta) or of the whole
file (LIBERO's problem_info). A folder of files is read file after file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import h5py
import numpy as np

from vla_stream.errors import InputError
from vla_stream.learning.recordings import reading


class Hdf5Files:
    """See recordings.Source. Raises InputError for what is no such file."""

    cameras: ClassVar[tuple[str, ...]] = ("{}_image", "{}_rgb", "{}")
    state: ClassVar[tuple[str, ...]] = ()
    actions: ClassVar[tuple[str, ...]] = ("actions",)
    by_simulator: ClassVar[bool] = True

    def __init__(self, path: Path, most: int | None) -> None:
        self._files: list[Any] = []
        self._demos: list[tuple[Path, Any, str]] = []
        for file in [path] if path.is_file() else sorted(path.glob("*.hdf5")):
            if most is None or len(self._demos) < most:
                with reading(file):
                    self._open(file)
        self._demos = self._demos[:most]
        if not self._demos:
            raise InputError(f"{path}: holds no demonstrations, expected data/demo_0 and so on; give robomimic's file")
        first = {**_datasets(self._demos[0][1]), **_datasets(self._demos[0][1].get("obs", {}))}
        self.pictures: Mapping[str, tuple[int, int]] = {
            key: found.shape[1:3] for key, found in first.items() if found.dtype == np.uint8 and _is_image(found.shape)
        }
        self.numbers: Mapping[str, int] = {
            key: int(np.prod(found.shape[1:]))
            for key, found in first.items()
            if found.dtype.kind in "fiub" and 1 <= found.ndim <= 2
        }
        with reading(path):
            self.lengths: Sequence[int] = [len(_find(demo, self.actions[0])) for _, demo, _ in self._demos]
        self._begins = np.concatenate([[0], np.cumsum(self.lengths)])

    def read(self, key: str) -> np.ndarray:
        parts = []
        for (file, demo, _), length in zip(self._demos, self.lengths, strict=True):
            with reading(file):
                part = _find(demo, key)[()].reshape(length, self.numbers[key])
            parts.append(part)
        return np.concatenate(parts)

    def sentences(self) -> list[str]:
        told = (sentence for _, _, sentence in self._demos)
        return [sentence for sentence, length in zip(told, self.lengths, strict=True) for _ in range(length)]

    def look(self, key: str, moments: np.ndarray) -> Iterator[np.ndarray]:
        for moment in moments:
            episode = int(np.searchsorted(self._begins, moment, side="right")) - 1
            file, demo, _ = self._demos[episode]
            with reading(file):
                image: np.ndarray = _find(demo, key)[moment - self._begins[episode]]
                if image.shape != (*self.pictures[key], 3):
                    raise ValueError(f"{key} of {demo.name} has images of {image.shape}, not as the first")
            yield image

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _open(self, path: Path) -> None:
        file = h5py.File(path, "r", locking=False)  # a file system without locks is no hindrance to a reader
        self._files.append(file)
        data = file["data"]
        sentence = _sentence(data.attrs.get("problem_info"), "language_instruction")
        for name in sorted(data, key=lambda name: [int(number) for number in re.findall(r"[0-9]+", name)]):
            own = _sentence(data[name].attrs.get("ep_meta"), "lang")
            self._demos.append((path, data[name], own or sentence))


def _datasets(group: Any) -> dict[str, Any]:
    return {name: found for name, found in group.items() if isinstance(found, h5py.Dataset)}


def _find(demo: Any, key: str) -> Any:
    return demo["obs"][key] if key in demo.get("obs", {}) else demo[key]


def _is_image(shape: tuple[int, ...]) -> bool:
    return len(shape) == 4 and shape[3] == 3


def _sentence(attribute: Any, key: str) -> str:
    """What JSON text says, if it is there; LIBERO's is a text, or a list of its letters."""
    told = json.loads(attribute).get(key, "") if attribute else ""
    return "".join(told).strip()
