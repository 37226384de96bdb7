"""Origins of tokens: the origin of each step's tokens, and their fields over HTTP."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import pytest

from protos.config.engine import SpeculativeConfig
from protos.messages import Step, TokenOutput
from runtime.http.app import create_app
from runtime.http.context import ServerOptions
from runtime.http.origins import OriginRecorder
from runtime.http.render import TokenTexts
from tests.support.serving.fake_engine import expected, local_engine, tokenizer

PROMPT = "the quick brown"


class Letters:
    """Token 1 is "a", 2 is "b", and so on."""

    def decode(self, ids: Sequence[int], /, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(96 + i) for i in ids)


@pytest.mark.parametrize(
    ("step", "num_tokens", "origins"),
    [
        (Step(), 1, ["plain"]),
        (Step(3, 0, 3), 1, ["correction"]),
        (Step(3, 2, 3), 3, ["accepted", "accepted", "correction"]),
        (Step(3, 3, 3), 4, ["accepted", "accepted", "accepted", "bonus"]),
        (Step(6, 2, 2), 3, ["accepted", "accepted", "bonus"]),  # a tree of depth 2
        (Step(2, 2, 2), 2, ["accepted", "accepted"]),  # the answer ended inside the draft
    ],
)
def test_the_tokens_of_a_step_have_origins(step: Step, num_tokens: int, origins: list[str]) -> None:
    written = OriginRecorder(TokenTexts(Letters()))
    written.add(0, TokenOutput("r", list(range(1, num_tokens + 1)), step=step))
    [told] = written.take()
    assert [token.origin for token in told.tokens] == origins
    assert "".join(token.text for token in told.tokens) == "abcd"[:num_tokens]
    assert (told.drafted, told.depth, told.accepted) == (step.proposed, step.depth, step.accepted)
    assert written.take() == []


def test_each_choice_counts_its_own_steps() -> None:
    written = OriginRecorder(TokenTexts(Letters()))
    for index in (0, 1, 0):
        written.add(index, TokenOutput("r", [1], step=Step()))
    written.add(1, TokenOutput("r", finish_reason="stop", step=Step()))
    assert [(told.index, told.step) for told in written.take()] == [(0, 1), (1, 1), (0, 2)]


async def ask(*bodies: dict[str, Any]) -> list[httpx.Response]:
    """Query a fake engine that drafts four tokens and accepts two."""
    engine = local_engine(speculative=SpeculativeConfig("fake", num_speculative_tokens=4))
    await engine.start()
    assert engine.metrics is not None
    app = create_app(engine, tokenizer(), engine.metrics, ServerOptions(("fake",), "1"))
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
            return [
                await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 9, **body})
                for body in bodies
            ]
    finally:
        await engine.close()


def told(chunks: list[Any]) -> list[Any]:
    return [each for chunk in chunks for each in chunk.get("metrics", {}).get("token_origins", [])]


def test_origins_are_told_where_asked_for_and_only_there() -> None:
    asked = {"token_origins": True}
    whole, streamed, counted, silent, off = asyncio.run(
        ask(
            asked,
            {**asked, "stream": True},
            {
                **asked,
                "stream": True,
                "stream_options": {"include_usage": True},
                "per_request_spec_decode_metrics": "summary",
            },
            {"stream": True},
            {**asked, "speculative_config": {"enabled": False}},
        )
    )

    def chunks(response: httpx.Response) -> list[Any]:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert lines.pop() == "[DONE]"
        return [msgspec.json.decode(line) for line in lines]

    steps = told([whole.json()])
    assert [(step["drafted"], step["accepted"]) for step in steps] == [(4, 2), (4, 2), (2, 1), (0, 0)]
    assert "".join(token["text"] for step in steps for token in step["tokens"]) == expected(PROMPT, 9)
    assert [token["origin"] for token in steps[0]["tokens"]] == ["accepted", "accepted", "correction"]
    assert told(chunks(streamed)) == steps
    assert told(chunks(counted)) == steps
    assert chunks(counted)[-1]["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] == 5
    assert told(chunks(silent)) == []
    assert "metrics" not in silent.text
    assert {token["origin"] for step in told([off.json()]) for token in step["tokens"]} == {"plain"}
    assert off.json()["choices"] == whole.json()["choices"]
