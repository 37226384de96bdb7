"""The OpenAI face: the real client against a real server, and what no client would send."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from protos.config.engine import SpeculativeConfig
from tests.support.serving.fake_engine import TEMPLATE, expected, local_engine, ranked, tokenizer
from tests.support.serving.http_server import Served, serving

LONG = 100_000
PROMPT = "the quick brown"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    drafts = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model="none")
    with serving(local_engine(max_model_len=LONG, speculative=drafts)) as running:
        yield running


def ids(text: str) -> list[int]:
    return list(tokenizer().encode(text))


# Completions


def test_a_completion(served: Served) -> None:
    answer = served.client.completions.create(model="fake", prompt=PROMPT, max_tokens=12, user="someone")
    assert answer.object == "text_completion"
    assert answer.model == "fake"
    assert answer.choices[0].text == expected(PROMPT, 12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids(PROMPT))
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 12 + len(ids(PROMPT))


def test_the_default_is_16_tokens(served: Served) -> None:
    answer = served.client.completions.create(model="fake", prompt=PROMPT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_a_stream_says_the_same(served: Served) -> None:
    stream = served.client.completions.create(
        model="fake", prompt=PROMPT, max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert len({chunk.id for chunk in chunks}) == 1
    *parts, last = chunks
    assert "".join(part.choices[0].text for part in parts) == expected(PROMPT, 20)
    assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    assert all(part.choices[0].finish_reason is None for part in parts[:-1])
    assert all(part.usage is None for part in parts)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 20


def test_no_usage_chunk_unasked(served: Served) -> None:
    chunks = list(served.client.completions.create(model="fake", prompt=PROMPT, max_tokens=4, stream=True))
    assert all(len(chunk.choices) == 1 for chunk in chunks)
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        (PROMPT, [PROMPT]),
        (["one", "two"], ["one", "two"]),
        (ids("one"), ["one"]),
        ([ids("one"), ids("two")], ["one", "two"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_form_of_prompt(served: Served, prompt: Any, texts: list[str]) -> None:
    answer = served.client.completions.create(model="fake", prompt=prompt, max_tokens=6, n=2)
    assert [choice.index for choice in answer.choices] == list(range(2 * len(texts)))
    assert [choice.text for choice in answer.choices] == [expected(text, 6) for text in texts for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(ids(text)) for text in texts)


def test_streamed_choices_are_told_apart(served: Served) -> None:
    stream = served.client.completions.create(model="fake", prompt=["one", "two"], n=2, max_tokens=6, stream=True)
    texts = [""] * 4
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [expected("one", 6)] * 2 + [expected("two", 6)] * 2


def test_stop_strings(served: Served) -> None:
    whole = expected(PROMPT, 40)
    stop = whole[10:13]
    cut = whole[: whole.index(stop)]
    for stops in (stop, [stop]):
        choice = served.client.completions.create(model="fake", prompt=PROMPT, max_tokens=40, stop=stops).choices[0]
        assert (choice.text, choice.finish_reason) == (cut, "stop")
    kept = served.post(prompt=PROMPT, max_tokens=40, stop=stop, include_stop_str_in_output=True).json()["choices"][0]
    assert (kept["text"], kept["stop_reason"]) == (cut + stop, stop)
    streamed = served.client.completions.create(model="fake", prompt=PROMPT, max_tokens=40, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut


def test_logprobs(served: Served) -> None:
    choice = served.client.completions.create(model="fake", prompt=PROMPT, max_tokens=5, logprobs=2).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert "".join(found.tokens) == choice.text
    assert found.token_logprobs == [-0.5] * 5
    placed = zip(found.text_offset, found.tokens, strict=True)
    assert all(choice.text[offset:].startswith(token) for offset, token in placed)
    history = ids(PROMPT)
    best = [tokenizer().decode([token]) for token in ranked(history)[:2]]
    assert found.top_logprobs is not None
    assert found.top_logprobs[0] == {best[0]: -0.5, best[1]: -1.0}


def test_streamed_logprobs_add_up(served: Served) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": PROMPT, "max_tokens": 9, "logprobs": 1, "echo": True}
    whole = served.client.completions.create(**asked).choices[0].logprobs
    chunks = list(served.client.completions.create(**asked, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole, name)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + expected(PROMPT, 9)


@pytest.mark.parametrize("n", [1, 2])
def test_echo_scores_the_prompt(served: Served, n: int) -> None:
    answer = served.client.completions.create(model="fake", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, n=n)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    for choice in answer.choices:
        assert choice.text == PROMPT
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == [tokenizer().decode([i]) for i in ids(PROMPT)]
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert all(isinstance(value, float) for value in choice.logprobs.token_logprobs[1:])


def test_prompt_logprobs_and_the_lowest_number(served: Served) -> None:
    choice = served.post(prompt="aé", max_tokens=1, prompt_logprobs=1).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(ids("aé")) - 1
    chosen = others[0][str(ids("aé")[1])]
    assert chosen["logprob"] == -9999.0
    assert chosen["rank"] == 28


def test_vllm_fields_are_taken(served: Served) -> None:
    answer = served.post(
        prompt=PROMPT, max_tokens=6, top_k=5, min_p=0.1, repetition_penalty=1.1, min_tokens=2, stop_token_ids=[5],
        ignore_eos=True, skip_special_tokens=False, bad_words=["zebra"], allowed_token_ids=ids("abc"), seed=-1,
        truncate_prompt_tokens=2, spaces_between_special_tokens=True, logit_bias={"5": -100}, cache_salt="me",
    )  # fmt: skip
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 2


def test_acceptance_statistics_on_demand(served: Served) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 31}
    assert "metrics" not in served.post(**asked).json()
    told = served.post(**asked, per_request_spec_decode_metrics="summary").json()["metrics"]["speculative_decoding"]
    assert told["num_spec_tokens"] == 4
    assert told["mean_acceptance_length"] == 1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"] > 2
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"]
    off = served.post(**asked, per_request_spec_decode_metrics="summary", speculative_config={"enabled": False}).json()
    assert off["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert off["choices"][0]["text"] == expected(PROMPT, 31)
    several = served.post(**asked, n=2, per_request_spec_decode_metrics="summary").json()["metrics"]
    assert several["speculative_decoding"]["num_spec_steps"] == 2 * told["num_spec_steps"]
    assert several["speculative_decoding"]["mean_acceptance_length"] == told["mean_acceptance_length"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_every_step_on_demand(served: Served, n: int, stream: bool) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 31, "n": n, "stream": stream}
    body = served.post(**asked, per_request_spec_decode_metrics="detailed")
    answer = served.events(body)[-1] if stream else body.json()
    told = answer["metrics"]["speculative_decoding"]
    assert len(told["per_step_accepted"]) == len(told["per_step_drafted"]) == told["num_spec_steps"] > n
    assert sum(told["per_step_accepted"]) == told["num_accepted_draft_tokens"] > 0
    assert sum(told["per_step_drafted"]) == told["num_draft_tokens"]
    rows = told["acceptance_histogram_by_draft_length"]
    assert all(len(row) == int(length) + 1 for length, row in rows.items())
    assert [sum(column) for column in zip(*(row + [0] * (5 - len(row)) for row in rows.values()), strict=True)] == (
        told["acceptance_histogram"]
    )
    assert served.post(**asked | {"stream": False}).json()["choices"][0]["text"] == expected(PROMPT, 31)


def test_fewer_guesses_change_no_token(served: Served) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 31, "per_request_spec_decode_metrics": "summary"}
    for wish, most in (({"num_speculative_tokens": 2}, 2), ({"method": "draft_model"}, 4), ({"enabled": True}, 4)):
        answer = served.post(**asked, speculative_config=wish).json()
        assert answer["choices"][0]["text"] == expected(PROMPT, 31)
        assert answer["metrics"]["speculative_decoding"]["num_spec_tokens"] == most


def test_predictions_are_taken_and_change_no_token(served: Served) -> None:
    parts = [{"type": "text", "text": "fox"}, {"type": "text", "text": "es"}]
    for content in ("foxes", parts, ""):
        answer = served.post(prompt=PROMPT, max_tokens=9, prediction={"type": "content", "content": content})
        assert answer.json()["choices"][0]["text"] == expected(PROMPT, 9)


def test_sampling_defaults_are_those_of_requests_without_their_own() -> None:
    with serving(local_engine(), sampling_defaults={"bad_words": ["o"], "min_tokens": 3, "n": 2}) as served:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        assert len(served.post("/v1/chat/completions", **asked).json()["choices"]) == 2
        assert len(served.post("/v1/chat/completions", **asked, n=1).json()["choices"]) == 1
        assert len(served.post(prompt="x").json()["choices"]) == 2


def test_many_at_once(served: Served) -> None:
    prompts = [f"client {i} says" for i in range(24)]

    def ask(prompt: str) -> str:
        return served.client.completions.create(model="fake", prompt=prompt, max_tokens=20).choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, prompts)) == [expected(prompt, 20) for prompt in prompts]


def test_hanging_up_aborts(served: Served) -> None:
    served.idle()
    before = served.engine.stats().generated_tokens
    body = {"model": "fake", "prompt": "endless", "max_tokens": LONG - 100, "stream": True}
    with httpx.stream("POST", served.url + "/v1/completions", json=body) as response:
        next(response.iter_bytes())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + "/v1/completions", json=body | {"stream": False}, timeout=0.3)
    served.idle()
    assert served.engine.stats().generated_tokens - before < LONG
    assert served.post(prompt=PROMPT, max_tokens=3).json()["choices"][0]["text"] == expected(PROMPT, 3)


# Chat


def rendered(content: str) -> str:
    return f"[user] {content}\n[bot]"


def test_a_chat_completion(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=7,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.object == "chat.completion"
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected(rendered("hi"), 7))
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert "".join(entry.token for entry in content) == message.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * 7
    assert content[0].top_logprobs[0].token == content[0].token
    assert bytes(content[0].bytes or []).decode() == content[0].token


def test_a_streamed_chat_completion(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=9,
        stream=True,
        n=2,
        stream_options={"include_usage": True},
    )
    *parts, last = list(stream)
    assert last.usage is not None
    assert last.usage.completion_tokens == 18
    for index in range(2):
        mine = [part.choices[0] for part in parts if part.choices[0].index == index]
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(choice.delta.content or "" for choice in mine) == expected(rendered("hi"), 9)
        assert mine[-1].finish_reason == "length"


def test_a_model_without_a_template_says_what_to_do(served: Served) -> None:
    tokenizer().chat_template = None
    try:
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            served.client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "hi"}])
    finally:
        tokenizer().chat_template = TEMPLATE


# Tokens


def test_texts_become_tokens_and_back(served: Served) -> None:
    answer = served.post("/tokenize", prompt="café <eos>", return_token_strs=True).json()
    assert answer["tokens"] == ids("café <eos>")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == LONG
    assert answer["token_strs"] == tokenizer().convert_ids_to_tokens(answer["tokens"])
    assert served.post("/detokenize", tokens=answer["tokens"]).json() == {"prompt": "café <eos>"}
    empty = served.post("/tokenize", prompt="").json()
    assert (empty["count"], empty["tokens"], empty["token_strs"]) == (0, [], None)
    assert served.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_conversations_become_tokens(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = served.post("/tokenize", messages=messages).json()
    assert answer["tokens"] == ids(rendered("hi"))
    bare = served.post("/tokenize", messages=messages, add_generation_prompt=False, add_special_tokens=True).json()
    assert bare["tokens"] == ids("[user] hi\n")


BAD_TOKENS: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {}, "either prompt or messages"),
    ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "hi"}]}, "either prompt or messages"),
    ("/tokenize", {"prompt": 5}, "5"),
    ("/tokenize", {"prompt": "x", "chat_template": "{{ 1 }}"}, "--chat-template"),
    ("/tokenize", {"messages": []}, "at least one"),
    ("/detokenize", {}, "tokens is required"),
    ("/detokenize", {"tokens": [300]}, "ids are from 0 to 299"),
    ("/detokenize", {"tokens": [-1]}, "-1"),
    ("/detokenize", {"tokens": "x"}, "'x'"),
]


@pytest.mark.parametrize(("path", "body", "words"), BAD_TOKENS, ids=[words[:12] for *_, words in BAD_TOKENS])
def test_bad_tokens(served: Served, path: str, body: dict[str, Any], words: str) -> None:
    answer = served.post(path, **body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_tokens_of_a_model_that_is_not_served(served: Served) -> None:
    assert served.post("/tokenize", prompt="x", model="gone").status_code == 404
    assert served.post("/detokenize", tokens=[5], model="gone").status_code == 404


# Everything else


def test_models(served: Served) -> None:
    assert [model.id for model in served.client.models.list()] == ["fake", "org/alias"]
    assert served.client.models.retrieve("org/alias").id == "org/alias"
    with pytest.raises(openai.NotFoundError, match="'gone' does not exist"):
        served.client.models.retrieve("gone")
    assert served.client.completions.create(model="/models/fake", prompt="x", max_tokens=1).model == "fake"


def test_service_routes(served: Served) -> None:
    assert httpx.get(served.url + "/health").status_code == 200
    assert httpx.get(served.url + "/version").json() == {"version": "1.2.3"}
    document = httpx.get(served.url + "/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= document.json()["paths"].keys()
    assert "$defs" not in document.text
    echoed = httpx.get(served.url + "/health", headers={"x-request-id": "mine-1"})
    assert echoed.headers["x-request-id"] == "mine-1"
    assert httpx.get(served.url + "/health", headers={"x-request-id": "no good"}).headers["x-request-id"] != "no good"


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": {"a": 1}}, "prompt", "must be text"),
    ({"prompt": [1, "a"]}, "prompt", "must be text"),
    ({"prompt": [True]}, "prompt", "must be text"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [300]}, "prompt", "ids are from 0 to 299"),
    ({"prompt": "x", "max_tokens": LONG}, "max_tokens", f"{LONG}"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "-1"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "1.5"),
    ({"prompt": "x", "temperature": "hot"}, "temperature", "'hot'"),
    ({"prompt": "x", "temperature": -1}, "temperature", "at least 0"),
    ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "x", "n": 10**6}, "n", "at most 128"),
    ({"prompt": "x", "best_of": 3}, "best_of", "use n"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": "x", "logprobs": 10**6}, "logprobs", "at most 20"),
    ({"prompt": "x", "logprobs": -1}, "logprobs", "at least 0"),
    ({"prompt": "x", "stop": ["a"] * 1000}, "stop", "at most 64"),
    ({"prompt": "x", "stop": ["a", 1]}, "stop", "1"),
    ({"prompt": "x", "logit_bias": {"5": 1000}}, "logit_bias", "at most 100"),
    ({"prompt": "x", "logit_bias": {"five": 1}}, "logit_bias", "integer"),
    ({"prompt": "x", "logit_bias": {"400": 1}}, "logit_bias", "400"),
    ({"prompt": "x", "allowed_token_ids": [999]}, "allowed_token_ids", "999"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=true"),
    ({"prompt": "x", "temprature": 1}, "temprature", "did you mean 'temperature'"),
    ({"prompt": "x", "seed": 2**65}, "seed", "at most"),
    ({"prompt": "x", "tools": [{}]}, "tools", "use chat completions"),
    ({"prompt": "x", "speculative_config": {"num_speculative_tokens": 9}}, "speculative_config", "at most 4"),
    ({"prompt": "x", "speculative_config": {"num_speculative_tokens": 0}}, "speculative_config", "enabled: false"),
    ({"prompt": "x", "speculative_config": {"method": "ngram"}}, "speculative_config", "(draft_model), got 'ngram'"),
    ({"prompt": "x", "speculative_config": {"methods": "ngram"}}, "speculative_config", "unknown, got 'ngram'"),
    ({"prompt": "x", "prediction": "text"}, "prediction", "prediction must be an object"),
    ({"prompt": "x", "prediction": {"type": "content", "content": 5}}, "prediction", "prediction['content'] must be"),
    ({"prompt": "x", "per_request_spec_decode_metrics": "all"}, "per_request_spec_decode_metrics", "'detailed'"),
    ({"prompt": ["x"] * 2000}, "prompt", "at most 1024"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD, ids=[f"{p}-{w[:12]}" for _, p, w in BAD])
def test_bad_fields(served: Served, body: dict[str, Any], param: str, words: str) -> None:
    answer = served.post(**body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, None)
    assert words in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b'{"model": "fake", "prompt": "x", "temperature": NaN}', "application/json", 400),
        (b'{"model": "fake", "prompt": "x", "temperature": Infinity}', "application/json", 400),
        (b'{"model": "fake", "prompt": "x", "temperature": 1e999}', "application/json", 400),
        (b'{"model": "fake", "prompt": "\\ud800"}', "application/json", 400),
        (b'{"model": "fake", "prompt": "\xff"}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"model": "fake", "prompt": "x"}', "text/plain", 415),
        (b'{"model": "fake", "prompt": "x"}', "application/json; charset=utf-8", 200),
        (b'{"model": "gone", "prompt": "x"}', "application/json", 404),
        (b'{"prompt": "' + b"x" * (33 * 1024 * 1024) + b'"}', "application/json", 413),
    ],
    ids=["cut", "empty", "list", "nan", "infinity", "too big a number", "surrogate", "not utf-8", "deep", "text",
         "charset", "unknown model", "too long"],
)  # fmt: skip
def test_bad_bodies(served: Served, content: bytes, kind: str, status: int) -> None:
    answer = httpx.post(served.url + "/v1/completions", content=content, headers={"content-type": kind})
    assert answer.status_code == status, answer.text[:300]
    if status != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_routes_and_methods(served: Served) -> None:
    for answer, status in ((httpx.get(served.url + "/nowhere"), 404), (httpx.get(served.url + "/v1/completions"), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_the_client_sees_its_own_error_types(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        served.client.completions.create(model="gone", prompt="x")
    assert unknown.value.code == "model_not_found"
    assert unknown.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        served.client.completions.create(model="fake", prompt="x", temperature=-1)
    assert bad.value.param == "temperature"


def test_random_names_make_no_series(served: Served) -> None:
    def series() -> set[str]:
        lines = httpx.get(served.url + "/metrics").text.splitlines()
        return {line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")}

    def junk(client: httpx.Client, number: int) -> None:
        client.post("/v1/completions", json={"model": f"model-{number}", "prompt": "x"})
        client.get(f"/scan/{number}.php")
        client.get(f"/v1/models/{number}")
        client.request(f"METHOD{number}", "/health")

    with httpx.Client(base_url=served.url) as client:
        series()
        junk(client, 0)
        before = series()
        for number in range(1, 250):
            junk(client, number)
    assert series() == before
    assert len(before) < 1000


def test_a_dead_engine(served: Served) -> None:
    del served
    with serving(local_engine()) as doomed:
        with pytest.raises(openai.InternalServerError) as dead:
            doomed.client.completions.create(model="fake", prompt="raise", max_tokens=4)
        assert dead.value.status_code == 503
        assert dead.value.code == "engine_dead"
        assert "path" not in dead.value.message
        assert httpx.get(doomed.url + "/health").status_code == 503
        assert doomed.post(prompt="x").status_code == 503
        assert httpx.get(doomed.url + "/metrics").status_code == 200


def test_an_engine_that_dies_in_a_stream() -> None:
    with serving(local_engine(max_model_len=LONG)) as doomed:
        stream = doomed.client.completions.create(model="fake", prompt="endless", max_tokens=LONG // 2, stream=True)
        next(stream)
        assert doomed.post(prompt="raise").status_code == 503
        with pytest.raises(openai.APIError, match="the engine has stopped"):
            list(stream)
