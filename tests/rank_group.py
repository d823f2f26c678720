"""Processes that are the ranks of one learner, for learning/test_ranks.py: each case is trained by all of them."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, distributed
from toy import Failing, K, T, Toy, make_demonstrations, make_episodes, make_segment

from vla_stream import config
from vla_stream.environments.protocol import Observations, Specification
from vla_stream.learning.ranks import ALONE, Alone, Replicas, Shards
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import Learner, LearnerState
from vla_stream.plugins import POLICIES, load_class, parse_options

B = 4
UPDATES = 5
FAULTY, NEVER = (1, 3), 10**9
DEADLINE_S = 600
OUTCOMES = "outcomes.json"


class Case(NamedTuple):
    """What is trained. fault: of `Failing`, in the FAULTY updates, on the last rank alone. restored: from a state of
    rank 0's, after every update."""

    parallel: str
    algorithm: Mapping[str, Any] = {}
    trainer: Mapping[str, Any] = {}
    fault: str = ""
    restored: bool = False


STREAMING = {"update": "streaming", "epochs": 1}
CRITIC = {"entropy_coefficient": 0.01}
BOTH: dict[str, Case] = {
    "buffered": Case("", CRITIC, {"epochs": 2, "minibatch_samples": 13}),
    "streaming": Case("", CRITIC, STREAMING),
    "an optimiser step too big for one pass": Case("", CRITIC, {"epochs": 1, "minibatch_samples": 1000}),
    "warm-up": Case("", CRITIC, {"epochs": 1, "critic_warmup_updates": 3}),
    "by the chunk": Case("", {"granularity": "chunk"}, STREAMING),
    "imitation and a reference beside it": Case(
        "", {"imitation_coefficient": 0.3, "reference_kl_coefficient": 0.1}, {"epochs": 1}
    ),
    "ends early": Case("", {"max_kl": 1e-3}, {"epochs": 4, "minibatch_samples": 16}),
    "grpo": Case("", {"name": "grpo"}, {"epochs": 2, "minibatch_samples": 9}),
    "grpo, streaming": Case("", {"name": "grpo"}, {**STREAMING, "minibatch_samples": 5}),
    "rft": Case("", {"name": "rft"}, {"epochs": 1}),
    "appo": Case("", {"name": "appo"}, {"epochs": 1}),
    "restored": Case("", CRITIC, STREAMING, restored=True),
    "a loss that is not finite on one rank": Case("", CRITIC, STREAMING, fault="loss"),
    "a gradient that is not finite on one rank": Case("", CRITIC, {"epochs": 1}, fault="gradient"),
}
SHARES = Case("", CRITIC, {**STREAMING, "optimiser_steps": 2, "minibatch_samples": 7})
SHARED = {"streaming in shares": SHARES, "restored in shares": SHARES._replace(restored=True)}  # of two segments each


# What differs with the number of ranks: who has no sample of a part, who sees the fault.
FEW = (
    "buffered",
    "streaming",
    "imitation and a reference beside it",
    "grpo",
    "a loss that is not finite on one rank",
)


def cases(count: int) -> dict[str, Case]:
    """For two ranks all, for more, which take longer, a few; each by both ways."""
    found = BOTH | SHARED if count == 2 else {name: BOTH[name] for name in FEW}
    return {f"{way}: {name}": case._replace(parallel=way) for way in ("ddp", "fsdp") for name, case in found.items()}


def train(case: Case, ranks: Alone = ALONE) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Weights after UPDATES updates, and what each update told, of all segments or of this rank's."""
    torch.manual_seed(0)
    policy = Failing(NEVER, case.fault) if case.fault else Toy()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * ranks.rank  # rank 0's are everybody's
    defaults: dict[str, Any] = {
        "segments_per_update": B,
        "minibatch_samples": 16,
        "learning_rate": 1e-2,
        "critic_warmup_updates": 0,
    }
    algorithm = config.Algorithm.model_validate(case.algorithm)
    if algorithm.has_critic:
        defaults["value_learning_rate"] = 1e-2
    else:
        del defaults["critic_warmup_updates"]
    learner = Learner(
        policy.double(),
        algorithm,
        config.Trainer.model_validate(defaults | dict(case.trainer)),
        seed=7,
        reference=Toy(seed=2 + ranks.rank).double() if algorithm.reference_kl_coefficient else None,
        demonstrations=make_demonstrations() if algorithm.imitation_coefficient else None,
        ranks=ranks,
    )
    told = []
    for update in range(UPDATES):
        learner.version = update
        if isinstance(policy, Failing) and ranks.rank == ranks.count - 1:
            policy.good_passes = 0 if update in FAULTY else NEVER
        for segment in segments(algorithm, update)[ranks.rank :: ranks.count]:
            learner.add(segment)
        result = learner.finish(update)
        told.append({"skipped": result.skipped is not None, "samples": result.samples, **result.metrics})
        if case.restored:
            learner.add(segments(algorithm, update + 1)[ranks.rank])
            learner.discard()
            restore(learner, ranks)
    return learner.weights(), told


