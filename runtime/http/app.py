"""The HTTP application: its routes and middleware."""

import uuid
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.frontend.client import EngineClient
from runtime.http import errors, openapi, pages, tokenizing
from runtime.http.bodies import described, json_response, read_body
from runtime.http.chat import chat_job
from runtime.http.completions import completion_job
from runtime.http.context import RouteContext, ServerOptions
from runtime.http.errors import ApiError
from runtime.http.messages import routes as messages
from runtime.http.render import Decoder, TokenTexts
from runtime.http.responding import respond
from runtime.http.responses import ModelList
from runtime.http.responses_api import routes as responses_api
from runtime.http.schemas import ChatCompletionRequest, CompletionRequest
from runtime.http.server.guard import Guard
from runtime.http.server.limits import REQUEST_ID
from runtime.http.server.paths import MESSAGES_PATHS, routed_path
from runtime.metrics.logs import HTTP_REQUEST_ID
from runtime.metrics.prometheus import CONTENT_TYPE, Metrics


def create_app(engine: EngineClient, tokenizer: Decoder, metrics: Metrics, options: ServerOptions) -> FastAPI:
    """Build the application over a started engine. The caller closes the engine."""
    context = RouteContext(engine, options, TokenTexts(tokenizer))
    app = FastAPI(title="Slipstream", version=options.version, docs_url=None, redoc_url=None)
    errors.install(app)
    _add_service_routes(app, context, metrics)
    _add_model_routes(app, context)
    _add_generation_routes(app, context)
    responses_api.add_routes(app, context)
    messages.add_routes(app, context)
    tokenizing.add_routes(app, context)
    pages.add_routes(app)
    openapi.install(app)
    app.add_middleware(Guard, engine=engine, options=options.guard)
    app.add_middleware(RequestObserver, metrics=metrics)
    if origins := options.guard.sites.origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _add_service_routes(app: FastAPI, context: RouteContext, prometheus: Metrics) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """200 while requests are accepted, else 503."""
        if not context.engine.is_alive:
            raise ApiError(503, "the engine has stopped; see its log", code="engine_dead")
        context.engine.check_running()
        if context.engine.state == "draining":
            raise ApiError(503, "the server is about to stop and takes no new requests", code="draining")
        outage = context.engine.stats().outage
        if outage is not None and outage.lacks:
            raise ApiError(503, str(outage), code="no_room")
        return Response()

    @app.get("/version")
    async def version() -> Response:
        """The version of the server."""
        return json_response({"version": context.options.version})

    @app.get("/metrics")
    async def metrics() -> Response:
        """All metrics in Prometheus' text format."""
        return Response(prometheus.render(), headers={"content-type": CONTENT_TYPE})


def _add_model_routes(app: FastAPI, context: RouteContext) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The served names."""
        return json_response(ModelList([context.card(name) for name in context.options.model_names]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One served name, which may contain slashes."""
        return json_response(context.card(context.model_name(name)))


def _add_generation_routes(app: FastAPI, context: RouteContext) -> None:
    @app.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(http: Request) -> Response:
        """Continue one or several prompts."""
        body = await read_body(http, CompletionRequest)
        return await respond(context, http, body, await completion_job(context, body))

    @app.post("/v1/chat/completions", openapi_extra=described(ChatCompletionRequest))
    async def chat_completions(http: Request) -> Response:
        """Answer a conversation."""
        body = await read_body(http, ChatCompletionRequest)
        return await respond(context, http, body, await chat_job(context, body))


class RequestObserver:
    """Counts responses by route template, and adds `x-request-id` to each: the client's own id, or a new one."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        HTTP_REQUEST_ID.set(request_id.decode())
        await self._app(scope, receive, self._counting(scope, send, request_id))

    def _counting(self, scope: Scope, send: Send, request_id: bytes) -> Callable[[Message], Awaitable[None]]:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_id_headers(scope, request_id)]}
                route = getattr(scope.get("route"), "path", None)
                self._metrics.answered(scope["method"], route, message["status"])
            await send(message)

        return counting


def _id_headers(scope: Scope, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers with the id; Anthropic's client reads another one than OpenAI's."""
    names = [b"x-request-id", b"request-id"] if routed_path(scope) in MESSAGES_PATHS else [b"x-request-id"]
    return [(name, request_id) for name in names]


def _request_id(scope: Scope) -> bytes:
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given if REQUEST_ID.fullmatch(given.decode("latin-1")) else uuid.uuid4().hex.encode()
