"""What the gRPC interface answers, by clients made from the checked-in stubs."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import grpc
import httpx
import pytest

from protos import slipstream_v1_pb2 as pb
from protos.config.engine import SpeculativeConfig
from protos.errors import InvalidRequestError
from protos.sampling import SamplingParams
from runtime.grpc import parsing
from tests.support.serving.fake_engine import expected, ids, local_engine, ranked
from tests.support.serving.grpc_server import Served, answer, request, serving

LONG = 100_000
PROMPT = "the quick brown"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    drafts = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model="none", policy="fixed")
    with serving(local_engine(max_model_len=LONG, speculative=drafts)) as running:
        yield running


@pytest.fixture(scope="module")
def stub(served: Served) -> Iterator[Any]:
    with served.stub() as found:
        yield found


# Answers


def test_chunks_add_up_to_what_complete_says(stub: Any) -> None:
    call = stub.Generate(request(PROMPT, 20, request_id="mine-1"))
    messages = list(call)
    assert {message.request_id for message in messages} == {"mine-1"}
    *chunks, last = messages
    assert last.WhichOneof("response") == "complete"
    assert all(message.WhichOneof("response") == "chunk" for message in chunks)
    whole = last.complete
    assert whole.text == "".join(message.chunk.text for message in chunks) == expected(PROMPT, 20)
    assert list(whole.token_ids) == [token for message in chunks for token in message.chunk.token_ids]
    assert whole.finish_reason == pb.FINISH_REASON_LENGTH
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids(PROMPT)), 20)
    assert 0 < whole.usage.spec_accepted_tokens < whole.usage.spec_draft_tokens
    assert ("request_id", "mine-1") in call.initial_metadata()
    assert ("request_id", "mine-1") in call.trailing_metadata()


def test_a_request_without_a_name_gets_one(stub: Any) -> None:
    first, second = (next(iter(stub.Generate(request("x", 1)))).request_id for _ in range(2))
    assert first and second and first != second
    call = stub.Generate(request("x", 1), metadata=(("request_id", "by-metadata"),))
    assert {message.request_id for message in call} == {"by-metadata"}


def test_without_chunks(stub: Any) -> None:
    chunks, (whole,) = answer(stub.Generate(request(PROMPT, 9, stream=False)))
    assert not chunks
    assert whole.text == expected(PROMPT, 9)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"text": PROMPT}, PROMPT),
        ({"token_ids": {"ids": ids(PROMPT)}}, PROMPT),
        ({"chat": {"messages": [{"role": "user", "content": "hi"}]}}, "[user] hi\n[bot]"),
        (
            {"chat": {"messages": [{"role": "user", "content": ""}], "add_generation_prompt": False}},
            "[user] \n",
        ),
    ],
    ids=["text", "ids", "chat", "chat without an opening"],
)
def test_every_form_of_prompt(stub: Any, prompt: dict[str, Any], text: str) -> None:
    _, (whole,) = answer(stub.Generate(pb.GenerateRequest(sampling=pb.SamplingParams(max_tokens=6), **prompt)))
    assert whole.text == expected(text, 6)
    assert whole.usage.prompt_tokens == len(ids(text))


def test_defaults_are_those_of_http(served: Served, stub: Any) -> None:
    _, (whole,) = answer(stub.Generate(pb.GenerateRequest(text=PROMPT)))
    told = httpx.post(served.url + "/v1/completions", json={"prompt": PROMPT}).json()
    assert whole.usage.completion_tokens == told["usage"]["completion_tokens"] == 16
    assert whole.text == told["choices"][0]["text"]


def test_several_samples(stub: Any) -> None:
    chunks, ends = answer(stub.Generate(request(PROMPT, 7, n=3)))
    assert sorted(end.index for end in ends) == [0, 1, 2]
    for end in ends:
        assert end.text == expected(PROMPT, 7) == "".join(chunk.text for chunk in chunks if chunk.index == end.index)


def test_stop_strings_and_stop_tokens(stub: Any) -> None:
    whole = expected(PROMPT, 40)
    stop = whole[10:13]
    _, (by_text,) = answer(stub.Generate(request(PROMPT, 40, stop=[stop])))
    assert (by_text.text, by_text.finish_reason) == (whole[: whole.index(stop)], pb.FINISH_REASON_STOP)
    assert (by_text.WhichOneof("matched_stop"), by_text.stop_string) == ("stop_string", stop)
    first = ranked(ids(PROMPT))[0]
    _, (by_id,) = answer(stub.Generate(request(PROMPT, 40, stop_token_ids=[first])))
    assert (by_id.WhichOneof("matched_stop"), by_id.stop_token_id) == ("stop_token_id", first)


def test_logprobs_of_answer_and_prompt(stub: Any) -> None:
    asked = {"logprobs": 2, "prompt_logprobs": 1}
    chunks, (end,) = answer(stub.Generate(request("aé", 5, **asked)))
    told = [entry for chunk in chunks for entry in chunk.logprobs]
    assert [entry.chosen.token_id for entry in told] == list(end.token_ids)
    assert [len(entry.top) for entry in told] == [2] * 5
    assert (told[0].chosen.logprob, told[0].chosen.rank, told[0].chosen.text) == (-0.5, 1, end.text[0])
    of_prompt = [entry for chunk in chunks for entry in chunk.prompt_logprobs]
    assert [entry.chosen.token_id for entry in of_prompt] == ids("aé")[1:]
    assert of_prompt[0].chosen.logprob == float("-inf")
    assert not end.logprobs and not end.prompt_logprobs
    _, (whole,) = answer(stub.Generate(request("aé", 5, stream=False, **asked)))
    assert list(whole.logprobs) == told
    assert list(whole.prompt_logprobs) == of_prompt
    assert not answer(stub.Generate(request("aé", 5)))[0][0].logprobs


def test_acceptance_statistics_on_demand(stub: Any) -> None:
    _, (plain,) = answer(stub.Generate(request(PROMPT, 31)))
    assert not plain.HasField("speculative_decoding")
    level = pb.SPEC_DECODE_METRICS_DETAILED
    _, (end,) = answer(stub.Generate(request(PROMPT, 31, per_request_spec_decode_metrics=level)))
    told = end.speculative_decoding
    assert told.num_spec_tokens == 4
    assert told.num_draft_tokens == end.usage.spec_draft_tokens == sum(told.per_step_drafted)
    assert told.num_accepted_draft_tokens == end.usage.spec_accepted_tokens == sum(told.per_step_accepted) > 0
    assert sum(told.acceptance_histogram) == told.num_spec_steps == len(told.per_step_drafted)
    off = request(PROMPT, 31, speculative_config=pb.SpeculativeConfig(enabled=False))
    _, (without,) = answer(stub.Generate(off))
    assert (without.text, without.usage.spec_draft_tokens) == (end.text, 0)


def test_other_methods(stub: Any) -> None:
    said = stub.Tokenize(pb.TokenizeRequest(text="naïve fox"))
    assert (list(said.token_ids), said.max_model_len) == (ids("naïve fox"), LONG)
    assert stub.Detokenize(pb.DetokenizeRequest(token_ids=said.token_ids)).text == "naïve fox"
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert list(stub.Tokenize(pb.TokenizeRequest(chat=chat)).token_ids) == ids("[user] hi\n[bot]")
    model = stub.GetModelInfo(pb.GetModelInfoRequest(model="org/alias"))
    assert (model.model, list(model.served_model_names)) == ("org/alias", ["fake", "org/alias"])
    assert (model.max_model_len, model.vocab_size, list(model.eos_token_ids)) == (LONG, 300, [0])
    server = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.version, server.state) == ("1.2.3", pb.SERVER_STATE_LIVE)


def test_many_at_once(served: Served, stub: Any) -> None:
    prompts = [f"client {i} says" for i in range(24)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda prompt: answer(stub.Generate(request(prompt, 20)))[1][0].text, prompts))
    assert answers == [expected(prompt, 20) for prompt in prompts]


# Fields of sampling

ELSEWHERE = {
    "structured_outputs": {"regex": "a+"},
    "prediction": {"text": "as expected"},
    "logit_bias": {5: -1.5},
}
VALUES: dict[str, Any] = {
    "n": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5, "temperature": 0.7,
    "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 2**64 - 1, "stop": ["a", "b"], "stop_token_ids": [1, 2],
    "bad_words": ["c"], "include_stop_str_in_output": True, "ignore_eos": True, "max_tokens": 9, "min_tokens": 3,
    "logprobs": 20, "prompt_logprobs": 0, "detokenize": True, "skip_special_tokens": False,
    "spaces_between_special_tokens": False, "truncate_prompt_tokens": -1, "allowed_token_ids": [3, 4], **ELSEWHERE,
}  # fmt: skip


def test_every_sampling_parameter_has_a_field() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names == set(pb.SamplingParams.DESCRIPTOR.fields_by_name) == set(VALUES)


@pytest.mark.parametrize("name", sorted(VALUES))
def test_sampling_parameters_arrive_as_they_were_sent(name: str) -> None:
    value = VALUES[name]
    sent = pb.SamplingParams.FromString(pb.SamplingParams(**{name: value}).SerializeToString())
    read = parsing.sampling_params(sent, {"max_tokens": 16})
    assert read == SamplingParams(**{"max_tokens": 16, name: value if name != "prediction" else "as expected"})
    assert read != SamplingParams() or name == "detokenize"


def test_a_knob_that_is_set_to_zero_is_set() -> None:
    read = parsing.sampling_params(pb.SamplingParams(temperature=0, logprobs=0), {"temperature": 0.6, "top_k": 20})
    assert (read.temperature, read.logprobs, read.top_k) == (0.0, 0, 20)
    with pytest.raises(InvalidRequestError, match="max_tokens must be at least 1"):
        parsing.sampling_params(pb.SamplingParams(max_tokens=0), {})


# Statuses

BAD = [
    (pb.GenerateRequest(), Code.INVALID_ARGUMENT, "text, token_ids or chat"),
    (request(""), Code.INVALID_ARGUMENT, "must not be empty"),
    (request("x", request_id="no good"), Code.INVALID_ARGUMENT, "'no good'"),
    (request("x", timeout_ms=0), Code.INVALID_ARGUMENT, "at least 1"),
    (request("x", LONG), Code.INVALID_ARGUMENT, f"{LONG}"),
    (request("x", temperature=float("nan")), Code.INVALID_ARGUMENT, "temperature must be"),
    (request("x", temperature=float("inf")), Code.INVALID_ARGUMENT, "temperature must be"),
    (request("x", n=10**6), Code.INVALID_ARGUMENT, "at most 128"),
    (request("x", logit_bias={400: 1.0}), Code.INVALID_ARGUMENT, "400"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[300])), Code.INVALID_ARGUMENT, "ids are from 0 to 299"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), Code.INVALID_ARGUMENT, "must not be empty"),
    (pb.GenerateRequest(chat=pb.Chat()), Code.INVALID_ARGUMENT, "at least one"),
    (
        request("x", speculative_config=pb.SpeculativeConfig(num_speculative_tokens=99)),
        Code.INVALID_ARGUMENT,
        "speculative_config",
    ),
    (request("x", model="gone"), Code.NOT_FOUND, "'gone' does not exist; served: fake, org"),
]


@pytest.mark.parametrize(("bad", "code", "words"), BAD, ids=[words[:16] for _, _, words in BAD])
def test_bad_requests(stub: Any, bad: pb.GenerateRequest, code: Code, words: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(bad))
    assert caught.value.code() == code
    assert words in caught.value.details()
    assert "\n" not in caught.value.details()
    assert len(caught.value.details()) < 400
