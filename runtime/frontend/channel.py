"""Messages between a frontend and a controller, and the interface of the channel that carries them.

A frontend sends `Commands`. The controller sends `LoadProgress` while it loads, then `Ready`, then `Outputs`. If it
fails, it sends `Failed`. A controller in a process of its own also sends `Alive`, whatever it does, and the channel
reports `Stalled` if it falls silent.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec
from msgspec.structs import replace

from protos.messages import Abort, Request, TokenOutput, WorkerInfo
from protos.stats import EngineStats

IDLE_S = 0.5
"""Longest time an idle controller waits for commands before it checks for a stop and sends statistics."""
OWN_FIELDS = frozenset({"request_id", "sampling", "seed", "prompt_logprobs"})
"""Fields of `Request` and `Sampling` in which the samples of a prompt differ."""


class OtherSample(msgspec.Struct, frozen=True, gc=False):
    """A request that differs from an earlier one only in these fields."""

    request_id: str
    seed: int
    prompt_logprobs: int | None

    @classmethod
    def like(cls, request: Request, first: Request) -> "OtherSample | None":
        """Return what distinguishes *request* from *first*; None if they differ, or share no values, in other fields.

        Only identical objects count as equal: to compare long prompts would take longer than to send them.
        """
        if request.prompt_token_ids is not first.prompt_token_ids:
            return None
        sample = cls(request.request_id, request.sampling.seed, request.sampling.prompt_logprobs)
        made = sample.of(first)
        is_same = _fields(request) == _fields(made) and _fields(request.sampling) == _fields(made.sampling)
        return sample if is_same else None

    def of(self, first: Request) -> Request:
        """Return the request, which shares the values of *first*."""
        sampling = replace(first.sampling, seed=self.seed, prompt_logprobs=self.prompt_logprobs)
        return replace(first, request_id=self.request_id, sampling=sampling)


def _fields(struct: msgspec.Struct) -> list[object]:
    """Return the values of the fields that `OtherSample` shares, long ones by identity."""
    values = {name: getattr(struct, name) for name in struct.__struct_fields__ if name not in OWN_FIELDS}
    return [value if isinstance(value, int | float | str | None) else id(value) for value in values.values()]


class RequestGroup(msgspec.Struct, frozen=True):
    """Samples of one prompt. What they share is sent once: it may be megabytes."""

    first: Request
    others: tuple[OtherSample, ...] = ()

    def requests(self) -> Iterator[Request]:
        """Yield the requests in their order."""
        yield self.first
        for sample in self.others:
            yield sample.of(self.first)


class Commands(msgspec.Struct, frozen=True):
    """From a frontend. `stop` ends the controller's loop and abandons running requests."""

    groups: tuple[RequestGroup, ...] = ()
    aborts: tuple[str, ...] = ()
    stop: bool = False

    @classmethod
    def start(cls, requests: Iterable[Request]) -> "Commands":
        """Return the commands that start *requests*."""
        return cls(tuple(_grouped(requests)))

    def unpack(self) -> Iterator[Request | Abort]:
        """Yield the requests and aborts one by one."""
        for group in self.groups:
            yield from group.requests()
        if self.aborts:
            yield Abort(self.aborts)


def _grouped(requests: Iterable[Request]) -> Iterator[RequestGroup]:
    first: Request | None = None
    others: list[OtherSample] = []
    for request in requests:
        sample = None if first is None else OtherSample.like(request, first)
        if sample is not None:
            others.append(sample)
            continue
        if first is not None:
            yield RequestGroup(first, tuple(others))
        first, others = request, []
    if first is not None:
        yield RequestGroup(first, tuple(others))


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    """What the controller is loading, in one line."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The controller is loaded and accepts requests."""

    info: WorkerInfo


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Outputs of one step, with a snapshot of the statistics if one is due."""

    outputs: list[TokenOutput]
    stats: EngineStats | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The controller has ended. `kind` is the class name of the error that ended it."""

    reason: str
    kind: str = "EngineDeadError"


class Alive(msgspec.Struct, frozen=True, tag=True):
    """The controller's process runs. Sent by a thread of its own, so during long steps too."""


class Stalled(msgspec.Struct, frozen=True, tag=True):
    """Nothing has come from the controller for too long. The next report, if any, means that it has continued."""

    reason: str
    retry_after_s: float


Report = LoadProgress | Ready | Outputs | Failed | Alive | Stalled


class Channel(Protocol):
    """A frontend's connection to one controller. `start` and `close` are called once each, on one event loop."""

    async def start(self, on_report: Callable[[Report], None]) -> None:
        """Start the controller; from now on call *on_report* with each report, on this event loop."""
        ...

    def send(self, commands: Commands) -> None:
        """Send *commands* without waiting. Commands to a controller that has ended are dropped."""
        ...

    async def close(self) -> None:
        """Stop the controller and free everything. *on_report* is not called afterwards."""
        ...
