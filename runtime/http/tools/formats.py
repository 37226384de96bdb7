"""Readers of the formats in which models write tool calls."""

import string
from collections.abc import Callable, Collection, Mapping

from runtime.http.tools.scanner import CallPart, CallReader, ParsedCalls, Scanner, read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, END_THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
SEPARATORS = " \t\r\n;,"
NO_ARGUMENTS = "{}"


class HermesReader(Scanner):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around.

    White space next to a call belongs to the call. The tags alone mark it: it may name any function, and arguments may
    be missing. What the model only thinks of, in `<think>...</think>` at the beginning of the answer, is text.

    Args:
        is_thinking: `<think>` ended the prompt.
    """

    def __init__(self, *, is_thinking: bool = False) -> None:
        super().__init__()
        self._space = ""  # white space that was not returned yet
        self._state = self._thinking if is_thinking else self._beginning

    def _beginning(self) -> bool:
        body = self._held.lstrip()
        if len(body) < len(THINK) and THINK.startswith(body):
            return False
        self._state = self._thinking if body.startswith(THINK) else self._outside
        return True

    def _thinking(self) -> bool:
        is_over = self._emit_until(END_THINK)
        if is_over:
            self._emit(END_THINK)
            self._state = self._outside
        return is_over

    def _outside(self) -> bool:
        is_call = self._emit_until(OPEN)
        if is_call:
            self._state = self._before_object
        return is_call

    def _emit_until(self, mark: str) -> bool:
        """Return the text before *mark*, and consume that, too; return whether it is there."""
        before, found, after = self._held.partition(mark)
        kept = 0 if found else _overlap(before, mark)
        self._emit(before[: len(before) - kept])
        self._held = after if found else before[len(before) - kept :]
        return bool(found)

    def _emit(self, text: str) -> None:
        """Return *text*; hold back its trailing white space until more text follows."""
        text = self._space + text
        stripped = text.rstrip()
        self._space = text[len(stripped) :]
        self._found.add_text(stripped)

    def _before_object(self) -> bool:
        """Consume white space between the opening tag and the object."""
        body = self._held.lstrip()
        if not body:
            return False
        if body[0] == "{":
            self._mark = self._space + OPEN + self._held[: len(self._held) - len(body)]
            self._space = ""
            self._held = body
            return self._begin_object()
        self._emit(OPEN)
        self._state = self._outside
        return True

    def _call_in(self, text: str) -> tuple[str, str] | None:
        return read_call(text, NO_ARGUMENTS)

    def _not_a_call(self, text: str) -> bool:
        self._emit(self._mark + text)
        self._state = self._outside
        return True

    def _after_call(self) -> bool:
        """Consume the closing tag and the white space before it; with it, superfluous braces of the model."""
        body = self._held.lstrip(string.whitespace + "}")
        if len(body) < len(CLOSE) and CLOSE.startswith(body):
            return False
        self._held = body.removeprefix(CLOSE) if body.startswith(CLOSE) else self._held.lstrip(string.whitespace)
        self._state = self._outside
        return True

    def _release(self) -> None:
        if self._state == self._after_call:
            return
        if self._state == self._before_object:
            self._emit(OPEN)
        elif self._state == self._inside:
            self._emit(self._mark)
        self._emit(self._held)
        if not self.num_calls:
            self._found.add_text(self._space)


class LlamaReader(Scanner):
    """`{"name": ..., "parameters": {...}}`, one or more separated by `;`, perhaps after `<|python_tag|>`.

    An answer that begins with anything else is text to its end. Nothing sets a call apart from an answer in JSON but
    that it has arguments and names one of the functions.

    Args:
        names: the functions; None for any.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        super().__init__()
        self._names = names

    def _outside(self) -> bool:
        body = self._held.lstrip()
        body = "" if PYTHON_TAG.startswith(body) else body.removeprefix(PYTHON_TAG).lstrip()
        return bool(body) and self._begin_at(body)

    def _begin_at(self, body: str) -> bool:
        """Continue with *body*, the end of the text held back."""
        if body[0] == "{":
            self._mark = self._held[: len(self._held) - len(body)]
            self._held = body
            return self._begin_object()
        self._state = self._text
        return True

    def _text(self) -> bool:
        self._found.add_text(self._held)
        self._held = ""
        return False

    def _call_in(self, text: str) -> tuple[str, str] | None:
        call = read_call(text)
        return call if call is None or self._names is None or call[0] in self._names else None

    def _not_a_call(self, text: str) -> bool:
        self._held = self._mark + text + self._held
        self._state = self._text
        return True

    def _after_call(self) -> bool:
        self._held = self._held.lstrip(SEPARATORS)
        return bool(self._held) and self._begin_at(self._held)

    def _release(self) -> None:
        self._found.add_text((self._mark if self._state == self._inside else "") + self._held)


class ArrayReader(LlamaReader):
    """`[{"name": ..., "parameters": {...}}, ...]`: the format that the grammar enforces for `tool_choice` required.

    What follows the list is dropped.
    """

    def _outside(self) -> bool:
        body = self._held.lstrip()
        if body and body[0] == "[":
            self._held = body[1:]
            self._state = self._after_call
        elif body:
            self._state = self._text
        return bool(body)

    def _after_call(self) -> bool:
        if self._held.lstrip(SEPARATORS).startswith("]"):
            self._state = self._after_list
            return True
        return super()._after_call()

    def _after_list(self) -> bool:
        self._held = ""
        return False

    def _release(self) -> None:
        """Drop the beginning of a call that `max_tokens` cut off: it is no text for the user."""


class NamedReader(CallReader):
    """The arguments of one function: the format that the grammar enforces if `tool_choice` names a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def push(self, text: str) -> ParsedCalls:
        """See `CallReader`."""
        if not text:
            return ParsedCalls()
        name = None if self.num_calls else self._name
        self.num_calls = 1
        return ParsedCalls([CallPart(0, name, text)])

    def finish(self) -> ParsedCalls:
        """See `CallReader`."""
        return ParsedCalls()


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of *text* may be the beginning of *mark*."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


PARSERS: Mapping[str, Callable[[Collection[str], bool], CallReader]] = {
    "hermes": lambda _, is_thinking: HermesReader(is_thinking=is_thinking),
    "llama3_json": lambda names, _: LlamaReader(names),
}
"""Makes a reader from the names of the functions, and whether the prompt opens the model's thoughts. The formats have
vLLM's names."""
