from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from own_server import own_server

from vla_stream.broker.complaints import explain
from vla_stream.broker.connection import (
    OUT_OF_MEMORY,
    UNREACHABLE,
    Backoff,
    Client,
    ResponseError,
    ServerClock,
    address,
    check_server,
    connect,
)
from vla_stream.broker.server import EmbeddedServer
from vla_stream.errors import InputError

PASSWORD = "s3cret-Word"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A TCP server with a password of its own, whose settings these tests may change (and put back)."""
    with EmbeddedServer.start(tmp_path_factory.mktemp("guarded"), tcp=True) as server:
        yield server


@pytest.fixture
def admin(guarded: EmbeddedServer) -> Iterator[Client]:
    with contextlib.closing(connect(guarded.url, name="admin")) as made:
        yield made


def place_of(server: EmbeddedServer) -> str:
    """host:port/db of a TCP server."""
    return server.url.rpartition("@")[2]


def complaint(url: str) -> str:
    with contextlib.closing(connect(url, name="test", margin_s=0.5)) as client, pytest.raises(InputError) as caught:
        check_server(client)
    message = str(caught.value)
    assert "\n" not in message and PASSWORD not in message
    return message


def wait_until(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"waited {deadline_s} s for: {what}"
        time.sleep(0.005)


def commands_in(packet: bytes) -> int:
    """redis-py may send several commands of its greeting in one packet; each wants a reply."""
    return packet.count(b"\r\n*") + 1


@contextlib.contextmanager
def port_that(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A loopback port whose every connection is given to `answer`, then closed."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(10)

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


# --- one connection, binary, no silent retries ---


def test_f07_payloads_come_back_as_the_same_bytes(client: Client, run_name: str) -> None:
    payload = bytes(range(256)) * 4
    client.xadd(f"vla:{{{run_name}}}:x", {"data": payload})
    [(_, fields)] = client.xrange(f"vla:{{{run_name}}}:x")
    assert fields == {b"data": payload}


def test_f01_all_commands_and_pipelines_of_a_client_share_one_connection(client: Client) -> None:
    number = client.client_id()
    with client.pipeline() as pipeline:
        assert pipeline.client_id().client_id().execute() == [number, number]
    assert client.client_id() == number


def test_threads_that_share_a_client_wait_for_each_other(client: Client, run_name: str) -> None:
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(client.echo(str(i)) if i else client.ping()))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8


def test_name_is_shown_in_the_client_list_with_odd_characters_replaced(redis_url: str) -> None:
    with contextlib.closing(connect(redis_url, name="sim 0\nü")) as client:
        assert client.client_getname() in {"sim_0__", b"sim_0__"}


def test_f01_a_blocking_read_may_last_as_long_as_was_announced(redis_url: str, run_name: str) -> None:
    key = f"vla:{{{run_name}}}:x"
    with contextlib.closing(connect(redis_url, name="test", block_s=1.0, margin_s=0.5)) as client:
        started = time.monotonic()
        assert not client.xread({key: "$"}, block=900)
        assert time.monotonic() - started > 0.85
        with pytest.raises(UNREACHABLE):
            client.xread({key: "$"}, block=10_000)


def test_f01_a_reader_may_block_for_longer_than_the_five_seconds_of_redis_py(redis_url: str, run_name: str) -> None:
    with contextlib.closing(connect(redis_url, name="test", block_s=6.0)) as client:
        started = time.monotonic()
        assert not client.xread({f"vla:{{{run_name}}}:x": "$"}, block=5400)
        assert time.monotonic() - started > 5.3


def test_f02_an_xadd_over_a_stall_of_the_server_is_one_entry(tmp_path: Path) -> None:
    with (
        EmbeddedServer.start(tmp_path) as server,
        contextlib.closing(connect(server.url, name="other")) as other,
        contextlib.closing(connect(server.url, name="stalled", margin_s=0.3)) as client,
    ):
        client.ping()
        os.kill(server.pid, signal.SIGSTOP)
        resume = threading.Timer(1.5, os.kill, (server.pid, signal.SIGCONT))
        resume.start()
        with pytest.raises(UNREACHABLE):
            client.xadd("vla:{x}:x", {"a": b"1"})
        resume.join()
        # The server reads what waits in a connection before it finds it closed.
        wait_until(lambda: not any(item["name"] == "stalled" for item in other.client_list()), "the old one's end")
        assert other.xlen("vla:{x}:x") == 1


def test_f02_a_lost_reply_is_reported_and_the_command_never_sent_again() -> None:
    received: list[bytes] = []

    def lose_replies_to_xadd(connection: socket.socket) -> None:
        while request := connection.recv(4096):
            received.append(request)
            if b"XADD" not in request:
                connection.sendall(b"+OK\r\n" * commands_in(request))

    with (
        port_that(lose_replies_to_xadd) as port,
        contextlib.closing(connect(f"redis://127.0.0.1:{port}", name="test", margin_s=0.2)) as client,
    ):
        with pytest.raises(UNREACHABLE):
            client.xadd("vla:{x}:x", {"a": b"1"})
        client.ping()
    assert b"".join(received).count(b"XADD") == 1


class Interrupted(Exception):
    """What a signal raises in the midst of a read."""


@pytest.mark.parametrize("how", ["its time is over", "a signal interrupts it"])
def test_f04_a_blocking_read_that_is_given_up_leaves_no_reply_to_the_next_command(
    how: str, redis_url: str, client: Client, run_name: str
) -> None:
    key, name = f"vla:{{{run_name}}}:x", f"reader-{run_name}"
    by_signal = how == "a signal interrupts it"

    def interrupt(*_: object) -> None:
        raise Interrupted

    def interrupt_the_read() -> None:
        wait_until(lambda: any(c["name"] == name and "b" in c["flags"] for c in client.client_list()), "it blocks")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=interrupt_the_read if by_signal else lambda: None)
    with contextlib.closing(connect(redis_url, name=name, block_s=20.0 if by_signal else 0.0, margin_s=0.2)) as reader:
        try:
            thread.start()
            with pytest.raises((Interrupted, *UNREACHABLE)) as caught:
                reader.xread({key: "$"}, block=15_000)
            assert isinstance(caught.value, Interrupted) == by_signal
        finally:
            thread.join()
            signal.signal(signal.SIGUSR1, before)
        client.xadd(key, {"what": "it had waited for"})
        assert reader.echo("my own reply") == b"my own reply"
        assert reader.xlen(key) == 1


def test_f04_a_greeting_that_a_signal_interrupts_is_made_anew_before_the_next_command(redis_url: str) -> None:
    with contextlib.closing(connect(redis_url, name="whole")) as client:
        settings = client.connection_pool.connection_kwargs
        greet, greeted = settings["redis_connect_func"], []

        def interrupted_once(connection: object) -> None:
            greeted.append(connection)
            if len(greeted) == 1:
                raise Interrupted
            greet(connection)

        settings["redis_connect_func"] = interrupted_once
        with pytest.raises(Interrupted):
            client.ping()
        assert client.client_getname() in {"whole", b"whole"}


def test_a_broken_connection_is_made_anew_at_the_next_command(redis_url: str, client: Client) -> None:
    with contextlib.closing(connect(redis_url, name="test")) as victim:
        first = victim.client_id()
        client.execute_command("CLIENT", "KILL", "ID", first)
        with contextlib.suppress(*UNREACHABLE):
            victim.ping()
        assert victim.client_id() != first
        assert victim.client_getname() in {"test", b"test"}


def test_f23_a_full_server_raises_out_of_memory(guarded: EmbeddedServer, admin: Client, run_name: str) -> None:
    with contextlib.closing(connect(guarded.url, name="test")) as client:
        admin.config_set("maxmemory", 1)
        try:
            with pytest.raises(OUT_OF_MEMORY):
                client.xadd(f"vla:{{{run_name}}}:x", {"data": b"1"})
            assert client.xlen(f"vla:{{{run_name}}}:x") == 0
        finally:
            admin.config_set("maxmemory", 0)


# --- what the server must be ---


def test_a_fit_server_passes_and_tells_its_version(client: Client) -> None:
    version = check_server(client)
    assert version is not None and version >= (7, 0, 0)


def test_f22_an_evicting_server_is_refused_with_the_command_that_repairs_it(
    guarded: EmbeddedServer, admin: Client
) -> None:
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        message = complaint(guarded.url)
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
    assert "is allkeys-lru" in message and "CONFIG SET maxmemory-policy noeviction" in message


@pytest.mark.parametrize("forbidden", ["-config", "-info", "-client", "-hello", "-config -info -client -hello"])
def test_f33_a_user_without_administrative_commands_is_served_all_the_same(
    guarded: EmbeddedServer, admin: Client, forbidden: str
) -> None:
    rules = ["reset", "on", f">{PASSWORD}", "~vla:*", "+@all", *forbidden.split()]
    admin.execute_command("ACL", "SETUSER", "limited", *rules)
    with contextlib.closing(connect(f"redis://limited:{PASSWORD}@{place_of(guarded)}", name="test")) as client:
        check_server(client)
        client.xadd("vla:{acl}:x", {"a": b"1"})
        client.delete("vla:{acl}:x")


def test_f22_an_evicting_server_is_found_by_info_when_config_is_forbidden(
    guarded: EmbeddedServer, admin: Client
) -> None:
    admin.execute_command("ACL", "SETUSER", "limited", "reset", "on", f">{PASSWORD}", "~*", "+@all", "-config")
    admin.config_set("maxmemory-policy", "volatile-ttl")
    try:
        assert "volatile-ttl" in complaint(f"redis://limited:{PASSWORD}@{place_of(guarded)}")
    finally:
        admin.config_set("maxmemory-policy", "noeviction")


def test_an_old_server_is_refused_with_both_versions() -> None:
    def old(connection: socket.socket) -> None:
        while request := connection.recv(4096):
            text = "# Server\r\nredis_version:6.2.14\r\nmaxmemory_policy:noeviction\r\n"
            reply = f"${len(text)}\r\n{text}\r\n" if b"INFO" in request else "+OK\r\n"
            connection.sendall(reply.encode() * commands_in(request))

    with port_that(old) as port:
        message = complaint(f"redis://127.0.0.1:{port}")
    assert "6.2.14" in message and "7.0" in message


# --- errors for people, one line each ---


def test_f09_wrong_password(guarded: EmbeddedServer) -> None:
    assert "wrong user name or password" in complaint(f"redis://:{PASSWORD}@{place_of(guarded)}")
    assert "wrong user name or password" in complaint(f"redis://nobody:{PASSWORD}@{place_of(guarded)}")


def test_f09_missing_password(guarded: EmbeddedServer) -> None:
    assert "asks for a password and got none" in complaint(f"redis://{place_of(guarded)}")


def test_f09_password_for_a_server_that_has_none(redis_url: str) -> None:
    assert "has no password" in complaint(redis_url.replace("unix://", f"unix://:{PASSWORD}@"))


def test_f33_command_that_the_acl_forbids(guarded: EmbeddedServer, admin: Client) -> None:
    admin.execute_command("ACL", "SETUSER", "reader", "reset", "on", f">{PASSWORD}", "~vla:*", "+@read", "+ping")
    url = f"redis://reader:{PASSWORD}@{place_of(guarded)}"
    with contextlib.closing(connect(url, name="test")) as client:
        with pytest.raises(ResponseError) as command:
            client.xadd("vla:{acl}:x", {"a": b"1"})
        with pytest.raises(ResponseError) as key:
            client.xlen("other")
    assert "xadd" in str(explain(command.value, url)) and "ACL SETUSER" in str(explain(command.value, url))
    assert "key" in str(explain(key.value, url)) and "~vla:*" in str(explain(key.value, url))
    assert PASSWORD not in str(explain(command.value, url))


def test_f09_protected_mode(tmp_path: Path) -> None:
    own = own_address()
    if own is None:
        pytest.skip("this host has loopback only, to which a server in protected mode talks")
    with own_server(tmp_path, ["--bind", "0.0.0.0", "--protected-mode", "yes"]) as port:
        message = complaint(f"redis://{own}:{port}/0")
    assert "is in protected mode and takes no clients from other hosts; set a password there" in message


def own_address() -> str | None:
    """An address of this host that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # nothing is sent: only a route is looked up
        return str(probe.getsockname()[0])
    return None


