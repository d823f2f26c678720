"""π0: a tiny one of the real architecture, against transformers' own way to run it and against slow loops."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vla_stream.environments.protocol import Observations, Specification
from vla_stream.errors import InputError
from vla_stream.plugins import POLICIES, load_class, parse_options
from vla_stream.policies import pi0_network
from vla_stream.policies.pi0 import Pi0
from vla_stream.policies.protocol import GroundedPolicy, NormalisedPolicy, Policy

ROBOT = Specification({"front": (48, 48), "wrist": (24, 40)}, state_dims=8, action_dims=3)
CHUNK = 4

pytestmark = pytest.mark.timeout(180)  # transformers takes long to import where the disk or the machine is busy


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(specification: Specification = ROBOT, chunk: int = CHUNK, seed: int = 0, **options: Any) -> Pi0:
    torch.manual_seed(seed)
    return Pi0(parse_options(Pi0, options, "policy.options"), specification, chunk).eval()


def look(rows: int, specification: Specification = ROBOT, seed: int = 0) -> Observations:
    random = np.random.default_rng(seed)
    images = {
        camera: random.integers(0, 256, (rows, *size, 3), dtype=np.uint8)
        for camera, size in specification.cameras.items()
    }
    state = random.standard_normal((rows, specification.state_dims)).astype(np.float32)
    return Observations(images, state, [f"touch the {'red ' * row}cube" for row in range(rows)])


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in float32 where a policy is float64: the network's own casts would drown the differences."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def keys(rows: int) -> np.ndarray:
    return np.arange(100, 100 + rows, dtype=np.uint64)


def inputs(policy: Pi0, observations: Observations) -> dict[str, torch.Tensor]:
    """What the network is given, as transformers' own methods take it."""
    prefix = policy._prefix(observations)
    ids, mask = map(torch.from_numpy, policy._prompts(observations.instruction))
    from vla_stream.policies.vlm_inputs import fit_images

    pixels = torch.stack(
        [fit_images(policy.tensor(observations.images[camera]), 32) for camera in policy._cameras], dim=1
    )
    present = torch.ones(pixels.shape[:2], dtype=torch.bool)
    return {
        "state": prefix.state,
        "input_ids": ids,
        "attention_mask": mask,
        "pixel_values": pixels,
        "pixel_attention_mask": present,
    }


# --- the protocol, and what the network is asked


def test_it_offers_the_protocols_of_a_policy_under_its_name() -> None:
    assert load_class(POLICIES, "pi0") is Pi0
    policy = make()
    assert isinstance(policy, Policy) and isinstance(policy, NormalisedPolicy)
    assert not isinstance(policy, GroundedPolicy)


