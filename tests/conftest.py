"""Fixtures of all tests: one real embedded server per test session, a run name per test.

The server is shared, so no test may flush it: every test uses the keys of its own `run_name` only.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from vla_stream.broker.connection import Client, connect
from vla_stream.broker.server import EmbeddedServer


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedServer) -> str:
    return redis_server.url


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    """A client that may block for up to 5 s."""
    with contextlib.closing(connect(redis_url, name="test", block_s=5.0)) as made:
        yield made


@pytest.fixture
def run_name() -> str:
    return f"test-{secrets.token_hex(6)}"
