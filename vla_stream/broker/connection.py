"""Connections to Redis: one per client object, binary, without silent retries; and what goes wrong, in one line each.

Nothing else in the project imports redis outside this folder: workers catch UNREACHABLE and OUT_OF_MEMORY from here.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ResponseError
from redis.retry import Retry

from vla_stream.broker.client import Client, OneConnection
from vla_stream.broker.complaints import PLAIN_PORT, PROBE_TIMEOUT_S, explain, plain_greeting, without_secrets
from vla_stream.errors import InputError

__all__ = [
    "OUT_OF_MEMORY",
    "REDIS_ERRORS",
    "UNREACHABLE",
    "Backoff",
    "Client",
    "ResponseError",
    "ServerClock",
    "address",
    "check_server",
    "connect",
]

# What a worker meets while Redis is down, restarting or cut off: wait by Backoff and go on.
UNREACHABLE = (redis.ConnectionError, redis.TimeoutError)
# What XADD and SET meet under noeviction when maxmemory is reached: producers wait, consumers drain.
OUT_OF_MEMORY = OutOfMemoryError
# Whatever a command may raise, for the edges: those that turn it into words, and those that clear up.
REDIS_ERRORS = (redis.RedisError,)

SCHEMES = ("redis", "rediss", "unix")
OLDEST_VERSION = (7, 0, 0)
CONNECT_TIMEOUT_S = 5.0
# A server that is alive answers within this, even while it takes in some hundred MB from others.
REPLY_MARGIN_S = 10.0
CLOCK_REFRESH_S = 10.0
CLOCK_SAMPLES = 3


def connect(url: str, *, name: str, block_s: float = 0.0, margin_s: float = REPLY_MARGIN_S) -> Client:
    """A client with exactly one connection, made at the first command and again after it broke.

    `name` shows in CLIENT LIST where the server lets us set it. `block_s` is the longest BLOCK that the caller will
    ask for, and `margin_s` how much later than that a reply counts as lost. Threads that share a client wait for each
    other's replies, so a thread that blocks needs its own client.
    Raises InputError when the url is malformed; whether a server answers, `check_server` finds out.
    """

    def greet(connection: Any) -> None:
        # No CLIENT SETINFO: an ACL file of Redis 7.0 cannot even name it, and where it is refused it fills ACL LOG.
        connection.driver_info = connection.lib_name = connection.lib_version = None
        try:
            connection.on_connect()
        except AuthenticationError as exc:
            # redis-py counts this among broken connections; but waiting does not help.
            raise NoPermissionError(str(exc)) from exc
        try:
            connection.send_command("CLIENT", "SETNAME", re.sub(r"[^!-~]", "_", name))
            connection.read_response()
        except NoPermissionError:
            pass  # The name is for people who look; an ACL without CLIENT still does all the work.

    settings: dict[str, Any] = {
        "max_connections": 1,
        "wait_s": block_s + margin_s,
        "decode_responses": False,
        # RESP2 needs no HELLO.
        "protocol": 2,
        "socket_timeout": block_s + margin_s,
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        # redis-py retries ten times by default. A retried XADD after a lost reply is a second entry.
        "retry": Retry(NoBackoff(), 0),
        "redis_connect_func": greet,
    }
    _check_url(url, settings)
    pool = OneConnection.from_url(url, **settings)
    client: Client = Client.from_pool(pool)  # type: ignore[assignment]
    return client


def check_server(client: Client) -> tuple[int, ...] | None:
    """Ask at start-up whether the server is there and fit; its version, or None where an ACL hides it.

    Raises InputError, one line with the remedy: unreachable, refused, older than 7.0, or evicting.
    """
    _look_for_a_plain_port(client)
    try:
        client.ping()
        info = _info(client)
        version = _version(client, info)
        policy = info.get("maxmemory_policy") or _maxmemory_policy(client)
    except (redis.RedisError, OSError) as exc:
        raise explain(exc, address(client)) from exc
    where = address(client)
    if version is not None and version < OLDEST_VERSION:
        found = ".".join(str(part) for part in version)
        raise InputError(f"Redis at {where}: version {found}, expected 7.0 or newer; upgrade it or use another server")
    if policy is not None and policy != "noeviction":
        raise InputError(
            f"Redis at {where}: maxmemory-policy is {policy}, which deletes whole streams when memory is short, "
            "expected noeviction; run: redis-cli CONFIG SET maxmemory-policy noeviction"
        )
    return version


def address(client: Client) -> str:
    """The client's url without user, password and options, for messages."""
    pool = client.connection_pool
    settings = pool.connection_kwargs
    if "path" in settings:
        return f"unix://{settings['path']}"
    secure = issubclass(pool.connection_class, redis.SSLConnection)
    host = settings.get("host", "localhost")
    host = f"[{host}]" if ":" in host else host
    return f"{'rediss' if secure else 'redis'}://{host}:{settings.get('port', 6379)}/{settings.get('db') or 0}"


