"""Connections to Redis: one per client object, binary, without silent retries; and what goes wrong, in one line each.

Nothing else in the project imports redis outside this folder: workers catch UNREACHABLE and OUT_OF_MEMORY from here.
"""

from __future__ import annotations

import errno
import random
import re
import select
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, OutOfMemoryError, ResponseError
from redis.retry import Retry

from vla_stream.errors import InputError

__all__ = [
    "CUT_OFF",
    "OOM",
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
    "explain",
    "refused",
]

Client = redis.Redis
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
PROBE_TIMEOUT_S = 1.0
CLOCK_REFRESH_S = 10.0
CLOCK_SAMPLES = 3

PROTECTED = (
    "is in protected mode and takes no clients from other hosts; set a password there "
    "(CONFIG SET requirepass …) and put it into the url"
)
FULL = "has as many clients as it takes; raise maxclients in its config (and ulimit -n), or stop some workers"
OOM = "its memory is full (maxmemory under noeviction): nothing new is stored; raise maxmemory there, or free memory"
CUT_OFF = (
    "answers, but closes the connection at the same request again and again: the reply is larger than its "
    "client-output-buffer-limit for normal clients (or the request than its client-query-buffer-limit); "
    'raise it there, 0 0 0 is no limit: CONFIG SET client-output-buffer-limit "normal 0 0 0"'
)
PLAIN_PORT = "does not speak TLS there, but the url says rediss://; use redis://, or give the server's TLS port"
TLS_PORT = "speaks TLS there, but the url says redis://; use rediss://, or give the server's plain port"


def connect(url: str, *, name: str, block_s: float = 0.0, margin_s: float = REPLY_MARGIN_S) -> Client:
    """A client with exactly one connection, made at the first command and again after it broke.

    `name` shows in CLIENT LIST where the server lets us set it. `block_s` is the longest BLOCK that the caller will
    ask for, and `margin_s` how much later than that a reply counts as lost. Threads that share a client wait for each
    other's replies, so a thread that blocks needs its own client.
    Raises InputError when the url is malformed; whether a server answers, `check_server` finds out.
    """
    _check_url(url)

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

    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=1,
        timeout=block_s + margin_s,
        decode_responses=False,
        # RESP2 has the same shape of replies in all versions of redis-py and needs no HELLO.
        protocol=2,
        socket_timeout=block_s + margin_s,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        # redis-py ≥ 8 retries ten times by default. A retried XADD after a lost reply is a second entry.
        retry=Retry(NoBackoff(), 0),
        redis_connect_func=greet,
    )
    return redis.Redis.from_pool(pool)


def check_server(client: Client) -> tuple[int, ...] | None:
    """Ask at start-up whether the server is there and fit; its version, or None where an ACL hides it.

    Raises InputError, one line with the remedy: unreachable, refused, older than 7.0, or evicting.
    """
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


def explain(exc: BaseException, url: str) -> InputError:
    """The one line that tells a person what is wrong with `url` and what to do. It never holds the password."""
    return InputError(f"Redis at {_without_secrets(url)}: {_diagnosis(exc, url)}")


def refused(exc: BaseException) -> bool:
    """Whether the server knows us and says no, by password or ACL: waiting for it does not help."""
    return isinstance(exc, NoPermissionError | AuthenticationError) or (isinstance(exc, ResponseError) and _acl_in_script(str(exc)))


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

    def __init__(self, random_source: random.Random | None = None) -> None:
        self._random = random_source or random.Random()
        self.failures = 0

    def next_s(self) -> float:
        """Seconds to wait after one more failure."""
        full = min(self.LONGEST_S, self.FIRST_S * 2.0 ** min(self.failures, 16))
        self.failures += 1
        # The spread keeps a hundred workers from coming back at the same moment.
        return full * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """After a success."""
        self.failures = 0


def _check_url(url: str) -> None:
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in SCHEMES:
        got = f"scheme {scheme!r}" if separator else "no scheme"
        raise InputError(
            f"Redis url: got {got}, expected redis:// or rediss:// (TLS) or unix://; "
            "for example redis://:password@host:6379/0"
        )
    try:
        redis.ConnectionPool.from_url(url).make_connection()
    except (ValueError, TypeError) as exc:
        # The parser's own text is not shown: with an unescaped / or # in the password it quotes a part of it.
        raise InputError(
            f"Redis url: {_without_secrets(url)} does not parse, expected {scheme}://"
            + ("/path/to/redis.sock" if scheme == "unix" else ":password@host:port/number")
            + "; percent-encode special characters in the password (/ is %2F, @ is %40, # is %23), "
            "put an IPv6 address into [], and leave out options that redis-py does not know"
        ) from exc


def _without_secrets(url: str) -> str:
    scheme = url.partition("://")[0]
    try:
        parts = urlsplit(url)
        hidden = "@" in parts.path + parts.query + parts.fragment
        if scheme == "unix" and not hidden and parts.path:
            return f"unix://{unquote(parts.path)}"
        if scheme != "unix" and not hidden and parts.hostname:
            host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            return f"{scheme}://{host}:{parts.port or 6379}{parts.path}"
    except ValueError:
        pass
    # An @ outside its place means an unescaped password: what looks like a host may be a part of it.
    return f"{scheme}://…"


def _secrets(url: str) -> list[str]:
    found = re.findall(r"://[^/]*?:([^/]*)@", url) + re.findall(r"[?&]password=([^&]*)", url)
    return sorted({text for raw in found for text in (raw, unquote(raw)) if text}, key=len, reverse=True)


