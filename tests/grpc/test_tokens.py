"""The same requests over HTTP and gRPC to one model: the same tokens with all sampling parameters."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cluster import assemble
from protos import slipstream_v1_pb2 as pb
from protos.config import arguments
from protos.messages import WorkerInfo
from runtime.frontend.async_engine import AsyncEngine
from runtime.metrics.prometheus import Metrics
from runtime.text.preprocessor import Preprocessor
from runtime.text.tokenizer import load_tokenizer
from tests.support.models import tiny_pairs
from tests.support.policies import always
from tests.support.serving.grpc_server import Served, answer, serving
from tests.support.serving.thread_channel import ThreadChannel

PROMPT = "def f(x):\n    return"
ASKED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "seed": 2**64 - 1},
    {"temperature": 1.3, "min_p": 0.02, "presence_penalty": 0.4, "frequency_penalty": 0.3, "seed": 0},
    {"temperature": 1.0, "repetition_penalty": 1.2, "seed": 11, "n": 2},
    {"temperature": 0.0},
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target, draft = tiny_pairs.build(tmp_path_factory.mktemp("pair"))
    guesses = {"model": str(draft), "num_speculative_tokens": 3}
    config = arguments.parse(
        {
            "model": str(target),
            "speculative_config": always(guesses),
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "num_gpu_blocks_override": 64,
            "enforce_eager": True,
        }
    )
    tokenizer = load_tokenizer(config.model)

    async def make_preprocessor(info: WorkerInfo) -> Preprocessor:
        return assemble.make_preprocessor(config, info, tokenizer)

    channel = ThreadChannel(lambda inbox, say: assemble.build(config, inbox, say).controller)
    with serving(AsyncEngine(channel, make_preprocessor, Metrics("fake")), tokenizer=tokenizer) as running:
        yield running


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_completions(served: Served, asked: dict[str, Any]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "logprobs": 0, **asked}
    told = httpx.post(served.url + "/v1/completions", json=body, timeout=120).json()["choices"]
    with served.stub() as stub:
        sampling = pb.SamplingParams(max_tokens=24, logprobs=0, **asked)
        chunks, ends = answer(stub.Generate(pb.GenerateRequest(text=PROMPT, sampling=sampling)))
    assert [choice["text"] for choice in told] == [end.text for end in sorted(ends, key=lambda end: end.index)]
    assert sum(end.usage.spec_draft_tokens for end in ends) > 0
    for choice in told:
        streamed = [entry.chosen for chunk in chunks if chunk.index == choice["index"] for entry in chunk.logprobs]
        assert [entry.logprob for entry in streamed] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)


def test_a_chat_and_structured_output(served: Served) -> None:
    messages = [{"role": "user", "content": "say something"}]
    form = {"regex": "[a-f]{3} or [0-9]{4}"}
    body = {"messages": messages, "temperature": 1.0, "seed": 3, "max_tokens": 30, "structured_outputs": form}
    told = httpx.post(served.url + "/v1/chat/completions", json=body, timeout=120).json()
    sampling = pb.SamplingParams(temperature=1.0, seed=3, max_tokens=30, structured_outputs=form)
    with served.stub() as stub:
        _, (end,) = answer(stub.Generate(pb.GenerateRequest(chat={"messages": messages}, sampling=sampling)))
    assert told["choices"][0]["message"]["content"] == end.text
    assert end.finish_reason == pb.FINISH_REASON_STOP
    assert (len(end.text), end.text[3:7]) == (11, " or ")
