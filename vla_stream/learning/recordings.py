"""Demonstrations in formats of others (`pretrain.data`), imitated where they lie.

Of all moments the numbers are held in memory; an image is read when it is needed, and kept as long as there is room. So
a dataset may be as large as a disk. A format is a `Source`, one file each: lerobot_folder.py, hdf5_file.py.

Shape suffixes: N moments, H actions per chunk, A action dims.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from vla_stream import plugins, tasks
from vla_stream.environments.protocol import Observations, Recorded, Specification
from vla_stream.environments.spaces import scaled
from vla_stream.errors import InputError
from vla_stream.pretrain import Data

if TYPE_CHECKING:
    from vla_stream.config import Config

KEPT_BYTES = 1 << 30  # of images that were read
SLACK = 0.01  # of the action range, by which actions may leave it: they are clipped


class Source(Protocol):
    """One format: N moments, episode after episode, in files that stay where they are.

    cameras, state, actions: keys to try where the config names none, {} for the camera's name.
    by_simulator: whether the files are the simulator's own, whose keys and conventions its environment knows.
    lengths: moments of each episode; numbers: key → how many there are per moment; pictures: key → (height, width).
    """

    cameras: ClassVar[tuple[str, ...]]
    state: ClassVar[tuple[str, ...]]
    actions: ClassVar[tuple[str, ...]]
    by_simulator: ClassVar[bool]
    lengths: Sequence[int]
    numbers: Mapping[str, int]
    pictures: Mapping[str, tuple[int, int]]

    def read(self, key: str) -> np.ndarray:
        """The numbers of all moments, [N, numbers[key]]. Raises InputError."""

    def sentences(self) -> Sequence[str]:
        """What the robot was told at each moment; empty where the files do not say."""

    def look(self, key: str, moments: np.ndarray) -> Iterator[np.ndarray]:
        """The images u8[height, width, 3] of these moments, i64[n] in rising order. Raises InputError."""

    def close(self) -> None: ...


class Recordings:
    """What a warm start imitates: a Source, as the environment would show it."""

    def __init__(
        self,
        data: Data,
        source: Source,
        known: Recorded | None,
        chunk: int,
        specification: Specification,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """known: what the environment says of its simulator's files. Raises InputError where both do not fit."""
        known = known if known is not None and source.by_simulator else Recorded()
        self._data, self._source, self._chunk, self._specification = data, source, chunk, specification
        self._turned = known.turned if data.turned is None else data.turned
        self._keys = {camera: self._camera_key(camera, known) for camera in specification.cameras}
        self.state = self._read_state(known)
        self._actions = self._read_actions(known)
        lengths = np.asarray(source.lengths)
        self._ends = np.repeat(lengths.cumsum(), lengths)
        self._sentences = [data.instruction] * len(self) if data.instruction else list(source.sentences())
        if not all(self._sentences):
            raise InputError(
                f"{data.path}: does not say what the robot was told, expected a sentence for each episode; set "
                "pretrain.data.instruction"
            )
        self._kept: dict[tuple[str, int], np.ndarray] = {}
        self._room_bytes = kept_bytes
        self.episodes = len(source.lengths)
        self.successes: int | None = None
        for camera in self._keys:
            self._images(camera, np.zeros(1, dtype=np.int64))  # a file that is missing or damaged is told at once

    def __len__(self) -> int:
        return len(self._actions)

    def take(self, rows: np.ndarray) -> tuple[Observations, np.ndarray, np.ndarray]:
        """See cloning.Demonstrated. Raises InputError for an image that cannot be read."""
        rows = np.asarray(rows, dtype=np.int64)
        index, ends = rows[:, None] + np.arange(self._chunk), self._ends[rows][:, None]
        valid = index < ends
        actions = self._actions[np.minimum(index, ends - 1)] * valid[:, :, None]
        images = {camera: self._images(camera, rows) for camera in self._keys}
        return Observations(images, self.state[rows], [self._sentences[row] for row in rows]), actions, valid

    def close(self) -> None:
        self._source.close()

    def _images(self, camera: str, rows: np.ndarray) -> np.ndarray:
        """u8[n, height, width, 3] in the environment's size."""
        wanted = {row: self._kept.get((camera, row)) for row in map(int, rows)}
        missing = sorted(row for row, image in wanted.items() if image is None)
        for row, raw in zip(missing, self._source.look(self._keys[camera], np.array(missing)), strict=True):
            image = scaled(raw[::-1, ::-1] if self._turned else raw, self._specification.cameras[camera])
            wanted[row] = image
            if self._room_bytes >= image.nbytes:
                self._room_bytes -= image.nbytes
                self._kept[camera, row] = np.ascontiguousarray(image)
        return np.stack([wanted[row] for row in map(int, rows)])  # type: ignore[misc]

    def _camera_key(self, camera: str, known: Recorded) -> str:
        data, source, size = self._data, self._source, self._specification.cameras[camera]
        tried = [pattern.format(camera) for pattern in source.cameras]
        if data.images is not None:
            tried = [data.images[camera]] if camera in data.images else []
        elif camera in known.images:
            tried = [known.images[camera]]
        key = next((key for key in tried if key in source.pictures), None)
        if key is None:
            raise InputError(
                f"{data.path}: has no image {' or '.join(tried) or 'for it'}, but the environment has the camera "
                f"{camera}; set pretrain.data.images to camera: key, it has {_shown(source.pictures)}"
            )
        if source.pictures[key] != size and not data.resize:
            raise InputError(
                f"{data.path}: {key} is {_size(source.pictures[key])} pixels, but the camera {camera} of the "
                f"environment {_size(size)}; give the environment the same size, or set pretrain.data.resize to true"
            )
        return key

    def _read_state(self, known: Recorded) -> np.ndarray:
        data, source, dims = self._data, self._source, self._specification.state_dims
        first = [key for key in source.state if key in source.numbers][:1]
        keys = list(data.state if data.state is not None else known.state or (first if dims else ()))
        self._check_numbers(keys, "state")
        found = sum(source.numbers[key] for key in keys)
        if found != dims:
            raise InputError(
                f"{data.path}: state is {found} numbers ({_shown({key: source.numbers[key] for key in keys})}), but "
                f"this run's environment has {dims}; choose others of {_shown(source.numbers)} in pretrain.data.state"
            )
        parts = [self._read(key) for key in keys]
        return np.concatenate(parts, axis=1) if parts else np.zeros((sum(source.lengths), 0), np.float32)

    def _read_actions(self, known: Recorded) -> np.ndarray:
        data, source, specification = self._data, self._source, self._specification
        key = data.actions or next((key for key in source.actions if key in source.numbers), source.actions[0])
        self._check_numbers([key], "actions")
        if source.numbers[key] != specification.action_dims:
            raise InputError(
                f"{data.path}: {key} is {source.numbers[key]} numbers, but this run's environment takes "
                f"{specification.action_dims}; give data of this robot and controller, or another pretrain.data.actions"
            )
        raw = self._read(key)
        actions = (raw * np.asarray(known.action_scale) + np.asarray(known.action_offset)).astype(np.float32)
        low, high = specification.action_low, specification.action_high
        beyond = np.maximum(low - actions, actions - high).max(axis=0)
        worst = int(beyond.argmax())
        if beyond[worst] > SLACK * (high - low):
            lowest, highest = actions[:, worst].min(), actions[:, worst].max()
            raise InputError(
                f"{data.path}: number {worst} of {key} goes from {lowest:.4g} to {highest:.4g}, but actions of this "
                f"run's environment lie between {low:g} and {high:g}; give data of this controller"
            )
        clipped: np.ndarray = actions.clip(low, high)
        return clipped

    def _check_numbers(self, keys: Sequence[str], option: str) -> None:
        for key in keys:
            if key not in self._source.numbers:
                raise InputError(
                    f"{self._data.path}: has no numbers {key}, expected those of pretrain.data.{option}; "
                    f"it has {_shown(self._source.numbers)}"
                )

    def _read(self, key: str) -> np.ndarray:
        numbers = self._source.read(key).astype(np.float32)
        expected = (sum(self._source.lengths), self._source.numbers[key])
        if numbers.shape != expected:
            raise InputError(f"{self._data.path}: {key} has shape {numbers.shape}, expected {expected}; write it anew")
        if not np.isfinite(numbers).all():
            raise InputError(f"{self._data.path}: {key} holds numbers that are not finite; leave those episodes out")
        return numbers


