"""The OpenAPI document: the responses of every route, errors included, and the API key."""

from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from runtime.http.errors import ErrorBody
from runtime.http.messages.answers import MessageAnswer, MessageEvent, TokenCount
from runtime.http.messages.errors import MessageErrorBody
from runtime.http.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
)
from runtime.http.responses_api.objects import ResponseEvent, ResponseObject
from runtime.http.server.guard import OPEN_PATHS
from runtime.http.server.paths import MESSAGES_PATHS

COMPONENT = "#/components/schemas/{name}"
EVENTS = "Server-sent events where `stream` is true: `data: ` and JSON of the form {name}, finally `data: [DONE]`."
NAMED_EVENTS = "Server-sent events where `stream` is true: `event: ` and a type, `data: ` and JSON of the form {name}."
ANSWERS: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/responses": ResponseObject,
    "/v1/messages": MessageAnswer,
    "/v1/messages/count_tokens": TokenCount,
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/tokenize": Tokenized,
    "/detokenize": Detokenized,
}
STREAMS: dict[str, tuple[str, type[msgspec.Struct]]] = {
    "/v1/completions": (EVENTS, Completion),
    "/v1/chat/completions": (EVENTS, ChatCompletionChunk),
    "/v1/responses": (NAMED_EVENTS, ResponseEvent),
    "/v1/messages": (NAMED_EVENTS, MessageEvent),
}
OTHER_ANSWERS: dict[str, dict[str, Any]] = {
    "/health": {},
    "/metrics": {"text/plain": {"schema": {"type": "string"}}},
    "/version": {
        "application/json": {
            "schema": {"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}
        }
    },
}
KEY, HEADER_KEY = "key", "header_key"
SECURITY: dict[str, Any] = {
    KEY: {"type": "http", "scheme": "bearer"},
    HEADER_KEY: {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def install(app: FastAPI) -> None:
    """Set the document of *app*, which is built on first use."""
    app.openapi = partial(_document, app)  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        streamed = {kind for _, kind in STREAMS.values()}
        described: set[type[msgspec.Struct]] = {*ANSWERS.values(), *streamed, ErrorBody, MessageErrorBody}
        kinds = sorted(described, key=lambda each: each.__name__)
        _, schemas = msgspec.json.schema_components(kinds, ref_template=COMPONENT)
        document["components"] = {"schemas": schemas, "securitySchemes": SECURITY}
        document["paths"] = {
            _without_converter(path): _path(_without_converter(path), methods)
            for path, methods in document["paths"].items()
        }
        app.openapi_schema = document
    return app.openapi_schema


def _without_converter(path: str) -> str:
    """Return *path* without the converter of the router."""
    return path.replace(":path}", "}")


def _path(path: str, methods: dict[str, Any]) -> dict[str, Any]:
    keyed: dict[str, Any] = {} if path in OPEN_PATHS else {"security": [{}, {KEY: []}, {HEADER_KEY: []}]}
    return {method: {**operation, **keyed, "responses": _responses(path)} for method, operation in methods.items()}


def _responses(path: str) -> dict[str, Any]:
    content = dict(OTHER_ANSWERS.get(path, {}))
    if path in ANSWERS:
        content["application/json"] = {"schema": _reference(ANSWERS[path])}
    if path in STREAMS:
        template, kind = STREAMS[path]
        description = template.format(name=kind.__name__)
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "description": description}
        content["text/event-stream"] = {"schema": event}
    refusal = _reference(MessageErrorBody if path in MESSAGES_PATHS else ErrorBody)
    error = {"description": "what went wrong", "content": {"application/json": {"schema": refusal}}}
    return {"200": {"description": "the answer", "content": content}, "default": error}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": COMPONENT.format(name=kind.__name__)}
