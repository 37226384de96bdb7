"""The turns of a conversation, as messages of chat completions."""

from collections.abc import Mapping, Sequence
from typing import Any

INSTRUCTIONS = frozenset({"system", "developer"})
"""Roles whose successive messages are one turn, of the role of the first."""


class Turns:
    """The messages `found` so far.

    What one role says in succession is one message: many templates refuse turns that do not alternate.
    """

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def say(self, role: str, texts: Sequence[str]) -> None:
        """Add *texts* of *role*."""
        self._turn(role)["content"] += [{"type": "text", "text": text} for text in texts]

    def call(self, call_id: str, name: str, arguments: str | Mapping[str, Any]) -> None:
        """Add the assistant's call of a function."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, texts: Sequence[str]) -> None:
        """Add the result of a call; it may be empty."""
        self.found.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})

    def _turn(self, role: str) -> dict[str, Any]:
        """Return the current turn of *role*."""
        last = self.found[-1]["role"] if self.found else None
        if last != role and not {last, role} <= INSTRUCTIONS:
            self.found.append({"role": role, "content": []})
        return self.found[-1]
