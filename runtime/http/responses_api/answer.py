"""`POST /v1/responses`: a conversation, answered with output items."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from protos.messages import TokenOutput
from protos.sampling import SamplingParams
from runtime.frontend.stream_queue import Delta
from runtime.http.chat import ChatAnswer, prepare_chat
from runtime.http.context import RouteContext
from runtime.http.errors import ApiError
from runtime.http.job import CompletionJob, Envelope
from runtime.http.render import TokenTexts
from runtime.http.responding import EventWriter
from runtime.http.responses import ResponseMetrics, Usage
from runtime.http.responses_api.objects import (
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    OutputItem,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from runtime.http.responses_api.output import EventList, NoEvents, Output
from runtime.http.responses_api.request import ResponsesRequest, fields_renamed
from runtime.http.responses_api.truncation import truncated
from runtime.http.schemas import ChatCompletionRequest
from runtime.http.tools.choice import ToolUse


class ResponseOutput(msgspec.Struct, frozen=True):
    """The output of a whole answer, and whether it was cut off."""

    status: ItemStatus
    items: list[OutputItem]


class ResponseAnswer(ChatAnswer):
    """The answer of a response."""

    def __init__(self, body: ChatCompletionRequest, texts: TokenTexts, use: ToolUse, events: EventList) -> None:
        super().__init__(0, body, texts, use)
        self.output = Output(events)

    @property
    def status(self) -> ItemStatus:
        """`incomplete` if a limit on tokens ended the answer."""
        return "incomplete" if self.finish_reason == "length" else "completed"

    def add(self, output: TokenOutput) -> None:
        """Add the output of a step to the output items."""
        super().add(output)
        logprobs = self.pending_logprobs()
        self.output.add(self.pieces, [] if logprobs is None else logprobs.content)
        self.text, self.pieces, self.calls, self.logprobs = "", [], [], []
        if self.finish_reason is not None:
            self.output.close(self.status)

    def render(self) -> ResponseOutput:
        """See `Choice`."""
        return ResponseOutput(self.status, self.output.items)


@dataclass(frozen=True)
class ResponseEnvelope(Envelope):
    """The response around its output. `opening` is the response before its first token."""

    opening: ResponseObject
    events: EventList

    def wrap(
        self,
        choices: list[Any],
        usage: Usage | UnsetType | None = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> ResponseObject:
        """See `Envelope`; *choices* are one `ResponseOutput`."""
        (output,) = choices
        is_whole = output.status == "completed"
        return msgspec.structs.replace(
            self.opening,
            status=output.status,
            output=output.items,
            usage=_usage(usage) if usage else None,
            completed_at=int(time.time()) if is_whole else None,
            incomplete_details=None if is_whole else IncompleteDetails(),
            metrics=metrics,
        )


def _usage(usage: Usage) -> ResponseUsage:
    details = InputTokensDetails(usage.prompt_tokens_details.cached_tokens)
    return ResponseUsage(usage.prompt_tokens, details, usage.completion_tokens, usage.total_tokens)


class ResponseEvents(EventWriter):
    """Writes a response as OpenAI's typed events."""

    def __init__(self, job: CompletionJob) -> None:
        super().__init__(job)
        (answer,) = job.choices
        assert isinstance(answer, ResponseAnswer)
        self._answer = answer
        assert isinstance(job.envelope, ResponseEnvelope)
        self._envelope = job.envelope
        self._events = job.envelope.events

    def begin(self) -> list[bytes]:
        """See `EventWriter`."""
        for kind in ("created", "in_progress"):
            self._events.emit(kind, response=self._envelope.opening)
        return self._encoded()

    def add(self, batch: Sequence[Delta]) -> list[bytes]:
        """See `EventWriter`."""
        for delta in batch:
            self.job.add(delta)
        return self._encoded()

    def finish(self) -> list[bytes]:
        """See `EventWriter`."""
        response = self._envelope.wrap([self._answer.flush()], self.job.usage(), self.job.metrics())
        self._events.emit(response.status, response=response)
        return self._encoded()

    def fail(self, error: ApiError) -> list[bytes]:
        """See `EventWriter`; the response has what was streamed."""
        self._answer.output.cut_off()
        failed = msgspec.structs.replace(
            self._envelope.opening,
            status="failed",
            output=self._answer.output.items,
            usage=_usage(self.job.usage()) if self._answer.num_tokens else None,
            error=_failure(error),
        )
        self._events.emit("failed", response=failed)
        return self._encoded()

    def _encoded(self) -> list[bytes]:
        return [_encoded(event) for event in self._events.take()]


def _encoded(event: ResponseEvent) -> bytes:
    return b"event: " + event.type.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _failure(error: ApiError) -> ResponseFailure:
    if error.status == 429:
        return ResponseFailure("rate_limit_exceeded", error.message)
    return ResponseFailure("invalid_prompt" if error.status == 400 else "server_error", error.message)


async def response_job(context: RouteContext, body: ResponsesRequest, chat: ChatCompletionRequest) -> CompletionJob:
    """Validate *chat*, which is *body* as a chat request; nothing is scheduled yet.

    Raises:
        InvalidRequestError: names the field of *body*, the value and the limit.
        ApiError: the model is not served.
    """
    with fields_renamed():
        if body.truncation == "auto":
            chat = await truncated(context, chat)
        conversation = await prepare_chat(context, chat, f"resp_{uuid.uuid4().hex}")
    params = conversation.requests[0].params
    opening = _opening(body, conversation.id, conversation.model, params)
    envelope = ResponseEnvelope(opening, EventList() if chat.stream else NoEvents())
    answer = ResponseAnswer(chat, context.texts, conversation.use, envelope.events)
    spec_metrics, origins = context.spec_metrics(chat), context.origins(chat)
    return CompletionJob([conversation.requests], [answer], envelope, "none", spec_metrics, origins)


def _opening(body: ResponsesRequest, response_id: str, model: str, params: SamplingParams) -> ResponseObject:
    return ResponseObject(
        response_id,
        int(time.time()),
        model,
        body.shown_tools(),
        body.shown_choice(),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=params.temperature,
        top_p=params.top_p,
        text=body.shown_text(),
        top_logprobs=body.top_logprobs or 0,
        truncation=body.truncation or "disabled",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        user=body.user,
    )
