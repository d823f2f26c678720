"""Demonstrations in others' formats: the same ones are written in each layout, and read the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from recorded import Episode, episodes, pictures, write_hdf5, write_lerobot

from vla_stream.environments.libero import Libero
from vla_stream.environments.protocol import Recorded, Specification
from vla_stream.errors import InputError
from vla_stream.learning.cloning import warm_start
from vla_stream.learning.recordings import KEPT_BYTES, Recordings, open_source
from vla_stream.policies.tiny import Tiny
from vla_stream.pretrain import Data, Pretrain

CHUNK = 3
LENGTHS = (6, 4, 9, 2, 7)
N = sum(LENGTHS)
SPECIFICATION = Specification({"front": (16, 24)}, 3, 2)
LOSS = 3  # levels of grey that a codec may be off, on average; one image is 7 brighter than that before

MADE = episodes(LENGTHS, "observation.state", "action", "observation.images.front")
PLAIN = episodes(LENGTHS, "proprio", "actions", "front_image")
IMAGES, STATE, ACTIONS = (
    np.concatenate([next(iter(episode.images.values())) for episode in MADE]),
    np.concatenate([episode.numbers["observation.state"] for episode in MADE]),
    np.concatenate([episode.numbers["action"] for episode in MADE]),
)


def lerobot(version: str, **options: Any) -> Callable[[Path], Data]:
    def write(folder: Path) -> Data:
        write_lerobot(folder / "data", MADE, version, **options)
        return Data(path=folder / "data")

    return write


def hdf5(folder: Path) -> Data:
    write_hdf5(folder / "data.hdf5", PLAIN, "do it")
    return Data(path=folder / "data.hdf5", state=["proprio"])


def hdf5_folder(folder: Path) -> Data:
    write_hdf5(folder / "a_demo.hdf5", PLAIN[:3], "do it")
    write_hdf5(folder / "b_demo.hdf5", PLAIN[3:], "do it")
    return Data(path=folder, state=["proprio"])


LAYOUTS = {
    "v2.1": lerobot("v2.1"),
    "v3.0": lerobot("v3.0"),
    "v3.0, AV1": lerobot("v3.0", codec="libsvtav1"),
    "v2.0, images": lerobot("v2.0", images="image"),
    "v3.0, images": lerobot("v3.0", images="image"),
    "HDF5": hdf5,
    "HDF5, folder": hdf5_folder,
}


def opened(
    data: Data, specification: Specification = SPECIFICATION, known: Recorded | None = None, kept: int = KEPT_BYTES
) -> Recordings:
    return Recordings(data, open_source(data), known, CHUNK, specification, kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_written_is_read_moment_by_moment(layout: str, tmp_path: Path) -> None:
    recordings = opened(LAYOUTS[layout](tmp_path))
    assert (len(recordings), recordings.episodes, recordings.successes) == (N, len(LENGTHS), None)
    np.testing.assert_array_equal(recordings.state, STATE)
    rows = np.random.default_rng(0).permutation(np.concatenate([np.arange(N), [3, 3]]))
    seen, actions, valid = recordings.take(rows)
    np.testing.assert_array_equal(seen.state, STATE[rows])
    off = np.abs(seen.images["front"].astype(int) - IMAGES[rows])
    grey = off[:, 8:, 12:].mean(axis=(1, 2, 3))  # a codec smears colours at the edge of the red corner
    assert off.max() == 0 if "images" in layout or "HDF5" in layout else 0 < grey.max() <= LOSS
    told = ["do it"] * N if "HDF5" in layout else [episode.sentence for episode in MADE for _ in range(len(episode))]
    assert list(seen.instruction) == [told[row] for row in rows]
    # Slowly: the same row's action and those after it, up to its episode's end.
    ends = np.repeat(np.cumsum(LENGTHS), LENGTHS)
    for place, row in enumerate(rows):
        for ahead in range(CHUNK):
            inside = row + ahead < ends[row]
            assert valid[place, ahead] == inside
            np.testing.assert_allclose(actions[place, ahead], ACTIONS[row + ahead] if inside else 0, atol=1e-6)
    assert seen.images["front"].dtype == np.uint8 and actions.dtype == np.float32 and valid.dtype == np.bool_
    recordings.close()


@pytest.mark.parametrize("layout", ["v2.1", "v3.0", "HDF5", "HDF5, folder"])
def test_the_first_episodes_alone_may_be_taken(layout: str, tmp_path: Path) -> None:
    data = LAYOUTS[layout](tmp_path).model_copy(update={"episodes": 3})
    recordings = opened(data)
    assert (len(recordings), recordings.episodes) == (sum(LENGTHS[:3]), 3)
    np.testing.assert_array_equal(recordings.state, STATE[: sum(LENGTHS[:3])])
    assert recordings.take(np.array([18]))[2].tolist() == [[True, False, False]]


def test_images_are_kept_up_to_a_limit_and_read_again_beyond(tmp_path: Path) -> None:
    data = LAYOUTS["v2.0, images"](tmp_path)
    size = IMAGES[0].nbytes
    recordings = opened(data, kept=5 * size)
    everything = np.arange(N)
    first, second = (recordings.take(everything)[0].images["front"] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(recordings._kept) == 5
    shutil.rmtree(data.path)
    np.testing.assert_array_equal(recordings.take(np.arange(5))[0].images["front"], IMAGES[:5])
    with pytest.raises(InputError, match=r"episode_.*parquet: cannot be read"):
        recordings.take(np.array([5]))


def test_a_policy_learns_from_a_video(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = Tiny(Tiny.Options(words=6), SPECIFICATION, CHUNK)
    recordings = opened(LAYOUTS["v3.0"](tmp_path))
    before = float(policy.imitation_loss(*recordings.take(np.arange(N))).detach())
    figures = warm_start(policy, recordings, None, Pretrain(steps=40, batch=16, learning_rate=3e-3))
    assert figures["imitation_loss"] < before / 3 and "expert_success" not in figures
    np.testing.assert_allclose(policy.state_mean.numpy(), STATE.mean(0), rtol=1e-5)


def libero(tmp_path: Path, **options: Any) -> tuple[Recordings, np.ndarray, np.ndarray]:
    """A file in LIBERO's own layout, with its images and actions."""
    random = np.random.default_rng(0)
    shots = {key: pictures(5, size=(16, 16)) for key in ("agentview_rgb", "eye_in_hand_rgb")}
    numbers = {"ee_pos": 3, "ee_ori": 3, "ee_states": 6, "gripper_states": 2, "joint_states": 7}
    made = {key: random.normal(size=(5, dims)).astype(np.float32) for key, dims in numbers.items()}
    actions = random.uniform(-0.9, 0.9, (5, 7)).astype(np.float32)
    actions[:, 6] = [-1, -1, 1, 1, -1]
    episode = Episode(shots, {**made, "actions": actions}, "")
    write_hdf5(tmp_path / "pick_up_the_bowl_demo.hdf5", [episode], "pick up the bowl")
    specification = Specification({"agentview": (16, 16), "robot0_eye_in_hand": (16, 16)}, 8, 7)
    known = Libero.recorded(Libero.Options(**options))
    state = np.concatenate([made["ee_pos"], made["ee_ori"], made["gripper_states"]], axis=1)
    return opened(Data(path=tmp_path), specification, known), state, actions


