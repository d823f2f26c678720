"""A LeRobotDataset's folder as a Source, version 2.0, 2.1 or 3.0: parquet files, and images in them or in videos.

    meta/info.json        codebase_version, fps, features: key → dtype, shape, names
    data/*/*.parquet      one row per moment; 2.x: a file per episode, 3.0: many episodes in one
    meta/tasks.*          the sentences, which rows name by task_index
    videos/…mp4           2.x: one per episode; 3.0: many episodes in one, meta/episodes/ says from when

An image in a video is found by its time. LeRobot writes a key frame every other frame, so any one is near.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import av
import numpy as np
import pyarrow.parquet as pq
from PIL import Image

from vla_stream.errors import InputError
from vla_stream.learning.recordings import reading

VERSIONS = ("v2.0", "v2.1", "v3.0")
NEAR_FRAMES = 8  # decoding so many costs less than jumping


class LeRobotFolder:
    """See recordings.Source. Raises InputError for another version, or what is not whole."""

    cameras: ClassVar[tuple[str, ...]] = ("observation.images.{}", "{}")
    state: ClassVar[tuple[str, ...]] = ("observation.state", "state")
    actions: ClassVar[tuple[str, ...]] = ("action", "actions")
    by_simulator: ClassVar[bool] = False

    def __init__(self, path: Path, most: int | None) -> None:
        self._path = path
        with reading(path / "meta" / "info.json", TypeError):
            self._info: Any = json.loads((path / "meta" / "info.json").read_text(encoding="utf-8"))
            self._version, self._fps = str(self._info["codebase_version"]), float(self._info["fps"])
            features: dict[str, Any] = self._info["features"]
            self.pictures: Mapping[str, tuple[int, int]] = {
                key: _height_width(feature) for key, feature in features.items() if feature["dtype"] in _IMAGES
            }
            self.numbers: Mapping[str, int] = {
                key: int(np.prod(feature["shape"]))
                for key, feature in features.items()
                if feature["dtype"] not in (*_IMAGES, "string")
            }
        if self._version not in VERSIONS:
            raise InputError(
                f"{path}: codebase_version is {self._version}, expected one of {', '.join(VERSIONS)}; convert it with "
                "LeRobot's scripts"
            )
        self._places_of: dict[str, dict[int, tuple[float, float, float]]] = {}
        self._in_video = {key for key in self.pictures if features[key]["dtype"] == "video"}
        self._index(most)

    def read(self, key: str) -> np.ndarray:
        return np.concatenate([_column(file, key) for file in self._files])[: len(self._episode)]

    def sentences(self) -> list[str]:
        told = self._tasks()
        return [told.get(int(number), "") for number in self._task]

    def look(self, key: str, moments: np.ndarray) -> Iterator[np.ndarray]:
        files = self._video_of if key in self._in_video else lambda moment, _: self._file_of(moment)
        for file, group in groupby(map(int, moments), lambda moment: files(moment, key)):
            rows = list(group)
            frames = self._frames(file, key, rows) if key in self._in_video else _stored(file, key, self._rows_in(rows))
            for image in frames:
                if image.shape != (*self.pictures[key], 3):
                    raise InputError(
                        f"{file}: images of {key} have shape {image.shape}, but meta/info.json says "
                        f"{self.pictures[key]}; write the dataset anew"
                    )
                yield image

    def close(self) -> None:
        """Nothing stays open."""

    def _index(self, most: int | None) -> None:
        """What is where, of the first `most` episodes."""
        self._files = []
        parts: dict[str, list[np.ndarray]] = {"episode_index": [], "timestamp": [], "task_index": []}
        for file in sorted(self._path.glob("data/*/*.parquet")):
            if most is not None and sum(len(np.unique(part)) for part in parts["episode_index"]) >= most:
                break
            self._files.append(file)
            for key, columns in parts.items():
                columns.append(_column(file, key)[:, 0])
        if not self._files:
            raise InputError(f"{self._path}: has no data/*/*.parquet, expected the demonstrations; get them too")
        self._begins = np.cumsum([0, *(len(part) for part in parts["episode_index"])])  # of each file
        episode = np.concatenate(parts["episode_index"]).astype(np.int64)
        starts = np.flatnonzero(np.diff(episode, prepend=episode[0] - 1))
        bounds = [*starts.tolist(), len(episode)][: None if most is None else most + 1]
        self.lengths: Sequence[int] = np.diff(bounds).tolist()
        self._episode = episode[: bounds[-1]]
        self._time_s = np.concatenate(parts["timestamp"])[: bounds[-1]]
        self._task = np.concatenate(parts["task_index"])[: bounds[-1]]

    def _file_of(self, moment: int) -> Path:
        return self._files[int(np.searchsorted(self._begins, moment, side="right")) - 1]

    def _rows_in(self, moments: list[int]) -> list[int]:
        """Their rows in the one file that holds them."""
        begin = self._begins[np.searchsorted(self._begins, moments[0], side="right") - 1]
        return [moment - int(begin) for moment in moments]

    def _video_of(self, moment: int, key: str) -> Path:
        return self._video(int(self._episode[moment]), key)[0]

    def _frames(self, file: Path, key: str, moments: list[int]) -> Iterator[np.ndarray]:
        begins_s = [self._video(int(self._episode[moment]), key)[1] for moment in moments]
        times_s = [begin_s + float(self._time_s[moment]) for begin_s, moment in zip(begins_s, moments, strict=True)]
        with reading(file, av.FFmpegError):
            yield from _decoded(file, times_s, self._fps)

    def _video(self, episode: int, key: str) -> tuple[Path, float]:
        """The file, and the time in it, in seconds, at which the episode begins."""
        pattern = str(self._info["video_path"])
        if self._version != "v3.0":
            chunk = episode // int(self._info["chunks_size"])
            name = pattern.format(episode_chunk=chunk, video_key=key, episode_index=episode)
            return self._path / name, 0.0
        found = self._places(key).get(episode)
        if found is None:
            raise InputError(f"{self._path}: meta/episodes/ has no episode {episode}, expected all; get them too")
        name = pattern.format(video_key=key, chunk_index=int(found[0]), file_index=int(found[1]))
        return self._path / name, found[2]

    def _places(self, key: str) -> dict[int, tuple[float, float, float]]:
        """Version 3.0, episode → the video's chunk and file, and when it begins in it."""
        if key not in self._places_of:
            self._places_of[key] = self._read_places(key)
        return self._places_of[key]

    def _read_places(self, key: str) -> dict[int, tuple[float, float, float]]:
        parts = ("chunk_index", "file_index", "from_timestamp")
        columns = ["episode_index", *(f"videos/{key}/{part}" for part in parts)]
        files = sorted(self._path.glob("meta/episodes/*/*.parquet"))
        rows = (row for file in files for row in zip(*(_column(file, column)[:, 0] for column in columns), strict=True))
        return {int(episode): (chunk, number, begin_s) for episode, chunk, number, begin_s in rows}

    def _tasks(self) -> dict[int, str]:
        if self._version != "v3.0":
            file = self._path / "meta" / "tasks.jsonl"
            with reading(file, TypeError):
                lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
                return {int(line["task_index"]): str(line["task"]) for line in lines}
        file = self._path / "meta" / "tasks.parquet"
        with reading(file):
            table = pq.read_table(file)
            # Pandas wrote the sentences as its index, whose column has one name or another.
            sentences = next(name for name in table.column_names if name != "task_index")
            numbers = table["task_index"].to_pylist()
            return dict(zip(map(int, numbers), map(str, table[sentences].to_pylist()), strict=True))