def open_recordings(config: Config, specification: Specification) -> Recordings:
    """`pretrain.data` of a config, for an environment of these shapes. Raises InputError where both do not fit."""
    assert config.pretrain is not None and config.pretrain.data is not None
    data = config.pretrain.data
    source = open_source(data)
    try:
        return Recordings(data, source, _known(config), config.policy.chunk, specification)
    except BaseException:
        source.close()
        raise


def open_source(data: Data) -> Source:
    """The format that lies there. Raises InputError."""
    path = data.path
    if not path.exists():
        raise InputError(f"pretrain.data.path is {str(path)!r}, no such file or folder; give a dataset's")
    try:
        if (path / "meta" / "info.json").is_file():
            from vla_stream.learning.lerobot_folder import LeRobotFolder

            return LeRobotFolder(path, data.episodes)
        if path.is_file() or any(path.glob("*.hdf5")):
            from vla_stream.learning.hdf5_file import Hdf5Files

            return Hdf5Files(path, data.episodes)
    except ImportError as exc:
        raise InputError(
            f"pretrain.data: {exc.name} is not installed in the environment of {sys.executable}; run tools/setup data"
        ) from exc
    raise InputError(
        f"pretrain.data.path is {str(path)!r}, neither a LeRobotDataset's folder (with meta/info.json) nor robomimic's "
        "files (*.hdf5); give either"
    )


@contextmanager
def reading(path: Path, *others: type[Exception]) -> Iterator[None]:
    """What a library says of a damaged file becomes an InputError."""
    errors: tuple[type[Exception], ...] = (OSError, KeyError, ValueError, *others)
    try:
        yield
    except errors as exc:
        reason = " ".join(str(exc).split())[:300]
        raise InputError(f"{path}: cannot be read ({type(exc).__name__}: {reason}); get the file anew") from exc


def _known(config: Config) -> Recorded | None:
    environment = tasks.config_for(config, tasks.names(config.environment)[0]).environment
    try:
        cls = plugins.load_class(plugins.ENVIRONMENTS, environment.name)
    except InputError:
        return None  # it is only where the simulators are; what it says of files is for files of those that are here
    if not hasattr(cls, "recorded"):
        return None
    known: Recorded = cls.recorded(plugins.parse_options(cls, environment.options, "environment.options"))
    return known


def _size(size: tuple[int, int]) -> str:
    return f"{size[1]}×{size[0]}"


def _shown(keys: Mapping[str, int] | Mapping[str, tuple[int, int]]) -> str:
    shown = (f"{key} {_size(size) if isinstance(size, tuple) else size}" for key, size in keys.items())
    return ", ".join(shown) or "none"