@pytest.mark.parametrize(("gripper", "expected"), [("closes", [-1, -1, 1, 1, -1]), ("opens", [1, 1, 0, 0, 1])])
def test_liberos_own_files_need_no_keys_and_are_turned_and_gripped_as_its_environment_does(
    tmp_path: Path, gripper: str, expected: list[float]
) -> None:
    recordings, state, written = libero(tmp_path, gripper=gripper)
    seen, actions, _ = recordings.take(np.arange(5))
    np.testing.assert_array_equal(seen.state, state)
    np.testing.assert_allclose(actions[:, 0, :6], written[:, :6], atol=1e-7)
    np.testing.assert_array_equal(actions[:, 0, 6], expected)
    for image in seen.images.values():
        assert (image[:, 8:, 8:] == (220, 20, 20)).all()  # the red corner, which is at the top left in the file
    assert list(seen.instruction) == ["pick up the bowl"] * 5


def test_a_lerobot_dataset_is_not_turned_by_what_libero_says_of_its_own_files(tmp_path: Path) -> None:
    data = LAYOUTS["v3.0"](tmp_path)
    known = Recorded(images={"front": "elsewhere"}, state=("elsewhere",), turned=True, action_scale=-1.0)
    seen, actions, _ = opened(data, known=known).take(np.arange(3))
    np.testing.assert_allclose(actions[:, 0], ACTIONS[:3], atol=1e-6)
    assert (seen.images["front"][:, 2, 2, 0] > 150).all()
    seen, _, _ = opened(data.model_copy(update={"turned": True})).take(np.arange(3))
    assert (seen.images["front"][:, -3, -3, 0] > 150).all()


def test_images_of_another_size_are_scaled_when_asked_to(tmp_path: Path) -> None:
    data = hdf5(tmp_path).model_copy(update={"resize": True})
    seen, _, _ = opened(data, Specification({"front": (8, 12)}, 3, 2)).take(np.arange(4))
    expected = IMAGES[:4].reshape(4, 8, 2, 12, 2, 3).mean(axis=(2, 4))
    assert np.abs(seen.images["front"][:, 6:, 8:] - expected[:, 6:, 8:]).max() <= 1


