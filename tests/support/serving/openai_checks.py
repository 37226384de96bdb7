"""What the real OpenAI client must get from any server of ours: functions of a client and a model's name.

Every answer is validated strictly against the client's own types: nothing is missing, and nothing unknown but what we
document.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import httpx
import openai
import pydantic
import pytest
from openai.types import Completion

T = TypeVar("T", bound=pydantic.BaseModel)
Check = Callable[[openai.OpenAI, str], None]

PROMPT = "def add(a, b):\n    return"
USER: Any = [{"role": "user", "content": "say something"}]
DOCUMENTED = {
    "ChatCompletion": {"metrics"},
    "ChatCompletionChunk": {"metrics"},
    "Completion": {"metrics"},
    "CompletionChoice": {"stop_reason", "prompt_logprobs"},
    "Choice": {"stop_reason", "prompt_logprobs"},
    "Model": {"max_model_len"},
}
"""Fields that we add to the client's types, by type."""


def strict(answer: T, **patches: Any) -> T:
    """Return *answer* once it validates; *patches* replace fields of its choices that the client's type has wrong."""
    raw = json.loads(answer.model_dump_json(exclude_unset=True, by_alias=True, warnings=False))
    for choice in raw.get("choices", ()):
        choice.update(patches)
        _forget_parsed(choice.get("message", {}))
    kind = next(base for base in type(answer).__mro__ if "[" not in base.__name__ and "Parsed" not in base.__name__)
    checked = kind.model_validate_json(json.dumps(raw), strict=True)
    for name, extras in _extras(checked):
        assert extras <= DOCUMENTED.get(name, set()), (name, extras)
    return answer


def _forget_parsed(message: dict[str, Any]) -> None:
    """Remove what the client itself put in."""
    message.pop("parsed", None)
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
        call["function"].pop("parsed_arguments", None)


def _extras(value: object) -> Iterator[tuple[str, set[str]]]:
    """Yield each model in *value* by name, with the fields that its type does not know."""
    if isinstance(value, list):
        for item in value:
            yield from _extras(item)
    elif isinstance(value, pydantic.BaseModel):
        yield type(value).__name__, set(value.model_extra or {})
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name))


def strict_chunk(chunk: Completion) -> Completion:
    """Validate a piece of a completion; its type says that it has always ended, which the public API's have not."""
    ended = all(choice.finish_reason is not None for choice in chunk.choices)
    return strict(chunk) if ended else strict(chunk, finish_reason="stop")


