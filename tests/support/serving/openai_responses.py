"""Responses and their events, validated strictly against the OpenAI client's own types."""

import json
from typing import Any

import openai
import pydantic
from openai.types.responses import Response, ResponseStreamEvent

from tests.support.serving.http_server import Served
from tests.support.serving.openai_answers import strict
from tests.support.serving.openai_structured_checks import OTHER, ROOM, WIDE, Verdict

PATH = "/v1/responses"
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
PAINT_TOOL, WAIT_TOOL = ({"type": "function", **tool["function"], "strict": False} for tool in (WIDE, OTHER))


def answered(served: Served, **body: Any) -> Response:
    """Return the validated response to *body*."""
    answer = served.post(PATH, **body)
    assert answer.status_code == 200, answer.text
    assert set(answer.json()["usage"]) == {
        "input_tokens",
        "input_tokens_details",
        "output_tokens",
        "output_tokens_details",
        "total_tokens",
    }
    return strict(Response.model_validate_json(answer.text))


def streamed(served: Served, **body: Any) -> list[Any]:
    """Return the validated events of the stream for *body*; each has a name, and numbers are consecutive."""
    answer = served.post(PATH, stream=True, **body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return parsed(answer.text)


def parsed(text: str) -> list[Any]:
    """Return the validated events in *text*."""
    events = []
    for number, block in enumerate(text.strip().replace("\n\n\n", "\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = strict(EVENT.validate_json(data.removeprefix("data: "), strict=True))
        assert (event.type, event.sequence_number) == (name.removeprefix("event: "), number)
        assert json.loads(data.removeprefix("data: "))["type"] == event.type
        events.append(event)
    return events


def kinds(events: list[Any]) -> list[str]:
    """Return the types of *events*, repetitions left out."""
    types = [event.type for event in events]
    return [kind for before, kind in zip(["", *types], types, strict=False) if kind != before]


def assembled(events: list[Any]) -> list[dict[str, Any]]:
    """Return the output that the events between the first and the last describe, from their deltas alone."""
    items: list[dict[str, Any]] = []
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(items)
            assert event.item.status == "in_progress"
            items.append(event.item.to_dict())
        elif event.type == "response.content_part.added":
            assert event.content_index == len(items[-1]["content"]) == 0
            items[-1]["content"].append(event.part.to_dict())
        elif event.type == "response.output_text.delta":
            items[-1]["content"][0]["text"] += event.delta
        elif event.type == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event.delta
        elif event.type == "response.output_text.done":
            assert items[-1]["content"][0]["text"] == event.text
        elif event.type == "response.content_part.done":
            assert items[-1]["content"][0]["text"] == event.part.text
        elif event.type == "response.function_call_arguments.done":
            assert items[-1]["arguments"] == event.arguments
        elif event.type == "response.output_item.done":
            items[-1]["status"] = event.item.status
            assert without_logprobs(items[-1]) == without_logprobs(event.item.to_dict())
        if hasattr(event, "item_id"):
            assert (event.item_id, event.output_index) == (items[-1]["id"], len(items) - 1)
    return [without_logprobs(item) for item in items]


def without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """Return an output item without log-probabilities, whose form in deltas is another one."""
    return item | ({"content": [part | {"logprobs": None} for part in item["content"]]} if "content" in item else {})


def forms(output: list[Any]) -> list[Any]:
    """Return what an output consists of: texts, and names and arguments of calls."""
    return [item.content[0].text if item.type == "message" else (item.name, item.arguments) for item in output]


# For real models whose chat template takes tools


def a_parsed_response(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": "say something", "max_output_tokens": ROOM, "text_format": Verdict}
    asked["extra_body"] = {"seed": 5}
    answer = client.responses.parse(**asked)
    assert isinstance(answer.output_parsed, Verdict)
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == answer.output_parsed


def any_object_in_a_response(client: openai.OpenAI, model: str) -> None:
    answer = strict(
        client.responses.create(
            model=model,
            input="say something",
            max_output_tokens=40,
            text={"format": {"type": "json_object"}},
            temperature=0,
        )
    )
    assert answer.output_text.lstrip().startswith("{")


def a_call_by_name_in_a_response(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": "say something", "max_output_tokens": ROOM, "extra_body": {"seed": 3}}
    asked |= {"tools": [WAIT_TOOL, PAINT_TOOL], "tool_choice": {"type": "function", "name": "paint"}}
    answer = strict(client.responses.create(**asked))
    (call,) = answer.output
    assert call.type == "function_call"
    assert (answer.status, call.status, call.name) == ("completed", "completed", "paint")
    Verdict.model_validate_json(call.arguments)
    events = [strict(event) for event in client.responses.create(**asked, stream=True)]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == call.arguments
    cut = strict(client.responses.create(**(asked | {"max_output_tokens": 5})))
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]


def a_required_call_in_a_response(client: openai.OpenAI, model: str) -> None:
    asked: Any = {"model": model, "input": "say something", "max_output_tokens": ROOM, "extra_body": {"seed": 4}}
    asked |= {"tools": [WAIT_TOOL, PAINT_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = strict(client.responses.create(**asked)).output
    assert call.type == "function_call"
    assert call.name in {"paint", "wait"}
    with client.responses.stream(**asked) as stream:
        (same,) = stream.get_final_response().output
    assert same.type == "function_call"
    assert (same.name, same.arguments) == (call.name, call.arguments)


RESPONSES = (
    a_parsed_response,
    any_object_in_a_response,
    a_call_by_name_in_a_response,
    a_required_call_in_a_response,
)