_IMAGES = ("image", "video")


def _height_width(feature: Mapping[str, Any]) -> tuple[int, int]:
    """Channels stand first or last."""
    shape = [int(size) for size in feature["shape"]]
    height, width = shape[1:] if shape[0] == 3 else shape[:2]
    return height, width


def _column(file: Path, key: str) -> np.ndarray:
    """One column [rows, numbers per row]."""
    with reading(file):
        column = pq.read_table(file, columns=[key])[key].combine_chunks()
        rows = len(column)
        while hasattr(column, "flatten") and column.type.num_fields:
            column = column.flatten()
        numbers: np.ndarray = column.to_numpy(zero_copy_only=False)
        return numbers.reshape(rows, -1)


def _stored(file: Path, key: str, rows: list[int]) -> Iterator[np.ndarray]:
    """Images that lie in a parquet file itself, rows in rising order; of a group of rows the column is read at once."""
    with reading(file):
        parquet = pq.ParquetFile(file)
        begin, group = 0, 0
        column = None
        for row in rows:
            while row >= begin + parquet.metadata.row_group(group).num_rows:
                begin, group, column = begin + parquet.metadata.row_group(group).num_rows, group + 1, None
            if column is None:
                column = parquet.read_row_group(group, columns=[key])[key]
            yield np.array(Image.open(BytesIO(column[row - begin].as_py()["bytes"])).convert("RGB"))


def _decoded(file: Path, times_s: list[float], fps: float) -> Iterator[np.ndarray]:
    """The frames of a video at these times, which rise. Raises ValueError where there is none."""
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        frames: Iterator[Any] = iter(())
        now_s, unit_s = -float("inf"), float(stream.time_base or 1)
        for time_s in times_s:
            if not 0 <= time_s - now_s < NEAR_FRAMES / fps:
                container.seek(max(0, round((time_s - 0.5 / fps) / unit_s)), stream=stream)
                frames = container.decode(stream)
            frame = next((frame for frame in frames if frame.time > time_s - 0.5 / fps), None)
            if frame is None or frame.time >= time_s + 0.5 / fps:
                raise ValueError(f"no frame at {time_s:.3f} s")
            now_s = frame.time
            yield frame.to_ndarray(format="rgb24")
