"""What each method of `slipstream.v1.GenerationService` does, without a server: messages in, messages or statuses out.

Two thin adapters use it: `runtime.grpc.servicer` on grpc.aio, and the Ray Serve ingress.
"""

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import msgspec

from protos import slipstream_v1_pb2 as pb
from protos.errors import InvalidRequestError
from protos.messages import Request
from protos.sampling import SamplingParams
from runtime.frontend.client import EngineClient, Prompt
from runtime.frontend.pacing import UNPACED, Pacing
from runtime.frontend.speculation_override import apply_override
from runtime.frontend.stream_queue import Delta
from runtime.grpc import reading
from runtime.grpc.errors import StatusError, as_status
from runtime.grpc.writing import SampleWriter, padded
from runtime.http.context import ServerOptions
from runtime.http.render import TokenTexts
from runtime.http.schemas import SpecMetrics

LONGEST_NAME = 200
STATES = {
    "starting": pb.SERVER_STATE_STARTING,
    "live": pb.SERVER_STATE_LIVE,
    "degraded": pb.SERVER_STATE_DEGRADED,
    "draining": pb.SERVER_STATE_DRAINING,
    "dead": pb.SERVER_STATE_DEAD,
}
LEVELS: dict[int, SpecMetrics] = {
    pb.SPEC_DECODE_METRICS_NONE: "none",
    pb.SPEC_DECODE_METRICS_SUMMARY: "summary",
    pb.SPEC_DECODE_METRICS_DETAILED: "detailed",
}

Message = TypeVar("Message")
Reply = TypeVar("Reply")
Method = Callable[["Answering", Message], Awaitable[Reply]]


def _with_statuses(method: Method[Message, Reply]) -> Method[Message, Reply]:
    """Let a unary *method* raise nothing but `StatusError`."""

    @wraps(method)
    async def guarded(self: "Answering", message: Message) -> Reply:
        try:
            return await method(self, message)
        except Exception as error:
            raise as_status(error) from None

    return guarded


@dataclass(frozen=True)
class _Job:
    """One call of Generate, validated and ready to run: a writer for each request."""

    request_id: str
    requests: Sequence[Request]
    writers: Sequence[SampleWriter]
    timeout_s: float | None
    pacing: Pacing

    def written(self, batch: Sequence[Delta]) -> list[pb.GenerateResponse]:
        """Return what *batch* has the client told, in messages that are sent together."""
        for delta in batch:
            self.writers[delta.index].take(delta.output)
        touched = sorted({delta.index for delta in batch})
        messages = [message for index in touched for message in self.writers[index].write()]
        if not messages and self.pacing is UNPACED:
            return []
        messages = messages or [pb.GenerateResponse()]
        for message in messages:
            message.request_id = self.request_id
        padded(messages, self.pacing)
        return messages


