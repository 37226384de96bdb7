"""The input of a response: text, or a list of items, as messages of a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

from protos.errors import InvalidRequestError
from protos.validation import shown
from runtime.http.fields.turns import Turns
from runtime.text.chat import TEXT_OF_PART

ROLES = ("user", "assistant", "system", "developer")
TEXTS: Mapping[str, str] = {**TEXT_OF_PART, "input_text": "text", "output_text": "text"}
"""The content parts that are text, and the field that has it."""


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Return the chat messages of an input; *instructions* are a system message before it.

    Reasoning items are left out. Successive items of one role are one message, with the calls among them.

    Raises:
        InvalidRequestError: an item is malformed or not supported; names its position.
    """
    turns = Turns()
    if instructions:
        turns.say("system", [instructions])
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequestError("input must have at least one item, got []", "input")
    for index, item in enumerate(given):
        _add(turns, item, f"input[{index}]")
    if not turns.found:
        raise InvalidRequestError(
            f"input must have at least one item other than reasoning, got {shown(given)}", "input"
        )
    return turns.found


def _add(turns: Turns, item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type")
    if kind == "message" or (kind is None and "role" in item):
        turns.say(_role(item, where), _texts(item.get("content"), f"{where}.content"))
    elif kind == "function_call":
        name, arguments = _text(item, "name", where), _text(item, "arguments", where)
        turns.call(_text(item, "call_id", where), name, arguments)
    elif kind == "function_call_output":
        turns.result(_text(item, "call_id", where), _texts(item.get("output"), f"{where}.output"))
    elif kind == "item_reference":
        raise InvalidRequestError(
            f"{where} is an item_reference, but responses are not stored: send the item itself (clients do with store "
            "set to false)",
            "input",
        )
    elif kind != "reasoning":
        raise InvalidRequestError(
            f"{where} has type {shown(kind)}, which is not supported: only message, function_call, "
            "function_call_output and reasoning are",
            "input",
        )


def _role(item: Mapping[str, Any], where: str) -> str:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", "input")
    return str(role)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be text, got {shown(value)}", "input")
    return value


def _texts(content: object, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of parts, got {shown(content)}", "input")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = TEXTS.get(kind) if isinstance(kind, str) else None
    if not isinstance(part, Mapping) or name is None:
        got = shown(part if kind is None else kind)
        raise InvalidRequestError(f"{where} has type {got}, which is not supported: only text is", "input")
    return _text(part, name, where)
