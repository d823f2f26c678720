"""A dataset that LeRobot itself writes (3.0, AV1), in its own interpreter, and reads: the same is read here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from simulator_interpreters import interpreter

from vla_stream.environments.protocol import Specification
from vla_stream.learning.recordings import Recordings, open_source
from vla_stream.pretrain import Data

LENGTHS = (6, 4, 9, 2, 7)
WRITE = """
import sys
import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

root, answer = sys.argv[1:]
numbers = {"observation.state": 3, "action": 2}
features = {key: {"dtype": "float32", "shape": (dims,), "names": None} for key, dims in numbers.items()}
camera = "observation.images.front"
features[camera] = {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]}
made, count = LeRobotDataset.create(repo_id="me/made", fps=10, root=root, features=features, use_videos=True), 0
for episode, length in enumerate(LENGTHS):
    for _ in range(length):
        image = np.full((64, 96, 3), 40 + 7 * count, np.uint8)
        image[:32, :48] = (220, 20, 20)
        state, action = np.array([count, -count, episode], np.float32), np.array([count / 100, -0.5], np.float32)
        made.add_frame({"observation.state": state, "action": action, camera: image, "task": f"do {episode % 2}"})
        count += 1
    made.save_episode()
made.finalize()
rows = list(LeRobotDataset("me/made", root=root, video_backend="pyav"))
np.savez(
    answer,
    image=np.stack([(row[camera].numpy() * 255).round().astype(np.uint8).transpose(1, 2, 0) for row in rows]),
    state=np.stack([row["observation.state"].numpy() for row in rows]),
    action=np.stack([row["action"].numpy() for row in rows]),
    task=np.array([row["task"] for row in rows]),
)
"""


@pytest.mark.lerobot
@pytest.mark.timeout(300)
def test_what_lerobot_writes_is_read_as_lerobot_reads_it(tmp_path: Path) -> None:
    home = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    code = f"LENGTHS = {LENGTHS}\n{WRITE}"
    done = subprocess.run(
        [interpreter("lerobot"), "-W", "ignore", "-c", code, tmp_path / "made", tmp_path / "theirs.npz"],
        env={**os.environ, **home},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = np.load(tmp_path / "theirs.npz")
    data = Data(path=tmp_path / "made")
    ours = Recordings(data, open_source(data), None, 1, Specification({"front": (64, 96)}, 3, 2))
    assert (len(ours), ours.episodes) == (sum(LENGTHS), len(LENGTHS))
    rows = np.random.default_rng(0).permutation(len(ours))
    seen, actions, _ = ours.take(rows)
    np.testing.assert_array_equal(seen.state, theirs["state"][rows])
    np.testing.assert_array_equal(actions[:, 0], theirs["action"][rows])
    np.testing.assert_array_equal(seen.images["front"], theirs["image"][rows])
    assert list(seen.instruction) == theirs["task"][rows].tolist()
