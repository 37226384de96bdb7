"""Options of the chat template in requests: small values only, and never special tokens."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from runtime.frontend.async_engine import AsyncEngine
from runtime.http.fields.template import RESERVED
from runtime.text.chat import render_chat
from runtime.text.preprocessor import Preprocessor
from tests.support.serving.fake_engine import TEMPLATE, expected, ids, tokenizer
from tests.support.serving.http_server import Served

USER = [{"role": "user", "content": "hi"}]
SWITCHED = TEMPLATE + "{% if enable_thinking is false %}<no>{% endif %}{{ reasoning_effort }}{{ style }}"


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    tokenizer().chat_template = SWITCHED
    yield
    tokenizer().chat_template = TEMPLATE


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<no>"),
        ({"chat_template_kwargs": {"enable_thinking": True, "unknown": 1}}, ""),
        ({"chat_template_kwargs": {"style": "brief", "enable_thinking": None}}, "brief"),
        ({"chat_template_kwargs": {"style": "<eos>"}}, "<eos>"),
        ({"reasoning_effort": "low"}, "low"),
        ({"chat_template_kwargs": None, "reasoning_effort": None}, ""),
    ],
)
def test_the_template_reads_them(served: Served, options: dict[str, Any], end: str) -> None:
    text = f"[user] hi\n[bot]{end}"
    body = {"messages": USER, "max_tokens": 6, "return_token_ids": True, **options}
    answer = served.post("/v1/chat/completions", **body).json()
    if end == "<eos>":
        assert answer["prompt_token_ids"] != ids(text), "a special token can be forged"
        return
    assert answer["prompt_token_ids"] == ids(text)
    assert answer["choices"][0]["message"]["content"] == expected(text, 6)
    tokens = served.post("/tokenize", messages=USER, **options).json()["tokens"]
    assert tokens == answer["prompt_token_ids"]


BAD: list[tuple[Any, str]] = [
    ({"tools": []}, "must not have tools"),
    ({"chat_template": "{{ 1 }}"}, "must not have chat_template"),
    ({"add_generation_prompt": False}, "must not have add_generation_prompt"),
    ({"x": "y" * 65}, "texts of up to 64 characters"),
    ({"x": 10**9}, "numbers up to 1048576"),
    ({"x": [1]}, "got [1] for x"),
    ({"x": {"y": 1}}, "for x"),
    ({f"x{i}": 1 for i in range(17)}, "at most 16 names"),
    ("x", "must be an object"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words[-16:] for _, words in BAD])
def test_what_could_do_more_is_refused(served: Served, given: Any, words: str) -> None:
    answer = served.post("/v1/chat/completions", messages=USER, chat_template_kwargs=given)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "chat_template_kwargs"
    assert words in error["message"]


@pytest.mark.parametrize(
    "function", [PreTrainedTokenizerBase.apply_chat_template, render_chat, Preprocessor.chat, AsyncEngine.render_chat]
)
def test_no_parameter_of_ours_is_taken_for_an_option(function: Callable[..., object]) -> None:
    kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    assert {name for name, kind in kinds.items() if kind is not inspect.Parameter.VAR_KEYWORD} <= RESERVED


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "x"}), ("/v1/responses", {"input": "x", "max_output_tokens": 2})],
)
def test_other_endpoints_have_none(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = served.post(path, **body, chat_template_kwargs={"enable_thinking": False})
    assert answer.status_code == 400
    assert "use chat completions" in answer.json()["error"]["message"]
    assert served.post(path, **body, chat_template_kwargs={}).status_code == 200
