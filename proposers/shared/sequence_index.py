"""What model-free proposers keep of the sequences they follow: an index of each one's text, made in slices.

Nothing is done when a sequence arrives or grows. Prompts are taken in by a bounded number of tokens a round, and what
was said since when guesses are asked for; so a long prompt holds nobody up, and speculation that is off costs nothing.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from proposers.shared.ngram_index import Places
from proposers.shared.prediction import Prediction
from protos.draft import Draft, DraftRow
from protos.interfaces import SequenceListener
from protos.messages import Request

SLICE = 2048
"""Tokens that are taken in at a time, over all sequences: about a millisecond."""
GROWTH = 128
"""Tokens that a row need not stand in line for: more than a round can have brought."""


@dataclass(slots=True, eq=False)
class IndexedSequence:
    """One sequence: its tokens, which are the controller's, and what is known of where they stood.

    Attributes:
        places: of the grams of `tokens`.
        tokens: prompt and output; the prompt alone until guesses are asked for.
        salt: of its tenant.
        is_over: whether it ended.
        is_waiting: whether it stands in line for a slice.
    """

    places: Places
    tokens: Seq[int]
    prompt_len: int = 0
    salt: str = ""
    prediction: Prediction | None = None
    is_over: bool = False

    is_waiting: bool = False

    @property
    def num_new(self) -> int:
        """How many of `tokens` are to be taken in."""
        return len(self.tokens) - 1 - self.places.num_added

    @property
    def is_indexed(self) -> bool:
        """Whether all of `tokens` is in `places`."""
        return self.num_new <= 0

    def prepare(self, budget: int) -> int:
        """Take in at most *budget* tokens of what was there from the beginning; return how many."""
        taken = self.prediction.prepare(budget) if self.prediction else 0
        return taken + self.places.add(self.tokens, budget - taken)

    def predicted(self, k: int) -> list[int]:
        """Return at most *k* tokens that the user's prediction has next."""
        return self.prediction.follow(self.tokens[self.prompt_len :], k) if self.prediction else []


class SequenceIndex(SequenceListener):
    """A proposer that indexes every sequence, and guesses row by row."""

    def __init__(self) -> None:
        self._followed: dict[int, IndexedSequence] = {}
        self._unprepared: deque[IndexedSequence] = deque()
        self._grown: list[IndexedSequence] = []

    @abstractmethod
    def index(self) -> Places:
        """Return an empty index of the sizes that are looked for."""

    @abstractmethod
    def guess(self, row: DraftRow, followed: IndexedSequence) -> Draft:
        """Return a draft of at most `row.k` tokens for one row; an empty one without a confident guess."""

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft a row; rows that nobody told of in `begin` are indexed anew each time."""
        return [self.guess(row, one) for row, one in zip(rows, self.follow(rows), strict=True)]

    def follow(self, rows: Seq[DraftRow]) -> list[IndexedSequence]:
        """Return what is kept of the rows' sequences, brought up to date as far as a slice goes."""
        self._grown = [self._followed.get(row.key) or self._anew(row) for row in rows]
        for followed, row in zip(self._grown, rows, strict=True):
            followed.tokens = row.token_ids
        self._take_growth(SLICE)
        return self._grown

    def _anew(self, row: DraftRow) -> IndexedSequence:
        followed = IndexedSequence(self.index(), row.token_ids)
        followed.prepare(len(row.token_ids))
        return followed

    def _take_growth(self, budget: int) -> int:
        """Take in what was committed to the rows that asked last; return what is left of *budget*.

        Those to whom that is much, or left over, stand in line.
        """
        for grown in self._grown:
            if grown.num_new <= GROWTH:
                budget -= grown.places.add(grown.tokens, budget)
            if not (grown.is_indexed or grown.is_waiting or grown.is_over):
                self._wait(grown)
        return budget

    def _wait(self, followed: IndexedSequence) -> None:
        followed.is_waiting = True
        self._unprepared.append(followed)

    def prepare(self) -> None:
        """See `SequenceListener`: what was just committed, then the oldest prompts."""
        budget = self._take_growth(SLICE)
        self._grown = []
        while budget > 0 and self._unprepared:
            first = self._unprepared[0]
            taken = first.prepare(budget)
            if taken < budget:
                self._unprepared.popleft().is_waiting = False
            budget -= taken

    def begin(self, key: int, request: Request) -> None:
        """See `SequenceListener`."""
        prompt = request.prompt_token_ids
        prediction = Prediction(request.prediction_token_ids) if request.prediction_token_ids else None
        followed = IndexedSequence(self.index(), prompt, len(prompt), request.cache_salt, prediction)
        self._followed[key] = followed
        self._wait(followed)

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """See `SequenceListener`."""
        followed = self._followed.pop(key, None)
        if followed is not None:
            followed.is_over = True
            if followed.is_waiting:  # nobody comes to the line while speculation is off
                followed.is_waiting = False
                self._unprepared.remove(followed)
