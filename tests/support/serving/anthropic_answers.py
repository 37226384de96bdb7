"""Answers and events validated strictly against the Anthropic client's own types.

No field may be missing, and no field may be unknown except those we document.
"""

import json
from collections.abc import Iterable
from typing import Any, TypeVar

import anthropic
import httpx
import pydantic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse

from tests.support.serving.openai_answers import extras

T = TypeVar("T", bound=pydantic.BaseModel)
DOCUMENTED = {
    "Message": {"metrics"},
    "RawMessageDeltaEvent": {"metrics"},
    "InvalidRequestErrorObject": {"details"},  # the client reads it, but does not declare it
}
"""Fields that we add to the client's types, by type."""
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)
UNTYPED = "request_too_large"
"""A type of errors that Anthropic documents, but that the client's types lack."""


def client_of(url: str, **options: Any) -> anthropic.Anthropic:
    """Return the client as users make it, without retries."""
    return anthropic.Anthropic(**{"base_url": url, "api_key": "none", "max_retries": 0, **options})


def strict_message(answer: Message) -> Message:
    """Validate a whole answer and return it."""
    raw = answer.model_dump_json(exclude_unset=True, warnings=False)
    _no_extras(Message.model_validate_json(_without_parsed(raw), strict=True))
    return answer


def _without_parsed(raw: str) -> str:
    """Remove fields that the client itself added."""
    fields = json.loads(raw)
    for block in fields["content"]:
        block.pop("parsed_output", None)
    return json.dumps(fields)


def strict_count(answer: MessageTokensCount) -> int:
    """Validate a count and return it."""
    _no_extras(MessageTokensCount.model_validate_json(answer.model_dump_json(exclude_unset=True), strict=True))
    return answer.input_tokens


def strict_event(event: T) -> T:
    """Validate an event of a stream and return it."""
    _no_extras(EVENTS.validate_json(event.model_dump_json(exclude_unset=True, warnings=False), strict=True))
    return event


def strict_error(answer: httpx.Response) -> tuple[str, str]:
    """Validate an error's body; return its type and message."""
    fields = answer.json()
    found = fields["error"]["type"], fields["error"]["message"]
    typed = fields | {"error": fields["error"] | {"type": "invalid_request_error"}} if found[0] == UNTYPED else fields
    _no_extras(ErrorResponse.model_validate_json(json.dumps(typed), strict=True))
    assert "\n" not in found[1]
    assert answer.headers["request-id"] == fields["request_id"]
    return found


def _no_extras(checked: pydantic.BaseModel) -> None:
    for name, found in extras(checked):
        assert found <= DOCUMENTED.get(name, set()), (name, found)


def in_order(events: Iterable[Any]) -> list[Any]:
    """Check that *events* are one message: blocks one after the other, each with deltas of its own kind."""
    whole = [strict_event(event) for event in events]
    assert whole[0].type == "message_start"
    assert [event.type for event in whole[-2:]] == ["message_delta", "message_stop"]
    current, ended = None, 0
    for event in whole[1:-2]:
        assert event.index == ended
        if event.type == "content_block_start":
            assert current is None
            current = event.content_block.type
        elif event.type == "content_block_delta":
            assert event.delta.type == {"text": "text_delta", "tool_use": "input_json_delta"}[str(current)]
        else:
            assert event.type == "content_block_stop"
            assert current is not None
            current, ended = None, ended + 1
    assert current is None
    return whole


def named_events(text: str) -> list[tuple[str, Any]]:
    """Return the name and the JSON of each event in the text of a stream."""
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        event, data = part.split("\n")
        found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
