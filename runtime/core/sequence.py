"""The mutable state of one request, and how its tokens grow."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from protos.messages import Request, SpeculationStats, Step, TokenLogprobs, TokenOutput, Verdict
from runtime.core.block_manager import Chain
from runtime.text.detokenizer import Detokenizer

NO_SLOT = -1


@dataclass(slots=True, eq=False)
class SpeculationCounts:
    """Adds up `SpeculationStats`."""

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)

    def add(self, widths: Seq[int], accepted: int) -> None:
        """Count one round in which something was proposed: how many tokens at each position of the draft, from 1 on."""
        self.steps += 1
        self.proposed += sum(widths)
        self.accepted += accepted
        per_pos = self.accepted_per_pos
        if len(per_pos) < len(widths):
            per_pos.extend([0] * (len(widths) - len(per_pos)))
        for position in range(accepted):
            per_pos[position] += 1

    def snapshot(self) -> SpeculationStats:
        """Return the counts so far."""
        return SpeculationStats(self.steps, self.proposed, self.accepted, tuple(self.accepted_per_pos))


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. Owned by the `Scheduler`: nobody else writes to it.

    Attributes:
        token_ids: prompt and committed output.
        max_len: length at which `max_tokens` or the context ends it.
        num_computed: tokens from the front whose KV is in `block_ids`.
        slot: its place in the workers' tables while it runs, else `NO_SLOT`.
        key: names it for life, from 1 on; what proposers beside the controller follow it by.
        num_told_tokens / num_told_blocks: how much of `token_ids` and `block_ids` the workers know.
        chain / num_published: the content of its first `num_published` blocks, as the prefix cache knows it.
        num_cached_tokens: prompt tokens found in the prefix cache when it first ran, None before.
        arrived_at / queued_s: when it came, by this process's clock, and the seconds until it first ran, None before.
        num_prompt_logprobs: prompt positions 1 .. whose log-probabilities were emitted.
        finish_reason / stop_reason / error: why it ended; None while it lives.
    """

    request: Request
    token_ids: list[int]
    max_len: int
    detokenizer: Detokenizer | None
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    slot: int = NO_SLOT
    key: int = 0
    num_told_tokens: int = 0
    num_told_blocks: int = 0
    chain: Chain = ""
    num_published: int = 0
    num_cached_tokens: int | None = None
    arrived_at: float = field(default_factory=time.monotonic)
    queued_s: float | None = None
    num_prompt_logprobs: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has a place on the workers."""
        return self.slot != NO_SLOT

    @property
    def num_unfed(self) -> int:
        """Known tokens whose KV is still to be computed; at least 1."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest output is unfed."""
        return self.num_unfed == 1 and len(self.token_ids) > len(self.request.prompt_token_ids)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether the next token it feeds is one of the prompt whose successor's log-probability was asked for."""
        request = self.request
        return request.sampling.prompt_logprobs is not None and self.num_computed + 1 < len(request.prompt_token_ids)

    def append(self, token_ids: Seq[int]) -> int:
        """Grow by new tokens up to the first that ends the sequence; return how many were kept."""
        for index, token_id in enumerate(token_ids):
            self.token_ids.append(token_id)
            if self._ends_with(token_id):
                return index + 1
        return len(token_ids)

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

    def absorb(self, verdict: Verdict) -> int:
        """Grow by a verdict's tokens, and move `num_computed` with them; return how many were kept.

        The KV of an accepted draft is that of the token it became; the last token's is still to come.
        """
        known_len = len(self.token_ids)
        kept = self.append(verdict.token_ids)
        accepted = min(len(verdict.path), kept)
        self.num_computed = known_len + accepted
        return kept

    def take_prompt_logprobs(self, start: int, entries: Seq[TokenLogprobs]) -> Seq[TokenLogprobs]:
        """Return those of *entries*, for positions `start + 1 ...`, that were not emitted before."""
        fresh = entries[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs = max(self.num_prompt_logprobs, start + len(entries))
        return fresh

    def first_ran(self, num_cached: int) -> None:
        """It got its first place on the workers, behind *num_cached* tokens of the prefix cache."""
        self.num_cached_tokens = num_cached
        self.queued_s = time.monotonic() - self.arrived_at

    def start_after(self, num_cached: int, block_ids: list[int], chain: Chain) -> None:
        """Begin behind a prefix found in the cache; *block_ids* becomes the sequence's own list."""
        self.num_computed = num_cached
        self.block_ids = block_ids
        self.chain = chain
        self.num_published = len(block_ids)

    def leave_workers(self) -> None:
        """Forget blocks and slot; everything is to be computed and told again."""
        self.start_after(0, [], self.request.cache_salt)
        self.slot = NO_SLOT
        self.num_told_tokens = self.num_told_blocks = 0

    def report(
        self,
        token_ids: Seq[int] = (),
        logprobs: Seq[TokenLogprobs] | None = None,
        prompt_logprobs: Seq[TokenLogprobs] | None = None,
        step: Step | None = None,
    ) -> TokenOutput:
        """Return what a step added; the last report carries the speculation statistics and the rest of the text."""
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