def test_f09_what_a_server_in_protected_mode_says_is_understood() -> None:
    def refuse(connection: socket.socket) -> None:
        connection.sendall(b"-DENIED Redis is running in protected mode because protected mode is enabled\r\n")

    with port_that(refuse) as port:
        assert "in protected mode" in complaint(f"redis://127.0.0.1:{port}")


def test_too_many_clients(guarded: EmbeddedServer, admin: Client) -> None:
    admin.config_set("maxclients", 1)
    try:
        assert "maxclients" in complaint(guarded.url)
    finally:
        admin.config_set("maxclients", 10000)


def test_f09_tls_to_a_plain_port(guarded: EmbeddedServer) -> None:
    assert "use redis://" in complaint(f"rediss://:{PASSWORD}@{place_of(guarded)}")


def test_f09_plain_to_a_tls_port_and_an_untrusted_certificate(tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secure:
            secure.recv(1)

    with port_that(answer) as port:
        assert "use rediss://" in complaint(f"redis://:{PASSWORD}@127.0.0.1:{port}")
        assert "ssl_ca_certs" in complaint(f"rediss://:{PASSWORD}@127.0.0.1:{port}")


def test_port_of_another_protocol() -> None:
    def web(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with port_that(web) as port:
        assert "not in Redis's protocol" in complaint(f"redis://127.0.0.1:{port}")
        assert "not in Redis's protocol" in complaint(f"rediss://127.0.0.1:{port}")


def test_silent_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert "no answer in time" in complaint(f"redis://127.0.0.1:{listener.getsockname()[1]}")


def test_f09_closed_port() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # Bound but not listening: refused for certain.
        message = complaint(f"redis://:{PASSWORD}@127.0.0.1:{reserved.getsockname()[1]}")
    assert "nothing listens there" in message and "127.0.0.1" in message


def test_f09_unknown_host() -> None:
    assert "does not resolve" in complaint("redis://no-such-host.invalid:6379/0")


def test_unix_sockets_that_are_missing_or_dead(tmp_path: Path) -> None:
    for url in ("unix://", "unix://?db=0"):
        with pytest.raises(InputError, match="unix:// lacks the path of the socket, expected unix:///path"):
            connect(url, name="test")
    assert "no such socket" in complaint(f"unix://{tmp_path}/redis.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s"))
    assert "no server listens" in complaint(f"unix://{tmp_path}/s")


def test_database_number_out_of_range(guarded: EmbeddedServer) -> None:
    assert "no database" in complaint(guarded.url.removesuffix("/0") + "/999")


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "rdis://:pw@localhost", ""])
def test_f09_wrong_scheme_names_the_right_ones(url: str) -> None:
    with pytest.raises(InputError, match=r"expected redis:// or rediss://.*unix://") as caught:
        connect(url, name="test")
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter/zwei@host:6379/0",
        "redis://:hunter#zwei@host:6379/0",
        "redis://:hunter?zwei@host:6379/0",
        "redis://host:port/0",
        "redis://host:6379/0?no_such_option=1",
    ],
)
def test_malformed_url_is_refused_without_showing_a_part_of_the_password(url: str) -> None:
    with pytest.raises(InputError, match="does not parse") as caught:
        connect(url, name="test")
    assert "hunter" not in str(caught.value) and "zwei" not in str(caught.value)


