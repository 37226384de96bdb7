"""The answers of the Messages API and the events of its streams. Fields that are `UNSET` are left out."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from runtime.http.responses import ResponseMetrics, Usage

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(msgspec.Struct, frozen=True):
    """Token counts of a message. The tokens of the prompt are the sum of the first three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


def message_usage(usage: Usage) -> MessageUsage:
    """Return *usage* in Anthropic's form: prompt tokens from the prefix cache are counted apart."""
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens)


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text of the answer."""

    text: str
    citations: None = None


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A tool call of the answer; `input` is a JSON object."""

    id: str
    name: str
    input: msgspec.Raw


ContentBlock = TextBlock | ToolUseBlock


class MessageContent(msgspec.Struct, frozen=True):
    """The content of an answer, and why it ended."""

    blocks: list[ContentBlock]
    stop_reason: StopReason
    stop_sequence: str | None


class MessageAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """The response of `POST /v1/messages`. `stop_reason` is null at the beginning of a stream."""

    id: str
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"
    metrics: ResponseMetrics | UnsetType = UNSET


class TokenCount(msgspec.Struct, frozen=True):
    """The response of `POST /v1/messages/count_tokens`."""

    input_tokens: int


class MessageEvent(msgspec.Struct, frozen=True):
    """One event of a stream. Its `type`, the tag of its class, is also the name of the event."""


class MessageStart(MessageEvent, frozen=True, tag_field="type", tag="message_start"):
    """The first event of a stream: the message without its content."""

    message: MessageAnswer


class Ping(MessageEvent, frozen=True, tag_field="type", tag="ping"):
    """An event without content."""


class ContentBlockStart(MessageEvent, frozen=True, tag_field="type", tag="content_block_start"):
    """The beginning of the block at `index`: an empty text, or a call with an empty input."""

    index: int
    content_block: ContentBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """More of the JSON text of a call's input."""

    partial_json: str


class ContentBlockDelta(MessageEvent, frozen=True, tag_field="type", tag="content_block_delta"):
    """More of the block at `index`."""

    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStop(MessageEvent, frozen=True, tag_field="type", tag="content_block_stop"):
    """The end of the block at `index`."""

    index: int


class MessageEnd(msgspec.Struct, frozen=True):
    """Why a streamed message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(MessageEvent, frozen=True, tag_field="type", tag="message_delta"):
    """The end of a message, and the token counts of all of it."""

    delta: MessageEnd
    usage: MessageUsage
    metrics: ResponseMetrics | UnsetType = UNSET


class MessageStop(MessageEvent, frozen=True, tag_field="type", tag="message_stop"):
    """The last event of a stream."""
