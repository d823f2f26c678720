"""What the trainer gives its learner beside segments, and what it makes of updates with nothing to learn from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from live_run import Run
from trainer_bench import CPU, SPECIFICATION, A, H, Make, observe

from vla_stream.errors import InputError
from vla_stream.learning.cloning import Demonstrations, save_demonstrations
from workers.trainer import make_learner

EPISODES: dict[str, Any] = {"simulators__segment": "episode", "trainer__critic_warmup_updates": None, "updates": 9}


def test_updates_without_anything_to_learn_from_commit_and_do_not_end_the_run(make: Make, run: Run) -> None:
    bench = make(algorithm={"name": "rft"}, trainer__max_skipped_in_a_row=2, **EPISODES)
    trainer = bench.trainer()
    before = bench.weights()
    for _ in range(4):
        bench.feed()  # nobody succeeds in these
        assert trainer.step(None)
    after = bench.weights()
    assert (after.version, after.update, after.digest) == (5, 4, before.digest)
    assert run.flow.books().outcomes["skipped"] == 8 and run.flow.books().balance == 0
    assert all("no row succeeded" in text for kind, text in run.events() if kind == "skipped")


@pytest.mark.parametrize("update", ["buffered", "streaming"])
def test_grpo_trains_segments_that_travelled(make: Make, run: Run, update: str) -> None:
    bench = make(algorithm={"name": "grpo"}, trainer__update=update, **EPISODES)
    trainer = bench.trainer()
    before = bench.weights()
    bench.feed()
    assert trainer.step(None)
    assert run.flow.books().outcomes["trained"] == 2
    assert bench.weights().digest != before.digest
    (sample,) = bench.samples()
    assert sample["equal_groups"] == 0.0 and sample["gradient_norm"] > 0 and "value_loss" not in sample


def test_the_learner_knows_the_version_that_its_update_starts_with(make: Make) -> None:
    bench = make(updates=9)
    trainer = bench.trainer()
    for version in (1, 2):
        bench.feed(version=version)
        trainer.step(None)
        assert trainer.learner.version == version == trainer.version - 1


def test_the_kl_is_that_to_the_runs_first_weights_also_after_a_restart(make: Make) -> None:
    bench = make(algorithm={"reference_kl_coefficient": 0.1}, trainer__checkpoint_every=1, updates=9)
    trainer = bench.trainer()
    first = {name: tensor.clone() for name, tensor in trainer.learner.policy.state_dict().items()}
    for _ in range(2):
        bench.feed()
        assert trainer.step(None)
    second = bench.trainer()
    assert second.update == 2 and second.learner.reference is not None
    for name, tensor in second.learner.reference.state_dict().items():
        assert torch.equal(tensor, first[name])
    assert not torch.equal(second.learner.policy.state_dict()["action.weight"], first["action.weight"])
    assert bench.samples()[1]["kl_reference"] > 0

    for path in (bench.config.run_dir / "checkpoints" / "000000").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="000000"):
        make_learner(bench.config, SPECIFICATION, CPU, print)


def test_demonstrations_stay_where_they_are_imitated_beside_the_update(make: Make) -> None:
    bench = make(
        algorithm={"imitation_coefficient": 0.1},
        pretrain={"steps": 2, "batch": 4},
        policy={"name": "tiny", "chunk": H},
        updates=9,
    )
    known = Demonstrations(
        observe(0), np.zeros((2, H, A), dtype=np.float32), np.ones((2, H), dtype=bool), episodes=1, successes=1
    )
    save_demonstrations(bench.config.run_dir / "demos.safetensors", known, None, bench.config.environment.name)
    trainer = bench.trainer()
    bench.feed()
    assert trainer.step(None) and bench.samples()[0]["demonstration_loss"] >= 0
    trainer.close()
    for coefficient in (0.1, 0.0):
        changed = bench.config.model_copy(
            update={"algorithm": bench.config.algorithm.model_copy(update={"imitation_coefficient": coefficient})}
        )
        learner = make_learner(changed, SPECIFICATION, CPU, print)
        assert (learner.demonstrations is not None) is (coefficient > 0)


def test_generators_whose_numerics_differ_from_the_trainers_are_told_of_once(make: Make, run: Run) -> None:
    bench = make(updates=9)
    trainer = bench.trainer()

    def told() -> list[str]:
        return [text for kind, text in run.events() if kind == "numerics"]

    bench.feed()
    assert trainer.step(None) and not told()
    log_std = bench.policy.state_dict()["log_std"]
    log_std.add_(0.5)  # act is that of other weights than those of the version that it claims
    for version in (2, 3):
        bench.feed(version=version)
        assert trainer.step(None)
    (sentence,) = told()
    assert sentence.startswith("update 2: log-probs of generators and trainer differ by ")