@pytest.mark.parametrize(
    "option", ["decode_responses=yes", "socket_timeout=1", "protocol=3", "retry=9", "max_connections=50"]
)
def test_f07_a_url_may_not_set_what_every_reader_relies_on(option: str, guarded: EmbeddedServer) -> None:
    name = option.partition("=")[0]
    with pytest.raises(InputError, match=f"got the option {name}, which vla-stream sets itself; leave it out"):
        connect(f"{guarded.url}?{option}", name="test")


def test_f08_the_line_for_people_holds_what_the_server_said(redis_url: str, client: Client, run_name: str) -> None:
    client.set(f"vla:{{{run_name}}}:x", "no stream", px=60_000)
    with pytest.raises(ResponseError) as caught:
        client.xlen(f"vla:{{{run_name}}}:x")
    # Its repr is the bare class.
    assert "wrong kind of value" in str(explain(caught.value, redis_url))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:pw@host:1/2", "redis://host:1/2"),
        ("rediss://:pw@[::1]:1", "rediss://[::1]:1"),
        ("redis://host?password=pw", "redis://host:6379"),
        ("unix://:pw@/run/redis.sock?db=0&password=pw", "unix:///run/redis.sock"),
        ("redis://host?password=p@w", "redis://…"),
    ],
)
def test_explanations_show_the_url_without_the_password(url: str, shown: str) -> None:
    message = str(explain(redis.RedisError("odd: pw"), url))
    assert message.startswith(f"Redis at {shown}: ")
    assert "pw" not in message.replace("odd: pw", "") and "p@w" not in message