@pytest.mark.parametrize(
    ("change", "specification", "told"),
    [
        ({}, Specification({"wrist": (16, 24)}, 3, 2), "has no image wrist_image or wrist_rgb or wrist, but the env"),
        (
            {"images": {}},
            SPECIFICATION,
            "has no image for it, but the environment has the camera front; set pretrain.d",
        ),
        (
            {},
            Specification({"front": (16, 16)}, 3, 2),
            "front_image is 24×16 pixels, but the camera front of the envir",
        ),
        (
            {"state": ["propiro"]},
            SPECIFICATION,
            "has no numbers propiro, expected those of pretrain.data.state; it has ",
        ),
        (
            {"state": None},
            SPECIFICATION,
            "state is 0 numbers (none), but this run's environment has 3; choose others of",
        ),
        (
            {},
            Specification({"front": (16, 24)}, 4, 2),
            "state is 3 numbers (proprio 3), but this run's environment has",
        ),
        (
            {},
            Specification({"front": (16, 24)}, 3, 7),
            "actions is 2 numbers, but this run's environment takes 7; give",
        ),
        ({}, Specification({"front": (16, 24)}, 3, 2, 0, 1), "number 1 of actions goes from -0.5 to -0.5, but actions"),
    ],
)
def test_data_that_does_not_fit_is_one_line_with_the_remedy(
    tmp_path: Path, change: dict[str, Any], specification: Specification, told: str
) -> None:
    with pytest.raises(InputError) as caught:
        opened(hdf5(tmp_path).model_copy(update=change), specification)
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_data_without_sentences_needs_one(tmp_path: Path) -> None:
    write_hdf5(tmp_path / "data.hdf5", PLAIN, None)
    data = Data(path=tmp_path / "data.hdf5", state=["proprio"])
    with pytest.raises(InputError, match=r"does not say what the robot was told.*set pretrain\.data\.instruction"):
        opened(data)
    told = opened(data.model_copy(update={"instruction": "go on"})).take(np.array([0, 8]))[0].instruction
    assert list(told) == ["go on", "go on"]


def test_a_demonstrations_own_sentence_goes_before_the_files(tmp_path: Path) -> None:
    data = hdf5(tmp_path)
    with h5py.File(data.path, "r+") as file:
        file["data/demo_1"].attrs["ep_meta"] = json.dumps({"lang": "open the drawer"})
    assert list(opened(data).take(np.array([5, 6, 9, 10]))[0].instruction) == [
        "do it",
        "open the drawer",
        "open the drawer",
        "do it",
    ]


def test_ten_demos_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    made = episodes([2] * 12, "proprio", "actions", "front_image")
    write_hdf5(tmp_path / "data.hdf5", made, "do it")
    recordings = opened(Data(path=tmp_path / "data.hdf5", state=["proprio"]))
    np.testing.assert_array_equal(recordings.state[:, 0], np.arange(24))


def no_such(folder: Path, data: Data) -> Data:
    return Data(path=folder / "gone")


def other_file(folder: Path, data: Data) -> Data:
    (folder / "notes.txt").write_text("nothing of the kind")
    return Data(path=folder / "notes.txt")


def empty_folder(folder: Path, data: Data) -> Data:
    (folder / "empty").mkdir()
    return Data(path=folder / "empty")


def other_version(folder: Path, data: Data) -> Data:
    info = data.path / "meta" / "info.json"
    info.write_text(info.read_text().replace("v3.0", "v1.6"))
    return data


def no_parquet(folder: Path, data: Data) -> Data:
    shutil.rmtree(data.path / "data")
    return data


def no_video(folder: Path, data: Data) -> Data:
    shutil.rmtree(data.path / "videos")
    return data


def damaged_video(folder: Path, data: Data) -> Data:
    for video in data.path.glob("videos/*/*/*.mp4"):
        video.write_bytes(b"no film" * 100)
    return data


def not_finite(folder: Path, data: Data) -> Data:
    file = data.path / "data/chunk-000/file-001.parquet"
    table = pq.read_table(file)
    states = table["observation.state"].to_pylist()
    states[2][1] = float("nan")
    place = table.column_names.index("observation.state")
    pq.write_table(table.set_column(place, "observation.state", [states]), file)
    return data


def no_info(folder: Path, data: Data) -> Data:
    (data.path / "meta" / "info.json").write_text("{}")
    return data


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (no_such, "no such file or folder; give a dataset's"),
        (other_file, "notes.txt: cannot be read (OSError: "),
        (empty_folder, "neither a LeRobotDataset's folder (with meta/info.json) nor robomimic's files (*.hdf5)"),
        (other_version, "codebase_version is v1.6, expected one of v2.0, v2.1, v3.0; convert it"),
        (no_parquet, "has no data/*/*.parquet, expected the demonstrations; get them too"),
        (no_video, "file-000.mp4: cannot be read (FileNotFoundError: "),
        (damaged_video, "file-000.mp4: cannot be read (InvalidDataError: "),
        (not_finite, "observation.state holds numbers that are not finite; leave those episodes out"),
        (no_info, "info.json: cannot be read (KeyError: 'codebase_version'); get the file anew"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_files_that_are_damaged_or_missing_are_one_line(
    tmp_path: Path, harm: Callable[[Path, Data], Data], told: str
) -> None:
    data = harm(tmp_path, LAYOUTS["v3.0"](tmp_path))
    with pytest.raises(InputError) as caught:
        opened(data)
    assert told in str(caught.value) and "\n" not in str(caught.value)