class ServerClock:
    """The server's time, for ages of stream entries: hosts' clocks differ, the server stamps the entries.

    Between two looks at the server (every 10 s) the local monotonic clock is added to the last offset.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._offset_ms = 0.0
        self._refresh_at_s = float("-inf")

    def now_ms(self) -> float:
        """Milliseconds since the epoch by the server's clock. Raises what UNREACHABLE lists."""
        if time.monotonic() >= self._refresh_at_s:
            self._refresh()
        return time.monotonic() * 1000.0 + self._offset_ms

    def age_ms(self, entry_id: bytes) -> float:
        """How long ago the server gave out this stream id (`<ms>-<sequence>`); never negative."""
        return max(0.0, self.now_ms() - int(entry_id.split(b"-")[0]))

    def _refresh(self) -> None:
        # The sample with the shortest round trip bounds the error best; a busy machine spoils single ones.
        samples = []
        for _ in range(CLOCK_SAMPLES):
            sent_s = time.monotonic()
            seconds, microseconds = self._client.time()
            received_s = time.monotonic()
            server_ms = int(seconds) * 1000.0 + int(microseconds) / 1000.0
            samples.append((received_s - sent_s, server_ms - (sent_s + received_s) * 500.0))
        self._offset_ms = min(samples)[1]
        self._refresh_at_s = time.monotonic() + CLOCK_REFRESH_S


class Backoff:
    """Waiting times while Redis is unreachable: 50 ms, doubling to 2 s, each spread over its upper half."""

    FIRST_S = 0.05
    LONGEST_S = 2.0

    def __init__(self) -> None:
        self.failures = 0

    def next_s(self) -> float:
        """Seconds to wait after one more failure."""
        full = min(self.LONGEST_S, self.FIRST_S * 2.0 ** min(self.failures, 16))
        self.failures += 1
        # The spread keeps a hundred workers from coming back at the same moment.
        return full * random.uniform(0.5, 1.0)


def _check_url(url: str, settings: Mapping[str, object]) -> None:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES:
        got = f"scheme {scheme!r}" if separator else "no scheme"
        raise InputError(
            f"Redis url: got {got}, expected redis:// or rediss:// (TLS) or unix://; "
            "for example redis://:password@host:6379/0"
        )
    if scheme == "unix" and not urlsplit(url).path:
        raise InputError("Redis url: unix:// lacks the path of the socket, expected unix:///path/to/redis.sock")
    try:
        redis.ConnectionPool.from_url(url).make_connection()
    except (ValueError, TypeError) as exc:
        # The parser's own text is not shown: with an unescaped / or # in the password it quotes a part of it.
        raise InputError(
            f"Redis url: {without_secrets(url)} does not parse, expected {scheme}://"
            + ("/path/to/redis.sock" if scheme == "unix" else ":password@host:port/number")
            + "; percent-encode special characters in the password (/ is %2F, @ is %40, # is %23), "
            "put an IPv6 address into [], and leave out options that redis-py does not know"
        ) from exc
    # To redis-py the url has the last word; replies as text, say, would end every reader of payloads (F07).
    taken = sorted(parse_qs(urlsplit(url).query).keys() & settings.keys())
    if taken:
        raise InputError(f"Redis url: got the option {taken[0]}, which vla-stream sets itself; leave it out")


def _look_for_a_plain_port(client: Client) -> None:
    """A plain server may take a TLS greeting for half a command and wait for its end; raises InputError then."""
    pool = client.connection_pool
    if not issubclass(pool.connection_class, redis.SSLConnection):
        return
    probe = pool.connection_class(**{**pool.connection_kwargs, "socket_timeout": 2 * PROBE_TIMEOUT_S})
    try:
        probe.connect()
    except redis.TimeoutError as exc:
        # A slow server gets its full time afterwards; only one that speaks plainly is refused here.
        if plain_greeting(probe.host, probe.port).startswith(("+", "-")):
            raise InputError(f"Redis at {address(client)}: {PLAIN_PORT}") from exc
    except redis.RedisError:
        pass  # The next command meets it as well.
    finally:
        probe.disconnect()


def _info(client: Client) -> dict[str, str]:
    """INFO's server and memory sections as texts; empty where an ACL forbids it."""
    fields: dict[str, str] = {}
    try:
        for section in ("server", "memory"):
            reply = client.info(section)
            fields.update({str(key): str(value) for key, value in reply.items()})
    except NoPermissionError:
        pass
    return fields


def _version(client: Client, info: dict[str, str]) -> tuple[int, ...] | None:
    text = info.get("redis_version")
    if text is None:
        try:
            reply = client.execute_command("HELLO")
        except ResponseError:
            return None
        text = dict(zip(reply[::2], reply[1::2], strict=True))[b"version"].decode()
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _maxmemory_policy(client: Client) -> str | None:
    try:
        return str(client.config_get("maxmemory-policy")["maxmemory-policy"])
    except (ResponseError, KeyError):
        return None  # Forbidden or renamed, as hosted servers do: then it is its operator's word.
