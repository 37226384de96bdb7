"""Responses that fail while they are streamed."""

import pytest

from protos.messages import Row, Verdict
from runtime.http.tools.choice import ToolOptions
from tests.support.serving.fake_engine import Scripted, local_engine
from tests.support.serving.http_server import Served, serving
from tests.support.serving.openai_responses import PAINT_TOOL, assembled, forms, kinds, streamed, without_logprobs

NUM_TOKENS = 24


class FailsLater(Scripted):
    """Fails once it has generated `NUM_TOKENS`."""

    def _verdict(self, row: Row) -> Verdict:
        if row.known_len - self.prompt_len[row.slot] >= NUM_TOKENS:
            return Verdict(row.slot, failed="the logits are NaN")
        return super()._verdict(row)


def test_a_stream_that_fails_ends_with_response_failed(served: Served) -> None:
    for words, code in (("there is no way on", "invalid_prompt"), ("this is not a number", "server_error")):
        events = streamed(served, input=words)
        assert kinds(events) == ["response.created", "response.in_progress", "response.failed"]
        failed = events[-1].response
        assert (failed.status, failed.error.code) == ("failed", code)
        assert failed.error.message
        assert served.post("/v1/responses", input=words).status_code == (400 if code == "invalid_prompt" else 500)


def test_a_timeout_ends_a_stream(served: Served) -> None:
    events = streamed(served, input="x", timeout=0.2)
    assert events[-1].type == "response.failed"
    assert "0.2 s" in events[-1].response.error.message
    served.idle()


@pytest.mark.parametrize("is_call", [False, True])
def test_a_response_that_fails_has_what_was_streamed(is_call: bool) -> None:
    with serving(local_engine(kind=FailsLater), tools=ToolOptions("hermes", auto=True)) as served:
        text = '{"color": "a color that is described at some length"}'
        choice = {"tools": [PAINT_TOOL], "tool_choice": {"type": "function", "name": "paint"}} if is_call else {}
        events = streamed(served, input=f"say: {text}<end>", **choice)
    *_, done, last = events
    assert (done.type, last.type) == ("response.output_item.done", "response.failed")
    (item,) = last.response.output
    assert assembled(events) == [without_logprobs(item.to_dict())]
    assert item.status == "incomplete"
    (said,) = forms([item])
    assert text.startswith(said[1] if is_call else said)
    assert last.response.usage.output_tokens == NUM_TOKENS
