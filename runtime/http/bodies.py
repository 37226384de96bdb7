"""Reads and validates JSON request bodies, and writes JSON responses."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from pydantic import ValidationError
from starlette.requests import ClientDisconnect

from protos.errors import InvalidRequestError
from protos.validation import did_you_mean, one_line
from runtime.http.errors import ApiError
from runtime.http.schemas import RequestBody
from runtime.http.server.json_size import PART_BYTES, JsonSize

log = logging.getLogger("slipstream")

MAX_BODY_BYTES = 32 * 1024 * 1024
LARGE_BYTES = 1 << 18
"""Longer bodies are parsed in a thread, so that the event loop can answer others between two steps of it."""
_LARGE_BODIES = ThreadPoolExecutor(1, "slipstream-bodies")

Body = TypeVar("Body", bound=RequestBody)


def described(model: type[RequestBody]) -> dict[str, Any]:
    """Return the OpenAPI entry of a body that `read_body` reads."""
    schema = model.model_json_schema()
    whole = _inlined(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return *schema* with references replaced by their definitions."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref", "").rpartition("/")[2]
    if name in definitions:
        return _inlined(definitions[name], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}


def json_response(body: msgspec.Struct | dict[str, Any]) -> Response:
    """Return 200 with *body*."""
    return Response(msgspec.json.encode(body), media_type="application/json")


async def read_body(http: Request, model: type[Body]) -> Body:
    """Read and validate a JSON body.

    Raises:
        ApiError: 415 for another content type, 413 for a body that is too large, 400 for invalid JSON.
        InvalidRequestError: a field is unknown, missing or invalid.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body must be sent as content-type: application/json, got {kind[:80]!r}")
    content = await _read_bytes(http)
    if len(content) <= LARGE_BYTES:
        return _parsed(content, model)
    return await asyncio.get_running_loop().run_in_executor(_LARGE_BODIES, _parsed, content, model)


async def _read_bytes(http: Request) -> bytes:
    """Return the body; check its size as its parts arrive."""
    body, size = bytearray(), JsonSize()
    try:
        async for part in http.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                raise ApiError(413, f"the body must have at most {MAX_BODY_BYTES} bytes")
            for start in range(0, len(part), PART_BYTES):
                size.add(part[start : start + PART_BYTES])
                if len(body) > PART_BYTES:
                    await asyncio.sleep(0)
    except ClientDisconnect:
        log.debug("a client disconnected after %d bytes of its body", len(body))
        raise ApiError(400, "the connection ended before the body") from None
    return bytes(body)


def _parsed(content: bytes, model: type[Body]) -> Body:
    try:
        fields = msgspec.json.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {why}") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the body must be a JSON object")
    return _validated(model.screened(fields), model)


def _validated(fields: dict[str, Any], model: type[Body]) -> Body:
    known = model.model_fields.keys()
    for name in fields:
        if name not in known:
            raise InvalidRequestError(f"unknown field {name[:80]!r}{did_you_mean(name[:80], known)}", name[:80])
    for name in known - fields.keys():
        if model.model_fields[name].is_required():
            raise InvalidRequestError(f"{name} is required", name)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise InvalidRequestError(*one_line(error, known)) from None
