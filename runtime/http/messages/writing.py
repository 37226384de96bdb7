"""Writes the answers of the Messages API, whole or as events, from what the chat path found in the text."""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from pydantic_core import from_json, to_json

from runtime.frontend.stream_queue import Delta
from runtime.http.chat import ChatAnswer
from runtime.http.errors import ApiError
from runtime.http.job import CompletionJob, Envelope
from runtime.http.messages.answers import (
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageAnswer,
    MessageContent,
    MessageDelta,
    MessageEnd,
    MessageEvent,
    MessageStart,
    MessageStop,
    Ping,
    StopReason,
    TextBlock,
    TextDelta,
    ToolUseBlock,
    message_usage,
)
from runtime.http.messages.errors import message_error_body, message_status
from runtime.http.render import TokenTexts
from runtime.http.responding import EventWriter
from runtime.http.responses import ResponseMetrics, Usage
from runtime.http.schemas import ChatCompletionRequest
from runtime.http.tools.choice import ToolUse
from runtime.http.tools.scanner import CallPart
from runtime.text.chat import begun_object

EMPTY = b"{}"
Piece = str | CallPart


class MessageChoice(ChatAnswer):
    """The one answer of a message; *limit* is the number of tokens that the request allows."""

    def __init__(self, body: ChatCompletionRequest, texts: TokenTexts, use: ToolUse, limit: int) -> None:
        super().__init__(0, body, texts, use)
        self._limit = limit

    @property
    def stop(self) -> tuple[StopReason, str | None]:
        """Why the answer ended, and the stop sequence that it ended with."""
        if self.finish_reason == "length":
            return ("max_tokens" if self.num_tokens >= self._limit else "model_context_window_exceeded"), None
        if self.calls:
            return "tool_use", None
        if isinstance(self.stop_reason, str):
            return "stop_sequence", self.stop_reason
        return "end_turn", None

    def take(self) -> list[Piece]:
        """Return the pieces that were added since the last call, and forget them. Adjacent texts are one piece."""
        pieces, self.pieces, self.text, self.logprobs = self.pieces, [], "", []
        taken: list[Piece] = []
        for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
            found = [*run]
            taken += ["".join(map(str, found))] if is_text else found
        return [piece for piece in taken if piece]

    def render(self) -> MessageContent:
        """See `Choice`."""
        return MessageContent(content_blocks(self.take()), *self.stop)


def content_blocks(pieces: Sequence[Piece]) -> list[ContentBlock]:
    """Return the content blocks that *pieces* make."""
    blocks: list[tuple[str | None, str]] = []  # the name of a call, and text or arguments
    for piece in pieces:
        name, text = (None, piece) if isinstance(piece, str) else (piece.name, piece.arguments)
        starts_block = not blocks or (name is not None if isinstance(piece, CallPart) else blocks[-1][0] is not None)
        if starts_block:
            blocks.append((name, text))
        else:
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + text)
    return [TextBlock(text) if name is None else ToolUseBlock(_call_id(), name, _input(text)) for name, text in blocks]


def _input(arguments: str) -> msgspec.Raw:
    """Return *arguments* as JSON; of an object that was cut off at `max_tokens`, what is there."""
    try:
        found = from_json(arguments)
    except ValueError:
        return msgspec.Raw(to_json(begun_object(arguments) or {}))
    return msgspec.Raw(arguments.encode() if isinstance(found, dict) else EMPTY)


def _call_id() -> str:
    return f"toolu_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True)
class MessageEnvelope(Envelope):
    """The fields of a message around its content."""

    id: str
    model: str

    def wrap(
        self,
        choices: list[Any],
        usage: Usage | UnsetType | None = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> MessageAnswer:
        """See `Envelope`. *choices* is one `MessageContent`; none at the beginning of a stream."""
        assert isinstance(usage, Usage)
        blocks, reason, sequence = ([], None, None) if not choices else msgspec.structs.astuple(choices[0])
        return MessageAnswer(self.id, self.model, blocks, reason, sequence, message_usage(usage), metrics=metrics)


class MessageEventWriter(EventWriter):
    """Writes a message as the events of Anthropic's API."""

    def __init__(self, job: CompletionJob, choice: MessageChoice) -> None:
        super().__init__(job)
        self._choice = choice
        self._has_begun = False
        self._num_blocks = 0
        self._open: type[ContentBlock] | None = None  # the kind of the block that has not ended

    def add(self, batch: Sequence[Delta]) -> list[bytes]:
        """See `EventWriter`."""
        for delta in batch:
            self.job.add(delta)
        return [_encoded(event) for event in self._events()] if self._choice.num_tokens else []

    def finish(self) -> list[bytes]:
        """See `EventWriter`."""
        usage = message_usage(self.job.usage())
        end = MessageDelta(MessageEnd(*self._choice.stop), usage, self.job.metrics())
        return [_encoded(event) for event in (*self._events(), *self._close(), end, MessageStop())]

    def fail(self, error: ApiError) -> list[bytes]:
        """See `EventWriter`."""
        status = message_status(error.status, error.code)
        return [_event("error", message_error_body(status, error.message, error.code))]

    def _events(self) -> Iterator[MessageEvent]:
        """Yield the events of what was added. The first has the prompt's counts, so it waits for the first token."""
        if not self._has_begun:
            self._has_begun = True
            message = self.job.envelope.wrap([], self.job.usage())
            assert isinstance(message, MessageAnswer)
            yield MessageStart(message)
            yield Ping()
        for piece in self._choice.take():
            yield from self._text(piece) if isinstance(piece, str) else self._call(piece)

    def _text(self, text: str) -> Iterator[MessageEvent]:
        if self._open is not TextBlock:
            yield from self._start(TextBlock(""))
        yield ContentBlockDelta(self._num_blocks - 1, TextDelta(text))

    def _call(self, part: CallPart) -> Iterator[MessageEvent]:
        if part.name is not None:
            yield from self._start(ToolUseBlock(_call_id(), part.name, msgspec.Raw(EMPTY)))
        yield ContentBlockDelta(self._num_blocks - 1, InputJsonDelta(part.arguments))

    def _start(self, block: ContentBlock) -> Iterator[MessageEvent]:
        yield from self._close()
        self._open = type(block)
        self._num_blocks += 1
        yield ContentBlockStart(self._num_blocks - 1, block)

    def _close(self) -> Iterator[MessageEvent]:
        if self._open is not None:
            self._open = None
            yield ContentBlockStop(self._num_blocks - 1)


def _encoded(event: MessageEvent) -> bytes:
    return _event(str(event.__struct_config__.tag), msgspec.json.encode(event))


def _event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
