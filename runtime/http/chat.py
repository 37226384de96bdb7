"""`POST /v1/chat/completions`: a conversation, rendered by the model's chat template."""

import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from runtime.engine import EngineClient
from runtime.http.render import TokenTexts, chat_logprobs, prompt_logprobs
from runtime.http.responding import Choice, Envelope, Job, marked
from runtime.http.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    RequestMetrics,
    Usage,
)
from runtime.http.schemas import ChatCompletionRequest


@dataclass(frozen=True)
class ChatEnvelope(Envelope):
    """The fields that a chat completion, or all its chunks, have in common."""

    kind: type[ChatCompletion] | type[ChatCompletionChunk]
    id: str
    created: int
    model: str

    def wrap(
        self,
        choices: list[Any],
        usage: Usage | UnsetType | None = UNSET,
        metrics: RequestMetrics | UnsetType = UNSET,
    ) -> msgspec.Struct:
        """See `Envelope`."""
        return self.kind(self.id, self.created, self.model, choices, usage=usage, metrics=metrics)


class _ChatChoice(Choice):
    """What both forms of a chat choice have in common."""

    def __init__(self, index: int, body: ChatCompletionRequest, texts: TokenTexts) -> None:
        super().__init__(index)
        self.body = body
        self.texts = texts

    def written_logprobs(self) -> ChatLogprobs | None:
        """Return the pending log-probabilities, where they were asked for."""
        num_top = self.body.num_logprobs
        return None if num_top is None else chat_logprobs(self.logprobs, self.texts, num_top)


class ChatWriter(_ChatChoice):
    """One choice of a chat completion."""

    def written(self) -> ChatChoice:
        """See `Choice`."""
        shown = UNSET if self.body.prompt_logprobs is None else prompt_logprobs(self.prompt_logprobs, self.texts)
        message = ChatMessage(self.text)
        return ChatChoice(self.index, message, self.written_logprobs(), self.finish_reason, self.stop_reason, shown)


class ChatChunkWriter(_ChatChoice):
    """One choice of a streamed chat completion; its first chunk names the role."""

    role: Literal["assistant"] | UnsetType = "assistant"

    def written(self) -> ChatChunkChoice:
        """See `Choice`."""
        delta = ChatDelta(self.text, self.role)
        self.role = UNSET
        return ChatChunkChoice(self.index, delta, self.written_logprobs(), self.finish_reason, self.stop_reason)


async def chat_job(engine: EngineClient, body: ChatCompletionRequest, model: str, texts: TokenTexts) -> Job:
    """Validate everything *body* asks for; nothing is scheduled yet.

    Raises:
        InvalidRequestError: names the field, the value and the limit.
    """
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    params = body.chat_sampling()
    prompt = await engine.render_chat(body.messages, params, **body.template_options)
    group = marked(await engine.prepare(prompt, params, request_id), body)
    kind, writer = (ChatCompletionChunk, ChatChunkWriter) if body.stream else (ChatCompletion, ChatWriter)
    choices = [writer(index, body, texts) for index in range(len(group))]
    return Job([group], choices, ChatEnvelope(kind, request_id, int(time.time()), model), body.wants_usage)
