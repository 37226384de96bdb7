"""More connections than the server has room or files for."""

import errno
import logging
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.serving.file_limit import FEWEST_CONNECTIONS, OWN_FILES, raise_file_limit, within_files
from runtime.http.server import acceptor, open_connections
from runtime.http.server.limits import ConnectionLimits
from runtime.http.server.open_connections import OpenConnections
from runtime.metrics.logs import LogLimit, RepeatFilter
from tests.support.processes import wait_until
from tests.support.serving.attacked_server import HealthProbe, attacked
from tests.support.serving.certificates import Authority
from tests.support.serving.grpc_checks import SERVING, checked
from tests.support.serving.grpc_server import SERVICE
from tests.support.serving.guarded_server import Guarded, guarded

ASKED = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = 20_000
SMALL_LOG = 20_000
"""Bytes that an attack may add to the log."""


@pytest.fixture
def files() -> Iterator[None]:
    """Restores the limit on open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def connected(served: Guarded, stack: ExitStack, sent: bytes = b"") -> socket.socket:
    """Return a connection over which *sent* has been sent."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", served.port), 60))
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.05)
    try:
        return connection.recv(65536) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX-", ASKED, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
                                  b"Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{"])  # fmt: skip
def test_silent_connections_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(open_connections, "IDLE_S", 0.2)
    with guarded(max_connections=4) as served, ExitStack() as stack:
        held = [connected(served, stack, sent) for _ in range(4)]
        if sent is ASKED:
            assert all(each.recv(65536).startswith(b"HTTP/1.1 200") for each in held)
        wait_until(lambda: served.get("/health").status_code == 200, what="room for a connection")
        wait_until(lambda: is_closed(held[0]), what="the oldest to be closed")
        assert not is_closed(held[3])


@pytest.mark.parametrize(
    ("begin", "rest"),
    [(b"", b"GET /health HTTP/1.1\r\nX: "), (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 99\r\n\r\n", b"{")],
)
def test_a_byte_now_and_then_is_silence(monkeypatch: pytest.MonkeyPatch, begin: bytes, rest: bytes) -> None:
    monkeypatch.setattr(open_connections, "IDLE_S", 0.3)
    with guarded(max_connections=2) as served, ExitStack() as stack:
        held = [connected(served, stack, begin) for _ in range(2)]

        def is_answered() -> bool:
            for connection in held:
                with suppress(OSError):
                    connection.sendall(rest[-1:])
            return served.get("/health").status_code == 200

        wait_until(is_answered, what="room for a connection")


def test_who_sends_the_rest_after_the_answer_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_connections, "IDLE_S", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    with guarded(max_connections=2, api_key=["secret"]) as served, ExitStack() as stack:
        held = [connected(served, stack, head) for _ in range(2)]
        for each in held:
            assert each.recv(65536).startswith(b"HTTP/1.1 401 ")
            each.sendall(b"12345678")
        wait_until(lambda: served.get("/health").status_code == 200, what="room for a connection")


def test_an_answer_after_one_that_came_early_is_not_cut_off() -> None:
    """The time between requests ends with the next one, also where that came with the rest of the one before."""
    body = b'{"prompt": "endless", "max_tokens": %d, "stream": true}' % (LONG - 100)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n"
    with guarded(LONG, keep_alive_s=1, api_key=["secret"]) as served, ExitStack() as stack:
        asking = connected(served, stack, head % (9, b"") + b"{")
        assert asking.recv(65536).startswith(b"HTTP/1.1 401 ")
        asking.sendall(b"12345678" + head % (len(body), b"x-api-key: secret\r\n") + body)
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            assert asking.recv(65536)


def test_a_pipelined_request_is_not_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_connections, "IDLE_S", 0.0)
    body = b'{"prompt": "endless", "max_tokens": %d, "stream": true}' % (LONG - 100)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with guarded(LONG, max_connections=1) as served, ExitStack() as stack:
        asking = connected(served, stack, ASKED + head % len(body) + body)
        received = b""
        while b"data: " not in received:
            received += asking.recv(65536)
        assert served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 503 ")
        assert not is_closed(asking)


def test_busy_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_connections, "IDLE_S", 0.0)
    with guarded(LONG, max_connections=2) as served, ExitStack() as stack:
        body = b'{"prompt": "endless", "max_tokens": %d, "stream": true}' % (LONG - 100)
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        streams = [connected(served, stack, head % len(body) + body) for _ in range(2)]
        assert all(each.recv(100).startswith(b"HTTP/1.1 200") for each in streams)
        for each in streams:
            each.sendall(b"GET /health")  # a request that follows is no reason to end the answer
        for _ in range(5):
            told = served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 503 ")
            assert b'"code":"too_many_connections"' in told
        assert not any(map(is_closed, streams))


def test_at_the_limit_on_sockets_connections_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_connections, "MAX_REFUSALS", 0)
    with guarded(max_connections=2) as served, ExitStack() as stack:
        held = [connected(served, stack) for _ in range(2)]
        waiting = connected(served, stack, ASKED)
        assert not is_closed(waiting)  # nor answered
        held[0].close()
        waiting.settimeout(60)
        assert waiting.recv(100).startswith(b"HTTP/1.1 200")


