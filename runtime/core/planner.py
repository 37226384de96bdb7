"""Who runs in a step, with which tokens, blocks and guesses."""

from itertools import count

from protos.config.engine import CacheConfig, SchedulerConfig
from protos.layers import Needs
from protos.messages import NewSequence, Request, Row
from runtime.core.block_manager import Chain
from runtime.core.proposing import ControllerProposers, ScheduledSequence
from runtime.core.request_queue import RequestQueue
from runtime.core.sequence import Sequence
from runtime.core.speculation_policy import Policy
from runtime.core.stats import EngineCounters

PROMPT_LOGITS = 1 << 25
"""Most logits of prompt positions in one step, over all rows: 128 MiB in fp32, however large the vocabulary."""


class Planner:
    """Shares the token budget and the blocks of one step: running rows first, then waiting ones."""

    def __init__(
        self,
        config: SchedulerConfig,
        roster: RequestQueue,
        drafting: ControllerProposers,
        counters: EngineCounters,
        cache: CacheConfig,
        *,
        vocab_size: int,
        draft_needs: Needs = "none",
    ) -> None:
        self._config = config
        self._roster = roster
        self._blocks = roster.blocks
        self._drafting = drafting
        self._counters = counters
        self._prefix_caching = cache.enable_prefix_caching
        self._max_scored = max(1, PROMPT_LOGITS // vocab_size)
        self._num_scored = 0  # prompt tokens of this step whose logits are wanted
        self._can_draft = True  # whether the draft worker can, in this step
        self._draft_needs = draft_needs  # what the draft worker reads of what the target computes
        self._generations = count(1)

    def plan(self, policy: Policy, *, can_draft: bool = True) -> list[ScheduledSequence]:
        """Return the parts of the next step, in order of arrival, with their blocks secured.

        Where the draft worker cannot *draft*, rows get only what proposers beside the controller guess.
        """
        roster = self._roster
        self._num_scored = 0
        self._can_draft = can_draft
        policy.begin_step(sum([sequence.is_decoding for sequence in roster.running]))
        num_preemptions = roster.num_preemptions
        parts = self._secure_known(self._share_budget(policy))
        self._secure_drafts(parts)
        if roster.waiting and roster.num_preemptions == num_preemptions:
            budget = self._config.max_num_batched_tokens - sum([part.length + part.k for part in parts])
            parts += self._admit_waiting(policy, budget)
        return parts

    def _share_budget(self, policy: Policy) -> list[ScheduledSequence]:
        """Share the token budget among running rows; guesses leave one token to every row behind them."""
        parts = []
        budget = self._config.max_num_batched_tokens
        num_behind = len(self._roster.running)
        for sequence in self._roster.running:
            num_behind -= 1
            part = self._part(sequence, budget)
            if part is None:
                continue
            self._want_guesses(part, policy, budget - part.length - num_behind)
            budget -= part.length + part.k
            parts.append(part)
        return parts

    def _part(self, sequence: Sequence, budget: int) -> ScheduledSequence | None:
        """Return what of a sequence fits the budget: all that is unfed, or a chunk, or nothing."""
        length = sequence.num_unfed
        if length > budget:
            length = budget if self._config.enable_chunked_prefill else 0
        if sequence.owes_prompt_logprobs:
            length = self._score(length)
        return ScheduledSequence(sequence, length) if length > 0 else None

    def _score(self, length: int) -> int:
        """Return how many of *length* prompt tokens may have their logits computed in this step; count them."""
        length = min(length, self._max_scored - self._num_scored)
        self._num_scored += length
        return length

    def _want_guesses(self, part: ScheduledSequence, policy: Policy, budget: int) -> None:
        """Set `k`. The target adds a token of its own to what it accepts: one fewer than may still come."""
        sequence = part.sequence
        can_ask_worker = self._can_draft and (sequence.is_decoding or self._draft_needs == "none")
        if part.samples and (can_ask_worker or self._drafting.is_here):
            room = sequence.max_len - len(sequence.token_ids) - 1
            part.k = max(0, min(policy.guesses(sequence.request), room, budget))

    def _secure_known(self, parts: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Get blocks for the tokens that are known, preempting the youngest where blocks run short."""
        for part in parts:
            sequence = part.sequence
            missing = self._blocks.blocks_for(part.end) - len(sequence.block_ids)
            while sequence.is_running and missing > self._blocks.num_free:
                self._roster.preempt_youngest()
            if sequence.is_running and missing > 0:
                sequence.block_ids += self._blocks.allocate(missing)
        return [part for part in parts if part.sequence.is_running]

    def _secure_drafts(self, parts: list[ScheduledSequence]) -> None:
        """Get the guesses, and blocks for them as far as blocks are free."""
        self._drafting.fill(parts, can_ask_worker=self._can_draft)
        for part in parts:
            if part.k:
                self._secure_draft(part)

    def _secure_draft(self, part: ScheduledSequence) -> None:
        block_ids = part.sequence.block_ids
        missing = self._blocks.blocks_for(part.end + part.k) - len(block_ids)
        if missing > 0:
            block_ids += self._blocks.allocate(min(missing, self._blocks.num_free))
        room = len(block_ids) * self._blocks.block_size - part.end
        if room < part.k:
            part.shrink(room)

    def _admit_waiting(self, policy: Policy, budget: int) -> list[ScheduledSequence]:
        parts: list[ScheduledSequence] = []
        while self._roster.waiting and self._roster.has_slot and budget > 0:
            part = self._admit_first(policy, budget)
            if part is None:
                break
            self._want_guesses(part, policy, budget - part.length)
            budget -= part.length + part.k
            parts.append(part)
        self._secure_drafts(parts)
        return parts

    def _admit_first(self, policy: Policy, budget: int) -> ScheduledSequence | None:
        """Let the first waiting sequence run if all it knows fits, and one block more for each running one."""
        sequence = self._roster.waiting[0]
        if sequence.owes_prompt_logprobs and self._num_scored >= self._max_scored:
            return None
        if self._is_being_computed(sequence.request):
            return None
        hit, chain = self._look_up(sequence, policy)
        num_known = self._blocks.blocks_for(len(sequence.token_ids))
        wanted = num_known - len(hit) + self._blocks.num_free_among(hit)
        if wanted + len(self._roster.running) > self._blocks.num_free:
            return None
        num_cached = len(hit) * self._blocks.block_size
        if not self._config.enable_chunked_prefill and len(sequence.token_ids) - num_cached > budget:
            return None
        self._roster.run_first()
        self._blocks.share(hit)
        sequence.start_after(num_cached, hit, chain)
        self._count_admission(sequence, num_cached)
        length = min(sequence.num_unfed, budget)
        part = ScheduledSequence(sequence, self._score(length) if sequence.owes_prompt_logprobs else length)
        sequence.block_ids += self._blocks.allocate(self._blocks.blocks_for(part.end) - len(hit))
        return part

    def _is_being_computed(self, request: Request) -> bool:
        """Whether the request before this one is reading the same prompt, of which each full block can then be shared.

        So the samples of one request read their prompt once. Whoever is behind loses little: such a prompt takes all of
        the budget in every step but its last.
        """
        prompt, running = request.prompt_token_ids, self._roster.running
        num_full = (len(prompt) - 1) // self._blocks.block_size
        if not running or not self._reads_cache(request):
            return False
        first = running[-1]
        if first.num_computed >= num_full * self._blocks.block_size:
            return False
        if first.request.cache_salt != request.cache_salt or first.request.prompt_token_ids != prompt:
            return False
        return len(self._blocks.match(prompt, request.cache_salt)[0]) < num_full

    def _look_up(self, sequence: Sequence, policy: Policy) -> tuple[list[int], Chain]:
        request = sequence.request
        if not self._reads_cache(request):
            return [], request.cache_salt
        hit, chain = self._blocks.match(sequence.token_ids, request.cache_salt)
        if hit and self._draft_needs == "all" and self._can_draft and policy.guesses(request):
            # What a draft made of the last token of the hit depends on the token behind it, which may be another here.
            return self._blocks.match(
                sequence.token_ids[: (len(hit) - 1) * self._blocks.block_size + 1], request.cache_salt
            )
        return hit, chain

    def _reads_cache(self, request: Request) -> bool:
        """Prompt log-probabilities need every position computed."""
        return self._prefix_caching and request.sampling.prompt_logprobs is None

    def _count_admission(self, sequence: Sequence, num_cached: int) -> None:
        if self._reads_cache(sequence.request):
            self._counters.prefix_queries += len(sequence.token_ids)
            self._counters.prefix_hits += num_cached
        if sequence.num_cached_tokens is None:
            sequence.first_ran(num_cached)
            self._counters.prompt_tokens += len(sequence.token_ids)

    def introduce(self, parts: list[ScheduledSequence]) -> list[NewSequence]:
        """Tell the workers in full of the sequences that have just taken a slot."""
        return [
            _introduce(part.sequence, next(self._generations)) for part in parts if not part.sequence.num_told_tokens
        ]

    def row(self, part: ScheduledSequence) -> Row:
        """Tell the workers what of this part they do not know yet."""
        sequence = part.sequence
        known_len = len(sequence.token_ids)
        new_blocks = sequence.block_ids[sequence.num_told_blocks :]
        row = Row(
            sequence.slot,
            sequence.num_computed,
            part.length,
            known_len,
            part.k,
            part.samples,
            sequence.token_ids[sequence.num_told_tokens :],
            new_blocks,
            self._blocks.versions_of(new_blocks),
            part.draft,
        )
        sequence.num_told_tokens = known_len
        sequence.num_told_blocks = len(sequence.block_ids)
        return row


def _introduce(sequence: Sequence, generation: int) -> NewSequence:
    request = sequence.request
    sequence.num_told_tokens = len(sequence.token_ids)
    return NewSequence(
        sequence.slot, tuple(sequence.token_ids), len(request.prompt_token_ids), request.sampling, generation
    )
