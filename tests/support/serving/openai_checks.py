"""Checks that any OpenAI-compatible server of ours must pass: functions of a client and a model's name."""

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.support.serving.openai_answers import PROMPT, USER, Check, strict, strict_chunk


def root(client: openai.OpenAI) -> str:
    """Return the base URL without `/v1`."""
    return str(client.base_url).rstrip("/").removesuffix("/v1")


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
    # By text: pieces of characters have the same text and share an entry.
    assert all(1 <= len(tops) <= 3 for tops in choice.logprobs.top_logprobs or ())


def an_echo(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, max_tokens=3, echo=True, logprobs=1, temperature=0)
    strict(answer, logprobs=None)  # the type lacks the null that the public API has for the first token
    assert answer.choices[0].text.startswith(PROMPT)
    assert answer.choices[0].logprobs is not None
    first, *others = answer.choices[0].logprobs.token_logprobs or ()
    assert first is None
    assert all(isinstance(value, float) for value in others)


def the_same_seed(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "prompt": PROMPT, "max_tokens": 10, "temperature": 1.0, "seed": 11}
    first, second = (strict(client.completions.create(**asked)).choices[0].text for _ in range(2))
    assert first == second


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
        except openai.LengthFinishReasonError:  # raised by the client's helper
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
