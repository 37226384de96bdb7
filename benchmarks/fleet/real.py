"""Real replicas, `slipstream serve` each, under the load of the simulation and behind its routers."""

import asyncio
import json
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

from benchmarks.fleet.replica import ReplicaLimits
from benchmarks.fleet.routers import Router
from benchmarks.fleet.simulation import FleetResult
from benchmarks.fleet.trace import FleetRequest
from benchmarks.shared.server import served
from demo import pair

KV_BLOCK = 16
Prompts = Mapping[str, Sequence[int]]


class RealReplica:
    """A server, and the requests that it has.

    Args:
        url: of the server.
        session: sends the requests.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.load = 0

    async def answer(self, request: FleetRequest, prompt: Sequence[int], since: float) -> None:
        """Stream one answer; note when its first token and its end came, in seconds *since* the beginning."""
        body = {
            "prompt": list(prompt),
            "max_tokens": request.output,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.load += 1
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.content:
                    self._note(request, line, time.perf_counter() - since)
        finally:
            self.load -= 1
        request.ended = time.perf_counter() - since

    @staticmethod
    def _note(request: FleetRequest, line: bytes, now: float) -> None:
        if not line.startswith(b"data: {"):
            return
        if request.first is None:
            request.first = now
        usage: dict[str, Any] | None = json.loads(line[6:]).get("usage")
        if usage is not None:
            request.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def prompts_of(requests: Sequence[FleetRequest], prefix: int) -> Prompts:
    """Return each request's prompt: *prefix* tokens of its session's file of Python, and others that are its own."""
    tokenizer = Tokenizer.from_file(str(pair()[0] / "tokenizer.json"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [tokenizer.encode(path.read_text(), add_special_tokens=False).ids for path in files]
    longest = max(request.prompt for request in requests)
    texts = [ids for ids in texts if len(ids) >= 2 * longest]
    made = {}
    for number, request in enumerate(requests):
        shared = texts[int(request.keys[0].split(".")[0]) % len(texts)]
        own = texts[number % len(texts)]
        start = number % (len(own) - longest)
        made[request.name] = [*shared[:prefix], *own[start : start + request.prompt - prefix]]
    return made


@contextmanager
def servers(number: int, limits: ReplicaLimits) -> Iterator[list[str]]:
    """Run so many servers of the demo pair with one thread each; yield their URLs."""
    speculative: dict[str, Any] | None = None
    if limits.k:
        policy = {"num_speculative_tokens": limits.k, "policy": "fixed", "placement": "colocated"}
        speculative = {"model": str(pair()[1]), **policy}
    options = [
        f"--speculative-config={json.dumps(speculative)}",
        "--device=cpu",
        "--dtype=float32",
        "--enforce-eager",
        "--num-threads=1",
        f"--max-num-seqs={limits.max_seqs}",
        f"--max-num-batched-tokens={limits.max_tokens}",
        f"--block-size={KV_BLOCK}",
        f"--num-gpu-blocks-override={limits.kv_tokens // KV_BLOCK}",
    ]
    with ExitStack() as stack:
        yield [stack.enter_context(served(options)).url for _ in range(number)]


async def drive(urls: Sequence[str], router: Router, requests: Sequence[FleetRequest], prompts: Prompts) -> FleetResult:
    """Send each request when it arrives to the replica that *router* chooses."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        replicas = {f"replica-{number}": RealReplica(url, session) for number, url in enumerate(urls)}
        began = time.perf_counter()

        async def send(request: FleetRequest) -> None:
            await asyncio.sleep(max(0.0, request.arrives - (time.perf_counter() - began)))
            request.tries, request.replica = 1, router.choose(request, replicas)
            await replicas[request.replica].answer(request, prompts[request.name], began)
            router.ended(request, request.replica)

        await asyncio.gather(*map(send, requests))
    return FleetResult(requests)
