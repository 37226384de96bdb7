"""Requests to a Serve application, one after another over each protocol, until a file exists.

    python -m tests.support.serving.steady_load 10.77.0.12 /tmp/stop

prints how many were answered, the different answers, and what failed, as JSON.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import msgspec

from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from tests.support.distributed.ray_up import ASKED

PAUSE_S = 0.05
TIMEOUT_S = 120.0
STREAM_TOKENS = 64
"""So that some streams are under way whenever a replica is told to stop."""


class Answered(msgspec.Struct):
    """What one kind of request got.

    Attributes:
        count: requests that were answered.
        texts: the different answers.
        failures: what clients saw of requests that failed.
        longest_s: the longest wait for an answer, in seconds.
    """

    count: int = 0
    texts: list[str] = msgspec.field(default_factory=list)
    failures: list[str] = msgspec.field(default_factory=list)
    longest_s: float = 0.0

    def took(self, ask: Callable[[], str]) -> None:
        """Ask once."""
        started = time.monotonic()
        try:
            text = ask()
        except (grpc.RpcError, httpx.HTTPError, AssertionError) as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            return
        self.count += 1
        self.longest_s = max(self.longest_s, time.monotonic() - started)
        if text not in self.texts:
            self.texts.append(text)


def whole(address: str) -> str:
    """Ask over HTTP, on a connection of its own."""
    answer = httpx.post(f"http://{address}:8000/v1/completions", json=ASKED, timeout=TIMEOUT_S)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def streamed(address: str) -> str:
    """Stream an answer over HTTP; it fails if it breaks off."""
    asked = {**ASKED, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    text, finish = "", None
    with httpx.stream("POST", f"http://{address}:8000/v1/completions", json=asked, timeout=TIMEOUT_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line.removeprefix("data: "))["choices"][0]
                text, finish = text + choice["text"], choice["finish_reason"] or finish
    assert finish == "length", f"the stream ended with {finish}"
    return text


def called(channel: grpc.Channel) -> str:
    """Ask over gRPC, on a channel that stays open."""
    sampling = pb.SamplingParams(temperature=ASKED["temperature"], max_tokens=ASKED["max_tokens"])
    request = pb.GenerateRequest(text=ASKED["prompt"], sampling=sampling)
    *_, last = stubs.GenerationServiceStub(channel).Generate(request, timeout=TIMEOUT_S)
    return str(last.complete.text)


def load(address: str, stop: Path) -> dict[str, Answered]:
    """Ask until *stop* exists."""
    with grpc.insecure_channel(f"{address}:9000") as channel:
        kinds: dict[str, Callable[[], str]] = {
            "http": lambda: whole(address),
            "stream": lambda: streamed(address),
            "grpc": lambda: called(channel),
        }
        results = {name: Answered() for name in kinds}

        def run(name: str) -> None:
            while not stop.exists():
                results[name].took(kinds[name])
                time.sleep(PAUSE_S)

        threads = [threading.Thread(target=run, args=(name,)) for name in kinds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def read(printed: str) -> dict[str, Answered]:
    """Return the results that a load printed last."""
    given: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return {name: msgspec.convert(each, Answered) for name, each in given.items()}


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(load(sys.argv[1], Path(sys.argv[2]))).decode() + "\n")
