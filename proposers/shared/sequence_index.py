"""Base of model-free proposers: an n-gram index of each sequence's text, built in slices.

Nothing is indexed when a sequence arrives or grows. Prompts are indexed by a bounded number of tokens per round, and
new tokens when a draft is requested: so a long prompt does not delay a round, and speculation that is off costs
nothing.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from proposers.shared.answer_ring import AnswerText
from proposers.shared.ngram_index import Places
from protos.draft import Draft, DraftRow
from protos.interfaces import SequenceListener
from protos.messages import Request

SLICE = 2048
"""Tokens indexed per round, over all sequences: about a millisecond."""
GROWTH = 128
"""Sequences with at most this many new tokens are indexed at once, without queueing: more than a round can commit."""


@dataclass(slots=True, eq=False)
class IndexedSequence:
    """One sequence and the index of its n-grams.

    Attributes:
        places: index of the n-grams of `tokens`.
        tokens: prompt and output, owned by the controller; the prompt alone until a draft is requested.
        salt: of its tenant.
        answer: what the index of all answers has of its output, if the method has such an index.
        num_shared: number of tokens of the output in `answer`.
        is_over: whether it ended.
        is_waiting: whether it is queued to be indexed.
    """

    places: Places
    tokens: Seq[int]
    prompt_len: int = 0
    salt: str = ""
    answer: AnswerText | None = None
    num_shared: int = 0
    is_over: bool = False
    is_waiting: bool = False

    @property
    def num_new(self) -> int:
        """Number of `tokens` not indexed yet."""
        return len(self.tokens) - 1 - self.places.num_added

    def unshared(self, token_ids: Seq[int]) -> Seq[int]:
        """Return the tokens of the output that are not in `answer` yet, of *token_ids*: prompt and output."""
        return token_ids[self.prompt_len + self.num_shared :]

    @property
    def is_indexed(self) -> bool:
        """Whether all `tokens` are indexed."""
        return self.num_new <= 0

    def prepare(self, budget: int) -> int:
        """Index at most *budget* tokens; return how many."""
        return self.places.add(self.tokens, budget)


class SequenceIndex(SequenceListener):
    """A proposer that indexes every sequence, and drafts row by row."""

    def __init__(self) -> None:
        self._sequences: dict[int, IndexedSequence] = {}
        self._unprepared: deque[IndexedSequence] = deque()
        self._grown: list[IndexedSequence] = []

    @abstractmethod
    def index(self) -> Places:
        """Return an empty index with the n-gram sizes of the method."""

    @abstractmethod
    def draft(self, row: DraftRow, sequence: IndexedSequence) -> Draft:
        """Return a draft of at most `row.k` tokens for one row; an empty one if nothing is found."""

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft per row; rows without a `begin` are indexed anew each time."""
        return [self.draft(row, one) for row, one in zip(rows, self.update(rows), strict=True)]

    def update(self, rows: Seq[DraftRow]) -> list[IndexedSequence]:
        """Return the rows' sequences, with new tokens indexed up to the budget of one slice."""
        self._grown = [self._sequences.get(row.key) or self._indexed(row) for row in rows]
        for sequence, row in zip(self._grown, rows, strict=True):
            sequence.tokens = row.token_ids
        self._index_new(SLICE)
        return self._grown

    def _indexed(self, row: DraftRow) -> IndexedSequence:
        sequence = IndexedSequence(self.index(), row.token_ids)
        sequence.prepare(len(row.token_ids))
        return sequence

    def _index_new(self, budget: int) -> int:
        """Index the new tokens of the rows of the last `propose`; return the rest of *budget*.

        Sequences with many new tokens, and those beyond the budget, are queued.
        """
        for grown in self._grown:
            if grown.num_new <= GROWTH:
                budget -= grown.places.add(grown.tokens, budget)
            if not (grown.is_indexed or grown.is_waiting or grown.is_over):
                self._queue(grown)
        return budget

    def _queue(self, sequence: IndexedSequence) -> None:
        sequence.is_waiting = True
        self._unprepared.append(sequence)

    def prepare(self) -> None:
        """See `SequenceListener`: indexes newly committed tokens, then the oldest prompts."""
        budget = self._index_new(SLICE)
        self._grown = []
        while budget > 0 and self._unprepared:
            first = self._unprepared[0]
            taken = first.prepare(budget)
            if taken < budget:
                self._unprepared.popleft().is_waiting = False
            budget -= taken

    def is_prepared(self, key: int) -> bool:
        """See `SequenceListener`."""
        sequence = self._sequences.get(key)
        return sequence is None or not sequence.is_waiting

    def begin(self, key: int, request: Request) -> None:
        """See `SequenceListener`."""
        prompt = request.prompt_token_ids
        sequence = IndexedSequence(self.index(), prompt, len(prompt), request.cache_salt)
        self._sequences[key] = sequence
        self._queue(sequence)

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """See `SequenceListener`."""
        sequence = self._sequences.pop(key, None)
        if sequence is not None:
            sequence.is_over = True
            if sequence.is_waiting:  # the queue is not emptied while speculation is off
                sequence.is_waiting = False
                self._unprepared.remove(sequence)