def restore(learner: Learner, ranks: Alone) -> None:
    state = learner.state()
    learner.load_state(LearnerState(99, state.policy, state.optimiser) if ranks.rank == 0 else None)
    assert learner.updates_done == 99
    learner.updates_done = state.updates_done


def segments(algorithm: config.Algorithm, update: int) -> list[Segment]:
    """Off-policy, of several lengths; of rows that are compared one group has nothing to compare."""
    actor = Toy(seed=1)
    tickets = range(B * update, B * update + B)
    if algorithm.has_critic:
        made = [make_segment(actor, ticket) for ticket in tickets]
        for ticket, segment in enumerate(made):
            held = slice(K - ticket, K)
            segment.valid[1:, held], segment.executed[0, held, 1], segment.terminated[0, held] = False, False, True
        return made
    successes: list[Sequence[int]] = [(0, 2), (), (1,), (0, 1, 2)]
    lengths = [(2, T, 4, T), (T, T, T, T), (3, 3, T, 1), (T, 2, 2, T)]
    return [
        make_episodes(actor, ticket, length, success)
        for ticket, length, success in zip(tickets, lengths, successes, strict=True)
    ]


def be_a_rank(rank: int, count: int, folder: str, names: Sequence[str]) -> None:
    """Train these cases, or all, as one of `count` ranks; rank 0 leaves their outcomes in `folder`."""
    join(rank, count, folder)
    device = torch.device("cpu")
    outcomes = {}
    for name in names or cases(count):
        case = cases(count)[name]
        weights, told = train(case, (Shards if case.parallel == "fsdp" else Replicas)(device))
        outcomes[name] = {"weights": {key: tensor.tolist() for key, tensor in weights.items()}, "told": told}
    leave(rank, folder, outcomes)


def join(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", count)
    deadline = datetime.timedelta(seconds=DEADLINE_S)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=deadline)


def leave(rank: int, folder: str, outcomes: Mapping[str, Any]) -> None:
    if rank == 0:
        Path(folder, OUTCOMES).write_text(json.dumps(outcomes))
    distributed.barrier()
    distributed.destroy_process_group()


def sharded_policies(rank: int, count: int, folder: str, kinds: Sequence[str]) -> None:
    """Gradients of policies in shards, of which each rank passes the same rows; rank 0 leaves how far they are off."""
    join(rank, count, folder)
    outcomes = {}
    for kind in kinds:
        name, options = json.loads(kind)
        whole, sharded = make_policy(name, options), make_policy(name, options)
        rows = Observations(
            {"front": np.random.default_rng(3).integers(0, 255, (2, 48, 48, 3), dtype=np.uint8)},
            np.random.default_rng(4).standard_normal((2, 8)).astype(np.float32),
            ["touch the red cube", "touch it"],
        )
        act = whole.act(rows, np.array([3, 4], dtype=np.uint64))
        shards = Shards(torch.device("cpu"))
        passes = shards.prepare(sharded)
        with torch.no_grad():
            passes.evaluate(rows, act.actions, act.extras)
        found = []
        for policy, asked, ranks in ((whole, whole, ALONE), (sharded, passes, shards)):
            evaluation = asked.evaluate(rows, act.actions, act.extras)
            parameters = [each for group in policy.parameter_groups().values() for each in group]
            # Twice, as where a loss has two divisors.
            once = ranks.gradients(evaluation.logprobs.sum(), parameters, again=True)
            again = ranks.gradients(evaluation.values.sum(), parameters, again=False)
            there = [None if each is None else ranks.whole(each) / ranks.count for each in (*once, *again)]
            found.append(
                torch.cat([torch.zeros(0), *(each.reshape(-1) for each in there if each is not None and each.any())])
            )
        state = {name: shards.whole(tensor) for name, tensor in sharded.state_dict().items()}
        if rank == 0:
            assert all(torch.equal(state[name], tensor) for name, tensor in whole.state_dict().items())
            outcomes[kind] = float((found[0] - found[1]).norm() / found[0].norm())
    leave(rank, folder, outcomes)


def make_policy(name: str, options: Mapping[str, Any]) -> Any:
    cls = load_class(POLICIES, name)
    torch.manual_seed(0)
    specification = Specification({"front": (48, 48)}, state_dims=8, action_dims=3)
    return cls(parse_options(cls, options, "policy.options"), specification, 4).eval()


def run(work: str, count: int, folder: Path, names: Sequence[str], deadline_s: float) -> dict[str, Any]:
    """Do it in `count` processes; what rank 0 left."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{rank}.log" for rank in range(count)]
    with contextlib.ExitStack() as stack:
        processes = []
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "rank_group", work, str(rank), str(count), str(folder), *names]
            output = stack.enter_context(log.open("wb"))
            processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
            stack.callback(processes[-1].kill)
        assert [process.wait(deadline_s) for process in processes] == [0] * count, [
            log.read_text()[-2000:] for log in logs
        ]
    outcomes: dict[str, Any] = json.loads((folder / OUTCOMES).read_text())
    return outcomes


def main() -> None:
    work, rank, count, folder, *names = sys.argv[1:]
    {"train": be_a_rank, "shard": sharded_policies}[work](int(rank), int(count), folder, names)


if __name__ == "__main__":
    main()
