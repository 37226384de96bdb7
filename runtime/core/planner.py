"""Which sequences run in a step, with which tokens, blocks and draft tokens."""

from collections.abc import Sequence as Seq
from itertools import count

from protos.capacity import TokenBudget
from protos.config.engine import SchedulerConfig
from protos.messages import NewSequence, Request, Row, WorkerInfo
from runtime.core.proposing import ControllerProposers
from runtime.core.request_queue import RequestQueue
from runtime.core.run_ahead import FailedStart, continues
from runtime.core.sequence import ScheduledSequence, Sequence
from runtime.core.state_keeping import StateKeeping
from runtime.core.stats import EngineCounters
from runtime.policy.base import Policy

PROMPT_LOGITS = 1 << 25
"""Most logits of prompt positions in one step, over all rows: 128 MiB in fp32 for any vocabulary size."""


class Planner:
    """Shares the token budget and the blocks of one step: running sequences first, then waiting ones.

    Args:
        queue: all sequences; the planner starts and preempts them.
        prefix_caching: whether requests may begin after a prefix that is cached.
        states: decides which recurrent states are kept; None: the model has none, or prefixes are not cached.
        proposers: those in the controller process, None without any.
        worker_methods: requests whose `method` is one of these may get draft tokens from the draft worker.
        worker_source: the draft worker, as the policy numbers sources; None without one.
        counters: where prompt tokens and prefix-cache hits are counted.

    Attributes:
        budget: the tokens of a step.
        may_draft: whether any row may get draft tokens in this step.
        continues: see `RoundPlan.continues`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        info: WorkerInfo,
        *,
        queue: RequestQueue,
        prefix_caching: bool,
        states: StateKeeping | None,
        proposers: ControllerProposers | None,
        worker_methods: Seq[str | None],
        worker_source: int | None,
        counters: EngineCounters,
    ) -> None:
        self.budget = TokenBudget(config.max_num_batched_tokens)
        self._has_chunks = config.enable_chunked_prefill
        self._queue, self._states = queue, states
        self._blocks = queue.blocks
        self._proposers = proposers
        self._worker_methods = tuple(worker_methods)
        self._worker_source = worker_source
        self._counters = counters
        self._prefix_caching = prefix_caching
        self._max_scored = max(1, PROMPT_LOGITS // info.vocab_size)
        self._num_scored = 0  # prompt tokens whose logits are computed in this step
        self._worker_is_up = True  # whether the draft worker serves in this step
        self.may_draft = self.continues = False
        self._failed = FailedStart()
        self._rows_ahead = info.rows_ahead
        self._draft_needs = info.draft_needs
        self._max_model_len = info.max_model_len
        self._draft_places = info.draft_places
        self._generations = count(1)

    def plan(self, policy: Policy, *, worker_is_up: bool = True) -> list[ScheduledSequence]:
        """Return the sequences of the next step, in order of arrival, with their blocks allocated.

        Without the draft worker, rows get draft tokens only from proposers in the controller process.
        """
        queue = self._queue
        self._num_scored, self._worker_is_up = 0, worker_is_up
        policy.begin_step(queue.running)
        has_source = worker_is_up or self._proposers is not None
        self.may_draft = policy.current > 0 and has_source
        num_preemptions = queue.num_preemptions
        scheduled = self._allocate_known(self._share_budget(policy))
        self._allocate_drafts(scheduled, policy)
        is_begun = self.continues and bool(scheduled)  # the workers may be in this step: no row is added
        if queue.waiting and queue.num_preemptions == num_preemptions and not is_begun:
            budget = self.budget.limit - sum([one.length + one.k for one in scheduled])
            scheduled += self._start_waiting(policy, budget)
        self.continues = (
            len(scheduled) <= self._rows_ahead
            and (policy.stays_plain or not has_source)
            and continues(scheduled, queue, self._failed)
        )
        if self.budget.is_reduced:
            self.budget.count_step(sum([one.length for one in scheduled]))
        return scheduled

    def _share_budget(self, policy: Policy) -> list[ScheduledSequence]:
        """Share the token budget among running rows; draft tokens leave one token for every later row."""
        scheduled = []
        budget = self.budget.limit
        num_later = len(self._queue.running)
        for sequence in self._queue.running:
            num_later -= 1
            one = self._fit(sequence, budget)
            if one is None:
                continue
            self._request_drafts(one, policy, budget - one.length - num_later)
            budget -= one.length + one.k
            scheduled.append(one)
        return scheduled

    def _fit(self, sequence: Sequence, budget: int) -> ScheduledSequence | None:
        """Return as much of a sequence as fits the budget: all uncomputed tokens, or a chunk, or nothing."""
        length = sequence.num_uncomputed
        if length > budget:
            length = budget if self._may_chunk else 0
        if sequence.needs_prompt_logprobs:
            length = self._limit_scored(length)
        return ScheduledSequence(sequence, length) if length > 0 else None

    @property
    def _may_chunk(self) -> bool:
        """Whether a prompt may be fed in several steps: as configured, or because there is too little memory."""
        return self._has_chunks or self.budget.is_reduced

    def _limit_scored(self, length: int) -> int:
        """Return how many of *length* prompt tokens may have their logits computed in this step; count them."""
        length = min(length, self._max_scored - self._num_scored)
        self._num_scored += length
        return length

    def _request_drafts(self, one: ScheduledSequence, policy: Policy, budget: int) -> None:
        """Set `k`. A tree may have more nodes than tokens are still to come, but all within the context's length."""
        if not self.may_draft:
            return
        sequence = one.sequence
        has_features = self._draft_needs == "none" or sequence.is_decoding
        worker_drafts = has_features and self._worker_drafts(sequence.request)
        if one.samples and (worker_drafts or self._proposers is not None):
            room = self._max_model_len - len(sequence.token_ids) - 1
            one.k = max(0, min(policy.num_draft_tokens(sequence), room, budget))

    def _worker_drafts(self, request: Request) -> bool:
        """Whether the draft worker may propose for this request in this step."""
        return self._worker_is_up and request.method in self._worker_methods

    def _allocate_known(self, scheduled: list[ScheduledSequence]) -> list[ScheduledSequence]:
        """Allocate blocks for the known tokens, preempting the youngest sequences if too few are free."""
        for one in scheduled:
            sequence = one.sequence
            missing = self._blocks.blocks_for(one.end) - len(sequence.block_ids)
            if missing <= 0:
                continue
            while sequence.is_running and missing > self._blocks.num_free:
                self._queue.preempt_youngest()
            if sequence.is_running:
                sequence.block_ids += self._blocks.allocate(missing)
        return [one for one in scheduled if one.sequence.is_running]

    def _allocate_drafts(self, scheduled: list[ScheduledSequence], policy: Policy) -> None:
        """Get the drafts of the controller's proposers, and blocks for all drafts as far as blocks are free."""
        if self._proposers is not None and self.may_draft:
            self._proposers.fill(scheduled, policy)
            for one in scheduled:
                if one.draft is None:
                    self._leave_to_worker(one, policy, self._proposers.num_sources)
        for one in scheduled:
            if one.k:
                self._allocate_draft(one)

    def _leave_to_worker(self, one: ScheduledSequence, policy: Policy, source: int) -> None:
        """Give a row for which no draft was found what the draft worker may draft for it, if there is one."""
        one.source = source
        drafts = one.k and self._worker_drafts(one.sequence.request)
        one.shrink(min(one.k, policy.num_draft_tokens(one.sequence, source)) if drafts else 0)

    def _allocate_draft(self, one: ScheduledSequence) -> None:
        """Allocate blocks for the draft's nodes; for a draft worker's, also for all that it is fed to grow a tree."""
        block_ids, end = one.sequence.block_ids, one.end
        places = one.k if one.draft is not None else max(one.k, self._draft_places)
        missing = self._blocks.blocks_for(end + places) - len(block_ids)
        if missing <= 0:
            return
        block_ids += self._blocks.allocate(min(missing, self._blocks.num_free))
        room = len(block_ids) * self._blocks.block_size - end
        if room < one.k:
            one.shrink(room)

    def _start_waiting(self, policy: Policy, budget: int) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        while self._queue.waiting and self._queue.has_slot and budget > 0:
            one = self._start_first(policy, budget)
            if one is None:
                self._failed = FailedStart.of(self._queue)
                break
            self._request_drafts(one, policy, budget - one.length)
            budget -= one.length + one.k
            scheduled.append(one)
        self._allocate_drafts(scheduled, policy)
        return scheduled

    def _start_first(self, policy: Policy, budget: int) -> ScheduledSequence | None:
        """Start the first waiting sequence if blocks for all its tokens are free, and one more per running sequence."""
        sequence = self._queue.waiting[0]
        if sequence.needs_prompt_logprobs and self._num_scored >= self._max_scored:
            return None
        if self._is_being_computed(sequence.request):
            return None
        found = self._find_cached(sequence, policy)
        hit, chain = self._blocks.resumable(found, sequence.request.cache_salt)
        num_known = self._blocks.blocks_for(len(sequence.token_ids))
        wanted = num_known - len(hit) + self._blocks.num_free_among(hit)
        if wanted + len(self._queue.running) > self._blocks.num_free:
            return None
        num_cached = len(hit) * self._blocks.block_size
        if not self._may_chunk and len(sequence.token_ids) - num_cached > budget:
            return None
        self._queue.start_first()
        self._blocks.share(hit)
        sequence.start_after(num_cached, hit, chain)
        if self._states is not None:
            self._states.begin(sequence, len(found))
        self._count_start(sequence, num_cached)
        length = min(sequence.num_uncomputed, budget)
        one = ScheduledSequence(sequence, self._limit_scored(length) if sequence.needs_prompt_logprobs else length)
        sequence.block_ids += self._blocks.allocate(self._blocks.blocks_for(one.end) - len(hit))
        return one

    def _is_being_computed(self, request: Request) -> bool:
        """Whether the request started last is still computing the same prompt, whose full blocks can then be shared.

        So the n samples of one request compute their prompt once. Later requests lose little by waiting: such a prompt
        takes the whole budget of every step but its last.
        """
        prompt, running = request.prompt_token_ids, self._queue.running
        num_full = (len(prompt) - 1) // self._blocks.block_size
        if not running or not self._reads_cache(request):
            return False
        last = running[-1]
        if last.num_computed >= num_full * self._blocks.block_size:
            return False
        if last.request.cache_salt != request.cache_salt or last.request.prompt_token_ids != prompt:
            return False
        return len(self._blocks.match(prompt, request.cache_salt)[0]) < num_full

    def _find_cached(self, sequence: Sequence, policy: Policy) -> list[int]:
        """Return the blocks of the longest cached prefix that the sequence may reuse."""
        request = sequence.request
        if not self._reads_cache(request):
            return []
        hit = self._blocks.match(sequence.token_ids, request.cache_salt)[0]
        drafts = self._draft_needs == "all" and self._worker_is_up
        if hit and drafts and policy.num_draft_tokens(sequence, self._worker_source):
            # The draft's KV at the last token of the hit depends on the token after it, which may differ here.
            num_tokens = (len(hit) - 1) * self._blocks.block_size + 1
            return self._blocks.match(sequence.token_ids[:num_tokens], request.cache_salt)[0]
        return hit

    def _reads_cache(self, request: Request) -> bool:
        """Whether the request may reuse cached blocks; prompt log-probabilities need every position computed."""
        return self._prefix_caching and request.sampling.prompt_logprobs is None

    def _count_start(self, sequence: Sequence, num_cached: int) -> None:
        if self._reads_cache(sequence.request):
            self._counters.prefix_queries += len(sequence.token_ids)
            self._counters.prefix_hits += num_cached
        if sequence.num_cached_tokens is None:
            sequence.mark_started(num_cached)
            self._counters.prompt_tokens += len(sequence.token_ids)

    def new_sequences(self, scheduled: list[ScheduledSequence]) -> list[NewSequence]:
        """Return the full description of the sequences of which the workers were sent nothing yet."""
        return [one.sequence.describe(next(self._generations)) for one in scheduled if not one.sequence.num_sent_tokens]

    def row(self, one: ScheduledSequence) -> Row:
        """Return the row for the workers, with the tokens and blocks that they were not sent yet."""
        sequence = one.sequence
        known_len = len(sequence.token_ids)
        new_blocks = sequence.block_ids[sequence.num_sent_blocks :]
        row = Row(
            sequence.slot,
            sequence.num_computed,
            one.length,
            known_len,
            one.k,
            one.samples,
            sequence.token_ids[sequence.num_sent_tokens :],
            new_blocks,
            self._blocks.versions_of(new_blocks) if new_blocks else [],
            one.draft,
            one.depth,
            one.source,
            sequence.state_from,
            [] if self._states is None else self._states.reserve(one),
        )
        sequence.state_from = -1
        sequence.num_sent_tokens = known_len
        sequence.num_sent_blocks = len(sequence.block_ids)
        return row
