"""What is wrong with a server, or with the way to it, in one line for people: what was found, and what helps.

Errors of redis-py look alike where causes differ, so a broken connection is told apart by a look at the port.
"""

from __future__ import annotations

import errno
import re
import select
import socket
import ssl
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import redis
from redis.exceptions import AuthenticationError, InvalidResponse, NoPermissionError, OutOfMemoryError, ResponseError

from vla_stream.errors import InputError, VlaStreamError

__all__ = [
    "CUT_OFF",
    "OOM",
    "PLAIN_PORT",
    "PROBE_TIMEOUT_S",
    "Garbled",
    "explain",
    "not_stored",
    "plain_greeting",
    "refused",
    "was_cut",
    "without_secrets",
    "wrong_type",
]

PROBE_TIMEOUT_S = 1.0

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


class Garbled(VlaStreamError, ResponseError):
    """A field of a key of ours that somebody else wrote. An error of the server as a key of another type is one: it is
    met where any command is, and it helps to wait until the launcher has made the key anew (see `wrong_type`)."""


def explain(exc: BaseException, url: str) -> InputError:
    """The one line that tells a person what is wrong with `url` and what to do. It never holds the password."""
    return InputError(f"Redis at {without_secrets(url)}: {_diagnosis(exc, url)}")


def refused(exc: BaseException) -> bool:
    """Whether the server knows us and says no, by password or ACL: waiting for it does not help."""
    return isinstance(exc, NoPermissionError | AuthenticationError) or (
        isinstance(exc, ResponseError) and _acl_in_script(str(exc))
    )


def wrong_type(exc: BaseException) -> bool:
    """Whether a key holds another type than ours, as after somebody's SET, or fields of others: it helps to wait until
    it is removed."""
    return isinstance(exc, Garbled) or (isinstance(exc, ResponseError) and "WRONGTYPE" in str(exc))


def not_stored(exc: BaseException) -> bool:
    """Whether the server is there but does not take what we write: its memory is full, or see `wrong_type`."""
    return isinstance(exc, OutOfMemoryError) or wrong_type(exc)


def was_cut(exc: BaseException) -> bool:
    """Whether the connection broke, and was not just slow."""
    return isinstance(exc, redis.ConnectionError)


def without_secrets(url: str) -> str:
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
    if isinstance(exc, Garbled):
        return str(exc)
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
    if parts.scheme == "rediss" and plain_greeting(host, port).startswith(("+", "-")):
        return PLAIN_PORT
    if parts.scheme == "redis" and not late:
        greeting = plain_greeting(host, port)
        # That this look, which has no password, is asked for one says nothing about the connection that broke.
        known = None if "NOAUTH" in greeting else _refusal([], greeting)
        if known is not None:
            return known
        if not greeting.startswith(("+", "-")) and _speaks_tls(host, port):
            return TLS_PORT
    if garbled:
        return "answers, but not in Redis's protocol; check the port"
    if closed:
        return "closed the connection; see its log (a reply above its client-output-buffer-limit is one reason)"
    return "no answer in time; see whether the server is overloaded or a firewall drops the packets"


def plain_greeting(host: str, port: int) -> str:
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
