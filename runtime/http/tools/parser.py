"""From what a model writes to the calls in it. A call is JSON and is read as JSON, never as code.

A reader takes text as it comes and gives what may be told of it: text that belongs to no call, and parts of calls. What
looks like a call and is none is text. Reading an answer at once and piece by piece gives the same.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
STRUCTURE = re.compile(r'["{}]')
IN_STRING = re.compile(r'["\\]')
EMPTY = "{}"


@dataclass(frozen=True)
class CallPart:
    """New of the call at `index`: its name, in its first part, and more of its arguments, which are JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass
class ParsedCalls:
    """What was made of some text."""

    content: str = ""
    parts: list[CallPart] = field(default_factory=list)


class _Written(msgspec.Struct):
    """A call as models write it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


def read_call(text: str) -> tuple[str, str] | None:
    """Return name and arguments of the call that *text* is; None if it is none. Arguments stay as they were written."""
    try:
        written = msgspec.json.decode(text, type=_Written)
        arguments = bytes(written.arguments) or bytes(written.parameters) or EMPTY.encode()
        if isinstance(msgspec.json.decode(arguments), dict) and written.name:
            return written.name, arguments.decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    return None


class ObjectEnd:
    """Finds where the JSON object ends that *push* is given from its first brace on."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._skips = False  # the next character was escaped

    def push(self, text: str) -> int | None:
        """Return how much of *text* belongs to the object; None if it goes on."""
        at = int(self._skips and bool(text))
        self._skips = self._skips and not text
        while mark := (IN_STRING if self._is_in_string else STRUCTURE).search(text, at):
            at = mark.end()
            if self._take(mark[0]):
                return at
            if mark[0] == "\\":
                self._skips = at == len(text)
                at += 1
        return None

    def _take(self, char: str) -> bool:
        """Take a character that matters; return whether the object ends with it."""
        if char == '"':
            self._is_in_string = not self._is_in_string
        elif char != "\\":
            self._depth += 1 if char == "{" else -1
        return self._depth == 0


class CallReader(ABC):
    """Reads one answer; `num_calls` have begun so far."""

    def __init__(self) -> None:
        self.num_calls = 0

    @abstractmethod
    def push(self, text: str) -> ParsedCalls:
        """Take more of the answer."""

    @abstractmethod
    def finish(self) -> ParsedCalls:
        """Return what was held back: nothing more comes."""


class Scanner(CallReader):
    """Reads calls between marks: what stands before a call decides that it is one, its last brace ends it."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""  # of which it is not known yet what it is
        self._found = ParsedCalls()
        self._state: Callable[[], bool] = self._outside
        self._end = ObjectEnd()
        self._scanned = 0  # characters of `_held` that `_end` has seen

    def push(self, text: str) -> ParsedCalls:
        """See `CallReader`."""
        self._held += text
        while self._state():
            pass
        found, self._found = self._found, ParsedCalls()
        return found

    def finish(self) -> ParsedCalls:
        """See `CallReader`."""
        self._give_rest()
        found, self._found = self._found, ParsedCalls()
        return found

    @abstractmethod
    def _outside(self) -> bool:
        """Take text that is no call; return whether to go on with another state."""

    @abstractmethod
    def _behind(self) -> bool:
        """Take what may follow a call's last brace."""

    @abstractmethod
    def _no_call(self, text: str) -> bool:
        """Go on behind *text*, an object that is no call."""

    @abstractmethod
    def _give_rest(self) -> None:
        """Decide what the held text is, at the end."""

    def _begin_object(self) -> bool:
        self._end, self._scanned = ObjectEnd(), 0
        self._state = self._inside
        return True

    def _inside(self) -> bool:
        """Wait for the end of the object that `_held` begins with."""
        end = self._end.push(self._held[self._scanned :])
        if end is None:
            self._scanned = len(self._held)
            return False
        end += self._scanned
        text, self._held = self._held[:end], self._held[end:]
        call = read_call(text)
        if call is None:
            return self._no_call(text)
        self._add(*call)
        self._state = self._behind
        return True

    def _add(self, name: str, arguments: str) -> None:
        self._found.parts.append(CallPart(self.num_calls, name, arguments))
        self.num_calls += 1


