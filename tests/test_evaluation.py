"""Evaluation on fixed seeds, and its statistics."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import BaseModel

from vla_stream import tasks
from vla_stream.cli.evaluate import word_replacement
from vla_stream.config import Config, Evaluation, validate
from vla_stream.environments.protocol import Observations, Specification, StepResult
from vla_stream.environments.tabletop import Tabletop
from vla_stream.evaluation import Plan, evaluate, mcnemar, replacer, wilson_interval
from vla_stream.policies.protocol import Act

CHUNK = 4


class Countdown:
    """A seed's last digit d: an episode ends after d steps with d/10 reward per step; d above 5 is no success."""

    Options: ClassVar[type[BaseModel]] = BaseModel
    rows_per_process: ClassVar[int | None] = None
    whole_batch: ClassVar[bool] = False
    specification = Specification({}, 1, 1)
    max_steps = 8

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.digit, self.steps = np.ones(rows, np.int64), np.zeros(rows, np.int64)
        self.stepped = 0

    def look(self) -> Observations:
        return Observations({}, self.digit[:, None].astype(np.float32), ["go"] * self.rows)

    def reset(self, mask: np.ndarray, seeds: np.ndarray) -> Observations:
        self.digit = np.where(mask, seeds % np.uint64(10), self.digit).astype(np.int64)
        self.steps = np.where(mask, 0, self.steps)
        return self.look()

    def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        assert actions.shape == (self.rows, 1)
        assert active.all() or not self.whole_batch
        self.stepped += 1
        self.steps += active
        ended = active & (self.steps >= self.digit)
        truncated = active & ~ended & (self.steps >= self.max_steps)
        # Rows that are not active return nonsense here, as a backend that steps the whole batch does.
        reward = np.where(active, self.digit / 10, 100.0).astype(np.float32)
        return StepResult(self.look(), reward, ended, truncated, np.where(active, ended & (self.digit <= 5), True))

    def close(self) -> None:
        pass


class WholeCountdown(Countdown):
    whole_batch = True


class Recorder:
    """A policy that does nothing and remembers what it was asked."""

    Options: ClassVar[type[BaseModel]] = BaseModel

    def __init__(self) -> None:
        self.batch_sizes: list[int] = []
        self.keys: list[np.ndarray | None] = []
        self.sentences: set[str] = set()

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        self.keys.append(noise_keys)
        self.batch_sizes.append(len(observations))
        self.sentences.update(observations.instruction)
        actions = np.zeros((len(observations), CHUNK, 1), np.float32)
        return Act(actions, actions, np.zeros(len(observations), np.float32))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"evaluate should not need {name}")


@pytest.mark.parametrize("kind", [Countdown, WholeCountdown])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_each_seed_gets_its_own_outcome_whatever_the_batch(kind: type[Countdown], rows: int) -> None:
    outcomes = evaluate(Recorder(), kind(rows), CHUNK, [11, 7, 23, 5, 9, 2, 6])
    assert outcomes.success.tolist() == [True, False, True, True, False, True, False]
    assert outcomes.steps.tolist() == [1, 7, 3, 5, 8, 2, 6]
    np.testing.assert_allclose(outcomes.returns, [0.1, 4.9, 0.9, 2.5, 7.2, 0.4, 3.6], rtol=1e-6)


@pytest.mark.parametrize("kind", [Countdown, WholeCountdown])
def test_success_at_the_end_is_that_of_the_last_step_and_sentences_are_the_environments(kind: type[Countdown]) -> None:
    class Slipping(kind):  # type: ignore[misc,valid-type]
        """Succeeds in the first step, whatever comes then."""

        def step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
            result = super().step(actions, active)
            return dataclasses.replace(result, success=self.steps == 1)

    outcomes = evaluate(Recorder(), Slipping(3), CHUNK, [11, 7, 23, 5], lambda text: text + " away")
    assert outcomes.success.all()
    assert outcomes.success_at_end.tolist() == [True, False, False, False]
    assert outcomes.instructions.tolist() == ["go"] * 4


def test_the_policy_always_sees_the_whole_batch() -> None:
    policy = Recorder()
    evaluate(policy, Countdown(4), CHUNK, range(1, 8))
    assert set(policy.batch_sizes) == {4}


def test_a_chunk_is_not_executed_beyond_the_last_running_row() -> None:
    batch = Countdown(2)
    evaluate(Recorder(), batch, CHUNK, [1, 2])
    assert batch.stepped == 2


def test_no_seeds_give_no_outcomes() -> None:
    assert len(evaluate(Recorder(), Countdown(2), CHUNK, []).success) == 0


def test_the_instruction_can_be_replaced() -> None:
    policy = Recorder()
    evaluate(policy, Countdown(2), CHUNK, [1, 2, 3], lambda text: text + " away")
    assert policy.sentences == {"go away"}


