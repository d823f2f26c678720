"""LIBERO: what needs no simulator always; the simulator itself with `tools/test --all`, after `tools/setup libero`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simulator_interpreters import answer, config_for

from vla_stream.environments.libero import Libero, axis_angle
from vla_stream.errors import InputError
from workers import environment_apart


def test_module_and_options_work_without_the_simulators_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('libero', 'robosuite', 'torch', 'mujoco'): sys.modules[name] = None\n"
        "from vla_stream.environments.libero import Libero\n"
        "print(Libero.Options(suite='libero_goal').camera_size)\n"
        "try: Libero.check_installed(Libero.Options())\n"
        "except Exception as exc: print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "128"
    assert second.startswith("InputError libero: LIBERO is not installed in the environment of ")
    assert second.endswith("run tools/setup libero, and set simulators.python to .venvs/libero/bin/python")


def test_more_rows_than_a_process_can_hold_are_refused() -> None:
    with pytest.raises(InputError, match=r"2 rows.*one process per row"):
        Libero(2, 20, Libero.Options())


@pytest.mark.parametrize(
    ("axis", "angle"), [((0, 0, 1), 0.0), ((0, 0, 1), 0.5), ((0.6, 0, 0.8), 2.0), ((1, 0, 0), np.pi), ((0, 1, 0), 4.0)]
)
def test_an_orientation_is_axis_times_angle(axis: tuple[float, float, float], angle: float) -> None:
    quaternion = np.array([*(np.sin(angle / 2) * np.array(axis)), np.cos(angle / 2)])
    np.testing.assert_allclose(axis_angle(quaternion), angle * np.array(axis), atol=1e-7)


PLAY = """
from pathlib import Path
from vla_stream.environments.libero import CAMERAS, Libero
log = Path("/tmp/robosuite.log")
before = log.stat().st_mtime_ns if log.exists() else 0
still = np.array([[0, 0, 0, 0, 0, 0, -1]], dtype=np.float32)
env = Libero(1, 30, Libero.Options(tasks=[0], settle_steps=0, gripper="opens", camera_size=64))
seen = env.reset(ONE, seeds(3))
sim, domain = env._env.sim, env._env.env
start = sim.get_state().flatten()[1:]
closest = float(np.abs(env._tasks[0].initial_states[:, 1:] - start).max(axis=1).min())

# robosuite's own picture of the same moment, drawn as its camera observations are
drawn = {name: sim.render(width=64, height=64, camera_name=name) for name in CAMERAS}
turned = all((seen.images[name][0] == np.rot90(drawn[name], 2)).all() for name in CAMERAS)
above = float(seen.images["agentview"][0, :20].std())

def fingers(command):
    env.reset(ONE, seeds(3))
    for _ in range(15):
        action = still.copy()
        action[0, -1] = command
        state = env.step(action, ONE).observations.state
    return float(state[0, 6] - state[0, 7])

closed, opened = fingers(-1), fingers(1)

env.reset(ONE, seeds(4))
rewards = [float(env.step(still, ONE).reward[0]) for _ in range(3)]
bowl, plate = (domain.objects_dict[name] for name in ("akita_black_bowl_1", "plate_1"))
where = sim.data.get_joint_qpos(plate.joints[-1]).copy()
where[2] += 0.03
sim.data.set_joint_qpos(bowl.joints[-1], where)
while True:
    result = env.step(still, ONE)
    rewards.append(float(result.reward[0]))
    if result.terminated[0] or result.truncated[0]:
        break
tell({
    "closest": closest, "turned": turned, "above": above, "closed": closed, "opened": opened,
    "rewards": rewards, "success": bool(result.success[0]), "terminated": bool(result.terminated[0]),
    "sentence": seen.instruction[0], "torch": "torch" in sys.modules,
    "logged": (log.stat().st_mtime_ns if log.exists() else 0) != before,
})
"""


@pytest.mark.libero
@pytest.mark.timeout(300)
def test_it_starts_as_the_benchmark_does_shows_the_scene_upright_and_tells_success(tmp_path: Path) -> None:
    told = answer("libero", PLAY, tmp_path)
    assert told["sentence"] == "pick up the black bowl between the plate and the ramekin and place it on the plate"
    assert told["closest"] < 1e-6  # one of the benchmark's own fifty starts
    assert told["turned"] and told["above"] > 10
    # With `gripper: opens` a positive number opens: fingers 8 cm apart instead of closed.
    assert told["opened"] > 0.07 > 0.01 > told["closed"]
    # The bowl on the plate: reward once, in the step that ends the episode.
    assert told["success"] and told["terminated"]
    assert told["rewards"][-1] == 1.0 and not any(told["rewards"][:-1])
    assert not told["torch"] and not told["logged"]


SENTENCES = """
from vla_stream.environments.libero import Libero, _find_tasks
def found(**options): return [task.sentence for task in _find_tasks(Libero.Options(**options))]
tell([len(found(suite="libero_90")), found(suite="libero_goal_lan", tasks=[2])[0],
      found(suite="libero_goal_lan", tasks=[2], sentence="file")[0], found(suite="libero_10", tasks=[0, 0, 2])])
"""


@pytest.mark.libero
def test_instructions_are_those_of_names_or_of_files(tmp_path: Path) -> None:
    tasks, by_name, by_file, some = answer("libero", SENTENCES, tmp_path)
    assert tasks == 90
    assert by_name == "put the wine bottle on top of the cabinet" and by_file != by_name
    assert some[0] == some[1] != some[2]


@pytest.mark.libero
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"suite": "libero_spatail"}, r"suite is 'libero_spatail', no suite of LIBERO; did you mean libero_spatial\?"),
        ({"tasks": [10]}, r"tasks holds 10, expected numbers from 0 to 9, the tasks of libero_spatial"),
        ({"suite": "libero_goal_temp"}, r"libero_goal_temp: no task \w+\.bddl.* choose a suite whose files it has"),
        (
            {"suite": "libero_object_with_trigger"},
            r"no initial states \w+\.pruned_init\.npz.*or set environment\.options\.initial_states to false",
        ),
    ],
    ids=["suite", "task", "no task file", "no initial states"],
)
def test_what_is_missing_is_one_line_before_any_worker_starts(options: dict[str, object], told: str) -> None:
    with pytest.raises(InputError, match=told) as refused:
        environment_apart.ask(config_for("libero", **options))
    assert "\n" not in str(refused.value)
