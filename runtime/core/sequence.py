"""The mutable state of one request, and its row in the step being planned."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

from protos.draft import Draft
from protos.messages import NewSequence, Request, SpeculationStats, Step, TokenLogprobs, TokenOutput, Verdict
from runtime.core.block_manager import Chain
from runtime.text.detokenizer import Detokenizer

MOST_SHORTAGES = 3
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class SpeculationCounts:
    """Adds up `SpeculationStats`. `by_accepted[n]` of the drafts had n accepted tokens."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    by_accepted: list[int] = field(default_factory=lambda: [0])

    @property
    def accepted_per_pos(self) -> tuple[int, ...]:
        """How many drafts had an accepted token at each position."""
        return tuple(accumulate(self.by_accepted[:0:-1]))[::-1]

    def add(self, step: Step) -> None:
        """Count the draft of one step."""
        self.steps += 1
        self.proposed += step.proposed
        self.accepted += step.accepted
        by_accepted = self.by_accepted
        if len(by_accepted) <= step.depth:
            by_accepted.extend([0] * (step.depth + 1 - len(by_accepted)))
        by_accepted[step.accepted] += 1

    def snapshot(self) -> SpeculationStats:
        """Return the counts so far."""
        return SpeculationStats(self.steps, self.proposed, self.accepted, self.accepted_per_pos)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. Only the `Scheduler` and its parts change it.

    Attributes:
        token_ids: prompt and committed output.
        max_len: length at which `max_tokens` or the context length ends it.
        num_computed: leading tokens whose KV is in `block_ids`.
        slot: its index in the workers' tables while it runs, else `NO_SLOT`.
        key: unique for the life of the engine, from 1; proposers in the controller process identify it by this.
        num_sent_tokens / num_sent_blocks: how much of `token_ids` and `block_ids` was sent to the workers.
        chain / num_published: the prefix cache's identity of its first `num_published` blocks.
        state_ends: the block boundaries of its prompt after which recurrent states are kept for the prefix cache.
        state_from: the kept state with which its next row begins, -1 for its slot's own.
        moving_state: the node of the kept state that its next one replaces, None without one.
        num_cached_tokens: prompt tokens found in the prefix cache when it first ran, None before.
        arrived_at / queued_s: arrival on the monotonic clock; seconds until it first ran, None before.
        num_prompt_logprobs: prompt positions, from 1, whose log-probabilities were emitted.
        num_shortages: steps of one of its tokens alone that ran out of memory since one did not.
        finish_reason / stop_reason / error: why it ended; None while it is unfinished.
        ending_ids: tokens that end it.
        needs_host: whether the host takes part in sampling, which GPUs do without it otherwise.
    """

    request: Request
    token_ids: list[int]
    max_len: int
    detokenizer: Detokenizer | None
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int = NO_SLOT
    key: int = 0
    num_sent_tokens: int = 0
    num_sent_blocks: int = 0
    chain: Chain = ""
    num_published: int = 0
    state_ends: tuple[int, ...] = ()
    state_from: int = -1
    moving_state: int | None = None
    num_cached_tokens: int | None = None
    arrived_at: float = field(default_factory=time.monotonic)
    queued_s: float | None = None
    num_prompt_logprobs: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    num_shortages: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    ending_ids: frozenset[int] = field(init=False)
    needs_host: bool = field(init=False)

    def __post_init__(self) -> None:
        params = self.request.params
        self.ending_ids = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else self.request.eos_ids)))
        self.needs_host = self.request.sampling.needs_host

    def is_short_again(self) -> bool:
        """Count a step of one token that ran out of memory; return whether too many did, one after another.

        Another program may have taken the memory for a moment.
        """
        self.num_shortages += 1
        return self.num_shortages >= MOST_SHORTAGES

    @property
    def is_running(self) -> bool:
        """Whether it has a worker slot."""
        return self.slot != NO_SLOT

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is still to be computed; at least 1."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether all but its newest output token are computed."""
        return self.num_uncomputed == 1 and len(self.token_ids) > len(self.request.prompt_token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the request wants prompt log-probabilities, and the next token to compute predicts a prompt token."""
        request = self.request
        return request.sampling.prompt_logprobs is not None and self.num_computed + 1 < len(request.prompt_token_ids)

    @property
    def depth(self) -> int:
        """Most levels of a draft: one fewer than the tokens still to come, to which the target adds one of its own."""
        return self.max_len - len(self.token_ids) - 1

    def most_drafts(self, k: int, *, may_branch: bool, at_first: bool = False) -> int:
        """Return *k* draft tokens, or fewer if the request wants fewer, or a chain has no more levels.

        The levels are those that are left now; *at_first*: those that were left after the first output token.
        """
        request = self.request
        depth = self.max_len - len(request.prompt_token_ids) - 2 if at_first else self.depth
        if not request.speculate or depth <= 0:
            return 0
        most = k if request.num_speculative_tokens is None else min(request.num_speculative_tokens, k)
        return most if may_branch else min(most, depth)

    def append(self, token_ids: Seq[int]) -> int:
        """Append tokens up to and including the first that ends the sequence; return how many."""
        if self._goes_on_after(token_ids):
            self.token_ids.extend(token_ids)
            return len(token_ids)
        for index, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if self._ends_with(token_id):
                return index + 1
        return len(token_ids)

    def _goes_on_after(self, token_ids: Seq[int]) -> bool:
        """Whether none of *token_ids* can end it, which is known without looking at each."""
        if self.detokenizer is not None or len(self.token_ids) + len(token_ids) >= self.max_len:
            return False
        return self.ending_ids.isdisjoint(token_ids)

    def _ends_with(self, token_id: int) -> bool:
        params = self.request.params
        if token_id in self.request.eos_ids and not params.ignore_eos:
            self._stop(None)
        elif token_id in params.stop_token_ids:
            self._stop(token_id)
        if self.detokenizer and (self.finish_reason is None or params.include_stop_str_in_output):
            stop = self.detokenizer.push(token_id)
            if stop is not None and self.finish_reason is None:
                self._stop(stop)
        if self.finish_reason is None and len(self.token_ids) >= self.max_len:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def _stop(self, reason: int | str | None) -> None:
        self.finish_reason = "stop"
        self.stop_reason = reason

    def append_verdict(self, verdict: Verdict) -> int:
        """Append a verdict's tokens and advance `num_computed`; return how many tokens were appended.

        The KV of accepted draft tokens is already computed; that of the last token is not. After a verdict without
        tokens, of a row that skipped its turn, the last token is fed again.
        """
        known_len = len(self.token_ids)
        num_appended = self.append(verdict.token_ids)
        self.num_computed = known_len + min(len(verdict.path), num_appended) - (not verdict.token_ids)
        return num_appended

    def new_prompt_logprobs(self, start: int, entries: Seq[TokenLogprobs]) -> Seq[TokenLogprobs]:
        """Return those of *entries*, for positions `start + 1 ...`, that were not emitted before."""
        fresh = entries[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, start + len(entries))
        return fresh

    def mark_started(self, num_cached: int) -> None:
        """Record that it got a slot for the first time, after *num_cached* tokens of the prefix cache."""
        self.num_cached_tokens = num_cached
        self.queued_s = time.monotonic() - self.arrived_at

    def describe(self, generation: int) -> NewSequence:
        """Return what workers are sent of it first, in full."""
        request, self.num_sent_tokens = self.request, len(self.token_ids)
        num_prompt = len(request.prompt_token_ids)
        return NewSequence(self.slot, tuple(self.token_ids), num_prompt, request.sampling, generation)

    def start_after(self, num_cached: int, block_ids: list[int], chain: Chain) -> None:
        """Begin after a prefix found in the cache; *block_ids* becomes the sequence's own list."""
        self.num_computed = num_cached
        self.block_ids = block_ids
        self.chain = chain
        self.num_published = len(block_ids)

    def release_slot(self) -> None:
        """Drop blocks and slot; all tokens must be computed and sent again."""
        self.start_after(0, [], self.request.cache_salt)
        self.state_ends, self.state_from, self.moving_state = (), -1, None
        self.slot = NO_SLOT
        self.num_sent_tokens = self.num_sent_blocks = 0

    def output(
        self,
        token_ids: Seq[int] = (),
        logprobs: Seq[TokenLogprobs] | None = None,
        prompt_logprobs: Seq[TokenLogprobs] | None = None,
        step: Step | None = None,
    ) -> TokenOutput:
        """Return what a step added; the last output also has the speculation statistics and the rest of the text."""
        ended = self.finish_reason is not None
        return TokenOutput(
            self.request.request_id,
            token_ids,
            self._take_text(),
            logprobs,
            prompt_logprobs,
            self.finish_reason,
            self.stop_reason,
            self.num_cached_tokens or 0,
            self.speculation.snapshot() if ended else None,
            self.error,
            step if self.request.wants_steps else None,
            self.queued_s if ended else None,
        )

    def _take_text(self) -> str:
        if self.detokenizer is None:
            return ""
        return self.detokenizer.take() if self.finish_reason is None else self.detokenizer.finish()


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One sequence in the step being planned; becomes a `Row`. `length` known tokens are fed, then *k* draft tokens.

    Attributes:
        source: that of the draft, as the policy numbers them.
        end: position after the last known token fed.
        samples: whether its newest known token is fed.
    """

    sequence: Sequence
    length: int
    k: int = 0
    draft: Draft | None = None
    source: int = 0
    end: int = field(init=False)
    samples: bool = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.sequence.num_computed + self.length
        self.samples = self.end == len(self.sequence.token_ids)

    @property
    def depth(self) -> int:
        """See `Sequence.depth`."""
        return self.sequence.depth

    def shrink(self, k: int) -> None:
        """Keep the first *k* nodes of the draft."""
        self.k = k
        if self.draft is not None:
            self.draft = self.draft.first(k) if k else None


def refusal(request: Request, max_model_len: int) -> str | None:
    """Return why a request can never be served. Frontends check it earlier, and name the user's parameters."""
    num_prompt, limit = len(request.prompt_token_ids), max_model_len - 1
    if not 1 <= num_prompt <= limit:
        return f"the prompt has {num_prompt} tokens; with max_model_len {limit + 1} it must have 1 to {limit}"
    if request.max_tokens < 1:
        return f"max_tokens is {request.max_tokens}; it must be at least 1"
    return None