def _chain(exc: BaseException | None) -> Iterator[BaseException]:
    while exc is not None:
        yield exc
        exc = exc.__cause__ or exc.__context__


def _diagnosis(exc: BaseException, url: str) -> str:
    causes = list(_chain(exc))
    # str, not repr: redis-py 8's repr hides the message.
    text = " ".join(str(cause) for cause in causes)
    found = _refusal(causes, text) or _broken_way(causes, url) or _wrong_protocol(causes, text, url)
    if found is not None:
        return found
    shown = " ".join(str(exc).split())
    for secret in _secrets(url):
        shown = shown.replace(secret, "***")
    return f"{type(exc).__name__}: {shown}; see the server's log"


def _acl_in_script(text: str) -> bool:
    # Inside a script the refusal comes without its code: since 7.2 by the first text, in 7.0 by the second.
    return "ACL failure in script" in text or "user executing the script can't" in text


def _refusal(causes: list[BaseException], text: str) -> str | None:
    if "protected mode" in text:
        return PROTECTED
    if "max number of clients" in text:
        return FULL
    if any(isinstance(cause, OutOfMemoryError) for cause in causes):
        return OOM
    if "Authentication required" in text or "NOAUTH" in text:
        return "asks for a password and got none; put it into the url, redis://:password@host:port/0"
    if "without any password configured" in text:
        return "has no password, but the url holds one; take it out of the url, or set requirepass there"
    if any(isinstance(cause, AuthenticationError) for cause in causes) or "WRONGPASS" in text:
        return "wrong user name or password; put the right ones into the url, redis://user:password@host:port/0"
    if any(refused(cause) for cause in causes):
        reason = " ".join(str(causes[0]).split())
        return f"its ACL refuses this user: {reason}; grant it with ACL SETUSER (the run's keys are ~vla:*)"
    if "DB index" in text:
        return "has no database of the number at the url's end; use /0"
    return None


def _broken_way(causes: list[BaseException], url: str) -> str | None:
    numbers = {cause.errno for cause in causes if isinstance(cause, OSError)}
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        return "its host name does not resolve; check the spelling, or give the IP address"
    if url.startswith("unix:"):
        if errno.ENOENT in numbers:
            return "no such socket; start the server, or check the path (unixsocket in its config)"
        if errno.EACCES in numbers:
            return "this user may not open the socket; see unixsocketperm in the server's config"
        if errno.ECONNREFUSED in numbers:
            return "the socket is there but no server listens on it; start the server again"
    if errno.ECONNREFUSED in numbers:
        return "nothing listens there; start the server (vla-stream redis start), or check host and port"
    if numbers & {errno.EHOSTUNREACH, errno.ENETUNREACH}:
        return "the host cannot be reached; check address, network and firewall"
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
        return "its TLS certificate is not trusted; add ?ssl_ca_certs=FILE with the CA that signed it to the url"
    if any(isinstance(cause, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(cause) for cause in causes):
        return "asks for a client certificate; add ?ssl_certfile=FILE&ssl_keyfile=FILE to the url"
    return None


def _wrong_protocol(causes: list[BaseException], text: str, url: str) -> str | None:
    late = any(isinstance(cause, redis.TimeoutError | TimeoutError) for cause in causes)
    closed = "closed" in text or any(isinstance(cause, ConnectionResetError | BrokenPipeError) for cause in causes)
    garbled = any(isinstance(cause, InvalidResponse | ssl.SSLError) for cause in causes)
    if not (late or closed or garbled):
        return None
    # These three look alike for a plain client at a TLS port, the reverse, and a server that throws clients out.
    parts = urlsplit(url)
    host, port = parts.hostname or "localhost", parts.port or 6379
    if parts.scheme == "rediss" and _plain_greeting(host, port).startswith(("+", "-")):
        return PLAIN_PORT
    if parts.scheme == "redis" and not late:
        known = _refusal([], _plain_greeting(host, port))
        if known is not None:
            return known
        if _speaks_tls(host, port):
            return TLS_PORT
    if garbled:
        return "answers, but not in Redis's protocol; check the port"
    if closed:
        return "closed the connection; see its log (a reply above its client-output-buffer-limit is one reason)"
    return "no answer in time; see whether the server is overloaded or a firewall drops the packets"


def _plain_greeting(host: str, port: int) -> str:
    """The first line that a port says on its own or to a bare PING; empty if none."""
    try:
        with socket.create_connection((host, port), PROBE_TIMEOUT_S) as probe:
            # Listen first: a server that refuses this host says so and closes, and sending would then lose its words.
            if not select.select([probe], [], [], PROBE_TIMEOUT_S / 4)[0]:
                probe.sendall(b"PING\r\n")
            return probe.recv(1024).decode(errors="replace")
    except OSError:
        return ""


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # Nothing is sent: the question is only what the port speaks.
    try:
        with (
            socket.create_connection((host, port), PROBE_TIMEOUT_S) as probe,
            context.wrap_socket(probe, server_hostname=host),
        ):
            return True
    except OSError:
        return False


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
            reply = client.execute_command("HELLO")  # type: ignore[no-untyped-call]
        except ResponseError:
            return None
        text = dict(zip(reply[::2], reply[1::2], strict=True))[b"version"].decode()
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _maxmemory_policy(client: Client) -> str | None:
    try:
        return str(client.config_get("maxmemory-policy")["maxmemory-policy"])
    except (ResponseError, KeyError):
        return None  # Forbidden or renamed, as hosted servers do: then it is its operator's word.
