"""Key names: documented, in one hash slot, and never those of another run."""

from __future__ import annotations

from vla_stream.broker.connection import Client
from vla_stream.streams.keys import Keys

DEMO = Keys("demo")
ALL = {
    "obs-requests": DEMO.obs_requests,
    "trial:1700000000000-0": DEMO.trial("1700000000000-0"),
    "actions:simulator-0": DEMO.actions("simulator-0"),
    "trajectories": DEMO.trajectories,
    "weights": DEMO.weights,
    "weights:12.1:0": DEMO.weight_chunk(12, 1, 0),
    "blob:17.1-5c0ffee0": DEMO.blob("17.1-5c0ffee0"),
    "permits": DEMO.permits,
    "published": DEMO.published,
    "refunded": DEMO.refunded,
    "books": DEMO.books,
    "flow": DEMO.flow,
    "control": DEMO.control,
    "events": DEMO.events,
    "metrics": DEMO.metrics,
    "trace": DEMO.trace,
    "dead-letters": DEMO.dead_letters,
    "worker:generator-0": DEMO.worker("generator-0"),
    "config": DEMO.config,
}


def test_every_key_is_the_documented_one() -> None:
    assert {name: f"vla:{{demo}}:{name}" for name in ALL} == ALL


def test_f32_all_keys_of_a_run_share_one_hash_slot_so_that_scripts_may_touch_several() -> None:
    assert {key[key.index("{") + 1 : key.index("}")] for key in ALL.values()} == {"demo"}


def test_f50_runs_of_different_names_do_not_meet() -> None:
    other = Keys("demo-2")
    assert other.flow not in ALL.values() and not other.flow.startswith("vla:{demo}:")


def test_the_pattern_finds_the_runs_workers_and_no_others(client: Client, run_name: str) -> None:
    keys, other = Keys(run_name), Keys(run_name + "x")
    for key in (keys.worker("generator-0"), keys.worker("simulator-1"), other.worker("generator-0"), keys.flow):
        client.set(key, "", px=60_000)
    found = {key.decode() for key in client.scan_iter(match=keys.workers_pattern, count=1000)}
    assert found == {keys.worker("generator-0"), keys.worker("simulator-1")}
