"""Scripts of the broker itself: names of workers, and the last look before a consumer is deleted."""

from __future__ import annotations

import pytest

from vla_stream.broker.connection import Client, ResponseError
from vla_stream.broker.scripts import CLAIM_WORKER, RELEASE_WORKER, SWEEP_CONSUMER, Script, Scripts


@pytest.fixture
def scripts(client: Client) -> Scripts:
    return Scripts(client)


@pytest.fixture
def worker(run_name: str) -> str:
    return f"vla:{{{run_name}}}:worker:simulator-0"


def claim(scripts: Scripts, worker: str, token: str, ttl_ms: int = 60_000) -> int:
    return int(scripts.call(CLAIM_WORKER, [worker], [token, ttl_ms, "role", "simulator"]))


def test_f53_a_name_belongs_to_the_first_who_claims_it_and_to_nobody_else(scripts: Scripts, worker: str) -> None:
    assert claim(scripts, worker, "one") == 1
    assert claim(scripts, worker, "other") == 0
    assert scripts.client.hgetall(worker) == {b"token": b"one", b"role": b"simulator"}


def test_claiming_again_keeps_the_name_for_its_whole_lifetime(scripts: Scripts, worker: str) -> None:
    claim(scripts, worker, "one", ttl_ms=10_000)
    assert 9_000 < scripts.client.pttl(worker) <= 10_000
    assert claim(scripts, worker, "one", ttl_ms=60_000) == 1
    assert 59_000 < scripts.client.pttl(worker) <= 60_000


def test_f53_only_the_holder_gives_a_name_back(scripts: Scripts, worker: str) -> None:
    claim(scripts, worker, "one")
    assert scripts.call(RELEASE_WORKER, [worker], ["other"]) == 0
    assert claim(scripts, worker, "other") == 0
    assert scripts.call(RELEASE_WORKER, [worker], ["one"]) == 1
    assert claim(scripts, worker, "other") == 1


def test_f13_a_consumer_that_became_active_since_the_look_is_not_deleted(scripts: Scripts, run_name: str) -> None:
    stream = f"vla:{{{run_name}}}:obs-requests"
    scripts.client.xgroup_create(stream, "generators", id="0", mkstream=True)
    scripts.client.xgroup_createconsumer(stream, "generators", "generator-0")
    assert scripts.call(SWEEP_CONSUMER, [stream], ["generators", "generator-0", 60_000]) == 0
    assert scripts.call(SWEEP_CONSUMER, [stream], ["generators", "nobody", 0]) == 0
    assert len(scripts.client.xinfo_consumers(stream, "generators")) == 1


def test_a_script_that_the_server_forgot_is_loaded_again(scripts: Scripts, worker: str) -> None:
    claim(scripts, worker, "one")
    scripts.client.script_flush()
    assert claim(scripts, worker, "one") == 1


def test_an_error_inside_a_script_reaches_the_caller(scripts: Scripts, worker: str) -> None:
    with pytest.raises(ResponseError, match="no such thing"):
        scripts.call(Script("broken", "return redis.error_reply('ERR no such thing')"), [worker], [])
