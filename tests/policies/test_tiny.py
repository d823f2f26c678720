"""The tiny policy: what generators and trainers rely on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.policies.protocol import GroundedPolicy, NormalisedPolicy, Policy
from vla_stream.policies.tiny import Tiny, _word_ids

TABLE = Specification({"front": (48, 48)}, state_dims=8, action_dims=3)
ROBOT = Specification({"base_camera": (64, 64), "hand": (17, 30)}, state_dims=42, action_dims=4)
CHUNK = 4


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(specification: Specification = TABLE, chunk: int = CHUNK, seed: int = 0, **options: object) -> Tiny:
    torch.manual_seed(seed)
    return Tiny(Tiny.Options.model_validate(options), specification, chunk)


def look(rows: int, specification: Specification = TABLE, seed: int = 0, sentence: str = "touch it") -> Observations:
    random = np.random.default_rng(seed)
    images = {
        camera: random.integers(0, 256, (rows, height, width, 3), dtype=np.uint8)
        for camera, (height, width) in specification.cameras.items()
    }
    state = random.standard_normal((rows, specification.state_dims)).astype(np.float32)
    return Observations(images, state, [f"{sentence} {row}" for row in range(rows)])


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def test_it_offers_the_protocols_of_a_policy() -> None:
    policy = make()
    assert isinstance(policy, Policy)
    assert isinstance(policy, GroundedPolicy)
    assert isinstance(policy, NormalisedPolicy)


def test_it_is_small_enough_for_one_core() -> None:
    assert sum(parameter.numel() for parameter in make().parameters()) < 150_000


@pytest.mark.parametrize("specification", [TABLE, ROBOT])
def test_any_cameras_state_and_sentence_give_a_chunk_of_actions(specification: Specification) -> None:
    policy = make(specification, chunk=5)
    observations = look(3, specification, sentence="Pick up the 红色 cube — carefully, and " + "then " * 40)
    act = policy.act(observations, keys(1, 2, 3))
    assert act.actions.shape == act.logprobs.shape == (3, 5, specification.action_dims)
    assert act.values.shape == (3,)
    assert {array.dtype for array in (act.actions, act.logprobs, act.values)} == {np.dtype(np.float32)}
    assert all(np.isfinite(array).all() for array in (act.actions, act.logprobs, act.values))


def test_without_a_camera_it_decides_and_learns_by_the_state() -> None:
    blind = Specification({}, state_dims=3, action_dims=1)
    policy, observations = make(blind), look(4, blind)
    act = policy.act(observations, keys(1, 2, 3, 4))
    assert len({float(action) for action in act.actions[:, 0, 0]}) == 4
    evaluation = policy.evaluate(observations, act.actions, {})
    np.testing.assert_allclose(evaluation.logprobs.detach().numpy(), act.logprobs, atol=1e-5)
    (evaluation.logprobs.sum() + evaluation.values.sum()).backward()
    assert policy.state_token.weight.grad is not None and policy.state_token.weight.grad.abs().sum() > 0


def test_an_empty_sentence_is_accepted() -> None:
    observations = look(2)
    assert np.isfinite(make().act(Observations(observations.images, observations.state, ["", "?"]), None).actions).all()


def test_a_camera_too_small_is_refused() -> None:
    with pytest.raises(InputError, match=r"camera front has 48×12 pixels, expected at least 16×16"):
        make(Specification({"front": (48, 12)}, 8, 3))


def test_evaluate_gives_the_log_probs_and_values_of_act() -> None:
    policy = make()
    observations = look(4)
    act = policy.act(observations, keys(1, 2, 3, 4))
    evaluation = policy.evaluate(observations, act.actions, act.extras)
    np.testing.assert_allclose(evaluation.logprobs.detach().numpy(), act.logprobs, atol=1e-5)
    np.testing.assert_allclose(evaluation.values.detach().numpy(), act.values, atol=1e-6)


def test_log_probs_and_entropy_are_those_of_a_gaussian() -> None:
    policy = make(initial_std=0.5)
    observations = look(2)
    mode = policy.act(observations, None)
    expected = torch.distributions.Normal(torch.from_numpy(mode.actions), 0.5)
    actions = mode.actions + np.float32(0.3)
    evaluation = policy.evaluate(observations, actions, {})
    torch.testing.assert_close(evaluation.logprobs.detach(), expected.log_prob(torch.from_numpy(actions)))
    torch.testing.assert_close(evaluation.entropy.detach(), expected.entropy())
    np.testing.assert_allclose(mode.logprobs, -math.log(0.5 * math.sqrt(2 * math.pi)), rtol=1e-5)


def test_without_noise_keys_act_gives_the_mode_and_with_them_it_scatters_by_the_std() -> None:
    policy = make(initial_std=0.2)
    observations = look(1).take([0] * 2000)
    mode = policy.act(observations.take([0]), None).actions
    scattered = policy.act(observations, keys(*range(2000))).actions - mode
    np.testing.assert_allclose(scattered.std(axis=0), 0.2, rtol=0.1)
    np.testing.assert_allclose(scattered.mean(axis=0), 0.0, atol=0.02)


def test_a_row_depends_on_its_own_observation_and_key_only() -> None:
    policy = make()
    observations, others = look(8), look(8, seed=1)
    act = policy.act(observations, keys(*range(8)))
    order = np.random.default_rng(0).permutation(8)
    moved = policy.act(observations.take(order), keys(*order))
    np.testing.assert_array_equal(moved.actions, act.actions[order])
    mixed = Observations.concatenate([observations.take(range(3)), others.take(range(5))])
    beside = policy.act(mixed, keys(0, 1, 2, 99, 98, 97, 96, 95))
    np.testing.assert_array_equal(beside.actions[:3], act.actions[:3])
    np.testing.assert_array_equal(beside.logprobs[:3], act.logprobs[:3])


def test_the_words_change_the_action() -> None:
    policy, observations = make(), look(2).take([0, 0])
    said = Observations(observations.images, observations.state, ["touch the red cube", "touch the blue cube"])
    first, second = policy.act(said, None).actions
    assert not np.allclose(first, second)


def test_words_beyond_the_limit_are_not_read_and_padding_does_not_count() -> None:
    observations = look(2).take([0, 0])
    said = Observations(observations.images, observations.state, ["touch red", "touch red cube"])
    two, first_two = make(words=3).act(said, None).actions, make(words=2).act(said, None).actions
    assert not np.allclose(two[0], two[1])
    np.testing.assert_array_equal(first_two[0], first_two[1])


def test_the_three_colours_and_all_other_words_of_the_tabletop_fall_into_different_buckets() -> None:
    ids = _word_ids("touch the red cube, nothing else green BLUE", 8, Tiny._BUCKETS)
    assert len(set(ids)) == 8
    assert _word_ids("Red", 2, Tiny._BUCKETS) == (ids[2], -1)


def test_word_buckets_are_the_same_on_every_host() -> None:
    # Python's own hash is salted: it would give other words to every process. These numbers are xxh64's.
    assert _word_ids("red green blue", 3, 512) == (362, 69, 55)


def test_the_std_has_a_floor() -> None:
    policy = make(initial_std=0.3, min_std=0.1)
    with torch.no_grad():
        policy.log_std.fill_(-9.0)
    entropy = policy.evaluate(look(1), np.zeros((1, CHUNK, 3), np.float32), {}).entropy
    torch.testing.assert_close(entropy.exp().mean(), torch.tensor(0.1 * math.sqrt(2 * math.pi * math.e)))


def test_evaluate_reaches_every_parameter() -> None:
    policy = make(ROBOT)
    evaluation = policy.evaluate(look(3, ROBOT), np.zeros((3, CHUNK, 4), np.float32), {})
    (evaluation.logprobs.sum() + evaluation.values.sum()).backward()
    assert [name for name, parameter in policy.named_parameters() if parameter.grad is None] == []


def test_parameter_groups_hold_every_parameter_once_and_the_value_head_cannot_move_actions() -> None:
    policy = make()
    groups = policy.parameter_groups()
    ids = [id(parameter) for group in groups.values() for parameter in group]
    assert sorted(ids) == sorted(id(parameter) for parameter in policy.parameters())
    before = policy.act(look(2), None)
    with torch.no_grad():
        for parameter in groups["value"]:
            parameter.add_(1.0)
    after = policy.act(look(2), None)
    np.testing.assert_array_equal(after.actions, before.actions)
    assert not np.allclose(after.values, before.values)


def test_imitation_loss_counts_valid_steps_only_and_leaves_the_std_alone() -> None:
    policy, observations = make(), look(2)
    mean = policy.act(observations, None).actions
    valid = np.array([[True, True, False, False], [True, False, False, False]])
    far = mean + np.where(valid[:, :, None], 3.0, 1000.0).astype(np.float32)
    loss = policy.imitation_loss(observations, far, valid)
    assert float(loss.detach()) == pytest.approx(3.0 - 0.5, rel=1e-4)  # smooth-L1 beyond 1 is |x| − ½
    loss.backward()
    assert policy.log_std.grad is None


def test_state_statistics_travel_with_the_weights_and_acting_does_not_change_them() -> None:
    policy, twin = make(), make(seed=1)
    mean, std = np.full(8, 100.0, np.float32), np.full(8, 50.0, np.float32)
    std[3] = 0.0
    policy.set_state_statistics(mean, std)
    shifted = look(2)
    observations = Observations(shifted.images, shifted.state * 50 + 100, shifted.instruction)
    expected = policy.act(observations, None).actions
    twin.load_state_dict(policy.state_dict())
    np.testing.assert_array_equal(twin.act(observations, None).actions, expected)
    policy.evaluate(observations, expected, {})
    np.testing.assert_array_equal(policy.state_mean.numpy(), mean)
    assert policy.state_std[3] == 1.0


def test_a_state_far_outside_the_demonstrations_counts_as_the_border() -> None:
    policy, observations = make(), look(1)
    far, farther = (
        Observations(observations.images, np.full((1, 8), value, np.float32), observations.instruction)
        for value in (50.0, 5e6)
    )
    np.testing.assert_array_equal(policy.act(far, None).actions, policy.act(farther, None).actions)


def test_grounding_can_be_learned() -> None:
    policy = make()
    random = np.random.default_rng(0)
    places = random.integers(1, 11, (64, 2))
    image = np.zeros((64, 48, 48, 3), np.uint8)
    for row, (x, y) in enumerate(places):
        image[row, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4, 0] = 255
    scenes = Observations({"front": image}, np.zeros((64, 8), np.float32), ["the red thing"] * 64)
    targets = ((places + 0.5) / 6 - 1).astype(np.float32)
    optimiser = torch.optim.Adam(policy.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = policy.grounding_loss(scenes, targets)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 20
