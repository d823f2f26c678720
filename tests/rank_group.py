"""Processes that are the ranks of one learner, for learning/test_ranks.py: each case is trained by all of them."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from toy import Failing, K, T, Toy, make_demonstrations, make_episodes, make_segment

from vla_stream import config
from vla_stream.learning.ranks import ALONE, Alone, Replicas, Shards
from vla_stream.learning.segments import Segment
from vla_stream.learning.update import Learner, LearnerState

B = 4
UPDATES = 5
FAULTY, NEVER = (1, 3), 10**9
DEADLINE_S = 40


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
    "a loss that is not finite on one rank": Case("", CRITIC, {"epochs": 1}, fault="loss"),
    "a gradient that is not finite on one rank": Case("", CRITIC, STREAMING, fault="gradient"),
}
SHARES = Case("", CRITIC, {**STREAMING, "optimiser_steps": 2, "minibatch_samples": 7})
SHARED = {"streaming in shares": SHARES, "restored in shares": SHARES._replace(restored=True)}  # of two segments each


def cases(count: int) -> dict[str, Case]:
    """For so many ranks, each by both ways."""
    found = BOTH | (SHARED if B // 2 % count == 0 else {})
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
    """Train the cases as one of `count` ranks; rank 0 leaves their outcomes in `folder`."""
    from torch import distributed

    torch.set_num_threads(1)
    store = distributed.FileStore(f"{folder}/store", count)
    deadline = datetime.timedelta(seconds=DEADLINE_S)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=deadline)
    device = torch.device("cpu")
    outcomes = {}
    for name in names:
        case = cases(count)[name]
        weights, told = train(case, (Shards if case.parallel == "fsdp" else Replicas)(device))
        outcomes[name] = {"weights": {key: tensor.tolist() for key, tensor in weights.items()}, "told": told}
    if rank == 0:
        Path(folder, "outcomes.json").write_text(json.dumps(outcomes))
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    rank, count, folder, *names = sys.argv[1:]
    be_a_rank(int(rank), int(count), folder, names or list(cases(int(count))))


if __name__ == "__main__":
    main()