def test_f08_unknown_errors_keep_their_text_but_not_the_password() -> None:
    message = str(explain(redis.RedisError(f"cannot do\n {PASSWORD} things"), f"redis://:{PASSWORD}@host"))
    assert "RedisError: cannot do *** things" in message


def test_address_is_the_url_without_secrets(redis_url: str, client: Client, guarded: EmbeddedServer) -> None:
    assert address(client) == redis_url
    with contextlib.closing(connect(guarded.url, name="test")) as other:
        assert address(other) == f"redis://{place_of(guarded)}"


# --- time ---


def test_f35_server_clock_follows_the_servers_time(client: Client) -> None:
    clock = ServerClock(client)
    for _ in range(3):
        before = clock.now_ms()
        seconds, microseconds = client.time()
        after = clock.now_ms()
        assert before - 20 <= seconds * 1000 + microseconds / 1000 <= after + 20


def test_f35_server_clock_ignores_the_hosts_wall_clock(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    true_ms = ServerClock(client).now_ms()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert abs(ServerClock(client).now_ms() - true_ms) < 5_000


def test_server_clock_asks_again_after_ten_seconds_only(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, asked = 100.0, 0

    class Server:
        def time(self) -> tuple[int, int]:
            nonlocal asked
            asked += 1
            return 5000, 250_000

    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    clock = ServerClock(Server())  # type: ignore[arg-type]
    assert clock.now_ms() == pytest.approx(5_000_250)
    first = asked
    now_s = 109.0
    assert clock.now_ms() == pytest.approx(5_009_250) and asked == first
    now_s = 110.5
    assert clock.now_ms() == pytest.approx(5_000_250) and asked == 2 * first


def test_f35_age_of_an_entry_is_read_from_its_id(client: Client, run_name: str) -> None:
    clock = ServerClock(client)
    entry = client.xadd(f"vla:{{{run_name}}}:x", {"a": b"1"})
    assert 0 <= clock.age_ms(entry) < 5_000
    assert clock.age_ms(b"1-0") > 1e12
    assert clock.age_ms(b"99999999999999-0") == 0


def test_backoff_doubles_from_50_ms_to_2_s_and_is_spread() -> None:
    backoff = Backoff()
    waits = [backoff.next_s() for _ in range(40)]
    for index, wait in enumerate(waits):
        full = min(2.0, 0.05 * 2**index)
        assert full / 2 <= wait <= full
    assert len(set(waits)) == len(waits)
