"""Requests to a deployment on Ray Serve, in tests."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from tests.support.distributed.ray_serving import (
    PATIENCE_S,
    Cluster,
    Stream,
    until,
)

PROMPTS = [f"def number_{i}(values):\n" for i in range(16)]
LENGTH = 400
"""Long enough for all streams to be in flight when a process is killed."""


def asked(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, **fields}


def completed(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=asked(prompt, **fields), timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@contextlib.contextmanager
def channel(made: Cluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(made.target) as opened:
        yield opened


def refusal(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


def streamed(url: str, prompt: str, began: Callable[[], None]) -> Stream:
    """Stream an answer until it ends or fails."""
    seen = Stream()
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=asked(prompt, stream=True), timeout=PATIENCE_S) as got:
            if got.status_code != 200:
                seen.error = got.read().decode()
                return seen
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    took(seen, json.loads(line.removeprefix("data: ")))
                    began()
    except httpx.TransportError as error:
        seen.error = type(error).__name__
    return seen


def took(seen: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error = event["error"]["code"]
    else:
        seen.text += event["choices"][0]["text"]
        seen.finish_reason = event["choices"][0]["finish_reason"] or seen.finish_reason


def streams_under(made: Cluster, act: Callable[[], None]) -> dict[str, Stream]:
    """Stream all prompts at once, and act when all have begun; return the results."""
    begun: set[str] = set()
    results: dict[str, Stream] = {}

    def one(prompt: str) -> None:
        results[prompt] = streamed(made.url, prompt, lambda: begun.add(prompt))

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    until(lambda: len(begun) == len(PROMPTS), "streams that have begun")
    act()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(results) == len(PROMPTS)
    return results