def test_options_are_read_without_transformers() -> None:
    code = "import sys\nfrom vla_stream.policies.pi0 import Pi0\nPi0.Options()\nprint('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_without_keys_the_actions_are_those_of_transformers_own_sampling() -> None:
    policy, observations = make(), look(3)
    act = policy.act(observations, None)
    noise = torch.from_numpy(act.extras["chain"][:, 0])
    expected = policy.network.sample_actions(**inputs(policy, observations), noise=noise, num_steps=4)
    np.testing.assert_allclose(act.extras["chain"][:, -1], expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(act.actions, expected[:, :CHUNK, :3].numpy(), atol=1e-5)


def test_the_prefix_is_computed_once_per_observation_and_the_expert_once_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, calls = make(denoising_steps=5), []
    monkeypatch.setattr(policy, "_prefix", lambda o, old=policy._prefix: calls.append("prefix") or old(o))
    monkeypatch.setattr(policy, "_expert", lambda *a, old=policy._expert: calls.append("expert") or old(*a))
    act = policy.act(look(2), keys(2))
    assert calls == ["prefix", *["expert"] * 5]
    calls.clear()
    policy.evaluate(look(2), act.actions, act.extras)
    assert calls == ["prefix", *["expert"] * 6]  # the random step with a gradient, and all for the value


def test_a_chunk_is_cut_out_of_what_the_network_makes_and_padded_dims_do_not_count() -> None:
    policy, observations = make(), look(2)
    act = policy.act(observations, keys(2))
    assert act.actions.shape == (2, CHUNK, 3) and act.extras["chain"].shape == (2, 5, CHUNK, 32)
    other = {name: array.copy() for name, array in act.extras.items()}
    last = other["random_steps"][:, 0] + 1
    for row, step in enumerate(last):
        other["chain"][row, step, :, 3:] += 1.0
    logprobs = policy.evaluate(observations, act.actions, other).logprobs.detach()
    np.testing.assert_array_equal(logprobs.numpy(), act.logprobs)
    for row, step in enumerate(last):
        other["chain"][row, step, 1, 2] += 1.0
    moved = policy.evaluate(observations, act.actions, other).logprobs.detach().numpy() != act.logprobs
    assert moved[:, 1, 2].all() and moved.sum() == 2


def test_what_a_sentence_says_changes_the_action_and_what_is_said_beside_it_does_not() -> None:
    policy, observations = make(), look(1).take([0, 0])
    said = Observations(observations.images, observations.state, ["touch the red cube", "touch the blue cube"])
    red, blue = policy.act(said, None).actions
    assert not np.allclose(red, blue)
    longer = Observations(said.images, said.state, ["touch the red cube", "put it into the drawer on the left"])
    np.testing.assert_array_equal(policy.act(longer, None).actions[0], red)


def test_the_cameras_of_the_option_are_seen_in_its_order() -> None:
    observations = look(2)
    swapped = Observations(
        {"front": observations.images["front"], "wrist": np.zeros_like(observations.images["wrist"])},
        observations.state,
        observations.instruction,
    )
    front = make(cameras=["front"])
    np.testing.assert_array_equal(front.act(observations, None).actions, front.act(swapped, None).actions)
    both, turned = make(), make(cameras=["wrist", "front"])
    assert not np.allclose(both.act(observations, None).actions, front.act(observations, None).actions)
    assert not np.allclose(both.act(observations, None).actions, turned.act(observations, None).actions)


# --- log-probs


def slow_logprobs(policy: Pi0, observations: Observations, extras: dict[str, np.ndarray]) -> np.ndarray:
    """NUMERICS' formula number by number; the velocity by transformers' forward, without a cache of the prefix."""
    steps, chain, given = policy._flow.denoising_steps, extras["chain"], inputs(policy, observations)
    delta, result = 1 / steps, np.zeros((len(chain), CHUNK, 3))
    for row, random_steps in enumerate(extras["random_steps"]):
        for k in random_steps:
            t, x = 1 - k / steps, torch.tensor(chain[row : row + 1, k])
            with torch.no_grad():
                one = {name: tensor[row : row + 1] for name, tensor in given.items()}
                velocity = policy.network(noise=x, timestep=torch.tensor([t], dtype=x.dtype), **one).logits[0].numpy()
            for h in range(CHUNK):
                for a in range(3):
                    now, after, v = float(x[0, h, a]), float(chain[row, k + 1, h, a]), float(velocity[h, a])
                    sigma = 0.5 * math.sqrt(t / (1 - t if k > 0 else 1 - (t - delta)))
                    action, noise = now - v * t, now + v * (1 - t)
                    mean = action * (1 - (t - delta)) + noise * (t - delta - sigma**2 * delta / (2 * t))
                    std = sigma * math.sqrt(delta)
                    result[row, h, a] += -((after - mean) ** 2) / (2 * std**2) - math.log(std * math.sqrt(2 * math.pi))
    return result


def fixed_chain(policy: Pi0, rows: int) -> dict[str, np.ndarray]:
    """One that no network made, with each step as the random one of some row."""
    steps = policy._flow.denoising_steps
    chain = np.random.default_rng(3).standard_normal((rows, steps + 1, CHUNK, 32))
    return {"chain": chain, "random_steps": np.arange(rows)[:, None] % steps}


@pytest.mark.usefixtures("exact")
def test_the_log_prob_of_a_fixed_chain_is_that_of_a_slow_loop() -> None:
    policy, observations = make(train="all").double(), look(8)
    extras = fixed_chain(policy, 8)
    got = policy.evaluate(observations, np.zeros((8, CHUNK, 3), np.float32), extras).logprobs.detach().numpy()
    np.testing.assert_allclose(got, slow_logprobs(policy, observations, extras), rtol=0, atol=1e-6)


@pytest.mark.usefixtures("exact")
def test_with_learned_noise_the_log_probs_of_all_steps_are_summed() -> None:
    policy, observations = make(noise="learned").double(), look(2)
    extras = fixed_chain(policy, 2) | {"random_steps": np.tile(np.arange(4), (2, 1))}
    got = policy.evaluate(observations, np.zeros((2, CHUNK, 3), np.float32), extras)
    given, expected = inputs(policy, observations), np.zeros((2, CHUNK, 3))
    low, high = policy.log_std_range.exp()
    assert (float(low), float(high)) == pytest.approx((0.08, 0.16))
    for k in range(4):
        t, x = torch.full((2,), 1 - k / 4, dtype=torch.float64), torch.tensor(extras["chain"][:, k])
        with torch.no_grad():
            velocity = policy.network(noise=x, timestep=t, **given).logits
            output, _ = policy._expert(policy._prefix(observations), x, t)
            share = torch.sigmoid(output @ policy.noise_head.weight.T + policy.noise_head.bias)
        std = low * (high / low) ** share
        density = torch.distributions.Normal(x - velocity / 4, std).log_prob(torch.tensor(extras["chain"][:, k + 1]))
        expected += density[:, :, :3].numpy()
    np.testing.assert_allclose(got.logprobs.detach().numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("noise", ["sde", "learned"])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_gradient_of_the_log_prob_is_the_numerical_one(noise: str, gradient_checkpointing: bool) -> None:
    policy = make(train="all", noise=noise, gradient_checkpointing=gradient_checkpointing).double()
    observations = look(4)
    extras = fixed_chain(policy, 4)
    if noise == "learned":
        extras["random_steps"] = np.tile(np.arange(4), (4, 1))
    weights = torch.randn(4, CHUNK, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss() -> torch.Tensor:
        evaluation = policy.evaluate(observations, np.zeros((4, CHUNK, 3), np.float32), extras)
        return (weights * evaluation.logprobs).sum() + evaluation.entropy.sum()

    trained = policy.parameter_groups()["policy"]
    gradients = torch.autograd.grad(loss(), trained)
    # Along one direction for each tensor, by central differences.
    with torch.no_grad():
        for seed, (parameter, gradient) in enumerate(zip(trained, gradients, strict=True)):
            direction = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            step = 1e-6 / float(direction.norm())
            around = []
            for sign in (1, -1):
                parameter.add_(sign * step * direction)
                around.append(float(loss()))
                parameter.sub_(sign * step * direction)
            numerical, exact = (around[0] - around[1]) / (2 * step), float((gradient * direction).sum())
            assert numerical == pytest.approx(exact, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize(("noise", "told"), [("sde", False), ("learned", True)])
def test_an_entropy_bonus_moves_a_learned_noise_only(noise: str, told: bool) -> None:
    policy = make(noise=noise)
    act = policy.act(look(2), keys(2))
    entropy = policy.evaluate(look(2), act.actions, act.extras).entropy.sum()
    assert entropy.requires_grad == told


def test_each_denoising_step_is_the_random_one_equally_often_and_only_it_is_random() -> None:
    policy = make(denoising_steps=3)
    act = policy.act(look(1).take([0] * 300), np.arange(300, dtype=np.uint64))
    chosen, chain = act.extras["random_steps"][:, 0], torch.from_numpy(act.extras["chain"])
    assert np.bincount(chosen).tolist() == pytest.approx([100] * 3, abs=30)
    prefix = policy._prefix(look(1).take([0] * 300))
    for step in range(3):
        with torch.no_grad():
            _, velocity = policy._expert(prefix, chain[:, step], torch.full((300,), 1 - step / 3))
        ode = chain[:, step] - velocity / 3
        followed = torch.isclose(ode, chain[:, step + 1], atol=1e-4).flatten(1).all(1).numpy()
        np.testing.assert_array_equal(followed, chosen != step)


def test_temperatures_scale_the_noise_of_training_and_of_evaluation() -> None:
    observations = look(1).take([0] * 200)
    numbers = np.arange(200, dtype=np.uint64)
    spread = {}
    for temperature in (1.0, 0.5):
        # One step: the action is the end of the first noise plus that of the step, whose deviation is the noise level.
        act = make(denoising_steps=1, temperature=temperature).act(observations, numbers)
        mean = make(denoising_steps=1, temperature=1e-9).act(observations, numbers).actions
        spread[temperature] = float((act.actions - mean).std())
    assert spread[1.0] == pytest.approx(0.5, rel=0.07) and spread[0.5] == pytest.approx(0.25, rel=0.07)
    still, moved = (make(evaluation_temperature=t).act(look(2), None).extras["chain"][:, 0] for t in (0.0, 1.0))
    assert not still.any() and moved.std() == pytest.approx(1, rel=0.2)


# --- values, statistics, what is trained


def test_the_value_moves_no_action_and_its_gradient_ends_at_its_head() -> None:
    policy, observations = make(train="all"), look(3)
    act = policy.act(observations, keys(3))
    policy.evaluate(observations, act.actions, act.extras).values.sum().backward()
    with_gradient = {name for name, parameter in policy.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in policy.named_parameters() if name.startswith("value_head.")}
    assert {id(p) for p in policy.parameter_groups()["value"]} == {id(p) for p in policy.value_head.parameters()}


def test_the_value_is_that_of_the_mean_over_executed_actions_and_denoising_steps() -> None:
    policy, observations = make(), look(2)
    act = policy.act(observations, keys(2))
    outputs = []
    for step in range(4):
        t, x = torch.full((2,), 1 - step / 4), torch.from_numpy(act.extras["chain"][:, step])
        with torch.no_grad():
            outputs.append(policy._expert(policy._prefix(observations), x, t)[0][:, :CHUNK])
            expected = policy.value_head(torch.stack(outputs, 1).flatten(1, 2).mean(1))[:, 0]
    np.testing.assert_allclose(act.values, expected.numpy(), atol=1e-5)


def test_what_no_gradient_reaches_is_frozen_and_nothing_else() -> None:
    policy = make(train="all")
    frozen = sorted(name for name, parameter in policy.named_parameters() if not parameter.requires_grad)
    language = "network.model.vlm.language_model."
    last = language + "layers.1."
    assert frozen == sorted(
        [
            "network.model.dit.embed_tokens.weight",
            language + "norm.weight",
            last + "post_attention_layernorm.weight",
            *(last + f"self_attn.{name}_proj.weight" for name in "qo"),
            *(last + f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        ]
    )


@pytest.mark.parametrize("train", ["expert", "lora"])
def test_only_what_is_trained_travels_and_it_lands_on_its_own_base_only(train: str) -> None:
    policy, twin = make(train=train, lora_rank=4), make(train=train, lora_rank=4, seed=1)
    state = policy.state_dict()
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert state.keys() == trained | {"state_mean", "state_std", "action_mean", "action_std", "base_digest"}
    travelling = sum(tensor.numel() for tensor in state.values())
    assert travelling < sum(parameter.numel() for parameter in policy.parameters()) / 4
    if train == "lora":
        assert all(
            "lora_" in name or "embed_action_time" in name or "_proj" in name for name in trained if "dit" in name
        )
        assert not any(".base_layer." in name for name in trained)
    twin.load_state_dict(state)
    np.testing.assert_array_equal(
        twin.act(look(2), keys(2)).actions, policy.act(look(2), keys(2)).actions, "the same weights"
    )
    with pytest.raises(InputError, match="another base"):
        twin.load_state_dict(state | {"base_digest": state["base_digest"] + 1})
    with pytest.raises(InputError, match=r"1 weights are missing, or not trained here, first: value_head\.0\.bias"):
        twin.load_state_dict({name: tensor for name, tensor in state.items() if name != "value_head.0.bias"})


def test_computing_layers_again_gives_the_same_gradients() -> None:
    plain, again = make(train="all"), make(train="all", gradient_checkpointing=True)
    observations = look(3)
    act = plain.act(observations, keys(3))
    for policy in (plain, again):
        policy.evaluate(observations, act.actions, act.extras).logprobs.sum().backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_computing_layers_again_keeps_less_for_the_way_back() -> None:
    kept = {}
    for again in (False, True):
        policy, observations = make(train="all", gradient_checkpointing=again), look(8)
        act = policy.act(observations, keys(8))
        seen: dict[int, int] = {}

        def keep(tensor: torch.Tensor, seen: dict[int, int] = seen) -> torch.Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            evaluation = policy.evaluate(observations, act.actions, act.extras)
        assert evaluation.logprobs.requires_grad
        kept[again] = sum(seen.values())
    assert kept[True] < kept[False] / 2


def test_low_precision_is_near_and_not_the_same() -> None:
    exact, rough = make(), make(precision="bfloat16")
    assert rough.low_precision and not exact.low_precision
    ours, theirs = (policy.act(look(4), keys(4)).actions for policy in (exact, rough))
    assert 1e-5 < np.abs(ours - theirs).max() < 0.05
    assert {parameter.dtype for parameter in rough.parameters()} == {torch.float32}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("default")  # of the compiler's own packages
def test_a_compiled_network_gives_the_same_actions_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is captured is run as it is: the step to machine code takes minutes on a CPU, and is torch's.
    whole = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: whole(module, backend="aot_eager"))
    plain, compiled = make(), make(compile=True)
    observations = look(4)
    ours, theirs = plain.act(observations, keys(4)), compiled.act(observations, keys(4))
    np.testing.assert_allclose(theirs.actions, ours.actions, atol=1e-4)
    for policy in (plain, compiled):
        policy.evaluate(observations, ours.actions, ours.extras).logprobs.sum().backward()
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)


def test_the_warm_start_sets_the_statistics_of_the_state_and_they_are_used() -> None:
    policy, plain = make(), make()
    mean, std = np.full(8, 100.0, np.float32), np.full(8, 50.0, np.float32)
    std[3] = 0.0
    policy.set_state_statistics(mean, std)
    observations = look(2)
    far = observations.state * np.where(std == 0, 1, std) + mean
    shifted = Observations(observations.images, far.astype(np.float32), observations.instruction)
    np.testing.assert_allclose(policy.act(shifted, None).actions, plain.act(observations, None).actions, atol=1e-3)


def test_actions_are_in_the_environments_range_where_no_statistics_say_otherwise() -> None:
    wide = Specification(ROBOT.cameras, 8, 3, action_low=0.0, action_high=10.0)
    ours, theirs = make().act(look(2), None), make(wide).act(look(2), None)
    np.testing.assert_allclose(theirs.actions, ours.actions * 5 + 5, atol=1e-4)


def test_imitation_can_be_learned_and_counts_valid_steps_only() -> None:
    policy, observations = make(train="all"), look(4)
    actions = np.tile(np.array([0.5, -0.5, 0.2], np.float32), (4, CHUNK, 1))
    valid = np.ones((4, CHUNK), dtype=bool)
    valid[:, 2:] = False
    optimiser = torch.optim.Adam(policy.parameter_groups()["policy"], lr=5e-3)

    def measured() -> float:
        torch.manual_seed(9)
        with torch.no_grad():
            return float(np.mean([float(policy.imitation_loss(observations, actions, valid)) for _ in range(8)]))

    before = measured()
    for _ in range(60):
        loss = policy.imitation_loss(observations, actions, valid)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert measured() < 0.8 * before
    nothing = policy.imitation_loss(observations, actions, valid & False)
    assert float(nothing.detach()) == 0.0


# --- checkpoints


def save_checkpoint(folder: Path, specification: Specification = ROBOT, chunk_size: int = 6) -> Pi0:
    """A folder as a user has it: transformers' files, the tokenizer's, and the processor's with the statistics."""
    policy = make(specification, chunk=chunk_size)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    policy.network.save_pretrained(folder)
    policy._prompts._tokenizer.save(str(folder / "tokenizer.json"))
    random = np.random.default_rng(5)
    statistics = {
        "state_mean": random.standard_normal(specification.state_dims).tolist(),
        "state_std": random.uniform(0.5, 2, specification.state_dims).tolist(),
        "actions_mean": random.standard_normal(specification.action_dims).tolist(),
        "actions_std": random.uniform(0.5, 2, specification.action_dims).tolist(),
    }
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "PI0Processor"} | statistics))
    return policy


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Pi0]:
    folder = tmp_path / "pi0"
    folder.mkdir()
    return folder, save_checkpoint(folder)


