"""The controller's truth: every sequence, its tokens and its blocks."""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from itertools import count

from protos.config.engine import CacheConfig, SchedulerConfig
from protos.errors import ConfigError
from protos.interfaces import ALWAYS_UP, DraftService, Proposer
from protos.messages import Abort, Request, RoundPlan, Row, StepCosts, TokenOutput, Verdict, WorkerInfo
from protos.stats import EngineStats
from runtime.core.block_manager import BlockManager
from runtime.core.committer import Committer
from runtime.core.planner import Planner
from runtime.core.proposing import ControllerProposers
from runtime.core.request_queue import RequestQueue
from runtime.core.sequence import Sequence
from runtime.core.speculation_policy import Policy
from runtime.core.stats import EngineCounters
from runtime.text.detokenizer import Detokenizer

logger = logging.getLogger(__name__)

Command = Request | Abort


def without_text(request: Request) -> Detokenizer | None:
    """The detokenizer of an engine without a tokenizer: none."""
    return None


class Scheduler:
    """Admits requests, plans rounds, commits verdicts. There are no phases: computed tokens catch up with known ones.

    Args:
        proposers: propose beside the controller, in the order in which they are asked.
        has_worker: whether rows for which they have no guess may be left to a draft worker.
        detokenizers: makes each request's detokenizer (`DetokenizerFactory`).

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
        detokenizers: Callable[[Request], Detokenizer | None] = without_text,
    ) -> None:
        _check_limits(config, info)
        self._info = info
        self._detokenizers = detokenizers
        self._counters = EngineCounters()
        self._drafting = ControllerProposers(proposers, info.vocab_size, has_worker=has_worker, methods=info.methods)
        blocks = BlockManager(info.num_blocks, info.block_size)
        self._roster = RequestQueue(config.max_num_seqs, blocks, self._drafting.end)
        self._planner = Planner(
            config,
            self._roster,
            self._drafting,
            self._counters,
            cache,
            vocab_size=info.vocab_size,
            draft_needs=info.draft_needs,
        )
        self._committer = Committer(self._roster, self._drafting, self._counters, cache)
        self._in_flight: dict[int, list[tuple[Sequence, Row]]] = {}
        self._keys = count(1)
        self._round = 0
        self._epoch = 0

    @property
    def num_unfinished(self) -> int:
        """Requests running or waiting."""
        return len(self._roster)

    @property
    def costs(self) -> StepCosts | None:
        """What steps cost, where it was measured."""
        return self._info.costs

    @property
    def propose_s(self) -> float:
        """Seconds spent beside the controller on guesses."""
        return self._drafting.propose_s

    def admit(self, commands: Iterable[Command]) -> list[TokenOutput]:
        """Take new requests and aborts; return what ended by it. An aborted request's blocks are free at once."""
        outputs: list[TokenOutput] = []
        for command in commands:
            outputs += self._add(command) if isinstance(command, Request) else self._abort(command)
        return outputs

    def _add(self, request: Request) -> list[TokenOutput]:
        if self._roster.find(request.request_id) is not None:
            logger.warning("request %r is already being served; its second arrival is ignored", request.request_id)
            return []
        refusal = self._refusal(request)
        if refusal is not None:
            return [TokenOutput(request.request_id, finish_reason="error", error=refusal)]
        max_len = min(len(request.prompt_token_ids) + request.max_tokens, self._info.max_model_len)
        sequence = Sequence(request, list(request.prompt_token_ids), max_len, self._detokenizers(request))
        sequence.key = next(self._keys)
        self._roster.enter(sequence)
        self._drafting.begin(sequence)
        return []

    def _refusal(self, request: Request) -> str | None:
        """Say why a request could never be served. Front ends refuse it earlier, in the user's words."""
        num_prompt, limit = len(request.prompt_token_ids), self._info.max_model_len - 1
        if not 1 <= num_prompt <= limit:
            return f"the prompt has {num_prompt} tokens; with max_model_len {limit + 1} it must have 1 to {limit}"
        if request.max_tokens < 1:
            return f"max_tokens is {request.max_tokens}; it must be at least 1"
        return None

    def _abort(self, abort: Abort) -> list[TokenOutput]:
        found = [self._roster.find(request_id) for request_id in dict.fromkeys(abort.request_ids)]
        return [self._roster.end(sequence, "abort") for sequence in found if sequence is not None]

    def fail_all(self, reason: str) -> list[TokenOutput]:
        """End every request with an error: nobody is left to serve it."""
        return [self._roster.end(sequence, "error", reason) for sequence in self._roster.everyone()]

    def schedule(self, policy: Policy, drafting: DraftService = ALWAYS_UP) -> RoundPlan:
        """Plan the next round; empty where nothing can run.

        Every plan that is not empty must be committed, or else all of them given up.
        """
        if drafting.is_up and drafting.epoch != self._epoch:
            self._epoch = drafting.epoch
            self._roster.tell_all_again()
        parts = self._planner.plan(policy, can_draft=drafting.is_up)
        new = self._planner.introduce(parts)
        rows = [self._planner.row(part) for part in parts]
        is_on = any(policy.guesses(part.sequence.request) for part in parts)
        moves = self._committer.take_moves() if rows else ()
        plan = RoundPlan(self._round, rows, new, drafting.epoch if is_on and drafting.is_up else 0, moves, is_on)
        if rows:
            self._in_flight[self._round] = [(part.sequence, row) for part, row in zip(parts, rows, strict=True)]
            self._round += 1
        return plan

    def commit(self, plan: RoundPlan, verdicts: Seq[Verdict]) -> list[TokenOutput]:
        """Grow and end sequences by what the workers found; those that ended meanwhile are skipped."""
        self._counters.count_step(sum([row.length + row.k for row in plan.rows]))
        by_slot = {verdict.slot: verdict for verdict in verdicts}
        outputs = []
        for sequence, row in self._in_flight.pop(plan.round):
            if sequence.finish_reason is None:
                outputs.append(self._committer.commit(sequence, row, by_slot.get(row.slot)))
        if plan.speculates:
            self._drafting.prepare()
        return [output for output in outputs if output is not None]

    def give_up(self) -> None:
        """The workers lost all they held: compute every sequence again from its committed tokens, oldest first."""
        self._in_flight.clear()
        self._committer.take_moves()  # of a cache that is gone
        self._roster.give_up()

    def stats(self) -> EngineStats:
        """Return a picture of all counters and gauges."""
        roster = self._roster
        self._counters.preemptions = roster.num_preemptions
        self._counters.draft_failures = self._drafting.num_failures
        usage = 1 - roster.blocks.num_free / roster.blocks.num_blocks
        return self._counters.snapshot(len(roster.running), len(roster.waiting), usage)

    def check_integrity(self) -> None:
        """Check blocks, slots and queues against each other. Raises RuntimeError where they disagree."""
        self._roster.check_integrity()


def _check_limits(config: SchedulerConfig, info: WorkerInfo) -> None:
    room = info.num_blocks * info.block_size
    if info.max_model_len > room:
        raise ConfigError(
            f"max_model_len {info.max_model_len} is more than the {room} tokens that {info.num_blocks} KV blocks of "
            f"{info.block_size} hold; lower max_model_len or give the cache more memory"
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < info.max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} is less than max_model_len {info.max_model_len}, "
            "and without chunked prefill a prompt must fit in one step; raise it or enable chunked prefill"
        )
