"""Small demonstrations in the layouts that others publish: LeRobotDataset 2.0, 2.1, 3.0 and robomimic's HDF5.

Layouts as the LeRobot project's documentation and LIBERO's and robomimic's scripts describe them; nothing of theirs is
called.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import av
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

FPS = 10
ATTACHED = {"timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64"}


class Episode(NamedTuple):
    """images: key → u8[n, height, width, 3]; numbers: key → f32[n, dims]."""

    images: dict[str, np.ndarray]
    numbers: dict[str, np.ndarray]
    sentence: str

    def __len__(self) -> int:  # type: ignore[override]
        return len(next(iter(self.numbers.values())))


def pictures(count: int, first: int = 0, size: tuple[int, int] = (16, 24)) -> np.ndarray:
    """u8[count, *size, 3], each of its own grey, with a red corner at the top left: which way is up can be seen."""
    shots = np.zeros((count, *size, 3), np.uint8)
    shots[:] = (40 + 7 * (first + np.arange(count)))[:, None, None, None]
    shots[:, : size[0] // 2, : size[1] // 2] = (220, 20, 20)
    return shots


def episodes(lengths: Sequence[int], state_key: str, action_key: str, image_key: str) -> list[Episode]:
    """Of a robot with a state of 3 numbers and actions of 2, which count."""
    made, first = [], 0
    for number, length in enumerate(lengths):
        counted = np.arange(first, first + length, dtype=np.float32)
        numbers = {
            state_key: np.stack([counted, -counted, np.full(length, number, np.float32)], axis=1),
            action_key: np.stack([counted / 100, np.full(length, -0.5, np.float32)], axis=1),
        }
        made.append(Episode({image_key: pictures(length, first)}, numbers, f"do number {number % 2}"))
        first += length
    return made


def write_hdf5(path: Path, made: Sequence[Episode], sentence: str | None, actions: str = "actions") -> None:
    """robomimic's layout; demos are written in an order that is not that of their numbers' digits."""
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        if sentence is not None:
            data.attrs["problem_info"] = json.dumps({"language_instruction": list(sentence)})
        for number, episode in enumerate(made):
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = len(episode)
            demo["actions"] = episode.numbers[actions].astype(np.float64)
            demo["dones"] = np.arange(len(episode)) == len(episode) - 1
            for key, values in {**episode.images, **episode.numbers}.items():
                if key != actions:
                    demo[f"obs/{key}"] = values


def write_lerobot(
    folder: Path, made: Sequence[Episode], version: str, *, images: str = "video", codec: str = "libx264"
) -> None:
    """`v2.0` and `v2.1`: a file per episode; `v3.0`: two episodes per data file, all in one video."""
    sentences = sorted({episode.sentence for episode in made})
    features: dict[str, Any] = {
        key: {"dtype": "float32", "shape": [values.shape[1]], "names": None} for key, values in made[0].numbers.items()
    }
    features |= {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in ATTACHED.items()}
    features["task_index"] = {"dtype": "int64", "shape": [1], "names": None}
    for key, shots in made[0].images.items():
        shape, names = list(shots.shape[1:]), ["height", "width", "channels"]
        if version == "v2.0":  # which also wrote channels first
            shape, names = [shape[2], *shape[:2]], ["channels", "height", "width"]
        features[key] = {"dtype": images, "shape": shape, "names": names}
    old = version != "v3.0"
    info = {
        "codebase_version": version,
        "fps": FPS,
        "chunks_size": 2,
        "total_episodes": len(made),
        "features": features,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
        if old
        else "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
        if old
        else "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    tables, first = [], 0
    for number, episode in enumerate(made):
        tables.append(_table(episode, number, first, sentences.index(episode.sentence), images))
        first += len(episode)
    if old:
        lines = [json.dumps({"task_index": index, "task": task}) for index, task in enumerate(sentences)]
        (folder / "meta" / "tasks.jsonl").write_text("\n".join(lines) + "\n")
        for number, (episode, table) in enumerate(zip(made, tables, strict=True)):
            _write(folder / f"data/chunk-{number // 2:03d}/episode_{number:06d}.parquet", table)
            for key, shots in episode.images.items() if images == "video" else ():
                film(folder / f"videos/chunk-{number // 2:03d}/{key}/episode_{number:06d}.mp4", shots, codec)
        return
    tasks = {"task_index": list(range(len(sentences))), "__index_level_0__": sentences}
    _write(folder / "meta/tasks.parquet", pa.table(tasks))
    for number in range(0, len(tables), 2):
        _write(folder / f"data/chunk-000/file-{number // 2:03d}.parquet", pa.concat_tables(tables[number : number + 2]))
    begins_s = np.cumsum([0, *map(len, made)])[:-1] / FPS
    rows: dict[str, list[Any]] = {"episode_index": list(range(len(made))), "length": list(map(len, made))}
    for key in made[0].images if images == "video" else ():
        rows |= {f"videos/{key}/chunk_index": [0] * len(made), f"videos/{key}/file_index": [0] * len(made)}
        rows[f"videos/{key}/from_timestamp"] = begins_s.tolist()
        film(
            folder / f"videos/{key}/chunk-000/file-000.mp4",
            np.concatenate([episode.images[key] for episode in made]),
            codec,
        )
    _write(folder / "meta/episodes/chunk-000/file-000.parquet", pa.table(rows))


def film(path: Path, shots: Iterable[np.ndarray], codec: str) -> None:
    """A video with a key frame every other frame, as LeRobot writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream: Any = None
        for shot in shots:
            if stream is None:
                stream = container.add_stream(codec, rate=FPS, options={"g": "2", "crf": "18"})
                stream.height, stream.width, stream.pix_fmt = *shot.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shot, format="rgb24")))
        container.mux(stream.encode())


def _table(episode: Episode, number: int, first: int, task: int, images: str) -> pa.Table:
    count = len(episode)
    columns: dict[str, Any] = {
        key: pa.array(list(values), type=pa.list_(pa.float32())) for key, values in episode.numbers.items()
    }
    columns["timestamp"] = pa.array(np.arange(count, dtype=np.float32) / np.float32(FPS))
    columns["frame_index"] = np.arange(count)
    columns["episode_index"] = np.full(count, number)
    columns["index"] = np.arange(first, first + count)
    columns["task_index"] = np.full(count, task)
    for key, shots in episode.images.items() if images == "image" else ():
        columns[key] = [{"bytes": _png(shot), "path": None} for shot in shots]
    return pa.table(columns)


def _png(shot: np.ndarray) -> bytes:
    stored = io.BytesIO()
    Image.fromarray(shot).save(stored, "png")
    return stored.getvalue()


def _write(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=5)
