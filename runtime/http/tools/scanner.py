"""Base classes of tool call readers. A call is parsed as JSON, never run as code.

A reader takes text as it is generated and returns the text that belongs to no call, and parts of calls. Text that only
looks like a call is returned as text. The result does not depend on how the text is divided.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

STRUCTURE = re.compile(r'["{}]')
IN_STRING = re.compile(r'["\\]')


@dataclass(frozen=True)
class CallPart:
    """A part of the call at `index`: its name, in the first part, and more of its arguments, which are JSON text."""

    index: int
    name: str | None
    arguments: str


@dataclass
class ParsedCalls:
    """The text outside of calls and the parts of calls in some text, in their order."""

    pieces: list[str | CallPart] = field(default_factory=list)

    def add_text(self, text: str) -> None:
        """Append *text* that belongs to no call."""
        if text:
            self.pieces.append(text)

    @property
    def content(self) -> str:
        """The text outside of calls."""
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def parts(self) -> list[CallPart]:
        """The parts of calls."""
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]


class _CallText(msgspec.Struct):
    """A call as models write it."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"")
    parameters: msgspec.Raw = msgspec.Raw(b"")


def read_call(text: str, default: str = "") -> tuple[str, str] | None:
    """Parse *text* as a call; return its name and the text of its arguments, None if it is not a call.

    *default* are the arguments of a call that has none; without it, such an object is not a call.
    """
    try:
        parsed = msgspec.json.decode(text, type=_CallText)
        arguments = bytes(parsed.arguments) or bytes(parsed.parameters) or default.encode()
        if isinstance(msgspec.json.decode(arguments), dict) and parsed.name:
            return parsed.name, arguments.decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        pass
    return None


class ObjectEnd:
    """Finds the end of a JSON object. The first text pushed begins with its opening brace."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._skips_next = False  # the next character is escaped

    def push(self, text: str) -> int | None:
        """Return how many characters of *text* belong to the object; None if it continues."""
        position = int(self._skips_next and bool(text))
        self._skips_next = self._skips_next and not text
        while mark := (IN_STRING if self._is_in_string else STRUCTURE).search(text, position):
            position = mark.end()
            if self._process(mark[0]):
                return position
            if mark[0] == "\\":
                self._skips_next = position == len(text)
                position += 1
        return None

    def _process(self, char: str) -> bool:
        """Process a quote, backslash or brace; return whether the object ends with it."""
        if char == '"':
            self._is_in_string = not self._is_in_string
        elif char != "\\":
            self._depth += 1 if char == "{" else -1
        return self._depth == 0


class CallReader(ABC):
    """Finds the calls in one answer; `num_calls` have begun so far."""

    def __init__(self) -> None:
        self.num_calls = 0

    @abstractmethod
    def push(self, text: str) -> ParsedCalls:
        """Read more of the answer."""

    @abstractmethod
    def finish(self) -> ParsedCalls:
        """Return what was held back, at the end of the answer."""


class Scanner(CallReader):
    """A state machine over held-back text. What precedes an object marks it as a call; its last brace ends the call."""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""  # not classified yet
        self._mark = ""  # the text before the object
        self._found = ParsedCalls()
        self._state: Callable[[], bool] = self._outside
        self._end = ObjectEnd()
        self._scanned = 0  # characters of `_held` that were pushed to `_end`

    def push(self, text: str) -> ParsedCalls:
        """See `CallReader`."""
        self._held += text
        while self._state():
            pass
        found, self._found = self._found, ParsedCalls()
        return found

    def finish(self) -> ParsedCalls:
        """See `CallReader`."""
        self._release()
        found, self._found = self._found, ParsedCalls()
        return found

    @abstractmethod
    def _outside(self) -> bool:
        """Consume text outside of calls; return whether the state has changed."""

    @abstractmethod
    def _after_call(self) -> bool:
        """Consume what may follow a call's last brace; return whether the state has changed."""

    @abstractmethod
    def _call_in(self, text: str) -> tuple[str, str] | None:
        """Return the name and the arguments of *text*, an object; None if it is not a call."""

    @abstractmethod
    def _not_a_call(self, text: str) -> bool:
        """Continue after *text*, an object that is not a call."""

    @abstractmethod
    def _release(self) -> None:
        """Classify the held-back text at the end of the answer."""

    def _begin_object(self) -> bool:
        self._end, self._scanned = ObjectEnd(), 0
        self._state = self._inside
        return True

    def _inside(self) -> bool:
        """Consume the object at the beginning of `_held`, once it is complete."""
        end = self._end.push(self._held[self._scanned :])
        if end is None:
            self._scanned = len(self._held)
            return False
        end += self._scanned
        text, self._held = self._held[:end], self._held[end:]
        call = self._call_in(text)
        if call is None:
            return self._not_a_call(text)
        self._add(*call)
        self._state = self._after_call
        return True

    def _add(self, name: str, arguments: str) -> None:
        self._found.pieces.append(CallPart(self.num_calls, name, arguments))
        self.num_calls += 1
