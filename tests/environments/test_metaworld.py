"""Meta-World: what needs no simulator always; the simulator with `tools/test --all`, after `tools/setup metaworld`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simulator_interpreters import answer

from vla_stream.environments.metaworld import SETS, TASKS, MetaWorld, _expand
from vla_stream.errors import InputError


def test_module_and_options_work_without_the_simulators_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('metaworld', 'torch', 'mujoco'): sys.modules[name] = None\n"
        "from vla_stream.environments.metaworld import MetaWorld\n"
        "print(MetaWorld.Options(tasks=['MT50']).camera)\n"
        "try: MetaWorld(1, 8, MetaWorld.Options())\n"
        "except Exception as exc: print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first == "corner4"
    assert second.startswith("InputError metaworld: Meta-World is not installed in the environment of ")
    assert second.endswith("run tools/setup metaworld, and set simulators.python to .venvs/metaworld/bin/python")


def test_sets_stand_for_their_tasks_and_repeats_for_weight() -> None:
    assert len(SETS["MT10"]) == 10 and len(SETS["MT50"]) == 50 and set(SETS["MT10"]) <= set(TASKS)
    assert _expand(["MT10", "push-v3", "push-v3"]) == [*SETS["MT10"], "push-v3", "push-v3"]
    with pytest.raises(InputError, match=r"tasks holds 'push-v2', no task of Meta-World; did you mean push-v3\?"):
        _expand(["push-v2"])


def test_more_rows_than_a_process_can_hold_are_refused() -> None:
    with pytest.raises(InputError, match=r"2 rows.*one process per row"):
        MetaWorld(2, 20, MetaWorld.Options())


PLAY = """
from vla_stream.environments.metaworld import MetaWorld, SETS
def play(reward, task):
    env = MetaWorld(1, 200, MetaWorld.Options(tasks=[task], image=False, reward=reward))
    env.reset(ONE, seeds(1))
    rewards = []
    while not rewards or not (result.terminated[0] or result.truncated[0]):
        result = env.step(env.expert_actions(), ONE)
        rewards.append(float(result.reward[0]))
    env.close()
    return bool(result.success[0]), rewards

five = {task: play("sparse", task) for task in ("reach-v3", "push-v3", "door-open-v3", "hammer-v3", "stick-pull-v3")}
env = MetaWorld(1, 200, MetaWorld.Options(tasks=["reach-v3", "push-v3", "push-v3"], image=False))
sentences = [env.reset(ONE, seeds(n)).instruction[0] for n in range(12)]
from metaworld.env_dict import MT10_V3, MT50_V3  # imports mujoco, which asks then how to draw

tell({
    "five": five, "dense": play("dense", "push-v3")[1], "differenced": play("differenced", "push-v3")[1],
    "sentences": sentences, "torch": "torch" in sys.modules,
    "same": [SETS["MT10"] == tuple(MT10_V3), set(SETS["MT50"]) == set(MT50_V3)],
})
"""


@pytest.mark.metaworld
@pytest.mark.timeout(180)
def test_experts_succeed_rewards_are_what_they_say_and_seeds_choose_tasks(tmp_path: Path) -> None:
    told = answer("metaworld", PLAY, tmp_path)
    assert told["same"] == [True, True] and not told["torch"]
    for success, rewards in told["five"].values():
        assert success and rewards[-1] == 1 and not any(rewards[:-1])
    dense, differenced = told["dense"], told["differenced"]
    assert len(dense) == len(differenced) and all(0 <= reward <= 1 for reward in dense)
    assert sum(differenced) == pytest.approx(dense[-1] - dense[0] + 1, abs=1e-5)
    chosen = told["sentences"].count(TASKS["push-v3"])
    assert 12 - chosen == told["sentences"].count(TASKS["reach-v3"]) < chosen < 12
