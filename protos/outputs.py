"""Outputs of `LLM.generate`, with vLLM's names."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from protos.messages import SpeculationStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability under the model's raw logits; `rank` 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> log-probability at one position: the chosen token first, then the most likely, best first."""


@dataclass(frozen=True, slots=True)
class SpeculativeDecodingMetrics:
    """Acceptance statistics under vLLM's names, all over the steps in which something was proposed.

    Attributes:
        mean_acceptance_length: tokens per step, 1 + accepted / steps; None without steps.
        draft_acceptance_rate: accepted / proposed; None if nothing was proposed.
        acceptance_histogram: index j counts the steps that accepted exactly j draft tokens.
        acceptance_per_position: index j is the share of steps that accepted a draft token at position j.
        num_spec_steps / num_accepted_draft_tokens / num_draft_tokens: the counts they are computed from.
        num_spec_tokens: the longest chain of draft tokens proposed in a step.
    """

    mean_acceptance_length: float | None = None
    draft_acceptance_rate: float | None = None
    acceptance_histogram: list[int] = field(default_factory=list)
    acceptance_per_position: list[float] = field(default_factory=list)
    num_spec_steps: int = 0
    num_accepted_draft_tokens: int = 0
    num_draft_tokens: int = 0
    num_spec_tokens: int = 0

    @classmethod
    def of(cls, stats: SpeculationStats) -> "SpeculativeDecodingMetrics":
        """Return the figures of *stats*."""
        steps, per_pos = stats.steps, stats.accepted_per_pos
        at_least = (steps, *per_pos, 0)
        return cls(
            mean_acceptance_length=1 + stats.accepted / steps if steps else None,
            draft_acceptance_rate=stats.accepted / stats.proposed if stats.proposed else None,
            acceptance_histogram=[at_least[j] - at_least[j + 1] for j in range(len(per_pos) + 1)] if steps else [],
            acceptance_per_position=[count / steps for count in per_pos] if steps else [],
            num_spec_steps=steps,
            num_accepted_draft_tokens=stats.accepted,
            num_draft_tokens=stats.proposed,
            num_spec_tokens=len(per_pos),
        )

    def counts(self) -> SpeculationStats:
        """Return the statistics that `of` was given."""
        at_least = tuple(sum(self.acceptance_histogram[j + 1 :]) for j in range(self.num_spec_tokens))
        return SpeculationStats(self.num_spec_steps, self.num_draft_tokens, self.num_accepted_draft_tokens, at_least)


def total(stats: Iterable[SpeculationStats | None]) -> SpeculationStats:
    """Return the sum of *stats*, skipping None."""
    known = [one for one in stats if one is not None]
    width = max((len(one.accepted_per_pos) for one in known), default=0)
    padded = [(*one.accepted_per_pos, *[0] * (width - len(one.accepted_per_pos))) for one in known]
    return SpeculationStats(
        sum(one.steps for one in known),
        sum(one.proposed for one in known),
        sum(one.accepted for one in known),
        tuple(map(sum, zip(*padded, strict=True))),
    )


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request in seconds of `time.time`, and its acceptance statistics."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    speculative_decoding: SpeculativeDecodingMetrics | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
        index: which of the request's `n` samples.
        token_ids: all output tokens, the end-of-sequence or stop token included.
        cumulative_logprob: sum over the chosen tokens; None unless requested.
        logprobs: one dict per token; None unless requested.
        finish_reason: "stop", "length", "abort" or "error"; None while it runs.
        stop_reason: the stop string or stop token id that ended it; after "error", the message.
        speculation: acceptance statistics of this sample, once it has finished.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    speculation: SpeculativeDecodingMetrics | None = None

    def finished(self) -> bool:
        """Whether the sample is complete."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its `n` samples.

    Attributes:
        prompt: the prompt's text; None if token ids were given.
        prompt_logprobs: one dict per prompt token, None for the first; None unless requested.
        num_cached_tokens: prompt tokens found in the prefix cache.
        metrics: times, and acceptance statistics over all samples.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0

    @property
    def speculation(self) -> SpeculativeDecodingMetrics | None:
        """Acceptance statistics over all samples; None until the request has finished."""
        return self.metrics.speculative_decoding
