"""Completions through the OpenAI client against a running server."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from runtime.http.schemas import CompletionRequest
from tests.support.serving.fake_engine import EOS, bare_tokenizer, expected, ids, local_engine, ranked, tokenizer
from tests.support.serving.http_server import Served, serving

LONG = 100_000
PROMPT = "the quick brown"


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


@pytest.mark.parametrize("stream", [False, True])
def test_ids_on_demand(served: Served, stream: bool) -> None:
    answer = served.client.completions.create(
        model="fake", prompt=["ab", "cde"], max_tokens=8, stream=stream, extra_body={"return_token_ids": True}
    )
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    for index, prompt in enumerate(("ab", "cde")):
        mine = [choice.model_extra or {} for choice in choices if choice.index == index]
        assert [extra.get("prompt_token_ids") for extra in mine] == [ids(prompt)] + [None] * (len(mine) - 1)
        assert tokenizer().decode([*chain.from_iterable(extra["token_ids"] for extra in mine)]) == expected(prompt, 8)


def test_usage_in_every_chunk(served: Served) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = served.client.completions.create(
        model="fake", prompt=PROMPT, max_tokens=20, stream=True, stream_options=options
    )
    counts = [part.usage.completion_tokens for part in stream if part.usage is not None]
    assert len(counts) > 2
    assert (counts, counts[-2:]) == (sorted(counts), [20, 20])


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
    prompt = PROMPT + "é😀"
    asked: dict[str, Any] = {"model": "fake", "prompt": prompt, "max_tokens": 9, "logprobs": 1, "echo": True}
    whole = served.client.completions.create(**asked).choices[0].logprobs
    chunks = list(served.client.completions.create(**asked, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    assert whole is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole, name)
    assert "".join(chunk.choices[0].text for chunk in chunks) == prompt + expected(prompt, 9)
    assert whole.text_offset is not None
    assert whole.text_offset[-9:] == list(range(len(prompt), len(prompt) + 9))


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
        priority=0, request_id="mine", return_token_ids=False, kv_transfer_params=None, add_special_tokens=True,
    )  # fmt: skip
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == 2


def test_special_tokens_of_a_prompt_can_be_left_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Tokenizer.from_str(bare_tokenizer().to_str())
    bare.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", EOS)])
    adding = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<eos>")
    monkeypatch.setattr(served.engine.preprocessor, "tokenizer", adding)
    for adds, begin in ((None, [EOS]), (True, [EOS]), (False, [])):
        asked: dict[str, Any] = {"max_tokens": 1, "echo": True, "return_token_ids": True, "add_special_tokens": adds}
        (choice,) = served.post(**asked, prompt=PROMPT).json()["choices"]
        assert choice["prompt_token_ids"] == [*begin, *ids(PROMPT)]
        assert choice["text"].startswith(PROMPT)
        (choice,) = served.post(**asked, prompt=[5, 6]).json()["choices"]
        assert choice["prompt_token_ids"] == [5, 6]
        long = served.post(prompt="x " * 50_000, truncate_prompt_tokens=2, max_tokens=1, add_special_tokens=adds)
        assert long.status_code == 200


@pytest.mark.parametrize(("sent", "seed"), [(-1, None), (-2, 2**64 - 2), (7, 7), (None, None)])
def test_seeds_may_be_negative_and_minus_one_is_none(sent: int | None, seed: int | None) -> None:
    assert CompletionRequest(prompt="x", seed=sent).sampling({}).seed == seed


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


def test_fewer_draft_tokens_change_no_token(served: Served) -> None:
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
