"""Generated requests over HTTP and gRPC against `slipstream serve` of the demo pair, other ones in every run.

Whatever is sent: no status above 499 but those that are stated, an answer in time, the same answer to a fixed request
after every 500, and memory that does not grow.
"""

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.support.fuzz.http_cases import PATHS, HttpCase
from tests.support.fuzz.run import ROUND, Fuzz, Server
from tests.support.processes import wait_until

ROOT = Path(__file__).parents[2]
SERVE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from cluster.cli.main import main; main()"
OPTIONS = ("serve", "--served-model-name", "demo", "--host", "127.0.0.1", "--port", "0", "--grpc-port", "0", "--device",
           "cpu", "--max-model-len", "96", "--request-timeout", "20", "--enforce-eager",
           "--disable-log-stats")  # fmt: skip
"""Eager: a compiled forward that is swapped in may change a sampled answer, within the guarantee."""
READY = re.compile(r"ready on (http://[\d.:]+), gRPC on ([\d.:]+);")
START_S = 120.0
QUICK = 300
TRACEBACK = re.compile(r"^Traceback.*?^(\S[^\n]*)$", re.M | re.S)
"""With the error in its last line."""
SETTLED = 0.1
"""Share of the requests after which memory is settled: 10,000 of 100,000."""
MOST_GROWTH = 1.05


@contextlib.contextmanager
def served(log: Path) -> Iterator[Server]:
    """Serve the demo pair; its log is in a file, because a pipe that is not read would hold it up."""
    command = [sys.executable, "-c", SERVE, str(ROOT), *OPTIONS]
    with log.open("w") as written, subprocess.Popen(command, stderr=written) as process:
        try:
            wait_until(lambda: READY.search(log.read_text()) is not None or process.poll() is not None, START_S)
            found = READY.search(log.read_text())
            assert found is not None, log.read_text()
            yield Server(found[1], found[2], process.pid)
        finally:
            process.terminate()
            process.wait(60)


def fuzz(folder: Path, seed: int, num_requests: int) -> Fuzz:
    """Run; return what was found. The server's log has no traceback."""
    log = folder / "server.log"
    print(f"--fuzz-seed {seed} --fuzz-requests {num_requests}")
    with served(log) as server:
        run = Fuzz(server, seed, num_requests)
        asyncio.run(run.run())
    print(dict(sorted(run.counts.items())), [(number, round(held)) for number, held in run.memory_mib[::20]])
    assert not run.violations, "\n\n".join(run.violations[:10])
    found = [traceback[0] for traceback in TRACEBACK.finditer(log.read_text())]
    assert not found, f"--fuzz-seed {seed}: {found[0]}"
    return run


def test_whatever_is_sent(tmp_path: Path, fuzz_seed: int) -> None:
    run = fuzz(tmp_path, fuzz_seed, QUICK)
    assert {"HTTP 200", "HTTP 400", "gRPC OK", "gRPC INVALID_ARGUMENT", "cut off"} <= run.counts.keys()


@pytest.mark.parametrize(
    ("status", "body", "wrong"),
    [
        (500, "", "status 500"),
        (503, "who knows why", "status 503"),
        (503, '{"error": {"code": "overloaded"}}', None),
        (400, "{}", None),
        (200, 'data: {"error": {"type": "server_error"}}', "a stream ended with an error of the server"),
    ],
)
def test_what_is_wrong_is_noticed(status: int, body: str, wrong: str | None) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    async def ask() -> str | None:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
            port = server.sockets[0].getsockname()[1]
            return await Fuzz(Server(f"http://127.0.0.1:{port}", "", 0), 0, 0).ask(HttpCase("GET", PATHS[0]), session)

    assert (asyncio.run(ask()) or "").startswith(wrong or "")
    assert (wrong is None) == (asyncio.run(ask()) is None)


def test_a_seed_makes_the_same_requests() -> None:
    one, same, other = (Fuzz(Server("", "", 0), seed, 0) for seed in (1, 1, 2))
    assert [str(one.case(i)) for i in range(50)] == [str(same.case(i)) for i in range(50)]
    assert str(one.case(0)) != str(other.case(0))


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_whatever_is_sent_for_long(tmp_path: Path, fuzz_seed: int, fuzz_requests: int) -> None:
    run = fuzz(tmp_path, fuzz_seed, fuzz_requests)
    settled = max(ROUND, round(SETTLED * fuzz_requests / ROUND) * ROUND)
    print(f"memory: {run.growth(settled):.3f} of that after {settled} requests")
    assert run.growth(settled) <= MOST_GROWTH