def test_clients_that_do_not_shake_hands_make_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(open_connections, "MAX_REFUSALS", 0)
    monkeypatch.setattr(acceptor, "HANDSHAKE_S", 600.0)
    signed = Authority(tmp_path / "ours", "ours").sign("server")
    with guarded(max_connections=3, tls=signed) as served, ExitStack() as stack:
        held = [connected(served, stack) for _ in range(8)]
        assert served.get("/health").status_code == 200
        assert is_closed(held[0])
        assert not is_closed(held[7])


def test_without_files_the_server_waits_and_logs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 3

    def failing(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    with guarded() as served:
        monkeypatch.setattr(socket.socket, "accept", failing)
        caplog.clear()
        assert served.get("/health").status_code == 200
        assert not failures
    lines = [record.getMessage() for record in caplog.records if record.name != "httpx"]
    assert lines == ["cannot accept connections for now: Too many open files"]


def test_the_limit_on_files_is_raised_and_bounds_connections(files: None, caplog: pytest.LogCaptureFixture) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    assert raise_file_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 1024
    limits = ConnectionLimits(4096, head_timeout_s=3.0)
    assert within_files(limits, 2 * 4096 + OWN_FILES, 2) is limits
    assert not caplog.records
    assert within_files(limits, 1024, 2) == ConnectionLimits((1024 - OWN_FILES) // 2, head_timeout_s=3.0)
    assert "the limit on open files is 1024" in caplog.text
    assert within_files(limits, 64, 1).max_connections == FEWEST_CONNECTIONS


def test_a_connection_is_counted_once() -> None:
    class Quiet:
        def cut(self) -> None:
            raise AssertionError("is not silent")

    connections, one = OpenConnections(1), Quiet()
    assert connections.enter(one)
    connections.answer(one)
    assert not connections.enter(Quiet())
    for _ in range(2):
        connections.leave(one)
    connections.hear(one)  # too late
    assert connections.enter(Quiet())


def test_lines_that_clients_cause_are_rationed(caplog: pytest.LogCaptureFixture) -> None:
    limit, log = LogLimit(period_s=60), logging.getLogger("slipstream")
    for number in range(100):
        limit.log(log.warning, "too many: %d", number)
    limit._next_at = 0.0
    limit.log(log.warning, "too many: %d", 100)
    assert [record.getMessage() for record in caplog.records] == ["too many: 0", "too many: 100 (99 more such events)"]

    kept = RepeatFilter(burst=3, period_s=60)

    def passed(name: str, text: str) -> int:
        record = logging.LogRecord(name, logging.WARNING, "", 0, text, (), None)
        return sum(kept.filter(record) for _ in range(50))

    assert passed("uvicorn.error", "Invalid HTTP request received.") == 3
    assert passed("uvicorn.error", "another text") == 3
    assert passed("slipstream", "ours") == 50


def test_a_server_with_few_files_stays_reachable(tmp_path: Path) -> None:
    with attacked(tmp_path / "log", hard=512) as server, ExitStack() as stack:
        http_port, grpc_port = server.ports
        before = server.log_bytes
        for port in (http_port, grpc_port):
            for connection in server.crowd(port, 700):
                stack.enter_context(connection)
        with HealthProbe(http_port) as probe:
            wait_until(lambda: probe.statuses.get(200, 0) >= 20, 60, "20 answers")
        server.check_answers()
        stack.close()

        def is_serving() -> bool:
            with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
                return checked(channel, SERVICE) == SERVING

        assert is_serving()
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", http_port)) as connection:
                connection.sendall(b"nonsense\r\n\r\n")
                connection.recv(100)
        assert server.log_bytes - before < SMALL_LOG, server.log.read_text()[-2000:]
