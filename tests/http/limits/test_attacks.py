"""Attacks at full length on a server process, beside which `/health` and other requests are asked. Prints figures."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.support.serving.attacked_server import Attacked, HealthProbe, attacked
from tests.support.serving.bad_fields import CHAT, COMPLETIONS, MESSAGES_API, RESPONSES

pytestmark = pytest.mark.full

LONGEST_S = 10.0
"""A hang, even on a busy machine."""
MOST_MIB = 512
MOST_LOG = 50_000
MESSAGE = b'{"role":"user","content":"a"}'
PART = b'{"type":"text","text":"a"}'


def many(item: bytes, number: int) -> bytes:
    return b",".join([item] * number)


def numbered(item: bytes, number: int) -> bytes:
    return b",".join(item % index for index in range(number))


BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "7 M nested lists in an ignored field": (COMPLETIONS, lambda: b'{"metadata": [%s]}' % many(b"[]", 7_000_000)),
    "a prompt of 7 M lists": (COMPLETIONS, lambda: b'{"prompt": [%s]}' % many(b"[]", 7_000_000)),
    "2 M unknown fields": (COMPLETIONS, lambda: b'{"prompt": "x", %s}' % numbered(b'"%d":1', 2_000_000)),
    "65,000 unknown fields": (COMPLETIONS, lambda: b'{"prompt": "x", %s}' % numbered(b'"%d":1', 65_000)),
    "2 M biases": (COMPLETIONS, lambda: b'{"prompt": "x", "logit_bias": {%s}}' % numbered(b'"%d":1', 2_000_000)),
    "65,000 biases": (COMPLETIONS, lambda: b'{"prompt": "x", "logit_bias": {%s}}' % numbered(b'"%d":1', 65_000)),
    "8 M token ids": (COMPLETIONS, lambda: b'{"prompt": [%s]}' % many(b"5", 8_000_000)),
    "1.1 M token ids": (COMPLETIONS, lambda: b'{"prompt": [%s]}' % many(b"5", 1_100_000)),
    "1.1 M allowed ids": (
        COMPLETIONS, lambda: b'{"prompt": "x", "allowed_token_ids": [%s]}' % many(b"5", 1_100_000)
    ),
    "250,000 allowed ids, n=128": (
        COMPLETIONS, lambda: b'{"prompt": "x", "n": 128, "allowed_token_ids": [%s]}' % many(b"5", 250_000)
    ),
    "1.1 M stop strings": (COMPLETIONS, lambda: b'{"prompt": "x", "stop": [%s]}' % many(b'"a"', 1_100_000)),
    "1 M messages": (CHAT, lambda: b'{"messages": [%s]}' % many(MESSAGE, 1_000_000)),
    "20,000 messages": (CHAT, lambda: b'{"messages": [%s]}' % many(MESSAGE, 20_000)),
    "20,000 parts": (CHAT, lambda: b'{"messages": [{"role":"user","content":[%s]}]}' % many(PART, 20_000)),
    "20,000 items": (RESPONSES, lambda: b'{"input": [%s]}' % many(MESSAGE, 20_000)),
    "20,000 messages to /v1/messages": (
        MESSAGES_API, lambda: b'{"max_tokens": 3, "messages": [%s]}' % many(MESSAGE, 20_000)
    ),
    "1.1 M ids to decode": ("/detokenize", lambda: b'{"tokens": [%s]}' % many(b"5", 1_100_000)),
    "30 MB of marks in a text": (COMPLETIONS, lambda: b'{"prompt": "%s"}' % (b"[{,:" * 7_500_000)),
    "30 MB of escapes": (COMPLETIONS, lambda: b'{"prompt": "%s"}' % (b"\\n" * 15_000_000)),
    "30 MB of quotes": (COMPLETIONS, lambda: b'"' * 30_000_000),
    "30 MB of blanks": (COMPLETIONS, lambda: b" " * 30_000_000 + b"{}"),
    "30 MB of a name": (COMPLETIONS, lambda: b'{"%s": 1}' % (b"a" * 30_000_000)),
    "a number of 30 MB": (COMPLETIONS, lambda: b'{"prompt": "x", "seed": %s}' % (b"9" * 30_000_000)),
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with attacked(tmp_path_factory.mktemp("attacked") / "log", soft=1024, hard=1024) as running:
        yield running


class Figures:
    """Measures a server during an attack, and prints the figures."""

    def __init__(self, server: Attacked, name: str) -> None:
        self._server, self._name = server, name
        self._probe = HealthProbe(server.ports[0])

    def __enter__(self) -> "Figures":
        self._memory, self._log, self._began = self._server.memory_mib(), self._server.log_bytes, time.monotonic()
        self.peak_mib = self._memory
        self._probe.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.sample()
        self._probe.__exit__()
        grown, logged = self.peak_mib - self._memory, self._server.log_bytes - self._log
        print(
            f"\n{self._name}: {time.monotonic() - self._began:.2f} s, worst /health {self._probe.worst_s:.3f} s, "
            f"statuses {self._probe.statuses}, memory {self._memory:.0f} +{grown:.0f} MiB, log {logged} bytes"
        )
        assert self._probe.worst_s < LONGEST_S
        assert self._probe.statuses[200] > sum(self._probe.statuses.values()) / 2
        assert grown < MOST_MIB
        assert logged < MOST_LOG
        self._server.check_answers()

    def sample(self) -> None:
        self.peak_mib = max(self.peak_mib, self._server.memory_mib())


@pytest.mark.parametrize("name", BODIES)
def test_hostile_bodies(server: Attacked, name: str) -> None:
    path, made = BODIES[name]
    body, statuses = made(), []
    senders = [threading.Thread(target=lambda: statuses.append(server.post(path, body))) for _ in range(3)]
    with Figures(server, name) as figures:
        for sender in senders:
            sender.start()
        while any(sender.is_alive() for sender in senders):
            figures.sample()
            time.sleep(0.05)
    assert len(statuses) == 3
    assert set(statuses) <= {400, 413}


@pytest.mark.parametrize("which", ["http", "grpc"])
def test_idle_connections_that_come_back(server: Attacked, which: str) -> None:
    port = server.ports[which == "grpc"]
    with Figures(server, f"1,300 idle connections, {which}, three times") as figures:
        for _ in range(3):
            with ExitStack() as stack:
                for connection in server.crowd(port, 1300):
                    stack.enter_context(connection)
                time.sleep(3)
                figures.sample()


SLOW = {
    "heads": (b"", b"GET /health HTTP/1.1\r\n"),
    "uploads": (
        b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 10000\r\n\r\n",
        b'{"prompt": "aaaaaaaaaaaaa',
    ),
}


@pytest.mark.parametrize("what", SLOW)
def test_requests_that_come_byte_by_byte(server: Attacked, what: str) -> None:
    begin, rest = SLOW[what]
    with Figures(server, f"1,300 slow {what}") as figures, ExitStack() as stack:
        slow = [stack.enter_context(each) for each in server.crowd(server.ports[0], 1300)]
        for connection in slow:
            _send(connection, begin)
        for byte in rest:
            for connection in slow:
                _send(connection, bytes([byte]))
            figures.sample()
            time.sleep(0.3)


def test_uploads_that_break_off(server: Attacked) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
    with Figures(server, "2,000 uploads that break off") as figures:
        for index in range(2000):
            with socket.create_connection(("127.0.0.1", server.ports[0]), 60) as connection:
                _send(connection, head % (COMPLETIONS, CHAT, RESPONSES, MESSAGES_API)[index % 4].encode())
        figures.sample()
        time.sleep(1)


def test_requests_that_are_none(server: Attacked) -> None:
    with Figures(server, "2,000 malformed requests"):
        for _ in range(2000):
            with socket.create_connection(("127.0.0.1", server.ports[0]), 60) as connection:
                _send(connection, b"nonsense\r\n\r\n")
                connection.recv(100)


def _send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:  # the server has closed it
        return
