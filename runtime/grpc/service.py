"""The methods of `slipstream.v1.GenerationService`, independent of the server.

Two adapters use them: `runtime.grpc.servicer` on grpc.aio, and the ingress of Ray Serve.
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
from runtime.grpc import parsing
from runtime.grpc.errors import StatusError, as_status
from runtime.grpc.sample_writer import SampleWriter, pad
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
    "stalled": pb.SERVER_STATE_STALLED,
}
METRICS_FIELD = "per_request_spec_decode_metrics"
LEVELS: dict[int, SpecMetrics] = {
    pb.SPEC_DECODE_METRICS_NONE: "none",
    pb.SPEC_DECODE_METRICS_SUMMARY: "summary",
    pb.SPEC_DECODE_METRICS_DETAILED: "detailed",
}

Message = TypeVar("Message")
Reply = TypeVar("Reply")
Method = Callable[["GenerationService", Message], Awaitable[Reply]]


def _with_statuses(method: Method[Message, Reply]) -> Method[Message, Reply]:
    """Convert every error of a unary *method* to a `StatusError`."""

    @wraps(method)
    async def guarded(self: "GenerationService", message: Message) -> Reply:
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

    def messages(self, batch: Sequence[Delta]) -> list[pb.GenerateResponse]:
        """Add *batch* to the writers; return the messages to send, as one packet."""
        for delta in batch:
            self.writers[delta.index].add(delta.output)
        touched = sorted({delta.index for delta in batch})
        messages = [message for index in touched for message in self.writers[index].write()]
        if not messages and self.pacing is UNPACED:
            return []
        messages = messages or [pb.GenerateResponse()]
        for message in messages:
            message.request_id = self.request_id
        pad(messages, self.pacing)
        return messages


class GenerationService:
    """The service's methods over one engine. Every error they raise is a `StatusError`.

    Args:
        engine: closed by the caller.
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
        """Stream the answer; *request_id* is used if the message has none.

        Closing the generator aborts the request; its blocks are free within a step.
        """
        try:
            job = await self._job(message, parsing.request_id(message, request_id))
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
                for response in job.messages(batch):
                    yield response

    async def _job(self, message: pb.GenerateRequest, request_id: str) -> _Job:
        """Validate *message*; nothing is scheduled yet."""
        self.model_name(message.model)
        timeout_s = parsing.timeout_s(message)
        prompt, params = await self._prompt(message)
        # Clients may reuse an id, or retry a request before its first attempt is aborted.
        prepared = await self._engine.prepare(prompt, params, f"{request_id}-{uuid.uuid4().hex[:12]}")
        override = parsing.speculation_override(message.speculative_config)
        level = self._level(message.per_request_spec_decode_metrics)
        requests = [
            msgspec.structs.replace(each, cache_salt=message.cache_salt, wants_steps=level == "detailed")
            for each in apply_override(prepared, override, self._engine.info)
        ]
        streams = parsing.flag(message, "stream", default=True)
        writers = [
            SampleWriter(index, request, self._texts, streams=streams, level=level)
            for index, request in enumerate(requests)
        ]
        # An answer in one message is not paced.
        return _Job(request_id, requests, writers, timeout_s, self._options.pacing if streams else UNPACED)

    async def _prompt(self, message: pb.GenerateRequest) -> tuple[Prompt, SamplingParams]:
        kind, defaults = message.WhichOneof("prompt"), self._options.sampling_defaults
        if kind is None:
            raise InvalidRequestError("prompt must have text, token_ids or chat, got none of them", "prompt")
        if kind == "chat":
            params = parsing.sampling_params(message.sampling, {"max_tokens": None, **defaults})
            return await self._rendered(message.chat, params), params
        params = parsing.sampling_params(message.sampling, defaults)
        return (message.text if kind == "text" else list(parsing.bounded(message.token_ids.ids, "prompt"))), params

    async def _rendered(self, chat: pb.Chat, params: SamplingParams) -> Prompt:
        return await self._engine.render_chat(parsing.chat_messages(chat), params, **parsing.template_options(chat))

    def _level(self, requested: int) -> SpecMetrics:
        if requested not in pb.SpecDecodeMetrics.values():  # open enums keep numbers that the protocol does not define
            names = ", ".join(f"{name} ({number})" for name, number in pb.SpecDecodeMetrics.items())
            raise InvalidRequestError(f"{METRICS_FIELD} must be one of {names}, got {requested}", METRICS_FIELD)
        return LEVELS.get(requested, self._options.spec_metrics)

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
        adds = parsing.flag(message, "add_special_tokens", default=True)
        return await self._engine.tokenize(message.text, add_special_tokens=adds)

    @_with_statuses
    async def detokenize(self, message: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        """Return the text of token ids."""
        self.model_name(message.model)
        return pb.DetokenizeResponse(
            text=await self._engine.detokenize(list(parsing.bounded(message.token_ids, "tokens")))
        )

    @_with_statuses
    async def model_info(self, message: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        """Describe the model."""
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
        """Describe the server and its load."""
        del message  # has no fields
        stats = self._engine.stats()
        return pb.GetServerInfoResponse(
            version=self._options.version,
            state=STATES[self._engine.state],
            started_at=self._options.created,
            num_requests_running=stats.num_running,
            num_requests_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_usage,
        )

    def model_name(self, requested: str) -> str:
        """Return the served name for *requested*, the first one if empty. Raises `StatusError` if it is not served."""
        names = self._options.model_names
        if not requested or requested in self._options.unlisted_names:
            return names[0]
        if requested not in names:
            served = ", ".join(names)
            raise StatusError("NOT_FOUND", f"the model {requested[:LONGEST_NAME]!r} does not exist; served: {served}")
        return requested
