"""Chat completions, tokenization, models and service routes."""

from itertools import chain
from typing import Any

import httpx
import openai
import pytest

from tests.support.serving.fake_engine import TEMPLATE, expected, ids, tokenizer
from tests.support.serving.http_server import Served

LONG = 100_000


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


def test_candidates_need_log_probabilities_unless_there_are_none(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    answer = served.post("/v1/chat/completions", **body, top_logprobs=0).json()
    assert answer["choices"][0]["logprobs"] is None
    error = served.post("/v1/chat/completions", **body, top_logprobs=1).json()["error"]
    assert (error["param"], error["message"]) == ("top_logprobs", "top_logprobs needs logprobs=true")


def test_logprobs_of_the_prompt_are_where_vllm_has_them(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 2, "echo": False}
    answer = served.post("/v1/chat/completions", **body, prompt_logprobs=1).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(choice["prompt_logprobs"] == answer["prompt_logprobs"] for choice in answer["choices"])
    assert "prompt_logprobs" not in served.post("/v1/chat/completions", **body).json()


def test_ids_on_demand(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "n": 2}
    answer = served.post("/v1/chat/completions", **body, return_token_ids=True).json()
    texts = expected(rendered("hi"), 9)
    assert answer["prompt_token_ids"] == ids(rendered("hi"))
    assert [tokenizer().decode(choice["token_ids"]) for choice in answer["choices"]] == [texts, texts]
    plain = served.post("/v1/chat/completions", **body).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


def test_streamed_ids_add_up(served: Served) -> None:
    stream = served.client.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=9,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    first, *others = list(stream)
    assert first.model_extra is not None
    assert first.model_extra["prompt_token_ids"] == ids(rendered("hi"))
    assert not any("prompt_token_ids" in (part.model_extra or {}) for part in others)
    parts = [(part.choices[0].model_extra or {})["token_ids"] for part in (first, *others)]
    assert tokenizer().decode([*chain.from_iterable(parts)]) == expected(rendered("hi"), 9)


@pytest.mark.parametrize(
    ("content", "fields", "param"),
    [
        ("hi " * LONG, {}, "messages"),
        ("hi", {"max_completion_tokens": 2 * LONG}, "max_completion_tokens"),
        ("hi", {"max_tokens": 2 * LONG}, "max_tokens"),
    ],
)
def test_too_long_a_context_has_the_code_of_openai(
    served: Served, content: str, fields: dict[str, int], param: str
) -> None:
    messages = [{"role": "user", "content": content}]
    error = served.post("/v1/chat/completions", messages=messages, **fields).json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")
    assert error["message"].startswith(f"{param} must" if fields else "prompt has")


@pytest.mark.parametrize(
    ("field", "value", "limit"), [("max_completion_tokens", -1, "least 1"), ("top_logprobs", 25, "most 20")]
)
def test_limits_are_named_as_they_were_sent(served: Served, field: str, value: int, limit: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, field: value}
    error = served.post("/v1/chat/completions", **body).json()["error"]
    assert (error["param"], error["message"]) == (field, f"{field} must be at {limit}, got {value}")


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
    assert httpx.get(served.url + "/health").status_code == httpx.head(served.url + "/health").status_code == 200
    assert httpx.get(served.url + "/version").json() == {"version": "1.2.3"}
    document = httpx.get(served.url + "/openapi.json")
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"} <= document.json()["paths"].keys()
    assert "$defs" not in document.text
    echoed = httpx.get(served.url + "/health", headers={"x-request-id": "mine-1"})
    assert echoed.headers["x-request-id"] == "mine-1"
    assert httpx.get(served.url + "/health", headers={"x-request-id": "no good"}).headers["x-request-id"] != "no good"
