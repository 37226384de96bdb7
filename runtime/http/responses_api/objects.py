"""The response of `POST /v1/responses` and the events of its stream. Fields that are `UNSET` are left out."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from runtime.http.responses import ResponseMetrics

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class TextTopLogprob(msgspec.Struct, frozen=True):
    """One candidate of a token of text."""

    token: str
    logprob: float
    bytes: list[int] | UnsetType = UNSET


class TextLogprob(msgspec.Struct, frozen=True):
    """A token of text and its candidates. `bytes` are empty for part of a character, and left out in events."""

    token: str
    logprob: float
    top_logprobs: list[TextTopLogprob]
    bytes: list[int] | UnsetType = UNSET


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    logprobs: list[TextLogprob]
    annotations: list[Any] = []


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the model; it has one part when it is done."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | OutputCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Input tokens that were in the prefix cache. Writing to it is not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Reasoning is part of the text, and not counted apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()


class ResponseFailure(msgspec.Struct, frozen=True):
    """Why a stream failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseObject(msgspec.Struct, frozen=True):
    """The response of `POST /v1/responses`. Options are those of the request, or the defaults that applied."""

    id: str
    created_at: int
    model: str
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    text: dict[str, Any]
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    user: str | None
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    object: Literal["response"] = "response"
    background: Literal[False] = False
    previous_response_id: None = None
    metrics: ResponseMetrics | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, frozen=True):
    """One event of a stream. `type` determines which of the fields after `sequence_number` it has."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TextLogprob] | UnsetType = UNSET
