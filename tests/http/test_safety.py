"""Load and safety: deadlines, full queues, slow readers, keys, draining, connections, pacing."""

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from typer.testing import CliRunner

from cluster.cli import main as cli
from cluster.cli import serve as cli_serve
from protos.errors import (
    ConfigError,
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    OverloadedError,
    SlowReaderError,
)
from protos.messages import TokenLogprobs, TokenOutput
from protos.sampling import SamplingParams
from runtime.frontend.admission import Admission, QueueLimits
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.keys import TENANT, Keys
from runtime.frontend.pacing import Aggregate
from runtime.frontend.stream_queue import KEPT_APART, ReadingLimits, StreamQueue, joined
from runtime.http.options import SafetyOptions
from runtime.text.tokenizer_pool import TokenizerPool
from tests.support.processes import wait_until
from tests.support.serving import fake_engine
from tests.support.serving.fake_engine import expected
from tests.support.serving.guarded_server import Guarded, events, guarded, guarded_engine

KEY, OTHER_KEY = "sk-one", "sk-two"
LONG = 20_000
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 ms, so that there is time to be late."""
    monkeypatch.setattr(fake_engine, "STEP_S", 0.01)


async def settled(engine: AsyncEngine) -> None:
    async with asyncio.timeout(60):
        while (now := engine.stats()).num_running or now.num_waiting or now.kv_usage:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# Keys


def test_keys() -> None:
    keys = Keys([KEY, OTHER_KEY])
    for given in (f"Bearer {KEY}", f"bearer {OTHER_KEY}", f"BEARER  {KEY} "):
        assert keys.accepts(given)
    for given in (
        None,
        "",
        KEY,
        "Bearer",
        "Bearer ",
        f"Basic {KEY}",
        f"Bearer {KEY}x",
        f"Bearer {KEY.upper()}",
        "Bearer " + "x" * 100_000,
        "Bearer \ud800",
    ):
        assert not keys.accepts(given)
    assert KEY not in repr(keys)
    assert all(Keys().accepts(given) for given in (None, "", "Bearer anything"))
    assert keys.tenant(f"Bearer {KEY}") == keys.tenant(f"bearer {KEY}") != keys.tenant(f"Bearer {OTHER_KEY}")
    assert Keys().tenant(f"Bearer {KEY}") == ""


def test_keys_that_cannot_be_sent_are_refused() -> None:
    for key in ("", " ", "a\nb", "é", "x" * 5000):
        with pytest.raises(ConfigError, match="api_key"):
            Keys([key])


@pytest.fixture(scope="module")
def locked() -> Iterator[Guarded]:
    with guarded(LONG, api_key=(KEY, OTHER_KEY)) as running:
        yield running


def test_every_route_but_health_needs_a_key(locked: Guarded) -> None:
    known = [*locked.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()["paths"]]
    assert {"/metrics", "/version", "/v1/models", "/v1/completions", "/tokenize"} <= {*known}
    odd = ["/openapi.json", "/", "/nowhere", "//health", "/health/", "/healthy", "/HEALTH", "/%68ealth/x"]
    for path in {*known, *odd} - {"/health"}:
        for method in ("GET", "POST"):
            answer = locked.client.request(method, locked.url + path.replace("{name}", "x").replace("{name:path}", "x"))
            assert answer.status_code == 401, (method, path)
            scheme = "Basic" if (method, path) == ("GET", "/") else "Bearer"  # a browser must be able to ask
            assert answer.headers["www-authenticate"].startswith(scheme)
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.json()["error"]["type"] == "authentication_error"
    assert locked.get("/health").status_code == 200


def test_a_browser_is_asked_for_the_key_and_its_password_opens_the_page_alone(locked: Guarded) -> None:
    for key, status in ((KEY, 200), ("sk-three", 401), ("", 401)):
        assert locked.get("/", auth=("anybody", key)).status_code == status
    assert locked.get("/playground/app.js", auth=("", OTHER_KEY)).status_code == 200
    assert locked.get("/v1/models", auth=("", KEY)).status_code == 401
    assert locked.client.post("/v1/completions", json={"prompt": "x"}, auth=("", KEY)).status_code == 401
    assert locked.get("/", headers={"authorization": "Basic !nonsense"}).status_code == 401


def test_the_path_that_counts_is_the_one_that_is_routed(locked: Guarded) -> None:
    for host in ("localhost/health?", "localhost/health#", "x@y/health", "localhost:80/health/", "/health"):
        request = f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        assert locked.raw(request).split(b" ", 2)[1] in (b"401", b"400")
    absolute = b"GET http://localhost/health/../v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert locked.raw(absolute).split(b" ", 2)[1] == b"401"


def test_the_real_client_and_its_key(locked: Guarded) -> None:
    for key, is_known in ((KEY, True), (OTHER_KEY, True), ("sk-three", False)):
        client = openai.OpenAI(base_url=locked.url + "/v1", api_key=key, max_retries=0)
        if is_known:
            assert client.completions.create(model="fake", prompt="x", max_tokens=3).choices[0].text == expected("x", 3)
        else:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        client.close()


def test_keys_do_not_share_caches(locked: Guarded) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 10

    def cached(key: str, **body: Any) -> int:
        answer = locked.client.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 1, **body},
            headers={"authorization": f"Bearer {key}"},
        )
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEY) == 0
    assert cached(KEY) > 0
    assert cached(OTHER_KEY) == 0
    assert cached(OTHER_KEY) > 0
    assert cached(KEY, cache_salt="mine") == 0
    assert cached(KEY, cache_salt="mine") > 0


def test_without_keys_any_key_is_taken() -> None:
    with guarded() as served:
        for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer whatever"}):
            assert served.get("/v1/models", headers=headers).status_code == 200


# Queues


def test_admission_counts_requests_and_tokens() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions())
        await engine.start()
        made = [(await engine.prepare([5] * 10, SamplingParams(), f"r{i}"))[0] for i in range(4)]
        await engine.close()
        admission = Admission(QueueLimits(3, 30))
        admission.enter(made[:2])
        with pytest.raises(OverloadedError, match="prompts of 20 tokens wait already; at most 30") as full:
            admission.check(1, 11)
        assert full.value.retry_after_s >= 1
        admission.start("r0")
        admission.enter(made[2:4])
        assert admission.num_waiting == 3
        with pytest.raises(OverloadedError, match="3 requests wait already; at most 3"):
            admission.check()
        for name in ("r1", "r2", "r3", "r3", "gone"):
            admission.leave(name)
        assert admission.num_waiting == 0
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


# Readers


def outputs(count: int, **fields: Any) -> list[TokenOutput]:
    return [TokenOutput("a", [i], chr(97 + i % 26), **fields) for i in range(count)]


def test_what_nobody_reads_is_added_up() -> None:
    async def check() -> None:
        delivery = StreamQueue({"a": 0, "b": 1}, ReadingLimits())
        for output in outputs(1000):
            delivery.put(output)
        delivery.put(TokenOutput("b", [7], "x", finish_reason="stop"))
        delivery.put(TokenOutput("a", [], "end", finish_reason="length", num_cached_tokens=3))
        taken = []
        while delivery.open:
            taken.append(await delivery.take())
        mine = [delta.output for delta in taken if delta.index == 0]
        assert len(taken) <= KEPT_APART + 2
        assert [i for output in mine for i in output.token_ids] == list(range(1000))
        assert "".join(output.text for output in mine) == "".join(o.text for o in outputs(1000)) + "end"
        assert (mine[-1].finish_reason, mine[-1].num_cached_tokens) == ("length", 3)

    asyncio.run(check())


def test_joined_outputs_keep_everything() -> None:
    entry = TokenLogprobs([1], [0.0], [1])
    first = TokenOutput("a", [1], "x", [entry], [entry], num_cached_tokens=2)
    both = joined(first, TokenOutput("a", [2], "y", [entry]))
    assert both == TokenOutput("a", [1, 2], "xy", [entry, entry], [entry], num_cached_tokens=2)
    known = {"request_id", "token_ids", "text", "logprobs", "prompt_logprobs", "finish_reason", "stop_reason",
             "num_cached_tokens", "speculation", "error", "step", "queued_s"}  # fmt: skip
    assert set(TokenOutput.__struct_fields__) == known, (
        "say in runtime.frontend.stream_queue how a new field is added up"
    )


def test_a_reader_too_far_behind_loses_its_stream() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions(), LONG)
        engine._reading = ReadingLimits(max_unread=200)
        await engine.start()
        stream = engine.stream(await engine.prepare("endless", SamplingParams(max_tokens=LONG - 100), "slow"))
        first = await anext(stream)
        assert first.output.token_ids
        await asyncio.sleep(0.5)
        await settled(engine)  # aborted although nobody looked
        with pytest.raises(SlowReaderError, match="at most 200"):
            async for _ in stream:
                pass
        await engine.close()

    asyncio.run(check())


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with guarded(LONG, read_timeout=1.0) as served:
        body = b'{"prompt": "endless", "max_tokens": %d, "stream": true, "logprobs": 5}' % (LONG - 100)
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(HEAD % len(body) + body)
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
            began = time.monotonic()
            served.idle()  # long before all 19,900 tokens, and without a byte read
            assert time.monotonic() - began < 60
        text = served.get("/metrics").text
        assert 'finished_reason="length",model_name="fake"} 0.0' in text


# Tokenising


def test_tokenising_is_bounded_in_time_and_number() -> None:
    async def check() -> None:
        tokenising = TokenizerPool(longest_s=0.3, num_threads=2)
        assert await tokenising.run(max, 3, 4) == 4
        with pytest.raises(ZeroDivisionError):
            await tokenising.run(divmod, 1, 0)
        asked = [tokenising.run(time.sleep, 1.0) for _ in range(3)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(each) for each in found] == [InvalidRequestError, InvalidRequestError, OverloadedError]
        with pytest.raises(OverloadedError):
            await tokenising.run(max, 3, 4)  # both threads are still asleep
        await asyncio.sleep(1.0)
        assert await tokenising.run(max, 3, 4) == 4

    asyncio.run(check())


def test_long_texts_are_tokenised_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def encode(self: Any, *args: Any, **options: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return [5]

    with guarded() as served:
        kind = type(fake_engine.tokenizer())
        monkeypatch.setattr(kind, "encode", encode)
        long = "ab " * LONG
        bodies = [{"prompt": [5], "prediction": {"type": "content", "content": long}}, {"prompt": [5]}]
        for body in bodies:
            assert served.post(max_tokens=2, **body).status_code == 200
        assert threads == {"slipstream-tokenise"}
        assert served.post("/tokenize", prompt="x").status_code == 200
        assert threads == {"slipstream-tokenise"}


# Connections


def test_heads_are_bounded_in_size_number_and_time() -> None:
    with guarded(header_timeout=0.5) as served:
        huge = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 500_000
        many = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(1000)) + b"\r\n"
        whole = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n"
        for data in (huge, many, whole, b"GET /" + b"a" * 500_000):
            assert served.raw(data).startswith(b"HTTP/1.1 431 "), data[:40]
        assert b'"code":"headers_too_large"' in served.raw(many)
        for data in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: b"):
            answer = served.raw(data)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"code":"header_timeout"' in answer
        assert served.raw(b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
        assert served.get("/health", headers={"x-a": "a" * 30_000}).status_code == 200
        for _ in range(2):  # the time of a second head begins with its first byte
            assert served.get("/health").status_code == 200
            time.sleep(0.8)


def test_bodies_must_come_in_time() -> None:
    with guarded(body_timeout=0.5) as served:
        answer = served.raw(HEAD % 1000 + b"{")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"body_timeout"' in answer


def test_one_connection_too_many_is_told_so() -> None:
    with guarded(max_connections=3) as served:
        held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(3)]

        def asked() -> bytes:
            return served.raw(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

        wait_until(lambda: asked().startswith(b"HTTP/1.1 503 "), what="three connections")
        assert b'"code":"too_many_connections"' in asked()
        for connection in held:
            connection.close()
        wait_until(lambda: served.get("/health").status_code == 200, what="room for a connection")


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


# Tenants


def test_a_tenant_is_part_of_what_separates_caches() -> None:
    async def check() -> None:
        engine = guarded_engine(SafetyOptions())
        await engine.start()
        sent: list[str] = []
        engine._channel.send = lambda mail: sent.extend(each.cache_salt for each in mail.requests)  # type: ignore[method-assign]
        for name, tenant in (("a", ""), ("b", "t1"), ("c", "t2")):
            TENANT.set(tenant)
            stream = engine.stream(await engine.prepare({"prompt": "x", "cache_salt": "s"}, SamplingParams(), name))
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        TENANT.set("")
        assert sent == ["s", "t1/s", "t2/s"]
        await engine.close()

    asyncio.run(check())


# Pacing

NUM_PROMPTS, NUM_TRAINED, NUM_TRIED = 50, 3, 4
PACKET = 1024


def sizes(served: Guarded, prompt: str, length: int = 40) -> np.ndarray:
    """Return the sizes of a stream's pieces as they come, in order, with zeros behind them."""
    found = np.zeros(length)
    body = {"prompt": prompt, "max_tokens": 48, "stream": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        for place, piece in enumerate(response.iter_raw()):
            found[min(place, length - 1)] += len(piece)
    return found


def accuracy(served: Guarded) -> float:
    """Return how often a nearest-centroid classifier tells the prompt from the sizes alone."""
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


def test_packets_are_all_of_one_size() -> None:
    pacing = Aggregate(packet_bytes=100)
    for size in (0, 1, 50, 96, 97, 98, 99, 100, 101, 250):
        packet = pacing.packet([b"x" * size])
        assert len(packet) % 100 == 0
        assert len(packet) - size < 103
        assert packet.endswith(b"\n\n")


# Options


def given_to_serve(monkeypatch: pytest.MonkeyPatch, *arguments: str, **environment: str) -> SafetyOptions:
    """Return what `slipstream serve` makes of the command line, without serving."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(cli_serve, "run", lambda config, **options: seen.append(options["safety"]))
    CliRunner().invoke(cli.app, ["serve", *arguments], env=environment, catch_exceptions=False)
    return SafetyOptions.of(seen[0])


def test_flags_yaml_and_the_environment_say_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags = ("--api-key", KEY, "--api-key", OTHER_KEY, "--max-waiting-requests", "5", "--stream-pacing", "aggregate",
             "--no-cache-salt-by-key", "--request-timeout", "1.5")  # fmt: skip
    wanted = SafetyOptions(
        api_key=(KEY, OTHER_KEY),
        max_waiting_requests=5,
        stream_pacing="aggregate",
        cache_salt_by_key=False,
        request_timeout=1.5,
    )
    assert given_to_serve(monkeypatch, *flags) == wanted
    path = tmp_path / "serve.yaml"
    path.write_text(
        f"api_key: [{KEY}, {OTHER_KEY}]\nmax-waiting-requests: 5\nstream_pacing: aggregate\n"
        "cache_salt_by_key: false\nrequest_timeout: 1.5\n"
    )
    assert given_to_serve(monkeypatch, "--config", str(path)) == wanted
    told = given_to_serve(monkeypatch, SLIPSTREAM_API_KEY=f"{KEY} {OTHER_KEY}")
    assert told == SafetyOptions(api_key=(KEY, OTHER_KEY))
    assert KEY not in repr(told)
    assert given_to_serve(monkeypatch) == SafetyOptions()


def test_bad_options_are_refused_without_telling_keys() -> None:
    for given in (
        {"max_waiting_requests": 0},
        {"request_timeout": -1},
        {"stream_pacing": "some"},
        {"api_keys": KEY},
        {"header_timeout": float("nan")},
        {"max_connections": "many"},
    ):
        with pytest.raises(ConfigError, match=next(iter(given))):
            SafetyOptions.of(given)
    with pytest.raises(ConfigError, match="list of texts") as refused:
        SafetyOptions.of({"api_key": [12345]})
    assert "12345" not in str(refused.value)