class Answering:
    """The interface's methods over one engine. Every error they raise is a `StatusError`.

    Args:
        engine: answers; it stays the caller's to close.
        texts: the texts of tokens.
        options: as for HTTP.
    """

    def __init__(self, engine: EngineClient, texts: TokenTexts, options: ServerOptions) -> None:
        self._engine = engine
        self._texts = texts
        self._options = options

    async def generate(
        self, message: pb.GenerateRequest, request_id: str | None = None
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream the answer; *request_id* is one told beside the message, used where the message has none.

        Closing the generator aborts the request; its blocks are free within a step.
        """
        try:
            job = await self._job(message, reading.request_id(message, request_id))
            async with aclosing(self._responses(job)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            raise as_status(error) from None

    async def _responses(self, job: _Job) -> AsyncGenerator[pb.GenerateResponse, None]:
        async with (
            aclosing(self._engine.stream(job.requests, job.timeout_s)) as deltas,
            aclosing(job.pacing.batches(deltas)) as batches,
        ):
            async for batch in batches:
                for response in job.written(batch):
                    yield response

    async def _job(self, message: pb.GenerateRequest, request_id: str) -> _Job:
        """Validate everything *message* asks for; nothing is scheduled yet."""
        self.model_name(message.model)
        timeout_s = reading.timeout_s(message)
        prompt, params = await self._prompt(message)
        # Clients may name two requests alike, and try one again before its first try is gone.
        prepared = await self._engine.prepare(prompt, params, f"{request_id}-{uuid.uuid4().hex[:12]}")
        override = reading.speculation_override(message.speculative_config)
        level = self._level(message.per_request_spec_decode_metrics)
        requests = [
            msgspec.structs.replace(each, cache_salt=message.cache_salt, wants_steps=level == "detailed")
            for each in apply_override(prepared, override, self._engine.info)
        ]
        streams = reading.given(message, "stream", default=True)
        writers = [
            SampleWriter(index, request, self._texts, streams=streams, level=level)
            for index, request in enumerate(requests)
        ]
        # An answer in one piece has no pace.
        return _Job(request_id, requests, writers, timeout_s, self._options.pacing if streams else UNPACED)

    async def _prompt(self, message: pb.GenerateRequest) -> tuple[Prompt, SamplingParams]:
        kind, defaults = message.WhichOneof("prompt"), self._options.sampling_defaults
        if kind is None:
            raise InvalidRequestError("prompt must have text, token_ids or chat, got none of them", "prompt")
        if kind == "chat":
            params = reading.sampling_params(message.sampling, {"max_tokens": None, **defaults})
            return await self._rendered(message.chat, params), params
        params = reading.sampling_params(message.sampling, defaults)
        return (message.text if kind == "text" else list(message.token_ids.ids)), params

    async def _rendered(self, chat: pb.Chat, params: SamplingParams) -> Prompt:
        return await self._engine.render_chat(reading.chat_messages(chat), params, **reading.template_options(chat))

    def _level(self, asked: int) -> SpecMetrics:
        return LEVELS.get(asked, self._options.spec_metrics)

    @_with_statuses
    async def tokenize(self, message: pb.TokenizeRequest) -> pb.TokenizeResponse:
        """Return the ids of a text or of a rendered conversation."""
        self.model_name(message.model)
        return pb.TokenizeResponse(
            token_ids=await self._token_ids(message), max_model_len=self._engine.info.max_model_len
        )

    async def _token_ids(self, message: pb.TokenizeRequest) -> Sequence[int]:
        kind = message.WhichOneof("prompt")
        if kind is None:
            raise InvalidRequestError("prompt must have text or chat, got neither", "prompt")
        if kind == "chat":
            rendered: Any = await self._rendered(message.chat, SamplingParams())
            return tuple(rendered.token_ids)
        adds = reading.given(message, "add_special_tokens", default=True)
        return await self._engine.tokenize(message.text, add_special_tokens=adds)

    @_with_statuses
    async def detokenize(self, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        self.model_name(message.model)
        return pb.DetokenizeResponse(text=await self._engine.detokenize(list(message.token_ids)))

    @_with_statuses
    async def model_info(self, message: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        """Return what is served."""
        info = self._engine.info
        return pb.GetModelInfoResponse(
            model=self.model_name(message.model),
            served_model_names=self._options.model_names,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_ids,
            speculative_methods=info.methods,
            num_speculative_tokens=info.num_speculative_tokens,
        )

    @_with_statuses
    async def server_info(self, message: pb.GetServerInfoRequest) -> pb.GetServerInfoResponse:
        """Return what serves it, and how busy it is."""
        del message  # it asks nothing
        stats = self._engine.stats()
        return pb.GetServerInfoResponse(
            version=self._options.version,
            state=STATES[self._engine.state],
            started_at=self._options.created,
            num_requests_running=stats.num_running,
            num_requests_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_usage,
        )

    def model_name(self, asked: str) -> str:
        """Return the served name *asked* for, the first for none. Raises `StatusError` for one that is not served."""
        names = self._options.model_names
        if not asked or asked in self._options.unlisted_names:
            return names[0]
        if asked not in names:
            served = ", ".join(names)
            raise StatusError("NOT_FOUND", f"the model {asked[:LONGEST_NAME]!r} does not exist; served: {served}")
        return asked
