"""Bounded queues, deadlines and draining."""

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import httpx
import openai
import pytest
from starlette.requests import ClientDisconnect

from protos.errors import (
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    OverloadedError,
)
from protos.sampling import SamplingParams
from runtime.frontend.admission import Admission, QueueLimits
from runtime.http.options import SafetyOptions
from runtime.http.responding import EventStream
from tests.support.processes import wait_until
from tests.support.serving.fake_engine import expected
from tests.support.serving.guarded_server import events, guarded, guarded_engine, settled

LONG = 20_000


def test_admission_counts_requests_and_tokens() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions())
        await engine.start()
        made = [(await engine.prepare([5] * 10, SamplingParams(), f"r{i}"))[0] for i in range(4)]
        await engine.close()
        admission = Admission(QueueLimits(3, 30))
        admission.enter(made[:2])
        with pytest.raises(OverloadedError, match="prompts of 20 tokens are waiting; the limit is 30") as full:
            admission.check(1, 11)
        assert full.value.retry_after_s >= 1
        admission.start("r0")
        admission.enter(made[2:4])
        with pytest.raises(OverloadedError, match="3 requests are waiting; the limit is 3"):
            admission.check()
        for name in ("r1", "r2", "r3", "r3", "gone"):
            admission.leave(name)
        admission.check(1, 10**9)  # one prompt always finds a place in an empty queue
        with pytest.raises(InvalidRequestError, match="at most 3 answers"):
            admission.check(4)

    asyncio.run(check())


@pytest.mark.usefixtures("slow")
def test_a_full_queue_refuses_at_once_and_recovers() -> None:
    with guarded(LONG, max_waiting_requests=4) as served:
        with ThreadPoolExecutor(32) as pool:
            asked = [pool.submit(served.post, prompt=f"client {i}", max_tokens=150) for i in range(32)]
            answers = [each.result() for each in asked]
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 4  # one for each slot
        for answer in answers:
            if answer.status_code == 429:
                assert 1 <= int(answer.headers["retry-after"]) <= 30
                assert answer.json()["error"]["code"] == "overloaded"
                assert answer.json()["error"]["type"] == "rate_limit_error"
        served.idle()
        text = served.get("/metrics").text
        assert 'slipstream_requests_turned_away_total{engine="0",model_name="fake",reason="overloaded"} ' in text
        assert "vllm:requests_turned_away" not in text
        assert served.post(prompt="x", max_tokens=3).json()["choices"][0]["text"] == expected("x", 3)


@pytest.mark.usefixtures("slow")
def test_the_real_client_tries_again_after_429() -> None:
    with guarded(LONG, max_waiting_requests=1) as served:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=30)
        with ThreadPoolExecutor(12) as pool:
            asked = [
                pool.submit(client.completions.create, model="fake", prompt=f"c{i}", max_tokens=60) for i in range(12)
            ]
            found = [each.result().choices[0].text for each in asked]
        assert found == [expected(f"c{i}", 60) for i in range(12)]
        client.close()
        assert 'reason="overloaded"} 0.0' not in served.get("/metrics").text


def test_a_stream_is_refused_by_its_status() -> None:
    with guarded(LONG, max_waiting_requests=8, max_waiting_tokens=50) as served:
        body = {"prompt": ["x" * 40] * 3, "stream": True, "max_tokens": 2}
        assert served.post(**body).status_code == 200  # nothing else waits
        assert served.post(prompt=["x"] * 5, n=2, stream=True).status_code == 400
        served.drain()
        wait_until(lambda: served.post(prompt="x").status_code == 503, what="draining")
        for stream in (False, True):
            answer = served.post(prompt="x", stream=stream)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            assert int(answer.headers["retry-after"]) >= 1


def test_a_burst_of_streams_is_refused_by_status_too() -> None:
    """They all arrive before the first one has begun."""

    async def ask(client: httpx.AsyncClient, i: int) -> tuple[int, str]:
        body = {"model": "fake", "prompt": f"client {i}", "max_tokens": 20, "stream": True}
        answer = await client.post("/v1/completions", json=body)
        return answer.status_code, answer.text

    async def check(url: str) -> list[tuple[int, str]]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            return await asyncio.gather(*(ask(client, i) for i in range(32)))

    with guarded(LONG, max_waiting_requests=4) as served:
        answers = asyncio.run(check(served.url))
    assert {status for status, _ in answers} == {200, 429}
    for status, text in answers:
        assert ('"overloaded"' in text) == (status == 429)


