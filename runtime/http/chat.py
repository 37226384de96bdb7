"""`POST /v1/chat/completions`: a conversation, rendered by the model's chat template."""

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from protos.errors import InvalidRequestError
from protos.messages import Request, TokenOutput
from protos.sampling import SamplingParams
from runtime.http.context import RouteContext
from runtime.http.job import Choice, CompletionJob, Envelope
from runtime.http.render import TokenTexts, chat_logprobs, prompt_logprobs
from runtime.http.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ResponseMetrics,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from runtime.http.schemas import ChatCompletionRequest
from runtime.http.tools.choice import ToolUse
from runtime.http.tools.scanner import CallPart, CallReader, ParsedCalls


@dataclass(frozen=True)
class ChatEnvelope(Envelope):
    """The fields that a chat completion and all its chunks share."""

    kind: type[ChatCompletion] | type[ChatCompletionChunk]
    id: str
    created: int
    model: str
    prompt_token_ids: Sequence[int] | UnsetType = UNSET

    def wrap(
        self,
        choices: list[Any],
        usage: Usage | UnsetType | None = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> msgspec.Struct:
        """See `Envelope`."""
        shared = (self.id, self.created, self.model, choices)
        ids = self.prompt_token_ids
        if self.kind is ChatCompletionChunk:
            begins = any(choice.delta.role is not UNSET for choice in choices)
            return ChatCompletionChunk(*shared, usage=usage, metrics=metrics, prompt_token_ids=ids if begins else UNSET)
        shown = choices[0].prompt_logprobs
        return ChatCompletion(*shared, usage=usage, metrics=metrics, prompt_logprobs=shown, prompt_token_ids=ids)


class ChatAnswer(Choice):
    """One answer to a conversation. `pieces` are its text and the parts of its calls, in their order."""

    def __init__(self, index: int, body: ChatCompletionRequest, texts: TokenTexts, use: ToolUse) -> None:
        super().__init__(index)
        self.body = body
        self.texts = texts
        self.pieces: list[str | CallPart] = []
        self.calls: list[CallPart] = []
        self._use = use
        self._reader = use.reader()

    def add(self, output: TokenOutput) -> None:
        """Add the output of a step, and find the calls in it."""
        text_before = self.text
        super().add(output)
        found = ParsedCalls([output.text]) if self._reader is None else self._read(self._reader, output)
        self.text = text_before + found.content
        self.calls += found.parts
        self.pieces += found.pieces

    def flush(self) -> msgspec.Struct:
        """See `Choice`."""
        part = super().flush()
        self.pieces = []
        return part

    def _read(self, reader: CallReader, output: TokenOutput) -> ParsedCalls:
        """Return the calls in the new text, and the text outside of calls."""
        found = reader.push(output.text)
        ended = reader.finish() if output.finish_reason is not None else ParsedCalls()
        # As in OpenAI's API, the reason is not "tool_calls" if the request named the function.
        if output.finish_reason == "stop" and reader.num_calls and self._use.mode != "named":
            self.finish_reason = "tool_calls"
        return ParsedCalls([piece for piece in (*found.pieces, *ended.pieces) if self._is_wanted(piece)])

    def _is_wanted(self, piece: str | CallPart) -> bool:
        return isinstance(piece, str) or self._use.is_parallel or piece.index == 0

    def pending_logprobs(self) -> ChatLogprobs | None:
        """Return the pending log-probabilities, if requested."""
        num_top = self.body.num_logprobs
        return None if num_top is None else chat_logprobs(self.logprobs, self.texts, num_top)

    def pending_ids(self) -> list[int] | UnsetType:
        """Return the ids of the pending tokens, if requested."""
        return self.token_ids if self.body.return_token_ids else UNSET


class ChatWriter(ChatAnswer):
    """One choice of a chat completion."""

    def render(self) -> ChatChoice:
        """See `Choice`."""
        shown = UNSET if self.body.prompt_logprobs is None else prompt_logprobs(self.prompt_logprobs, self.texts)
        return ChatChoice(
            self.index,
            self._message(),
            self.pending_logprobs(),
            self.finish_reason,
            self.stop_reason,
            shown,
            self.pending_ids(),
        )

    def _message(self) -> ChatMessage:
        if not self.calls:
            return ChatMessage(self.text)
        calls = [ToolCall(new_call_id(), FunctionCall(name, arguments)) for name, arguments in join_parts(self.calls)]
        return ChatMessage(self.text or None, tool_calls=calls)


class ChatChunkWriter(ChatAnswer):
    """One choice of a streamed chat completion; its first chunk names the role."""

    role: Literal["assistant"] | UnsetType = "assistant"

    @property
    def has_pending(self) -> bool:
        """See `Choice`."""
        return bool(self.calls) or super().has_pending

    def render(self) -> ChatChunkChoice:
        """See `Choice`."""
        calls = [_delta(part) for part in self.calls] or UNSET
        self.calls = []
        delta = ChatDelta(self.text if self.text or calls is UNSET else UNSET, self.role, calls)
        self.role = UNSET
        return ChatChunkChoice(
            self.index, delta, self.pending_logprobs(), self.finish_reason, self.stop_reason, self.pending_ids()
        )


def join_parts(parts: Sequence[CallPart]) -> list[tuple[str, str]]:
    """Return the name and arguments of each call in *parts*."""
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.name is not None:
            calls.append((part.name, part.arguments))
        else:
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.arguments
    return calls


def _delta(part: CallPart) -> ToolCallDelta:
    if part.name is None:
        return ToolCallDelta(part.index, FunctionDelta(part.arguments))
    return ToolCallDelta(part.index, FunctionDelta(part.arguments, part.name), new_call_id(), "function")


def new_call_id() -> str:
    """Return an id for a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class Conversation:
    """A validated conversation: the requests for its answers, and how its tools may be called."""

    id: str
    model: str
    requests: list[Request]
    use: ToolUse


Fit = Callable[[SamplingParams, int], SamplingParams]
"""Adapts sampling parameters to the number of tokens of the prompt."""


def _as_given(params: SamplingParams, num_prompt: int) -> SamplingParams:
    del num_prompt
    return params


@contextlib.contextmanager
def _named_as_sent(body: ChatCompletionRequest) -> Iterator[None]:
    """Name the fields of a conversation in errors about the prompt and the limit that they became."""
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        yield
    except InvalidRequestError as error:
        if error.param not in names:
            raise
        text = str(error)
        if error.param != "prompt":
            text = text.replace(error.param, names[error.param], 1)
        raise type(error)(text, names[error.param]) from None


async def prepare_chat(
    context: RouteContext, body: ChatCompletionRequest, request_id: str, fit: Fit = _as_given
) -> Conversation:
    """Validate *body*; nothing is scheduled yet.

    Raises:
        InvalidRequestError: names the field, the value and the limit.
        ApiError: the model is not served.
    """
    model = context.model_name(body.model)
    use = body.tool_use(context.options.tools)
    with body.structured_as_sent():
        sampling = body.chat_sampling(context.options.sampling_defaults)
    params = use.constrained(sampling)
    options = body.template_options | use.template_options
    with body.structured_as_sent(), use.error_context(), _named_as_sent(body):
        prompt = await context.engine.render_chat(body.messages, params, **options)
        requests = await context.engine.prepare(prompt, fit(params, len(prompt.token_ids)), request_id)
    return Conversation(request_id, model, context.with_options(requests, body), use.after(prompt.text or ""))


async def chat_job(context: RouteContext, body: ChatCompletionRequest) -> CompletionJob:
    """Validate *body* as `prepare_chat`."""
    chat = await prepare_chat(context, body, f"chatcmpl-{uuid.uuid4().hex}")
    kind, writer = (ChatCompletionChunk, ChatChunkWriter) if body.stream else (ChatCompletion, ChatWriter)
    choices = [writer(index, body, context.texts, chat.use) for index in range(len(chat.requests))]
    prompt_ids = chat.requests[0].prompt_token_ids if body.return_token_ids else UNSET
    envelope = ChatEnvelope(kind, chat.id, int(time.time()), chat.model, prompt_ids)
    spec_metrics, origins = context.spec_metrics(body), context.origins(body)
    return CompletionJob([chat.requests], choices, envelope, body.stream_usage, spec_metrics, origins)
