"""Translates a conversation of the Messages API to one of chat completions.

Content blocks become messages: text stays with its role, a call becomes a `tool_calls` entry of the assistant, and a
result becomes a message of role `tool`. Successive turns of one role are joined, as in Anthropic's API.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protos.errors import InvalidRequestError
from protos.validation import shown
from runtime.http.fields.turns import Turns

Block = Mapping[str, Any]

ROLES = ("user", "assistant", "system")
REASONING = frozenset({"thinking", "redacted_thinking"})
"""Blocks that are left out: templates take no reasoning of earlier turns."""


def chat_messages(messages: Sequence[Block], system: str | Sequence[Block] | None) -> list[dict[str, Any]]:
    """Return *messages*, after *system*, as messages of chat completions.

    Raises:
        InvalidRequestError: names the block and what is wrong with it.
    """
    turns = Turns()
    for where, block in _blocks([] if system in (None, "") else system, "system"):
        _add(turns, "system", block, where)
    for index, message in enumerate(messages):
        where, role = f"messages[{index}]", message.get("role")
        if role not in ROLES:
            raise InvalidRequestError(f"{where}: role must be one of {', '.join(ROLES)}, got {shown(role)}", "messages")
        if message.get("content") in ("", []):
            if role == "assistant" and index == len(messages) - 1:
                break
            raise _error(where, "must have content; only the last message may be empty, to be continued")
        for place, block in _blocks(message.get("content"), f"{where}.content"):
            _add(turns, role, block, place)
    return turns.found


def is_prefilled(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the answer continues the last of *turns*. Raises `InvalidRequestError` if that one calls a tool."""
    if not turns or turns[-1]["role"] != "assistant":
        return False
    if "tool_calls" in turns[-1]:
        raise InvalidRequestError("messages end with a tool_use block; its tool_result must follow", "messages")
    return True


def _blocks(content: object, where: str) -> Iterator[tuple[str, Block]]:
    """Yield the place and the block for each block of *content*; text alone is one block."""
    if isinstance(content, str):
        yield where, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        raise _error(where, f"must be text or a list of blocks, got {shown(content)}")
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise _error(place, f"must be an object with a type, got {shown(block)}")
        yield place, block


def _add(turns: Turns, role: str, block: Block, where: str) -> None:
    """Add a block of a message of *role*."""
    kind = block["type"]
    if kind == "text":
        turns.say(role, [_required(block, "text", str, where)])
    elif kind == "tool_use" and role == "assistant":
        name, arguments = _required(block, "name", str, where), _required(block, "input", dict, where)
        turns.call(_required(block, "id", str, where), name, arguments)
    elif kind == "tool_result" and role == "user":
        turns.result(_required(block, "tool_use_id", str, where), _result(block, where))
    elif kind not in REASONING or role != "assistant":
        raise _error(where, f"is of type {shown(kind)}, which is not supported in a message of role {role}")


def _result(block: Block, where: str) -> list[str]:
    """Return the texts of a tool's result. It may be empty; that it `is_error` must be in its text."""
    texts = []
    for place, part in _blocks(block.get("content") or "", f"{where}.content"):
        if part["type"] != "text":
            raise _error(place, f"is of type {shown(part['type'])}, which is not supported: results are text")
        texts.append(_required(part, "text", str, place))
    return texts


def _required(block: Block, name: str, kind: type, where: str) -> Any:
    """Return the field *name* of *block*."""
    if not isinstance(block.get(name), kind):
        what = "text" if kind is str else "an object"
        raise _error(where, f"of type {block['type']!r} needs {name}, which is {what}, got {shown(block.get(name))}")
    return block[name]


def _error(where: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} {problem}", where.partition("[")[0].partition(".")[0])