def test_a_stream_takes_its_place_at_once_and_leaves_it_unread() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions(max_waiting_requests=1), LONG)
        await engine.start()
        first, second = [await engine.prepare("endless", SamplingParams(max_tokens=LONG - 100), name) for name in "ab"]
        stream = engine.stream(first)
        with pytest.raises(OverloadedError):
            engine.stream(second)

        async def no_events() -> AsyncGenerator[bytes, None]:
            yield b""

        async def gone(*_: object) -> NoReturn:
            raise OSError

        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with pytest.raises(ClientDisconnect):
            await EventStream(no_events(), stream)(scope, gone, gone)
        again = engine.stream(second)
        assert (await anext(again)).output.text
        await again.aclose()
        await engine.close()

    asyncio.run(check())


# Deadlines


@pytest.mark.usefixtures("slow")
def test_deadlines_while_running_and_while_waiting() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions(), LONG)
        await engine.start()
        params = SamplingParams(max_tokens=LONG - 100)

        async def ask(name: str, timeout_s: float) -> tuple[float, int]:
            began, count = time.monotonic(), 0
            with pytest.raises(DeadlineExceededError, match=f"{timeout_s:g} s"):
                async for delta in engine.stream(await engine.prepare("endless", params, name), timeout_s):
                    count += len(delta.output.token_ids)
            return time.monotonic() - began, count

        # Four slots: the fifth request waits all its time.
        running = [asyncio.create_task(ask(f"r{i}", 1.0)) for i in range(4)]
        await asyncio.sleep(0.2)
        _, count = await ask("waiting", 0.3)
        assert count == 0
        assert all(count > 0 for _, count in await asyncio.gather(*running))
        await settled(engine)
        await engine.close()

    asyncio.run(check())


@pytest.mark.usefixtures("slow")
def test_the_time_out_of_a_request_and_of_the_server() -> None:
    with guarded(LONG, request_timeout=0.5) as served:
        for body in ({}, {"timeout": 0.2}):
            answer = served.post(prompt="endless", max_tokens=LONG - 100, **body)
            assert (answer.status_code, answer.headers["x-should-retry"]) == (408, "false")
            assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert served.post(prompt="x", max_tokens=120, timeout=60).status_code == 200
        streamed = served.post(prompt="endless", max_tokens=LONG - 100, timeout=0.3, stream=True)
        *parts, last = events(streamed.text)
        assert last["error"]["code"] == "deadline_exceeded"
        assert "".join(part["choices"][0]["text"] for part in parts).strip()
        served.idle()


# Draining


@pytest.mark.usefixtures("slow")
def test_draining_lets_answers_end_and_takes_no_more() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions())
        assert engine.state == "starting"
        await engine.start()
        assert engine.state == "live"
        stream = engine.stream(await engine.prepare("x", SamplingParams(max_tokens=20), "a"))
        text = (await anext(stream)).output.text
        engine.drain()
        assert engine.state == "draining"
        with pytest.raises(DrainingError):
            await engine.prepare("x", SamplingParams(), "b")
        text += "".join([delta.output.text async for delta in stream])
        assert text == expected("x", 20)
        assert engine.silence_s < 30
        await engine.close()
        assert engine.state == "dead"

    asyncio.run(check())


def test_an_answer_that_outlasts_the_grace_is_cut_off_by_draining() -> None:
    """Not by a failure: a client should ask another server, and no one look for a crash."""

    async def check() -> None:
        engine = guarded_engine(SafetyOptions())
        await engine.start()
        stream = engine.stream(await engine.prepare("x", SamplingParams(max_tokens=400), "a"))
        await anext(stream)
        engine.drain()
        await engine.close()
        with pytest.raises(DrainingError, match="stopped, before this answer ended"):
            async for _ in stream:
                pass

    asyncio.run(check())
