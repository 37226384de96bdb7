"""Suffix decoding: what followed the longest run of tokens that was seen before is likely to follow again.

Oliaro et al. 2024, "SuffixDecoding"; vLLM's `suffix` with its four `suffix_decoding_*` keys. The last tokens are looked
up in the request's own text, in the user's prediction of the answer, and in what was answered to earlier requests of
the same tenant. The places where the longest match stands vote on what comes next, and the longer the match, the
more is guessed; of several sources the one that expects more tokens to be accepted supplies the draft.
"""

from array import array
from collections import deque
from collections.abc import Sequence as Seq
from itertools import islice
from typing import ClassVar, Self

from proposers.shared.answer_index import AnswerIndex
from proposers.shared.continuations import NO_GUESS, Guess, Vote, chain, confidence_of, tree
from proposers.shared.ngram_index import Places
from proposers.shared.sequence_index import IndexedSequence, SequenceIndex
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner

OWN_SIZES = (6, 2)
"""Grams of a request's own text that are indexed: a match has two tokens at least."""

MAX_FINISHED = 1 << 20
"""Tokens of answers that wait to be taken in."""
PART = 2048
"""Longer answers are remembered in parts, so that none is too long to be taken in in one round."""
SHORT = 512
"""While those of a round have fewer tokens than this, one more is taken in."""


class SuffixProposer(SequenceIndex):
    """Follows each request, and remembers the answers of those that ended.

    Args:
        config: the four keys, and how much memory all past answers may take.
        vote: makes a draft of what several texts say.
        confidence: how many tokens a guess has to expect to be accepted, to be one.
    """

    on_worker: ClassVar[bool] = False

    def __init__(self, config: SpeculativeConfig, vote: Vote, confidence: float) -> None:
        super().__init__()
        self._depth = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_probability = config.suffix_decoding_min_token_prob
        self._vote, self._confidence = vote, confidence
        max_answers = config.suffix_decoding_max_cached_requests
        self._past = AnswerIndex(config.suffix_decoding_max_bytes, max_answers, self._depth)
        self._keeps_answers = max_answers > 0
        self._finished: deque[tuple[str, array[int]]] = deque()  # salts and answers
        self._num_finished = 0  # tokens

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer as *config* asks: of chains, or of trees where `draft_shape` says so."""
        vote = tree if config.draft_shape == "tree" else chain
        return cls(config, vote, confidence_of(config, "suffix"))

    def index(self) -> Places:
        """See `SequenceIndex`."""
        return Places([size for size in OWN_SIZES if size <= self._depth], self._depth)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft a row; empty where nothing that was seen before ends in the same two tokens."""
        followed = self.follow(rows)
        here = [self._here(row, one) for row, one in zip(rows, followed, strict=True)]
        best = self._or_elsewhere(rows, [one.salt for one in followed], here) if len(self._past) else here
        return [guess.draft if guess.score >= self._confidence else NO_GUESS.draft for guess in best]

    def _here(self, row: DraftRow, followed: IndexedSequence) -> Guess:
        """Guess by the user's prediction of the answer, or by what was said before in the same request."""
        own = self._own(row, followed)
        if followed.prediction is None:
            return own
        predicted = followed.predicted(row.k)
        return Guess(Draft(tuple(predicted)), float(len(predicted))) if len(predicted) >= own.score else own

    def _own(self, row: DraftRow, followed: IndexedSequence) -> Guess:
        """Guess by the request's own text."""
        if not followed.is_indexed:
            return NO_GUESS
        tokens = row.token_ids
        length, ends = followed.places.longest(tokens, tokens[-self._depth :])
        count = self._count(row, length)
        texts = [tokens[end : end + count] for end in ends]
        return self._vote(texts, count, self._min_probability) if texts else NO_GUESS

    def _count(self, row: DraftRow, length: int) -> int:
        """Return how many tokens to guess behind a match of *length*."""
        return min(row.k, max(1, int(self._factor * length)))

    def _or_elsewhere(self, rows: Seq[DraftRow], salts: Seq[str], here: Seq[Guess]) -> list[Guess]:
        """Return for each row its guess or, where they say more, that by the answers to earlier requests."""
        found = self._past.longest(salts, [row.token_ids[-self._depth :] for row in rows])
        counts = [self._count(row, one.length) for row, one in zip(rows, found, strict=True)]
        # All of a draft accepted is the most that can be expected of it.
        asked = [i for i, one in enumerate(found) if one.places and counts[i] > here[i].score]
        most = max((counts[i] for i in asked), default=0)
        texts = iter(self._past.after([place for i in asked for place in found[i].places], most))
        best = list(here)
        for i in asked:
            guess = self._vote(list(islice(texts, len(found[i].places))), counts[i], self._min_probability)
            if guess.score > here[i].score:
                best[i] = guess
        return best

    def prepare(self) -> None:
        """Index a slice of prompts, and part of one answer that is complete, or a few short ones."""
        super().prepare()
        budget = SHORT
        while budget > 0 and self._finished:
            salt, answer = self._finished.popleft()
            self._num_finished -= len(answer)
            self._past.add(salt, answer)
            budget -= len(answer)

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """Keep the answer until there is time to take it in; where there is none for long, the oldest are dropped."""
        followed = self._followed.get(key)
        super().end(key, token_ids)
        if followed is None or not self._keeps_answers:
            return
        for start in range(followed.prompt_len, len(token_ids), PART):
            part = array("i", token_ids[start : start + PART])
            self._finished.append((followed.salt, part))
            self._num_finished += len(part)
        while self._num_finished > MAX_FINISHED:
            self._num_finished -= len(self._finished.popleft()[1])
