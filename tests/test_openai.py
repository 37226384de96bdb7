"""The real OpenAI client against a server of our own: see `tests.openai_checks`."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster import assemble
from cluster.settings import engine_config
from protos.config import EngineConfig, SpeculativeConfig
from protos.errors import OverloadedError
from protos.messages import Request
from protos.sampling import SamplingParams
from runtime.channel import ThreadChannel
from runtime.engine import AsyncEngine, Delta
from runtime.inputs import load_tokenizer
from runtime.metrics import Metrics
from tests import fake_engine, tiny_models
from tests.http_server import Served, serving
from tests.openai_checks import CHECKS, STRUCTURED, USER, Check, strict

DRAFTS = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model="none")


@pytest.fixture(scope="module")
def fake() -> Iterator[Served]:
    with serving(fake_engine.local_engine(speculative=DRAFTS)) as running:
        yield running


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_client_is_content(fake: Served, check: Check) -> None:
    check(fake.client, "fake")


# Real models


def real_engine(config: EngineConfig) -> AsyncEngine:
    """An engine whose controller and workers will run in a thread."""
    tokenizer = load_tokenizer(config.model)

    async def make_preprocessor(info: Any) -> Any:
        return assemble.preprocessor(config, info, tokenizer)

    channel = ThreadChannel(lambda inbox, say: assemble.build(config, inbox, say))
    metrics = Metrics("fake")
    engine = AsyncEngine(channel, make_preprocessor, metrics)
    metrics.follow(engine.stats)
    return engine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model of 300 tokens with a chat template that takes tools."""
    folder = tmp_path_factory.mktemp("tiny")
    vocab_size = fake_engine.bare_tokenizer().get_vocab_size()
    tiny_models.build("llama", folder, vocab_size=vocab_size, bos_token_id=0, eos_token_id=0, pad_token_id=0,
                      max_position_embeddings=2048)  # fmt: skip
    fake_engine.tokenizer().save_pretrained(folder)
    config = engine_config({
        "model": str(folder), "max_model_len": 1536, "num_gpu_blocks_override": 400, "device": "cpu",
        "enforce_eager": True, "max_num_seqs": 8,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    })  # fmt: skip
    with serving(real_engine(config)) as running:
        yield running


@pytest.mark.parametrize("check", STRUCTURED, ids=lambda check: check.__name__)
def test_answers_of_a_form(tiny: Served, check: Check) -> None:
    check(tiny.client, "fake")


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_tiny_model(tiny: Served, check: Check) -> None:
    check(tiny.client, "fake")


@pytest.fixture(scope="module")
def demo(demo_pair: Any) -> Iterator[Served]:
    config = engine_config({"enforce_eager": True, "max_num_seqs": 8, "device": "cpu"})
    assert Path(config.model.model) == Path(demo_pair.target)
    with serving(real_engine(config), load_tokenizer(config.model)) as running:
        yield running


@pytest.mark.full
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_demo_pair(demo: Served, check: Check) -> None:
    check(demo.client, "fake")


@pytest.mark.full
def test_the_demo_pair_speculates(demo: Served) -> None:
    told = demo.post(prompt="def add(a, b):", max_tokens=64, temperature=0, per_request_spec_decode_metrics="detailed")
    figures = told.json()["metrics"]["speculative_decoding"]
    assert figures["num_accepted_draft_tokens"] > 0
    assert len(figures["per_step_drafted"]) == figures["num_spec_steps"]


# Retries


class Busy(AsyncEngine):
    """Refuses the first requests it gets."""

    refusals = 0

    async def prepare(self, prompt: Any, params: SamplingParams, request_id: str) -> list[Request]:
        if self.refusals:
            self.refusals -= 1
            raise OverloadedError("the server is overloaded", 0.2)
        return await super().prepare(prompt, params, request_id)

    async def stream(self, requests: Sequence[Request], timeout_s: float | None = None) -> AsyncGenerator[Delta, None]:
        async for delta in super().stream(requests, timeout_s):
            yield delta


def busy_engine() -> Busy:
    return Busy(ThreadChannel(fake_engine.build), fake_engine.make_preprocessor, Metrics("fake"))


def test_the_client_tries_again_when_told_that_the_server_is_busy() -> None:
    engine = busy_engine()
    with serving(engine) as busy:
        engine.refusals = 1
        with pytest.raises(openai.RateLimitError) as refused:
            busy.client.completions.create(model="fake", prompt="x", max_tokens=2)
        assert refused.value.code == "overloaded"
        assert refused.value.response.headers["retry-after"] == "1"
        engine.refusals = 1
        patient = busy.client.with_options(max_retries=2)
        assert strict(patient.completions.create(model="fake", prompt="x", max_tokens=2)).choices[0].text
        engine.refusals = 1
        stream = patient.chat.completions.create(model="fake", messages=USER, max_tokens=2, stream=True)
        assert [strict(chunk) for chunk in stream][-1].choices[0].finish_reason == "length"
        assert engine.refusals == 0
