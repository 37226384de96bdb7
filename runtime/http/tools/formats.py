"""Readers of the formats in which models write tool calls."""

from collections.abc import Callable, Mapping

from runtime.http.tools.scanner import CallPart, CallReader, ParsedCalls, Scanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


class HermesReader(Scanner):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around.

    White space next to a call belongs to the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._space = ""  # white space that was not returned yet
        self._mark = ""  # the text before the object

    def _outside(self) -> bool:
        before, mark, after = self._held.partition(OPEN)
        if not mark:
            kept = _overlap(before, OPEN)
            self._emit(before[: len(before) - kept])
            self._held = before[len(before) - kept :]
            return False
        self._emit(before)
        self._held = after
        self._state = self._before_object
        return True

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

    def _not_a_call(self, text: str) -> bool:
        self._emit(self._mark + text)
        self._state = self._outside
        return True

    def _after_call(self) -> bool:
        body = self._held.lstrip()
        if CLOSE.startswith(body[: len(CLOSE)]) and len(body) < len(CLOSE):
            return False
        self._held = body.removeprefix(CLOSE)
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

    An answer that begins with anything else is text to its end.
    """

    def _outside(self) -> bool:
        body = self._held.lstrip()
        if not body or PYTHON_TAG.startswith(body):
            return False
        body = body.removeprefix(PYTHON_TAG).lstrip()
        if not body:
            return False
        if body[0] == "{":
            self._held = body
            return self._begin_object()
        self._state = self._text
        return True

    def _text(self) -> bool:
        self._found.add_text(self._held)
        self._held = ""
        return False

    def _not_a_call(self, text: str) -> bool:
        self._held = text + self._held
        self._state = self._text
        return True

    def _after_call(self) -> bool:
        body = self._held.lstrip(" \t\r\n;,")
        if not body:
            self._held = ""
            return False
        self._held = body
        if body[0] == "{":
            return self._begin_object()
        self._state = self._text
        return True

    def _release(self) -> None:
        self._found.add_text(self._held)


class ArrayReader(LlamaReader):
    """`[{"name": ..., "parameters": {...}}, ...]`: the format that the grammar enforces for `tool_choice` required."""

    def _outside(self) -> bool:
        body = self._held.lstrip()
        if body and body[0] == "[":
            self._held = body[1:]
            self._state = self._first_call
        elif body:
            self._state = self._text
        return bool(body)

    def _release(self) -> None:
        """Drop the beginning of a call that `max_tokens` cut off: it is no text for the user."""

    def _first_call(self) -> bool:
        return LlamaReader._after_call(self)

    def _after_call(self) -> bool:
        if self._held.lstrip().startswith("]"):
            self._held = ""
            return False
        return LlamaReader._after_call(self)


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


PARSERS: Mapping[str, Callable[[], CallReader]] = {"hermes": HermesReader, "llama3_json": LlamaReader}
"""The formats by vLLM's names."""
