"""Sends generated requests to a server in a process, and checks what must hold whatever is sent."""

import asyncio
import io
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
from yarl import URL

from protos import slipstream_v1_pb2 as pb
from tests.support.fuzz import grpc_cases, http_cases
from tests.support.fuzz.dice import Dice
from tests.support.fuzz.grpc_cases import GrpcCase
from tests.support.fuzz.http_cases import HttpCase

ROUND = 500
"""After so many requests the fixed one is asked again."""
CLIENTS = 8
HANGS_S = 90.0
"""Longest time for one answer: requests have a time limit of 20 s on the server."""
GRPC_SHARE = 0.25
STATED = (429, 503)
"""Statuses above 499 that may be answered, and 429."""
STATED_CODES = ("overloaded", "draining", "engine_stalled")
TIMED_OUT = "exceeded its time-out"
"""Words of the error of a request that reached its time limit."""
WRONG_CODES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
FIXED: dict[str, Any] = {
    "model": "demo", "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0.9, "seed": 20, "logprobs": 0
}  # fmt: skip


@dataclass(frozen=True)
class Server:
    """Where it listens, and its main process."""

    url: str
    grpc_address: str
    pid: int


@dataclass
class Fuzz:
    """One run over *num_requests* requests of *seed*. `violations`: what must not happen, with its request."""

    server: Server
    seed: int
    num_requests: int
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    memory_mib: list[tuple[int, float]] = field(default_factory=list)

    async def run(self) -> None:
        """Send everything; stop at the end of the first round with a violation."""
        timeout = aiohttp.ClientTimeout(total=HANGS_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session,
            grpc.aio.insecure_channel(self.server.grpc_address) as channel,
        ):
            fixed = await self._fixed_answers(session, channel)
            for first in range(0, self.num_requests, ROUND):
                last = min(first + ROUND, self.num_requests)
                numbers = iter(range(first, last))
                await asyncio.gather(*(self._client(numbers, session, channel) for _ in range(CLIENTS)))
                again = await self._fixed_answers(session, channel)
                if again != fixed:
                    self.violations.append(f"after {last} requests the fixed answer differs: {again} is not {fixed}")
                self.memory_mib.append((last, memory_mib(self.server.pid)))
                if self.violations:
                    return

    async def _client(self, numbers: Any, session: aiohttp.ClientSession, channel: Any) -> None:
        for number in numbers:
            case = self.case(number)
            began = time.monotonic()
            try:
                wrong = await self._send(case, session, channel)
            except TimeoutError:
                wrong = f"no answer within {HANGS_S:.0f} s"
            if wrong:
                took_s = time.monotonic() - began
                self.violations.append(
                    f"{wrong} after {took_s:.1f} s; --fuzz-seed {self.seed}, request {number}: {case}"
                )

    def case(self, number: int) -> HttpCase | GrpcCase:
        """Return request *number*, always the same one."""
        dice = Dice(f"{self.seed}/{number}")
        return grpc_cases.make(dice) if dice.is_lucky(GRPC_SHARE) else http_cases.make(dice)

    async def _send(self, case: HttpCase | GrpcCase, session: aiohttp.ClientSession, channel: Any) -> str | None:
        """Send *case*; return what is wrong with the answer, if anything."""
        if isinstance(case, GrpcCase):
            return await self._call(case, channel)
        if case.cut is not None:
            return await self._break_off(case)
        return await self.ask(case, session)

    async def ask(self, case: HttpCase, session: aiohttp.ClientSession) -> str | None:
        """Send a whole request; return what is wrong with the answer, if anything."""
        url = URL(self.server.url + case.path, encoded=True)
        body = io.BytesIO(case.body) if case.body else None
        try:
            async with session.request(case.method, url, data=body, headers=case.headers) as answer:
                text = (await answer.read()).decode("utf-8", "replace")
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if len(case.body) < http_cases.HUGE:  # it may be refused while it is still being sent
                return f"the connection was closed: {error!r}"
            self.counts["closed"] += 1
            return None
        self.counts[f"HTTP {answer.status}"] += 1
        if answer.status >= 500 and not (answer.status in STATED and any(code in text for code in STATED_CODES)):
            return f"status {answer.status}: {text[:500]}"
        failed = '"server_error"' in text or '"api_error"' in text
        if case.path in http_cases.PATHS and answer.status < 400 and failed and TIMED_OUT not in text:
            return f"a stream ended with an error of the server: {text[-500:]}"
        return None

    async def _break_off(self, case: HttpCase) -> None:
        """Send the beginning of a body, and close the connection."""
        url = URL(self.server.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {case.path} HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(case.body)}\r\n\r\n".encode() + case.body[: case.cut])
        await writer.drain()
        writer.close()
        self.counts["cut off"] += 1

    async def _call(self, case: GrpcCase, channel: Any) -> str | None:
        call = channel.unary_stream(grpc_cases.PREFIX + case.method)(case.body, timeout=HANGS_S)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            self.counts[f"gRPC {error.code().name}"] += 1
            if error.code() in WRONG_CODES:
                return f"{error.code().name}: {error.details()}"
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and TIMED_OUT not in str(error.details()):
                return f"no answer: {error.details()}"
            return None
        self.counts["gRPC OK"] += 1
        return None

    async def _fixed_answers(self, session: aiohttp.ClientSession, channel: Any) -> list[str]:
        """Ask a fixed seeded request over both protocols, and for the health; return the texts."""
        async with session.get(self.server.url + "/health") as health:
            assert health.status == 200
        async with session.post(self.server.url + "/v1/completions", json=FIXED) as answer:
            choice = json.loads(await answer.read())["choices"][0]
        options = {name: FIXED[name] for name in ("max_tokens", "temperature", "seed")}
        request = pb.GenerateRequest(text=FIXED["prompt"], sampling=pb.SamplingParams(**options), stream=False)
        stub = channel.unary_stream(
            grpc_cases.PREFIX + "Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        ends = [message.complete.text async for message in stub(request, timeout=HANGS_S)]
        return [choice["text"], choice["finish_reason"], "".join(ends)]

    def growth(self, after: int) -> float:
        """Return the memory at the end relative to that after the first *after* requests."""
        (base,) = [held for number, held in self.memory_mib if number == after]
        return self.memory_mib[-1][1] / base


def memory_mib(pid: int) -> float:
    """Return the memory of a process and all below it that no other process shares, in MiB."""
    return sum(_private_kib(each) for each in (pid, *_below(pid))) / 1024


def _below(pid: int) -> list[int]:
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *_below(child)]
    return found


def _private_kib(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "Private_Clean:")))
