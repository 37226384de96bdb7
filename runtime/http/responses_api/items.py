"""The input of a response: text, or a list of items, as messages of a conversation."""

from collections.abc import Mapping, Sequence
from typing import Any

from protos.errors import InvalidRequestError
from protos.validation import shown

ROLES = ("user", "assistant", "system", "developer")
TEXTS: Mapping[str, str] = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The content parts that are text, and the field that has it."""

Message = dict[str, Any]


def messages_of(given: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[Message]:
    """Return the chat messages of an input; *instructions* are a system message before it.

    Reasoning items are left out. Calls join the assistant's message before them.

    Raises:
        InvalidRequestError: an item is malformed or not supported; names its position.
    """
    messages: list[Message] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise InvalidRequestError("input must have at least one item, got []", "input")
    for index, item in enumerate(given):
        _add(messages, item, f"input[{index}]")
    return messages


def _add(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type")
    if kind == "message" or (kind is None and "role" in item):
        messages.append(_message(item, where))
    elif kind == "function_call":
        _add_call(messages, item, where)
    elif kind == "function_call_output":
        output = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", where), "content": output})
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


def _message(item: Mapping[str, Any], where: str) -> Message:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}", "input")
    return {"role": role, "content": _content(item.get("content"), f"{where}.content")}


def _add_call(messages: list[Message], item: Mapping[str, Any], where: str) -> None:
    function = {"name": _text(item, "name", where), "arguments": _text(item, "arguments", where)}
    call = {"id": _text(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"{where}.{name} must be text, got {shown(value)}", "input")
    return value


def _content(content: object, where: str) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where} must be text or a list of parts, got {shown(content)}", "input")
    return [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]


def _part(part: object, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    name = TEXTS.get(kind) if isinstance(kind, str) else None
    if not isinstance(part, Mapping) or name is None:
        got = shown(part if kind is None else kind)
        raise InvalidRequestError(f"{where} has type {got}, which is not supported: only text is", "input")
    return {"type": "text", "text": _text(part, name, where)}