class HermesReader(Scanner):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around.

    White space next to a call is of the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._space = ""  # white space that was not told yet
        self._mark = ""  # what stood before the object's brace

    def _outside(self) -> bool:
        before, mark, after = self._held.partition(OPEN)
        if not mark:
            kept = _overlap(before, OPEN)
            self._say(before[: len(before) - kept])
            self._held = before[len(before) - kept :]
            return False
        self._say(before)
        self._held = after
        self._state = self._before
        return True

    def _say(self, text: str) -> None:
        """Tell text, but the white space at its end only once more text follows."""
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        self._found.content += said

    def _before(self) -> bool:
        """Between the mark and the brace, where only white space may stand."""
        body = self._held.lstrip()
        if not body:
            return False
        if body[0] == "{":
            self._mark = self._space + OPEN + self._held[: len(self._held) - len(body)]
            self._space = ""
            self._held = body
            return self._begin_object()
        self._say(OPEN)
        self._state = self._outside
        return True

    def _no_call(self, text: str) -> bool:
        self._say(self._mark + text)
        self._state = self._outside
        return True

    def _behind(self) -> bool:
        body = self._held.lstrip()
        if CLOSE.startswith(body[: len(CLOSE)]) and len(body) < len(CLOSE):
            return False
        self._held = body.removeprefix(CLOSE)
        self._state = self._outside
        return True

    def _give_rest(self) -> None:
        if self._state == self._behind:
            return
        if self._state == self._before:
            self._say(OPEN)
        elif self._state == self._inside:
            self._say(self._mark)
        self._say(self._held)
        if not self.num_calls:
            self._found.content += self._space


class LlamaReader(Scanner):
    """`{"name": ..., "parameters": {...}}`, alone or several with `;` between them, perhaps behind `<|python_tag|>`.

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
        self._found.content += self._held
        self._held = ""
        return False

    def _no_call(self, text: str) -> bool:
        self._held = text + self._held
        self._state = self._text
        return True

    def _behind(self) -> bool:
        body = self._held.lstrip(" \t\r\n;,")
        if not body:
            self._held = ""
            return False
        self._held = body
        if body[0] == "{":
            return self._begin_object()
        self._state = self._text
        return True

    def _give_rest(self) -> None:
        self._found.content += self._held


class ArrayReader(LlamaReader):
    """`[{"name": ..., "parameters": {...}}, ...]`: what a grammar lets through where a call is required."""

    def _outside(self) -> bool:
        body = self._held.lstrip()
        if body and body[0] == "[":
            self._held = body[1:]
            self._state = self._first
        elif body:
            self._state = self._text
        return bool(body)

    def _first(self) -> bool:
        return LlamaReader._behind(self)

    def _behind(self) -> bool:
        if self._held.lstrip().startswith("]"):
            self._held = ""
            return False
        return LlamaReader._behind(self)


class NamedReader(CallReader):
    """The arguments of one function alone: what a grammar lets through where its call was asked for by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def push(self, text: str) -> ParsedCalls:
        """See `CallReader`."""
        if not text:
            return ParsedCalls()
        name = None if self.num_calls else self._name
        self.num_calls = 1
        return ParsedCalls(parts=[CallPart(0, name, text)])

    def finish(self) -> ParsedCalls:
        """See `CallReader`."""
        return ParsedCalls()


def _overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of *text* could be the beginning of *mark*."""
    longest = min(len(text), len(mark) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


PARSERS: Mapping[str, Callable[[], CallReader]] = {"hermes": HermesReader, "llama3_json": LlamaReader}
"""How models write calls, by vLLM's names."""
