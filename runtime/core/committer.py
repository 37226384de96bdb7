"""What verdicts do to sequences: the only place where tokens grow."""

from collections.abc import Sequence as Seq

from protos.config.engine import CacheConfig
from protos.messages import Row, Step, TokenOutput, Verdict
from runtime.core.proposing import ControllerProposers
from runtime.core.request_queue import RequestQueue
from runtime.core.sequence import Sequence
from runtime.core.stats import EngineCounters


class Committer:
    """Applies verdicts row by row, ends what is finished, and publishes full blocks to the prefix cache."""

    def __init__(
        self, roster: RequestQueue, drafting: ControllerProposers, counters: EngineCounters, cache: CacheConfig
    ) -> None:
        self._roster = roster
        self._drafting = drafting
        self._blocks = roster.blocks
        self._counters = counters
        self._prefix_caching = cache.enable_prefix_caching
        self._moves: list[int] = []

    def commit(self, sequence: Sequence, row: Row, verdict: Verdict | None) -> TokenOutput | None:
        """Apply one row's verdict; None is fine for rows that neither sample nor owe log-probabilities."""
        if verdict is None and row.samples:
            verdict = Verdict(row.slot, failed="the workers returned no verdict for this row")
        if verdict is not None and verdict.failed is not None:
            self._blocks.forget(sequence.block_ids)
            return self._roster.end(sequence, "error", verdict.failed)
        if verdict is None or not row.samples:
            return self._commit_chunk(sequence, row, verdict)
        return self._commit_tokens(sequence, row, verdict)

    def _commit_chunk(self, sequence: Sequence, row: Row, verdict: Verdict | None) -> TokenOutput | None:
        sequence.num_computed = row.start + row.length
        self._publish(sequence)
        entries = verdict.prompt_logprobs if verdict else None
        fresh = sequence.take_prompt_logprobs(row.start, entries) if entries else None
        return sequence.report(prompt_logprobs=fresh) if fresh else None

    def _commit_tokens(self, sequence: Sequence, row: Row, verdict: Verdict) -> TokenOutput:
        kept = sequence.absorb(verdict)
        self._straighten(sequence, row, verdict.path)
        self._drafting.grow(sequence, verdict.token_ids[:kept], verdict.probed)
        self._counters.generated_tokens += kept
        step = self._count_guesses(sequence, verdict, kept) if verdict.proposed else Step()
        self._publish(sequence)
        if sequence.finish_reason is not None:
            self._roster.depart(sequence)
        entries = verdict.prompt_logprobs
        return sequence.report(
            verdict.token_ids[:kept],
            verdict.logprobs[:kept] if verdict.logprobs is not None else None,
            sequence.take_prompt_logprobs(row.start, entries) or None if entries else None,
            step,
        )

    def _count_guesses(self, sequence: Sequence, verdict: Verdict, kept: int) -> Step:
        """Count a round's guesses; those behind the end of the sequence are nobody's."""
        widths = verdict.widths or (1,) * verdict.proposed
        if sequence.finish_reason is not None:
            widths = widths[:kept]
        accepted = min(len(verdict.path), kept)
        sequence.speculation.add(widths, accepted)
        self._counters.speculation.add(widths, accepted)
        return Step(sum(widths), accepted, len(widths))

    def _straighten(self, sequence: Sequence, row: Row, path: Seq[int]) -> None:
        """Have the K and V of a tree's accepted nodes moved to where a chain's would stand."""
        for index, node in enumerate(path[: sequence.num_computed - row.known_len]):
            if node != index:
                self._moves += self._place(sequence, row.known_len + node), self._place(sequence, row.known_len + index)

    def _place(self, sequence: Sequence, place: int) -> int:
        """Return where in the cache a place along the sequence's blocks lies."""
        index, offset = divmod(place, self._blocks.block_size)
        return sequence.block_ids[index] * self._blocks.block_size + offset

    def take_moves(self) -> list[int]:
        """Return the moves (`RoundPlan.moves`) that nobody was told of yet.

        They stand whatever becomes of their sequences: blocks that were published already rest on them.
        """
        moves, self._moves = self._moves, []
        return moves

    def _publish(self, sequence: Sequence) -> None:
        """Tell the prefix cache of the blocks that became full of computed, committed tokens."""
        size = self._blocks.block_size
        num_full = sequence.num_computed // size
        if not self._prefix_caching or num_full == sequence.num_published:
            return
        for index in range(sequence.num_published, num_full):
            content: Seq[int] = sequence.token_ids[index * size : (index + 1) * size]
            sequence.chain = self._blocks.publish(sequence.block_ids[index], sequence.chain, tuple(content))
        sequence.num_published = num_full