def root(client: openai.OpenAI) -> str:
    """Return where the routes are that stand beside `/v1`."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


# Completions


def a_completion(client: openai.OpenAI, model: str) -> None:
    answer = strict(client.completions.create(model=model, prompt=PROMPT, max_tokens=8, temperature=0))
    assert (answer.object, answer.model) == ("text_completion", model)
    assert answer.choices[0].finish_reason in {"length", "stop"}
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 8


def a_streamed_completion(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    stream = client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = [strict_chunk(chunk) for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert {chunk.id for chunk in chunks} == {last.id}
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def many_prompts(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": ["one", "two"], "n": 2, "max_tokens": 5, "temperature": 0}
    answer = strict(client.completions.create(**asked))
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    texts = [""] * 4
    for chunk in client.completions.create(**asked, stream=True):
        texts[strict_chunk(chunk).choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]
    assert texts[0] == texts[1]


def prompts_of_tokens(client: openai.OpenAI, model: str) -> None:
    headers = {"authorization": f"Bearer {client.api_key}"}
    told = httpx.post(root(client) + "/tokenize", json={"model": model, "prompt": PROMPT}, headers=headers, timeout=60)
    tokens = told.json()["tokens"]
    asked: Any = {"model": model, "max_tokens": 5, "temperature": 0}
    by_text = client.completions.create(**asked, prompt=PROMPT)
    for prompt in (tokens, [tokens]):
        assert strict(client.completions.create(**asked, prompt=prompt)).choices[0].text == by_text.choices[0].text
    sent = {"model": model, "tokens": tokens}
    back = httpx.post(root(client) + "/detokenize", json=sent, headers=headers, timeout=60)
    assert PROMPT in back.json()["prompt"]


def completion_logprobs(client: openai.OpenAI, model: str) -> None:
    choice = strict(client.completions.create(model=model, prompt=PROMPT, max_tokens=4, logprobs=2)).choices[0]
    assert choice.logprobs is not None
    lists = (choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs)
    assert {len(each or ()) for each in (*lists, choice.logprobs.text_offset)} == {len(choice.logprobs.tokens or ())}
    # By text, so that pieces of characters, which are spelt alike, share a place.
    assert all(1 <= len(tops) <= 3 for tops in choice.logprobs.top_logprobs or ())


def an_echo(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=3, echo=True, logprobs=1, temperature=0)
    strict(answer, logprobs=None)  # whose type has no null for the first token, as the public API has
    assert answer.choices[0].text.startswith(PROMPT)
    assert answer.choices[0].logprobs is not None
    first, *others = answer.choices[0].logprobs.token_logprobs or ()
    assert first is None
    assert all(isinstance(value, float) for value in others)


def the_same_seed(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": PROMPT, "max_tokens": 10, "temperature": 1.0, "seed": 11}
    first, second = (strict(client.completions.create(**asked)).choices[0].text for _ in range(2))
    assert first == second


# Chat


def a_chat(client: openai.OpenAI, model: str) -> None:
    answer = strict(
        client.chat.completions.create(
            model=model,
            messages=[{"role": "developer", "content": "Be brief."}, *USER],
            max_completion_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            user="someone",
            metadata={"a": "b"},
            store=False,
        )
    )
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.tool_calls is None
    assert choice.logprobs is not None
    assert answer.usage is not None
    assert len(choice.logprobs.content or ()) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content or ())


def a_streamed_chat(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": USER, "max_tokens": 9, "temperature": 0, "n": 2}
    whole = strict(client.chat.completions.create(**asked))
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = [strict(chunk) for chunk in stream]
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        assert mine[-1].finish_reason == whole.choices[index].finish_reason
    assert last.choices == []
    assert last.usage is not None


def the_stream_helper(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": USER, "max_tokens": 9, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0]
    said = ""
    with client.chat.completions.stream(**asked) as stream:
        try:
            for event in stream:
                said += event.delta if event.type == "content.delta" else ""
            assert stream.get_final_completion().choices[0].message.content == whole.message.content
        except openai.LengthFinishReasonError:  # which the helper raises of its own accord
            assert whole.finish_reason == "length"
    assert said == whole.message.content


def text_parts_and_earlier_turns(client: openai.OpenAI, model: str) -> None:
    messages: Any = [
        {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "hello", "name": "ann"},
        {"role": "assistant", "content": "hello"},
        *USER,
    ]
    strict(client.chat.completions.create(model=model, messages=messages, max_tokens=3, stop=["zzz"], seed=1))


# Everything else


def the_models(client: openai.OpenAI, model: str) -> None:
    assert model in [strict(each).id for each in client.models.list()]
    assert strict(client.models.retrieve(model)).id == model


def the_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model=model, prompt=PROMPT, temperature=-1)
    assert (bad.value.param, bad.value.type, bad.value.code) == ("temperature", "invalid_request_error", None)
    assert bad.value.request_id
    with pytest.raises(openai.BadRequestError, match="at least one"):
        client.chat.completions.create(model=model, messages=[])
    with pytest.raises(openai.NotFoundError) as gone:
        client.chat.completions.create(model="gone", messages=USER)
    assert (gone.value.param, gone.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gone")
    with pytest.raises(openai.BadRequestError, match="use tools"):
        client.chat.completions.create(model=model, messages=USER, functions=[{"name": "f"}])


def raw_responses(client: openai.OpenAI, model: str) -> None:
    raw = client.completions.with_raw_response.create(model=model, prompt=PROMPT, max_tokens=1)
    assert raw.headers["content-type"] == "application/json"
    assert raw.request_id
    assert strict(raw.parse()).id


def what_speculation_did(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    plain = strict(client.completions.create(**asked))
    told = strict(
        client.completions.create(
            **asked,
            extra_body={
                "per_request_spec_decode_metrics": "detailed",
                "speculative_config": {"enabled": False},
            },
        )
    )
    assert told.choices[0].text == plain.choices[0].text
    assert (told.model_extra or {})["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert "metrics" not in (plain.model_extra or {})


def a_stream_that_is_left(client: openai.OpenAI, model: str) -> None:
    with client.completions.create(model=model, prompt=PROMPT, max_tokens=100, stream=True) as stream:
        next(iter(stream))
    strict(client.completions.create(model=model, prompt=PROMPT, max_tokens=1))


def many_at_once_and_async(client: openai.OpenAI, model: str) -> None:
    async def ask(other: openai.AsyncOpenAI, number: int) -> str:
        answer = await other.completions.create(model=model, prompt=f"{number} is", max_tokens=6, temperature=0)
        return strict(answer).choices[0].text

    async def chat(other: openai.AsyncOpenAI) -> str:
        stream = await other.chat.completions.create(
            model=model, messages=USER, max_tokens=6, temperature=0, stream=True
        )
        return "".join([strict(chunk).choices[0].delta.content or "" async for chunk in stream])

    async def everybody() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, timeout=120) as other:
            return await asyncio.gather(*(ask(other, number) for number in range(12)), chat(other))

    *texts, said = asyncio.run(everybody())
    for number in (0, 11):
        answer = client.completions.create(model=model, prompt=f"{number} is", max_tokens=6, temperature=0)
        assert texts[number] == answer.choices[0].text
    answer = client.chat.completions.create(model=model, messages=USER, max_tokens=6, temperature=0)
    assert said == answer.choices[0].message.content


CHECKS: tuple[Check, ...] = (
    a_completion, a_streamed_completion, many_prompts, prompts_of_tokens, completion_logprobs, an_echo, the_same_seed,
    a_chat, a_streamed_chat, the_stream_helper, text_parts_and_earlier_turns, the_models, the_errors, raw_responses,
    what_speculation_did, a_stream_that_is_left, many_at_once_and_async,
)  # fmt: skip
"""For any model with a chat template."""


# Answers of a form. The model may be a random one, so what it fills in is bounded.


class Verdict(pydantic.BaseModel):
    """An answer that always ends."""

    model_config = pydantic.ConfigDict(extra="forbid")

    color: Literal["red", "green"]
    is_sure: bool


WIDE: dict[str, Any] = {"type": "function", "function": {"name": "paint", "parameters": Verdict.model_json_schema()}}
OTHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "wait",
        "description": "Do nothing.",
        "parameters": {
            "type": "object",
            "properties": {"long": {"enum": ["1", "2"]}},
            "required": ["long"],
            "additionalProperties": False,
        },
    },
}
ROOM = 700
"""Tokens that hold any such answer, white space of all its parts included."""


def a_parsed_answer(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "messages": USER, "max_tokens": ROOM, "response_format": Verdict, "seed": 5}
    answer = strict(client.chat.completions.parse(**asked))
    assert isinstance(answer.choices[0].message.parsed, Verdict)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def an_async_parsed_answer(client: openai.OpenAI, model: str) -> None:
    async def ask() -> object:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key, timeout=120) as other:
            answer = await other.chat.completions.parse(
                model=model, messages=USER, max_tokens=ROOM, response_format=Verdict, temperature=0
            )
        return strict(answer).choices[0].message.parsed

    assert isinstance(asyncio.run(ask()), Verdict)


def any_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=USER, max_tokens=40, response_format={"type": "json_object"}, temperature=0
    )
    assert (strict(answer).choices[0].message.content or "").lstrip().startswith("{")


def a_call_by_name(client: openai.OpenAI, model: str) -> None:
    asked: Any = {
        "model": model,
        "messages": USER,
        "max_tokens": ROOM,
        "tools": [OTHER, WIDE],
        "seed": 3,
        "tool_choice": {"type": "function", "function": {"name": "paint"}},
    }
    (choice,) = strict(client.chat.completions.create(**asked)).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "paint"
    Verdict.model_validate_json(call.function.arguments)
    deltas = [strict(chunk).choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert {part.index for part in parts} == {0}
    assert [part.function.name for part in parts if part.function and part.function.name] == ["paint"]
    assert [part.id is not None for part in parts] == [True] + [False] * (len(parts) - 1)
    assert "".join(part.function.arguments or "" for part in parts if part.function) == call.function.arguments


def a_required_call(client: openai.OpenAI, model: str) -> None:
    asked: Any = {
        "model": model,
        "messages": USER,
        "max_tokens": ROOM,
        "tools": [OTHER, WIDE],
        "seed": 4,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    (choice,) = strict(client.chat.completions.create(**asked)).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in {"paint", "wait"}
    with client.chat.completions.stream(**asked) as stream:
        events = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, event.arguments) for event in events] == [(call.function.name, call.function.arguments)]
    assert final.choices[0].finish_reason == "tool_calls"


def a_call_that_cannot_be_described(client: openai.OpenAI, model: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError, match="tools cannot be called as they are described") as refused:
        client.chat.completions.create(model=model, messages=USER, tools=[tool], tool_choice="required")
    assert refused.value.param == "tools"


def a_parsed_call(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model,
        messages=USER,
        max_tokens=ROOM,
        tools=[openai.pydantic_function_tool(Verdict)],
        temperature=0,
        tool_choice={"type": "function", "function": {"name": "Verdict"}},
    )
    (call,) = strict(answer).choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Verdict)


def a_form_and_tools_at_once(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError, match="do not go together"):
        client.chat.completions.create(
            model=model, messages=USER, tools=[OTHER], tool_choice="required", response_format={"type": "json_object"}
        )  # type: ignore[call-overload]


STRUCTURED: tuple[Check, ...] = (
    a_parsed_answer,
    an_async_parsed_answer,
    any_object,
    a_call_by_name,
    a_required_call,
    a_parsed_call,
    a_call_that_cannot_be_described,
    a_form_and_tools_at_once,
)
"""For real models whose chat template takes tools."""
