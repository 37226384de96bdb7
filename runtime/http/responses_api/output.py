"""Divides an answer into output items while it is generated, and makes the events of a stream."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import msgspec
from msgspec import UNSET

from runtime.http.responses import ChatTokenLogprob
from runtime.http.responses_api.objects import (
    ItemStatus,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ResponseEvent,
    TextLogprob,
    TextTopLogprob,
)
from runtime.http.tools.scanner import CallPart

Emit = Callable[..., None]
"""Appends the event of a type, with its fields."""


class EventList:
    """The events of one stream that were not sent yet. Numbers them, and joins the deltas that are sent together."""

    def __init__(self) -> None:
        self._numbers = count()
        self._pending: list[ResponseEvent] = []

    def emit(self, kind: str, **fields: Any) -> None:
        """Append the event `response.KIND`, or join it to the last one if both are deltas of the same item."""
        last = self._pending[-1] if self._pending else None
        if last is not None and last.delta is not UNSET and last.item_id == fields.get("item_id") and "delta" in fields:
            fields = {name: getattr(last, name) + fields[name] for name in ("delta", "logprobs") if name in fields}
            self._pending[-1] = msgspec.structs.replace(last, **fields)
        else:
            self._pending.append(ResponseEvent(f"response.{kind}", next(self._numbers), **fields))

    def take(self) -> list[ResponseEvent]:
        """Return the events since the last call."""
        pending, self._pending = self._pending, []
        return pending


class NoEvents(EventList):
    """Keeps no events, for a response that is not streamed."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Drop the event."""


class _OpenItem(ABC):
    """The item that is being generated."""

    def __init__(self, index: int, emit: Emit) -> None:
        self._index = index
        self._emit = emit

    def begin(self) -> None:
        """Emit the events of an empty item."""
        self._emit("output_item.added", output_index=self._index, item=self.item("in_progress"))

    def end(self, status: ItemStatus) -> OutputItem:
        """Emit the last events; return the item."""
        item = self.item(status)
        self._emit("output_item.done", output_index=self._index, item=item)
        return item

    @abstractmethod
    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as far as it is generated."""


class _OpenMessage(_OpenItem):
    def __init__(self, index: int, emit: Emit) -> None:
        super().__init__(index, emit)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._text = ""
        self._logprobs: list[TextLogprob] = []
        self._place = {"output_index": index, "content_index": 0, "item_id": self._id}
        self._has_part = False

    def begin(self) -> None:
        super().begin()
        self._has_part = True
        self._emit("content_part.added", **self._place, part=OutputText("", []))

    def add(self, text: str, logprobs: Sequence[TextLogprob]) -> None:
        self._text += text
        self._logprobs += logprobs
        self._emit("output_text.delta", **self._place, delta=text, logprobs=_for_events(logprobs))

    def end(self, status: ItemStatus, logprobs: Sequence[TextLogprob] = ()) -> OutputItem:
        """See `_OpenItem`; *logprobs* are of tokens after the last text."""
        self._logprobs += logprobs
        self._emit("output_text.done", **self._place, text=self._text, logprobs=_for_events(self._logprobs))
        self._emit("content_part.done", **self._place, part=self._part())
        return super().end(status)

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self._id, status, [self._part()] if self._has_part else [])

    def _part(self) -> OutputText:
        return OutputText(self._text, self._logprobs)


class _OpenCall(_OpenItem):
    def __init__(self, index: int, emit: Emit, name: str) -> None:
        super().__init__(index, emit)
        self._id = f"fc_{uuid.uuid4().hex}"
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"
        self._name = name
        self._arguments = ""
        self._place = {"output_index": index, "item_id": self._id}

    def add(self, arguments: str) -> None:
        self._arguments += arguments
        self._emit("function_call_arguments.delta", **self._place, delta=arguments)

    def end(self, status: ItemStatus) -> OutputItem:
        self._emit("function_call_arguments.done", **self._place, arguments=self._arguments)
        return super().end(status)

    def item(self, status: ItemStatus) -> OutputCall:
        return OutputCall(self._id, self._call_id, self._name, self._arguments, status)


class Output:
    """The output items of one answer. An answer without text and calls is a message without text."""

    def __init__(self, events: EventList) -> None:
        self.items: list[OutputItem] = []
        self._emit = events.emit
        self._open: _OpenMessage | _OpenCall | None = None
        self._logprobs: list[TextLogprob] = []  # of tokens whose text is not known yet

    def add(self, pieces: Sequence[str | CallPart], logprobs: Sequence[ChatTokenLogprob]) -> None:
        """Add texts and parts of calls; *logprobs* of tokens of calls are left out."""
        self._logprobs += map(_text_logprob, logprobs)
        for piece in pieces:
            if isinstance(piece, CallPart):
                self._add_call(piece)
            elif piece:
                self._message().add(piece, self._take_logprobs())

    def close(self, status: ItemStatus) -> None:
        """End the answer."""
        if self._open is None and not self.items:
            self._message()
        self._end(status)

    def cut_off(self) -> None:
        """End the open item, if there is one, of an answer that failed."""
        self._end("incomplete")

    def _add_call(self, part: CallPart) -> None:
        self._take_logprobs()
        if part.name is not None:
            self._begin(_OpenCall(self._next_index(), self._emit, part.name))
        assert isinstance(self._open, _OpenCall)
        self._open.add(part.arguments)

    def _message(self) -> _OpenMessage:
        if not isinstance(self._open, _OpenMessage):
            self._begin(_OpenMessage(self._next_index(), self._emit))
        assert isinstance(self._open, _OpenMessage)
        return self._open

    def _begin(self, item: _OpenMessage | _OpenCall) -> None:
        self._open = item
        item.begin()

    def _next_index(self) -> int:
        """End the open item; return the index of the next one."""
        self._end("completed")
        return len(self.items)

    def _end(self, status: ItemStatus) -> None:
        if isinstance(self._open, _OpenMessage):
            self.items.append(self._open.end(status, self._take_logprobs()))
        elif self._open is not None:
            self.items.append(self._open.end(status))
        self._open = None

    def _take_logprobs(self) -> list[TextLogprob]:
        taken, self._logprobs = self._logprobs, []
        return taken


def _text_logprob(entry: ChatTokenLogprob) -> TextLogprob:
    tops = [TextTopLogprob(top.token, top.logprob, top.bytes) for top in entry.top_logprobs]
    return TextLogprob(entry.token, entry.logprob, tops, entry.bytes)


def _for_events(logprobs: Sequence[TextLogprob]) -> list[TextLogprob]:
    """Return *logprobs* as events have them, without bytes."""
    return [
        TextLogprob(each.token, each.logprob, [TextTopLogprob(top.token, top.logprob) for top in each.top_logprobs])
        for each in logprobs
    ]
