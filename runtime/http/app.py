"""The application: routes, bodies, limits, and figures of what was answered."""

import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.errors import InvalidRequestError
from protos.validation import did_you_mean, one_line
from runtime.engine import EngineClient
from runtime.http import errors
from runtime.http.chat import chat_job
from runtime.http.completions import completion_job
from runtime.http.errors import ApiError
from runtime.http.render import Decoder, TokenTexts
from runtime.http.responding import Job, respond_in_chunks, respond_whole
from runtime.http.responses import ModelCard, ModelList
from runtime.http.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest, SpecMetrics, screen
from runtime.metrics import CONTENT_TYPE, Metrics

MAX_BODY_BYTES = 32 * 1024 * 1024
REQUEST_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)

Body = TypeVar("Body", bound=GenerationRequest)


@dataclass(frozen=True)
class ServerOptions:
    """What the server is told beside its engine.

    The first of `model_names` is the one answers carry by default; `unlisted_names` are taken for it, but not told.
    """

    model_names: tuple[str, ...]
    version: str
    unlisted_names: tuple[str, ...] = ()
    spec_metrics: SpecMetrics = "none"
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True)
class Server:
    """What the routes work with."""

    engine: EngineClient
    metrics: Metrics
    options: ServerOptions
    texts: TokenTexts

    def model_name(self, asked: str | None) -> str:
        """Return the served name *asked* for. Raises `ApiError` 404 for a name that is not served."""
        names = self.options.model_names
        if asked is None or asked in self.options.unlisted_names:
            return names[0]
        if asked not in names:
            served = ", ".join(names)
            raise ApiError(
                404, f"the model {asked[:200]!r} does not exist; served: {served}", "model", "model_not_found"
            )
        return asked

    def card(self, name: str) -> ModelCard:
        """Describe a served name."""
        return ModelCard(name, self.options.created, self.engine.info.max_model_len)


def create_app(engine: EngineClient, tokenizer: Decoder, metrics: Metrics, options: ServerOptions) -> FastAPI:
    """Build the application around a started engine, which stays the caller's to close."""
    server = Server(engine, metrics, options, TokenTexts(tokenizer))
    app = FastAPI(title="Slipstream", version=options.version, docs_url=None, redoc_url=None)
    errors.install(app)
    _add_service_routes(app, server)
    _add_model_routes(app, server)
    _add_generation_routes(app, server)
    app.add_middleware(Observed, metrics=metrics)
    return app


def _json(body: msgspec.Struct | dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


def _add_service_routes(app: FastAPI, server: Server) -> None:
    @app.get("/health")
    async def health() -> Response:
        """200 while the engine can answer, else 503."""
        if not server.engine.is_alive:
            raise ApiError(503, "the engine has stopped; its log says why", code="engine_dead")
        return Response()

    @app.get("/version")
    async def version() -> Response:
        """The version that runs."""
        return _json({"version": server.options.version})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Everything in Prometheus' text format."""
        return Response(server.metrics.render(), headers={"content-type": CONTENT_TYPE})


def _add_model_routes(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The served names."""
        return _json(ModelList([server.card(name) for name in server.options.model_names]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One served name; names may hold slashes."""
        return _json(server.card(server.model_name(name)))


def _add_generation_routes(app: FastAPI, server: Server) -> None:
    @app.post("/v1/completions", openapi_extra=_described(CompletionRequest))
    async def completions(http: Request) -> Response:
        """Continue one or several prompts."""
        body = await read_body(http, CompletionRequest)
        job = await completion_job(server.engine, body, server.model_name(body.model), server.texts)
        return await _respond(server, http, body, job)

    @app.post("/v1/chat/completions", openapi_extra=_described(ChatCompletionRequest))
    async def chat_completions(http: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(http, ChatCompletionRequest)
        job = await chat_job(server.engine, body, server.model_name(body.model), server.texts)
        return await _respond(server, http, body, job)


async def _respond(server: Server, http: Request, body: GenerationRequest, job: Job) -> Response:
    wanted = body.per_request_spec_decode_metrics or server.options.spec_metrics
    job = replace(job, wants_metrics=wanted == "summary")
    if body.stream:
        return respond_in_chunks(server.engine, job)
    return await respond_whole(server.engine, job, http)


def _described(model: type[GenerationRequest]) -> dict[str, Any]:
    """The OpenAPI entry of a body that is read by `read_body`."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


async def read_body(http: Request, model: type[Body]) -> Body:
    """Read and check a JSON body.

    Raises:
        ApiError: 415 for another content type, 413 for one too long, 400 for what is not JSON.
        InvalidRequestError: a field is unknown, missing or wrong.
    """
    kind = http.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body must be sent as content-type: application/json, got {kind[:80]!r}")
    try:
        fields = msgspec.json.decode(await _read_bytes(http))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {why}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return _validated(screen(fields), model)


async def _read_bytes(http: Request) -> bytes:
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body must have at most {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _validated(fields: dict[str, Any], model: type[Body]) -> Body:
    known = model.model_fields.keys()
    for name in fields.keys() - known:
        raise InvalidRequestError(f"unknown field {name[:80]!r}{did_you_mean(name[:80], known)}", name[:80])
    for name in known - fields.keys():
        if model.model_fields[name].is_required():
            raise InvalidRequestError(f"{name} is required", name)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(*one_line(error, known)) from None


class Observed:
    """Counts answers by route template, and gives each an `x-request-id`: the client's own, or a new one."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, self._counting(scope, send))

    def _counting(self, scope: Scope, send: Send) -> Callable[[Message], Awaitable[None]]:
        request_id = _request_id(scope)

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id)]}
                route = getattr(scope.get("route"), "path", None)
                self._metrics.answered(scope["method"], route, message["status"])
            await send(message)

        return counting


def _request_id(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if REQUEST_ID.fullmatch(given.decode("latin-1")) else uuid.uuid4().hex.encode()
