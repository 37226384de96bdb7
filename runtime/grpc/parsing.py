"""Converts messages of `slipstream.v1` to the engine's types. Sampling fields have the names of `SamplingParams`."""

import uuid
from collections.abc import Callable, Mapping
from typing import Any

from protos import slipstream_v1_pb2 as pb
from protos.errors import InvalidRequestError
from protos.sampling import SamplingParams
from protos.validation import shown
from runtime.frontend.speculation_override import SpeculationOverride
from runtime.http.server.limits import REQUEST_ID

MAX_REPEATED = 1 << 20
"""Most entries of a repeated field, such as the token ids of a prompt."""
MAX_CHAT_MESSAGES = 1 << 14


def bounded(values: Any, name: str, limit: int = MAX_REPEATED) -> Any:
    """Return *values*, which have not been copied yet. Raises `InvalidRequestError` if there are more than *limit*."""
    if len(values) > limit:
        raise InvalidRequestError(f"{name} must have at most {limit} items, got {len(values)} items", name)
    return values


def request_id(message: pb.GenerateRequest, in_metadata: str | None = None) -> str:
    """Return the request id of the message, else the one *in_metadata*, else a new one.

    Raises:
        InvalidRequestError: it is too long, or has invalid characters.
    """
    name = str(message.request_id or in_metadata or "")
    if not name:
        return uuid.uuid4().hex
    if not REQUEST_ID.fullmatch(name):
        raise InvalidRequestError(
            f"request_id must be 1 to 128 characters of A-Z a-z 0-9 _ . : / + = -, got {shown(name)}", "request_id"
        )
    return name


def timeout_s(message: pb.GenerateRequest) -> float | None:
    """Return the time limit in seconds, None for the server's limit. Raises `InvalidRequestError`."""
    if not message.HasField("timeout_ms"):
        return None
    if message.timeout_ms == 0:
        raise InvalidRequestError("timeout_ms must be at least 1, got 0; leave it out for the server's limit")
    return float(message.timeout_ms) / 1000


def flag(message: Any, name: str, *, default: bool) -> bool:
    """Return an optional flag of *message*, *default* if it is not set."""
    return bool(getattr(message, name)) if message.HasField(name) else default


def speculation_override(message: pb.SpeculativeConfig) -> SpeculationOverride:
    """Return the speculation override of a request."""
    return SpeculationOverride(**_fields(message))


def sampling_params(message: pb.SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of *message*, with *defaults* for those it leaves out.

    Raises:
        InvalidRequestError: names the field, the value and the limit.
    """
    values = {**defaults, **_fields(message)}
    for name in ("logprobs", "prompt_logprobs"):
        if message.HasField(name) and values[name] < 0:  # the whole vocabulary at every position would be too large
            raise InvalidRequestError(f"{name} must be at least 0, got {values[name]}", name)
    return SamplingParams(**values)


def _fields(message: Any) -> dict[str, Any]:
    """Return the fields that are set in *message*, by name. Optional fields may be zero."""
    return {
        field.name: _CONVERTERS.get(field.name, _scalar_or_tuple)(
            bounded(value, field.name) if field.is_repeated else value
        )
        for field, value in message.ListFields()
    }


def _scalar_or_tuple(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) else tuple(value)


def _prediction(message: pb.Prediction) -> str | tuple[int, ...] | None:
    kind = message.WhichOneof("content")
    if kind is None:
        return None
    return str(message.text) if kind == "text" else tuple(bounded(message.token_ids.ids, "prediction"))


def _choices(message: pb.Choices) -> tuple[str, ...]:
    return tuple(bounded(message.choices, "choice"))


_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "logit_bias": dict,
    "prediction": _prediction,
    "structured_outputs": _fields,
    "choice": _choices,
}
"""Converters of fields that are neither scalars nor lists of scalars."""


def chat_messages(chat: pb.Chat) -> list[dict[str, str]]:
    """Return the messages of a conversation in the format of chat templates."""
    return [_chat_message(message) for message in bounded(chat.messages, "messages", MAX_CHAT_MESSAGES)]


def _chat_message(message: pb.ChatMessage) -> dict[str, str]:
    named = {"name": message.name} if message.HasField("name") else {}
    return {"role": message.role, "content": message.content, **named}


def template_options(chat: pb.Chat) -> dict[str, bool]:
    """Return the options of the chat template."""
    names = ("add_generation_prompt", "continue_final_message")
    return {name: getattr(chat, name) for name in names if chat.HasField(name)}
