"""The OpenAPI document: what every route answers, errors included, and the key that it needs."""

from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from runtime.http.errors import ErrorBody
from runtime.http.responses import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
)
from runtime.http.server.guard import OPEN_PATHS

COMPONENT = "#/components/schemas/{name}"
EVENTS = "Server-sent events where `stream` is true: `data: ` and JSON of the form {name}, in the end `data: [DONE]`."
ANSWERS: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": Completion,
    "/v1/chat/completions": ChatCompletion,
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/tokenize": Tokenized,
    "/detokenize": Detokenized,
}
STREAMS: dict[str, type[msgspec.Struct]] = {"/v1/completions": Completion, "/v1/chat/completions": ChatCompletionChunk}
PLAIN: dict[str, dict[str, Any]] = {
    "/health": {},
    "/metrics": {"text/plain": {"schema": {"type": "string"}}},
    "/version": {
        "application/json": {
            "schema": {"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}
        }
    },
}
KEY = "key"


def install(app: FastAPI) -> None:
    """Let *app* describe itself in full; made when first asked for."""
    app.openapi = partial(_document, app)  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        described: set[type[msgspec.Struct]] = {*ANSWERS.values(), *STREAMS.values(), ErrorBody}
        kinds = sorted(described, key=lambda each: each.__name__)
        _, schemas = msgspec.json.schema_components(kinds, ref_template=COMPONENT)
        document["components"] = {"schemas": schemas, "securitySchemes": {KEY: {"type": "http", "scheme": "bearer"}}}
        document["paths"] = {_plain(path): _path(_plain(path), methods) for path, methods in document["paths"].items()}
        app.openapi_schema = document
    return app.openapi_schema


def _plain(path: str) -> str:
    """Return *path* without what only the router understands."""
    return path.replace(":path}", "}")


def _path(path: str, methods: dict[str, Any]) -> dict[str, Any]:
    keyed: dict[str, Any] = {} if path in OPEN_PATHS else {"security": [{}, {KEY: []}]}
    return {method: {**operation, **keyed, "responses": _responses(path)} for method, operation in methods.items()}


def _responses(path: str) -> dict[str, Any]:
    content = dict(PLAIN.get(path, {}))
    if path in ANSWERS:
        content["application/json"] = {"schema": _reference(ANSWERS[path])}
    if path in STREAMS:
        said = EVENTS.format(name=STREAMS[path].__name__)
        event = {"type": "object", "properties": {"data": {"type": "string"}}, "description": said}
        content["text/event-stream"] = {"schema": event}
    error = {"description": "what went wrong", "content": {"application/json": {"schema": _reference(ErrorBody)}}}
    return {"200": {"description": "the answer", "content": content}, "default": error}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": COMPONENT.format(name=kind.__name__)}
