"""Paced streams: packets of one size."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator

import numpy as np
import openai
import pytest

from protos.errors import DeadlineExceededError
from protos.messages import TokenOutput
from runtime.frontend.pacing import Aggregate
from runtime.frontend.stream_queue import Delta
from tests.support.serving.fake_engine import expected
from tests.support.serving.guarded_server import Guarded, guarded
from tests.support.serving.openai_responses import parsed

NUM_PROMPTS, NUM_TRAINED, NUM_TRIED = 50, 3, 4
PACKET = 1024


def sizes(served: Guarded, prompt: str, length: int = 40) -> np.ndarray:
    """Return the sizes of a stream's chunks in order, padded with zeros."""
    found = np.zeros(length)
    body = {"prompt": prompt, "max_tokens": 48, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        for place, piece in enumerate(response.iter_raw()):
            found[min(place, length - 1)] += len(piece)
    return found


def accuracy(served: Guarded) -> float:
    """Return the accuracy of a nearest-centroid classifier of prompts by sizes alone."""
    prompts = [f"prompt number {i} says" for i in range(NUM_PROMPTS)]
    centroids = np.array([np.mean([sizes(served, prompt) for _ in range(NUM_TRAINED)], axis=0) for prompt in prompts])
    right = 0
    for index, prompt in enumerate(prompts):
        for _ in range(NUM_TRIED):
            right += int(np.argmin(np.linalg.norm(centroids - sizes(served, prompt), axis=1))) == index
    return right / (NUM_PROMPTS * NUM_TRIED)


def test_paced_streams_are_packets_of_one_size() -> None:
    with guarded(stream_pacing="aggregate") as served:
        for prompt in ("a", "prompt number 1 says"):
            assert set(sizes(served, prompt)) <= {0.0, PACKET, 2.0 * PACKET}  # the last two may be read together


def test_a_paced_message_is_packets_of_one_size() -> None:
    with guarded(stream_pacing="aggregate") as served:
        body = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 400, "stream": True}
        with served.client.stream("POST", "/v1/messages", json=body) as response:
            pieces = [*response.iter_raw()]
    assert {len(piece) % PACKET for piece in pieces} == {0}
    lines = [line for line in b"".join(pieces).decode().splitlines() if line.startswith("data: ")]
    deltas = [event for line in lines if "text" in (event := json.loads(line[6:])).get("delta", {})]
    assert len("".join(event["delta"]["text"] for event in deltas)) > 100
    assert len(deltas) <= len(pieces)  # one per packet, however many steps it has


def test_what_came_before_an_error_is_sent_before_it() -> None:
    deltas = [Delta(0, TokenOutput(str(i), [i])) for i in range(2)]

    async def failing() -> AsyncGenerator[Delta, None]:
        for delta in deltas:
            yield delta
        raise DeadlineExceededError("too late")

    async def check() -> list[Delta]:
        got: list[Delta] = []
        with pytest.raises(DeadlineExceededError):
            async for batch in Aggregate(0.01).batches(failing()):
                got += batch
        return got

    assert asyncio.run(check()) == deltas


@pytest.mark.full
def test_paced_streams_tell_prompts_apart_no_better_than_chance() -> None:
    chance = 1 / NUM_PROMPTS
    with guarded() as served:
        told = accuracy(served)
    with guarded(stream_pacing="aggregate") as served:
        kept = accuracy(served)
    logging.getLogger("slipstream").info(
        "prompts told apart by packet sizes: %.1f %% without pacing, %.1f %% with; chance is %.1f %%",
        100 * told,
        100 * kept,
        100 * chance,
    )
    assert told > 3 * chance
    assert kept <= 3 * chance


def test_a_paced_stream_says_the_same() -> None:
    with guarded(stream_pacing="aggregate") as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="fake", prompt="one", n=2, max_tokens=30, stream=True)
        texts = ["", ""]
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [expected("one", 30)] * 2
        client.close()


def test_a_paced_response_is_packets_of_one_size() -> None:
    with guarded(stream_pacing="aggregate") as served:
        body = {"input": "one", "max_output_tokens": 400, "stream": True}
        with served.client.stream("POST", "/v1/responses", json=body) as response:
            pieces = [*response.iter_raw()]
    assert {len(piece) % PACKET for piece in pieces} == {0}
    events = parsed(re.sub(r"^:.*\n\n", "", b"".join(pieces).decode(), flags=re.MULTILINE))  # without the padding
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text
    assert len(deltas) <= len(pieces)  # one per packet, however many steps it has


def test_packets_are_all_of_one_size() -> None:
    pacing = Aggregate(packet_bytes=100)
    for size in (0, 1, 50, 96, 97, 98, 99, 100, 101, 250):
        packet = pacing.packet([b"x" * size])
        assert len(packet) % 100 == 0
        assert len(packet) - size < 103
        assert packet.endswith(b"\n\n")