def test_a_checkpoint_is_the_network_that_was_saved_with_its_statistics(saved: tuple[Path, Pi0]) -> None:
    folder, original = saved
    policy = make(checkpoint=str(folder))  # its network makes chunks of 6, of which 4 are executed
    for name, tensor in original.network.state_dict().items():
        assert torch.equal(policy.network.state_dict()[name], tensor), name
    about = json.loads((folder / "processor_config.json").read_text())
    observations = look(3)
    state = (observations.state - np.array(about["state_mean"])) / np.array(about["state_std"])
    normal = Observations(observations.images, state.astype(np.float32), observations.instruction)
    raw = original.act(normal, None).actions[:, :CHUNK]
    expected = raw * np.array(about["actions_std"]) + np.array(about["actions_mean"])
    np.testing.assert_allclose(policy.act(observations, None).actions, expected, atol=1e-4)
    policy.set_state_statistics(np.zeros(8, np.float32), np.ones(8, np.float32))
    np.testing.assert_allclose(policy.act(observations, None).actions, expected, atol=1e-4)


def test_weights_may_have_the_names_that_lerobot_gives_them(saved: tuple[Path, Pi0]) -> None:
    folder, original = saved

    def renamed(name: str) -> str:
        for ours, theirs in (
            ("model.dit.embed_tokens.", "paligemma_with_expert.gemma_expert.lm_head."),
            ("model.dit.", "paligemma_with_expert.gemma_expert.model."),
            ("model.vlm.language_model.embed_tokens.", "paligemma_with_expert.paligemma.lm_head."),
            ("model.vlm.", "paligemma_with_expert.paligemma.model."),
            ("embed_action_time.", ""),
        ):
            if name.startswith(ours):
                return "model." + theirs + name.removeprefix(ours)
        return "model." + name

    state = {renamed(name): tensor.contiguous() for name, tensor in original.network.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    policy = make(checkpoint=str(folder))
    for name, tensor in original.network.state_dict().items():
        assert torch.equal(policy.network.state_dict()[name], tensor), name


def test_weights_saved_in_bfloat16_are_trained_in_float32(saved: tuple[Path, Pi0]) -> None:
    folder, original = saved
    original.network.bfloat16().save_pretrained(folder)
    assert {parameter.dtype for parameter in make(checkpoint=str(folder)).parameters()} == {torch.float32}


@pytest.mark.parametrize("train", ["lora", "expert"])
def test_a_policy_that_is_written_out_is_a_whole_model_and_acts_as_before(
    saved: tuple[Path, Pi0], tmp_path: Path, train: str
) -> None:
    from transformers import PI0ForConditionalGeneration

    folder, _ = saved
    policy, observations = make(checkpoint=str(folder), train=train, noise="learned"), look(3)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape))
    acted, sampled = policy.act(observations, None), policy.act(observations, keys(3))
    written = tmp_path / "written"
    written.mkdir()
    policy.write(written)
    again = make(checkpoint=str(written), train=train, noise="learned", seed=9)
    for before, after in ((acted, again.act(observations, None)), (sampled, again.act(observations, keys(3)))):
        np.testing.assert_allclose(after.actions, before.actions, atol=1e-5)
        np.testing.assert_allclose(after.values, before.values, atol=1e-5)
        np.testing.assert_allclose(after.logprobs, before.logprobs, rtol=1e-4, atol=1e-3)
    loaded, about = PI0ForConditionalGeneration.from_pretrained(
        written, local_files_only=True, output_loading_info=True
    )
    assert not about["missing_keys"] and not about["unexpected_keys"]
    plain = make(checkpoint=str(written), train="all").network.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in loaded.state_dict().items())
    assert json.loads((written / "processor_config.json").read_text())["processor_class"] == "PI0Processor"
    with pytest.raises(
        InputError, match=r"value_head.0.weight is \[5, 5\], expected .*; use those, or remove the file"
    ):
        save_file({"value_head.0.weight": torch.zeros(5, 5)}, written / "heads.safetensors")
        make(checkpoint=str(written), train=train)


