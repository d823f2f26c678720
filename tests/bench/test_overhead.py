"""What the overhead's benchmark counts: stacks as py-spy writes them."""

from __future__ import annotations

import inspect

import pytest
from overhead import KINDS, shares

from vla_stream.broker import codec, queue
from vla_stream.flow import Flow
from vla_stream.metrics import Meter
from workers import replies
from workers.simulator import Simulator
from workers.worker import Worker

STACKS = """main (workers/simulator.py:436);Flow.grant (vla_stream/flow.py:246);evalsha (redis/client.py:9) 3
main (workers/simulator.py:436);write (vla_stream/broker/lanes.py:88);digest_of (vla_stream/broker/codec.py:179) 1
main (workers/trainer.py:1);digest_of (somewhere/else.py:1);renew (vla_stream/learning/x.py:2) 5
WorkQueue.renew (vla_stream/broker/queue.py:102) 1
serve (workers/generator.py:3);busy (vla_stream/metrics.py:99);spend (vla_stream/metrics.py:80) 2
act (vla_stream/policies/tiny.py:96);spend (somewhere/else.py:80) 8
"""


def test_a_sample_counts_once_for_each_kind_whose_functions_are_in_its_stack() -> None:
    found = shares(STACKS)
    assert found == {"leases": 0.05, "permits": 0.15, "digests": 0.05, "metrics": 0.1, "samples": 20.0}


def test_a_worker_that_was_never_seen_computing_has_no_share() -> None:
    assert shares("") == {"leases": 0.0, "permits": 0.0, "digests": 0.0, "metrics": 0.0, "samples": 0.0}


@pytest.mark.parametrize(
    ("kind", "owner", "file"),
    [
        ("leases", queue.WorkQueue, "queue.py"),
        ("leases", replies.Replies, "replies.py"),
        ("permits", Flow, "flow.py"),
        ("digests", codec, "codec.py"),
        ("metrics", Meter, "metrics.py"),
        ("metrics", Worker, "worker.py"),
        ("metrics", Simulator, "simulator.py"),
    ],
)
def test_the_functions_that_are_looked_for_are_there(kind: str, owner: object, file: str) -> None:
    for name, place in KINDS[kind]:
        if place == file:
            assert inspect.isfunction(getattr(owner, name))
