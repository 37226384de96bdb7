"""The real OpenAI client against a server of our own: see `tests.support.serving.openai_checks`."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cluster import assemble
from cluster.settings import engine_config
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.errors import OverloadedError
from protos.messages import Request
from protos.sampling import SamplingParams
from runtime.frontend.async_engine import AsyncEngine
from runtime.metrics.prometheus import Metrics
from runtime.text.tokenizer import load_tokenizer
from tests.support.models import tiny_models
from tests.support.serving import fake_engine
from tests.support.serving.anthropic_answers import client_of
from tests.support.serving.anthropic_structured_checks import MESSAGES, AnthropicCheck
from tests.support.serving.http_server import Served, serving
from tests.support.serving.openai_answers import USER, Check, strict
from tests.support.serving.openai_checks import CHECKS
from tests.support.serving.openai_responses import RESPONSES
from tests.support.serving.openai_structured_checks import STRUCTURED, a_parsed_answer
from tests.support.serving.server_process import Running
from tests.support.serving.thread_channel import ThreadChannel

DRAFTS = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model="none", policy="fixed")


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
        return assemble.make_preprocessor(config, info, tokenizer)

    channel = ThreadChannel(lambda inbox, say: assemble.build(config, inbox, say).controller)
    metrics = Metrics("fake")
    engine = AsyncEngine(channel, make_preprocessor, metrics)
    metrics.use_stats(engine.stats)
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of 300 tokens with a chat template that takes tools."""
    folder = tmp_path_factory.mktemp("tiny")
    vocab_size = fake_engine.bare_tokenizer().get_vocab_size()
    tiny_models.build(
        "llama",
        folder,
        vocab_size=vocab_size,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        max_position_embeddings=2048,
    )
    fake_engine.tokenizer().save_pretrained(folder)
    return folder


TINY = {
    "max_model_len": 1536,
    "num_gpu_blocks_override": 400,
    "device": "cpu",
    "max_num_seqs": 8,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "policy": "fixed"},
}


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[Served]:
    with serving(real_engine(engine_config({"model": str(folder), "enforce_eager": True, **TINY}))) as running:
        yield running


@pytest.mark.parametrize("check", [*STRUCTURED, *RESPONSES], ids=lambda check: check.__name__)
def test_answers_of_a_form(tiny: Served, check: Check) -> None:
    check(tiny.client, "fake")


@pytest.mark.parametrize("check", MESSAGES, ids=lambda check: check.__name__)
def test_answers_of_a_form_for_anthropics_client(tiny: Served, check: AnthropicCheck) -> None:
    with client_of(tiny.url) as client:
        check(client, "fake")


def test_what_is_predicted_comes_faster_and_is_the_same(tiny: Served) -> None:
    asked: dict[str, Any] = {
        "prompt": "foxes",
        "max_tokens": 48,
        "temperature": 1,
        "seed": 3,
        "allowed_token_ids": fake_engine.letters(),
        "per_request_spec_decode_metrics": "summary",
    }
    plain = tiny.post(**asked).json()
    text = plain["choices"][0]["text"]
    predicted = tiny.post(**asked, prediction={"type": "content", "content": text}).json()
    assert predicted["choices"][0]["text"] == text
    before, after = (each["metrics"]["speculative_decoding"] for each in (plain, predicted))
    assert after["num_accepted_draft_tokens"] > before["num_accepted_draft_tokens"] + 5


# `slipstream serve` as users start it


@contextlib.contextmanager
def slipstream_serve(**options: object) -> Iterator[openai.OpenAI]:
    """Run the command with *options* on a free port; yield a client of it."""
    flags = [f"--{name.replace('_', '-')}={shown_as_flag(value)}" for name, value in options.items()]
    command = [
        sys.executable,
        "-m",
        "cluster.cli.main",
        "serve",
        "--host=127.0.0.1",
        "--port=0",
        "--grpc-port=-1",
        *flags,
    ]
    with subprocess.Popen([*command, "--enable-auto-tool-choice"], stderr=subprocess.PIPE, text=True) as process:
        running = Running(process)
        try:
            with openai.OpenAI(base_url=running.url() + "/v1", api_key="none", max_retries=0, timeout=300) as client:
                yield client
            process.send_signal(signal.SIGTERM)
            code, log = running.ended()
            assert code == 0, log
            assert "Traceback" not in log
        finally:
            process.kill()


def shown_as_flag(value: object) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)


@pytest.fixture(scope="module")
def standalone_tiny(folder: Path) -> Iterator[openai.OpenAI]:
    with slipstream_serve(model=folder, served_model_name="tiny", tool_call_parser="hermes", **TINY) as client:
        yield client


@pytest.mark.full
@pytest.mark.parametrize("check", [*CHECKS, *STRUCTURED], ids=lambda check: check.__name__)
def test_a_tiny_model_as_users_serve_it(standalone_tiny: openai.OpenAI, check: Check) -> None:
    check(standalone_tiny, "tiny")


@pytest.mark.full
@pytest.mark.parametrize("check", MESSAGES, ids=lambda check: check.__name__)
def test_a_tiny_model_as_users_serve_it_to_anthropics_client(
    standalone_tiny: openai.OpenAI, check: AnthropicCheck
) -> None:
    with client_of(str(standalone_tiny.base_url).removesuffix("/v1/"), timeout=300) as client:
        check(client, "tiny")


@pytest.fixture(scope="module")
def standalone_demo() -> Iterator[openai.OpenAI]:
    with slipstream_serve(tool_call_parser="llama3_json", max_num_seqs=8) as client:
        yield client


@pytest.mark.full
@pytest.mark.parametrize("check", [*CHECKS, a_parsed_answer], ids=lambda check: check.__name__)
def test_the_demo_pair_as_users_serve_it(standalone_demo: openai.OpenAI, check: Check) -> None:
    check(standalone_demo, "demo")


@pytest.mark.full
def test_the_demo_pair_speculates(standalone_demo: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 64, "temperature": 0}
    bodies = [
        {"per_request_spec_decode_metrics": "detailed", "speculative_config": wish}
        for wish in ({}, {"num_speculative_tokens": 1}, {"enabled": False})
    ]
    answers = [strict(standalone_demo.completions.create(**asked, extra_body=body)) for body in bodies]
    assert len({answer.choices[0].text for answer in answers}) == 1
    figures = [(answer.model_extra or {})["metrics"]["speculative_decoding"] for answer in answers]
    assert [told["num_spec_tokens"] for told in figures] == [3, 1, 0]
    assert figures[0]["num_accepted_draft_tokens"] > figures[1]["num_accepted_draft_tokens"] > 0
    assert all(len(told["per_step_drafted"]) == told["num_spec_steps"] for told in figures)


# Retries


class Busy(AsyncEngine):
    """Refuses the first requests it gets."""

    refusals = 0

    async def prepare(self, prompt: Any, params: SamplingParams, request_id: str) -> list[Request]:
        if self.refusals:
            self.refusals -= 1
            raise OverloadedError("the server is overloaded", 0.2)
        return await super().prepare(prompt, params, request_id)


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
