"""Admits requests, plans steps and commits their results."""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import count

from protos.config.engine import CacheConfig, SchedulerConfig
from protos.errors import StepOutOfMemoryError
from protos.interfaces import ALWAYS_UP, DraftService, Proposer
from protos.messages import Abort, Request, RoundPlan, Row, Step, TokenOutput, Verdict, WorkerInfo
from protos.stats import EngineStats
from runtime.core.block_manager import BlockManager
from runtime.core.limits import check_limits
from runtime.core.planner import Planner
from runtime.core.proposing import ControllerProposers
from runtime.core.request_queue import RequestQueue
from runtime.core.sequence import Sequence, refusal
from runtime.core.state_keeping import StateKeeping
from runtime.core.stats import EngineCounters
from runtime.policy.base import Policy
from runtime.text.detokenizer import Detokenizer

logger = logging.getLogger(__name__)


def no_detokenizer(request: Request) -> Detokenizer | None:
    """Return None: an engine without a tokenizer returns no text."""
    return None


class Scheduler:
    """Owns every sequence, its tokens and its blocks.

    There are no separate prefill and decode phases: each step feeds known tokens whose KV is not computed yet.

    Args:
        info: what the loaded workers returned.
        proposers: run in the controller process, in order of priority; as an attribute, None without any.
        has_worker: whether a draft worker proposes for rows for which they have no draft.
        detokenizers: returns a request's detokenizer (`DetokenizerFactory`).

    Raises:
        ConfigError: the limits contradict each other.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        info: WorkerInfo,
        *,
        proposers: Seq[Proposer] = (),
        has_worker: bool = True,
        detokenizers: Callable[[Request], Detokenizer | None] = no_detokenizer,
    ) -> None:
        check_limits(config, info)
        self.info = info
        self._detokenizers = detokenizers
        counters = self._counters = EngineCounters()
        self.proposers = ControllerProposers(proposers, info.vocab_size, info.methods, counters) if proposers else None
        self._prefix_caching = cache.enable_prefix_caching and info.prefix_states != 0
        blocks = BlockManager(info.num_blocks, info.block_size, info.prefix_states if self._prefix_caching else None)
        self._queue = RequestQueue(config.max_num_seqs, blocks)
        lag = int(info.draft_needs == "all")
        self._states = None if blocks.states is None else StateKeeping(blocks, blocks.states, lag)
        worker_methods = (None, *info.methods[-1:]) if has_worker else ()
        self._worker_source = (self.proposers.num_sources if self.proposers else 0) if has_worker else None
        self._planner = Planner(
            config,
            info,
            queue=self._queue,
            prefix_caching=self._prefix_caching,
            states=self._states,
            proposers=self.proposers,
            worker_methods=worker_methods,
            worker_source=self._worker_source,
            counters=self._counters,
        )
        self._moves: list[int] = []
        self._in_flight: dict[int, list[tuple[Sequence, Row]]] = {}
        self._keys = count(1)
        self._round = 0
        self._epoch = 0

    @property
    def num_unfinished(self) -> int:
        """Requests running or waiting."""
        return len(self._queue)

    @property
    def propose_s(self) -> float:
        """Seconds spent in proposers in the controller process."""
        return self._counters.propose_s

    def admit(self, commands: Iterable[Request | Abort]) -> list[TokenOutput]:
        """Queue new requests and abort others; return the last outputs of those that ended.

        The blocks of an aborted request are free at once.
        """
        outputs: list[TokenOutput] = []
        for command in commands:
            outputs += self._add(command) if isinstance(command, Request) else self._abort(command)
        return outputs

    def _add(self, request: Request) -> list[TokenOutput]:
        if self._queue.find(request.request_id) is not None:
            logger.warning("request %r is already being served; the second one is ignored", request.request_id)
            return []
        error = refusal(request, self.info.max_model_len)
        if error is not None:
            return [TokenOutput(request.request_id, finish_reason="error", error=error)]
        max_len = min(len(request.prompt_token_ids) + request.max_tokens, self.info.max_model_len)
        sequence = Sequence(request, list(request.prompt_token_ids), max_len, self._detokenizers(request))
        sequence.key = next(self._keys)
        self._queue.add(sequence)
        if self.proposers is not None:
            self.proposers.begin(sequence)
        return []

    def _abort(self, abort: Abort) -> list[TokenOutput]:
        found = [self._queue.find(request_id) for request_id in dict.fromkeys(abort.request_ids)]
        return [self._end(sequence, "abort") for sequence in found if sequence is not None]

    def _end(self, sequence: Sequence, finish_reason: str, error: str | None = None) -> TokenOutput:
        """End a sequence that did not end by its own tokens; return its last output."""
        sequence.finish_reason = finish_reason
        sequence.error = error
        self._remove(sequence)
        return sequence.output()

    def _remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)
        if self.proposers is not None:
            self.proposers.end(sequence)

    def fail_all(self, reason: str) -> list[TokenOutput]:
        """End every request with an error; return their last outputs."""
        return [self._end(sequence, "error", reason) for sequence in self._queue.unfinished()]

    def schedule(self, policy: Policy, drafting: DraftService = ALWAYS_UP) -> RoundPlan:
        """Plan the next step; the plan is empty if nothing can run.

        Every plan that is not empty must be committed, unless `give_up` drops it, or `requeue_all` all of them.
        """
        if drafting.is_up and drafting.epoch != self._epoch:
            self._epoch = drafting.epoch
            self._queue.resend_all()
        scheduled = self._planner.plan(policy, worker_is_up=drafting.is_up)
        new = self._planner.new_sequences(scheduled)
        rows = [self._planner.row(one) for one in scheduled]
        wanted = (policy.num_draft_tokens(one.sequence, self._worker_source) for one in scheduled)
        is_on = self._planner.may_draft and any(wanted)
        moves = self._take_moves() if rows else ()
        epoch = drafting.epoch if is_on and drafting.is_up else 0
        goes_on = self._planner.continues
        plan = RoundPlan(self._round, rows, new, epoch, moves, is_on, policy.least_survival, goes_on)
        if rows:
            self._in_flight[self._round] = [(one.sequence, row) for one, row in zip(scheduled, rows, strict=True)]
            self._round += 1
        return plan

    def commit(self, plan: RoundPlan, verdicts: Seq[Verdict]) -> list[TokenOutput]:
        """Apply the workers' verdicts: append tokens, end finished requests, publish full blocks.

        Sequences that were aborted since the plan was made are skipped.
        """
        by_slot = {verdict.slot: verdict for verdict in verdicts}
        self._counters.count_step(sum([row.length + _num_drafted(row, by_slot.get(row.slot)) for row in plan.rows]))
        outputs = []
        for sequence, row in self._in_flight.pop(plan.round):
            if sequence.finish_reason is None:
                outputs.append(self._commit_row(sequence, row, by_slot.get(row.slot)))
            if self._states is not None:
                self._states.settle(row)
        if self._planner.may_draft and self.proposers is not None:
            self.proposers.prepare()
        return [output for output in outputs if output is not None]

    def _commit_row(self, sequence: Sequence, row: Row, verdict: Verdict | None) -> TokenOutput | None:
        """Apply one row's verdict; None is valid for a row that neither samples nor has prompt log-probabilities."""
        if verdict is None and row.samples:
            verdict = Verdict(row.slot, failed="the workers returned no verdict for this row")
        if verdict is not None and verdict.failed is not None:
            self._queue.blocks.forget(sequence.block_ids)
            return self._end(sequence, "error", verdict.failed)
        if verdict is None or not row.samples:
            return self._commit_chunk(sequence, row, verdict)
        return self._commit_tokens(sequence, row, verdict)

    def _commit_chunk(self, sequence: Sequence, row: Row, verdict: Verdict | None) -> TokenOutput | None:
        """Commit a chunk of a prompt: no new tokens."""
        sequence.num_computed = row.start + row.length
        self._publish(sequence, row)
        entries = verdict.prompt_logprobs if verdict else None
        fresh = sequence.new_prompt_logprobs(row.start, entries) if entries else None
        return sequence.output(prompt_logprobs=fresh) if fresh else None

    def _commit_tokens(self, sequence: Sequence, row: Row, verdict: Verdict) -> TokenOutput | None:
        num_new, sequence.num_shortages = sequence.append_verdict(verdict), 0
        self._publish(sequence, row)
        if not verdict.token_ids and not verdict.prompt_logprobs:
            return None  # it skipped its turn
        if verdict.widths:
            self._move_accepted(sequence, row, verdict.path)
        if self.proposers is not None:
            self.proposers.grow(sequence, verdict.token_ids[:num_new], verdict.probed)
        self._counters.generated_tokens += num_new
        step = self._count_draft(sequence, verdict, num_new) if verdict.proposed else Step()
        if sequence.finish_reason is not None:
            self._remove(sequence)
        entries = verdict.prompt_logprobs
        return sequence.output(
            verdict.token_ids[:num_new],
            verdict.logprobs[:num_new] if verdict.logprobs is not None else None,
            sequence.new_prompt_logprobs(row.start, entries) or None if entries else None,
            step,
        )

    def _count_draft(self, sequence: Sequence, verdict: Verdict, num_new: int) -> Step:
        """Count the draft tokens of a row, without those after the end of the sequence."""
        most = verdict.proposed if sequence.finish_reason is None else num_new
        depth = min(most, len(verdict.widths) or verdict.proposed)
        step = Step(sum(verdict.widths[:depth]) or depth, min(len(verdict.path), num_new), depth)
        sequence.speculation.add(step)
        self._counters.speculation.add(step)
        return step

    def _move_accepted(self, sequence: Sequence, row: Row, path: Seq[int]) -> None:
        """Have the KV of a tree's accepted nodes moved to where those of a chain would be (`RoundPlan.moves`).

        The moves stay due if the sequence ends: its blocks may already be published.
        """
        for index, node in enumerate(path[: sequence.num_computed - row.known_len]):
            if node != index:
                source, target = row.known_len + node, row.known_len + index
                self._moves += self._cache_position(sequence, source), self._cache_position(sequence, target)

    def _cache_position(self, sequence: Sequence, position: int) -> int:
        """Return the index in the KV cache of a position of the sequence."""
        size = self._queue.blocks.block_size
        index, offset = divmod(position, size)
        return sequence.block_ids[index] * size + offset

    def _take_moves(self) -> list[int]:
        moves, self._moves = self._moves, []
        return moves

    def _publish(self, sequence: Sequence, row: Row) -> None:
        """Add newly full blocks of computed, committed tokens to the prefix cache, and the states after them."""
        blocks = self._queue.blocks
        size = blocks.block_size
        num_full = sequence.num_computed // size
        if not self._prefix_caching or num_full == sequence.num_published:
            return
        for index in range(sequence.num_published, num_full):
            content = tuple(sequence.token_ids[index * size : (index + 1) * size])
            sequence.chain = blocks.publish(sequence.block_ids[index], sequence.chain, content)
            if self._states is not None:
                self._states.keep(sequence, (index + 1) * size, row)
        sequence.num_published = num_full

    def give_up(self, plan: RoundPlan, shortage: StepOutOfMemoryError) -> list[TokenOutput]:
        """Drop a plan that takes too much memory, and plan smaller steps; a sequence ends after some of one token."""
        in_flight = self._in_flight.pop(plan.round)
        num_tokens = sum([row.length + row.k for row in plan.rows])
        self._planner.budget.shrink(num_tokens)
        if not shortage.keeps_state:
            self.requeue_all()
        alone = [sequence for sequence, _ in in_flight if num_tokens == 1 and sequence.finish_reason is None]
        failed = [sequence for sequence in alone if sequence.is_short_again()]
        return [self._end(sequence, "error", f"out of memory for a single token: {shortage}") for sequence in failed]

    def requeue_all(self) -> None:
        """Drop all plans and KV of lost workers; every sequence is computed again from its tokens, oldest first."""
        self._in_flight.clear()
        self._moves.clear()
        self._queue.requeue_all()

    def resize(self, num_blocks: int, num_states: int | None) -> None:
        """Use so many KV blocks and kept states, at most as at first. Nothing may run: see `requeue_all`."""
        self._queue.blocks.resize(num_blocks, num_states)

    def stats(self) -> EngineStats:
        """Return a snapshot of all counters and gauges."""
        queue = self._queue
        self._counters.preemptions = queue.num_preemptions
        usage = 1 - queue.blocks.num_free / queue.blocks.num_blocks
        return self._counters.snapshot(len(queue.running), len(queue.waiting), usage)

    def check_integrity(self) -> None:
        """Check blocks, slots and queues against each other. Raises RuntimeError if they disagree."""
        self._queue.check_integrity()


def _num_drafted(row: Row, verdict: Verdict | None) -> int:
    """Return how many draft tokens of a row were fed: a draft worker's draft may have fewer than were asked for."""
    if row.draft is not None:
        return row.k
    return 0 if verdict is None else verdict.proposed
