"""One validated HTTP request for tokens: its choices, and what they have produced so far."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from protos.errors import failure
from protos.messages import Request, SpeculationStats, Step, TokenLogprobs, TokenOutput
from runtime.frontend.pacing import UNPACED, Pacing
from runtime.frontend.stream_queue import Delta
from runtime.http.origins import OriginRecorder
from runtime.http.output_recorder import OutputRecorder
from runtime.http.render import speculation, usage
from runtime.http.responses import ResponseMetrics, Usage
from runtime.http.schemas import SpecMetrics, StreamUsage


class Choice(ABC):
    """One choice of a response. Collects outputs; `flush` returns what was added since the last call."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_cached = 0
        self.speculation: SpeculationStats | None = None
        self.steps: list[Step] = []
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, output: TokenOutput) -> None:
        """Add the output of a step. Raises `SlipstreamError` if the request failed."""
        if output.error is not None:
            raise failure(output.error, output.retry_after_s)
        self.text += output.text
        self.token_ids += output.token_ids
        self.num_tokens += len(output.token_ids)
        self.logprobs += output.logprobs or ()
        self.prompt_logprobs += output.prompt_logprobs or ()
        self.num_cached = max(self.num_cached, output.num_cached_tokens)
        self.speculation = output.speculation or self.speculation
        if output.step is not None and output.step.proposed:
            self.steps.append(output.step)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason

    @property
    def has_pending(self) -> bool:
        """Whether a chunk would contain anything."""
        return self.finish_reason is not None or (self.num_tokens > 0 and bool(self.text or self.logprobs))

    def flush(self) -> msgspec.Struct:
        """Return what was added since the last call, as part of a response."""
        part = self.render()
        self.text, self.token_ids, self.logprobs, self.prompt_logprobs = "", [], [], []
        return part

    @abstractmethod
    def render(self) -> msgspec.Struct:
        """Return what is pending in the endpoint's format."""


class Envelope(ABC):
    """The fields of a response around its choices."""

    @abstractmethod
    def wrap(
        self,
        choices: list[Any],
        usage: Usage | UnsetType | None = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> msgspec.Struct:
        """Return a response, or a chunk of a stream."""


@dataclass(frozen=True)
class CompletionJob:
    """One HTTP request for tokens, validated and ready to run.

    `groups` holds the requests of each prompt. Flattened, they are in the order of `choices`.
    """

    groups: Sequence[Sequence[Request]]
    choices: Sequence[Choice]
    envelope: Envelope
    stream_usage: StreamUsage = "none"
    spec_metrics: SpecMetrics = "none"
    origins: OriginRecorder | None = None
    timeout_s: float | None = None
    pacing: Pacing = UNPACED
    recorder: OutputRecorder | None = None

    @property
    def requests(self) -> list[Request]:
        """All requests in the order of the choices."""
        return [request for group in self.groups for request in group]

    def usage(self) -> Usage:
        """Count the tokens so far."""
        cached, first = 0, 0
        for group in self.groups:
            cached += self.choices[first].num_cached
            first += len(group)
        return usage(self.groups, sum(choice.num_tokens for choice in self.choices), cached)

    def chunk_usage(self) -> Usage | UnsetType | None:
        """Return the usage of a chunk that is not the last: null where only that has it."""
        if self.stream_usage == "all":
            return self.usage()
        return None if self.stream_usage == "last" else UNSET

    def add(self, delta: Delta) -> Choice:
        """Add the output of a step to its choice; return the choice."""
        choice = self.choices[delta.index]
        num_before = choice.num_tokens
        choice.add(delta.output)
        if self.recorder is not None:
            self.recorder.add(delta)
        if self.origins is not None and choice.num_tokens > num_before:
            self.origins.add(delta.index, delta.output)
        return choice

    def metrics(self, *, is_last: bool = True) -> ResponseMetrics | UnsetType:
        """Return the requested statistics and token origins; statistics only with the last chunk."""
        metrics = self._statistics() if is_last else UNSET
        if self.origins is None:
            return metrics
        origins = self.origins.take()
        if metrics is UNSET:
            return ResponseMetrics(token_origins=origins) if origins else UNSET
        return msgspec.structs.replace(metrics, token_origins=origins)

    def _statistics(self) -> ResponseMetrics | UnsetType:
        if self.spec_metrics == "none":
            return UNSET
        steps = [step for choice in self.choices for step in choice.steps]
        stats = [choice.speculation for choice in self.choices]
        return speculation(stats, steps, is_detailed=self.spec_metrics == "detailed")