def test_statistics_may_come_from_a_lerobot_dataset(saved: tuple[Path, Pi0], tmp_path: Path) -> None:
    folder, _ = saved
    file = tmp_path / "stats.json"
    about = {"mean": [1.0] * 8, "std": [2.0] * 8}
    file.write_text(json.dumps({"observation.state": about, "action": {"mean": [3.0] * 3, "std": [0.0, 4.0, 5.0]}}))
    policy = make(checkpoint=str(folder), statistics=str(file))
    assert policy.state_std.tolist() == [2.0] * 8
    assert policy.action_mean.tolist() == [3.0] * 3 and policy.action_std.tolist() == [1.0, 4.0, 5.0]


def spoil(folder: Path, how: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "processor_config.json").read_text())
    match how:
        case "no folder":
            folder.rename(folder.with_name("elsewhere"))
        case "no config" | "no weights" | "no tokenizer" | "no processor":
            names = {"config": "config.json", "weights": "model.safetensors", "tokenizer": "tokenizer.json"}
            (folder / names.get(how.split()[1], "processor_config.json")).unlink()
        case "no shard":
            (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
            parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
        case "half a config":
            (folder / "config.json").write_text("{")
        case "another architecture":
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "paligemma"}))
        case "lerobot":
            (folder / "config.json").write_text(json.dumps({"type": "pi0", "chunk_size": 50}))
        case "no statistics":
            (folder / "processor_config.json").write_text(json.dumps(processor | {"state_mean": None}))
        case "uneven statistics":
            (folder / "processor_config.json").write_text(json.dumps(processor | {"state_std": [1.0]}))


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("no folder", "pi0', no such folder; give a pretrained model's"),
        ("no config", "config.json: cannot be read (No such file or directory), expected JSON"),
        ("half a config", "config.json: cannot be read (not JSON), expected JSON"),
        ("no weights", "pi0: lacks model.safetensors, expected a whole model"),
        ("no shard", "pi0: lacks model-00002-of-00002.safetensors, expected a whole model"),
        ("no tokenizer", "pi0: lacks tokenizer.json, expected a whole model"),
        ("no processor", "processor_config.json: cannot be read (No such file or directory)"),
        ("another architecture", "config.json: model_type is 'paligemma', expected 'pi0'"),
        ("lerobot", "config.json: is LeRobot's, expected that of transformers"),
        ("no statistics", "processor_config.json: state_mean is None, expected a list of numbers"),
        ("uneven statistics", "state_mean has 8 numbers and state_std 1, expected as many"),
    ],
)
def test_a_folder_that_is_no_whole_pi0_is_told_in_one_line_before_it_is_loaded(
    saved: tuple[Path, Pi0], how: str, line: str
) -> None:
    folder, _ = saved
    spoil(folder, how)
    with pytest.raises(InputError) as caught:
        parse_options(Pi0, {"checkpoint": str(folder)}, "policy.options")
    assert line in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("specification", "chunk", "line"),
    [
        (Specification(ROBOT.cameras, 7, 3), 4, "statistics of 8 state dims, but the environment has 7"),
        (Specification(ROBOT.cameras, 8, 4), 4, "statistics of 3 action dims, but the environment has 4"),
        (Specification(ROBOT.cameras, 8, 33), 4, "the environment's action has 33 dims, expected at most 32"),
        (Specification(ROBOT.cameras, 40, 3), 4, "the environment's state has 40 dims, expected at most 32"),
        (ROBOT, 7, "policy.chunk has 7 actions, expected at most 6"),
        (Specification({}, 8, 3), 4, "policy.options.cameras: no camera, expected one or more"),
    ],
)
def test_an_environment_that_does_not_fit_is_told_in_one_line_and_the_weights_are_not_even_read(
    saved: tuple[Path, Pi0], specification: Specification, chunk: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = saved
    monkeypatch.delattr(pi0_network, "build")
    with pytest.raises(InputError) as caught:
        make(specification, chunk, checkpoint=str(folder))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_a_camera_that_is_not_there_and_a_range_the_wrong_way_round_are_told_in_one_line() -> None:
    with pytest.raises(InputError, match="left, expected one or more of the environment's: front, wrist"):
        make(cameras=["front", "left"])
    with pytest.raises(InputError, match=r"learned_std is .*, expected two numbers above 0, the lower one first"):
        make(learned_std=[0.2, 0.1])


def test_weights_that_a_file_lacks_are_told_in_one_line(saved: tuple[Path, Pi0]) -> None:
    folder, _ = saved
    file = folder / "model.safetensors"
    state = load_file(file)
    lost = sorted(name for name in state if "action_out_proj" in name)
    save_file({name: tensor for name, tensor in state.items() if name not in lost}, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 2 weights, first .*action_out_proj\.bias, expected a whole π0"):
        make(checkpoint=str(folder))