class Knowing(Recorder):
    """Flies by the environment's own expert to the cube that the sentence names: a policy that obeys the words."""

    def __init__(self, batch: Tabletop) -> None:
        super().__init__()
        self.batch = batch

    def act(self, observations: Observations, noise_keys: np.ndarray | None) -> Act:
        actual = self.batch._targets
        self.batch._targets = np.array(
            [["red", "green", "blue"].index(sentence.split()[2]) for sentence in observations.instruction]
        )
        actions = self.batch.expert_actions()[:, None, :]
        self.batch._targets = actual
        return Act(actions, actions, np.zeros(len(actions), np.float32))


def test_a_policy_that_obeys_the_words_succeeds_with_the_right_colour_and_never_with_the_wrong_one() -> None:
    batch = Tabletop(8, 40, Tabletop.Options())
    assert evaluate(Knowing(batch), batch, 1, range(12)).success.all()
    other_colour = replacer(word_replacement("red=green,green=blue,blue=red"))
    assert not evaluate(Knowing(batch), batch, 1, range(12), other_colour).success.any()


def planned(**changes: Any) -> Config:
    data: dict[str, Any] = {
        "environment": {"name": "tabletop", "max_steps": 8},
        "policy": {"name": "tiny", "chunk": 4},
        "simulators": {"envs_per_slot": 4},
        "trainer": {"segments_per_update": 2},
    }
    return validate(data | changes)


def test_a_plan_gives_each_seed_to_one_row_and_goes_round() -> None:
    plan = Plan.of(planned(evaluation={"episodes": 10, "seed": 100}))
    assert [plan.seeds(ticket).tolist() for ticket in (1, 2, 3)] == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
        [108, 109, 109, 109],
    ]
    assert plan.part(3) == ("", (8, 9)) and plan.seeds(5).tolist() == plan.seeds(2).tolist()


def test_a_plan_of_several_tasks_deals_seeds_as_tickets_are_dealt_and_each_task_has_its_turns() -> None:
    environment = {"name": "tabletop", "max_steps": 8, "tasks": {"near": {"weight": 3}, "far": {}, "idle": {}}}
    config = planned(
        environment=environment, evaluation={"episodes": 12, "seed": 0}, simulators={"count": 3, "envs_per_slot": 2}
    )
    plan, dealt = Plan.of(config), tasks.dealt(config.environment, 12)
    for name, numbers in dealt.items():
        mine = [number for task, part in plan.parts for number in part if task == name]
        assert mine == numbers
        turns = plan.turns_of(config.environment, name)
        assert [task == name for task, _ in plan.parts] == [turn == turns.task for turn in turns.order]
    few = Plan.of(config.model_copy(update={"evaluation": Evaluation(episodes=1)}))
    assert {task for task, _ in few.parts} == {tasks.task_of(config.environment, 1)}
    assert few.turns_of(config.environment, "idle").task not in few.order


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_interval_gives_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_of_nothing_and_of_everything() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    low, high = wilson_interval(200, 200)
    assert 0.98 < low < 0.99
    assert high == pytest.approx(1.0)
    assert high <= 1.0


def outcomes(gained: int, lost: int, same: int = 10) -> tuple[np.ndarray, np.ndarray]:
    before = [False] * gained + [True] * lost + [True] * same
    after = [True] * gained + [False] * lost + [True] * same
    return np.array(before), np.array(after)


def binomial_double_loop(gained: int, lost: int) -> tuple[float, float]:
    """Exact and mid p by listing every way in which the changed seeds could have fallen."""
    exact = mid = 0.0
    for flips in itertools.product((0, 1), repeat=gained + lost):
        ones = sum(flips)
        extreme = min(ones, gained + lost - ones)
        if extreme <= min(gained, lost):
            exact += 0.5 ** (gained + lost)
            mid += 0.5 ** (gained + lost) * (0.5 if extreme == min(gained, lost) else 1.0)
    return exact, mid


@pytest.mark.parametrize(("gained", "lost"), [(1, 0), (0, 3), (9, 2), (4, 5), (10, 1)])
def test_mcnemar_equals_the_sum_over_all_possible_tables(gained: int, lost: int) -> None:
    exact, mid = binomial_double_loop(gained, lost)
    assert mcnemar(*outcomes(gained, lost)) == pytest.approx(exact)
    assert mcnemar(*outcomes(gained, lost), mid_p=True) == pytest.approx(mid)


def test_mcnemar_ignores_seeds_that_did_not_change_and_which_side_is_first() -> None:
    before, after = outcomes(9, 2, same=5000)
    assert mcnemar(before, after) == mcnemar(*outcomes(9, 2, same=0)) == mcnemar(after, before)


def test_mcnemar_without_a_change_is_1() -> None:
    assert mcnemar(*outcomes(0, 0)) == 1.0
    assert mcnemar(*outcomes(5, 5)) == 1.0


def test_mcnemar_does_not_overflow_with_thousands_of_changes() -> None:
    assert 0.0 <= mcnemar(*outcomes(3000, 10)) < 1e-300
    assert mcnemar(*outcomes(1500, 1500)) == 1.0
