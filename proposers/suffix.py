"""Suffix decoding: draft the continuations of what the text ends with, where that occurred before.

Oliaro et al. 2024, "SuffixDecoding"; vLLM's `suffix` with its four `suffix_decoding_*` keys. The last tokens are looked
up in the request's own text, and in the answers to other requests of the same tenant, those that are being generated
included. The continuations of a match are merged by frequency; the longer the
match, the longer the draft. Of the drafts after matches of all lengths, in all sources, the one with the highest
expected number of accepted tokens is proposed.

As in the authors' trees, the end of the text, after which nothing follows yet, counts as one occurrence of each match:
tokens that followed the only earlier occurrence have probability 1/2. Unlike there, the ends of other answers do not
count, and what follows a long match is not cut at the depth of a tree.
"""

from array import array
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice
from typing import ClassVar, NamedTuple, Self

import numpy as np

from proposers.shared.answer_index import AnswerIndex, AnswerMatch
from proposers.shared.answer_ring import RESERVED, AnswerText
from proposers.shared.continuations import NO_SCORED_DRAFT, Continuations, Merge, ScoredDraft, chain, min_score, tree
from proposers.shared.ngram_index import Places
from proposers.shared.sequence_index import IndexedSequence, SequenceIndex
from proposers.shared.votes import most_frequent
from protos.config.engine import SpeculativeConfig
from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.messages import Request

OWN_SIZES = (6, 2, 1)
"""Sizes of the indexed n-grams of a request's own text."""

MAX_FINISHED = 1 << 20
"""Most tokens of finished answers that wait to be indexed."""
PART = 2048
"""Longer answers are indexed in parts, so that each fits into one round."""
BUDGET = 512
"""Tokens of finished answers indexed per round; the last answer may exceed it."""
FEW = 4
"""So many rows are looked up in the answers one by one: numpy takes as long for them."""
SHORT = 4
"""Chains of at most this many tokens are made together, apart from longer ones."""
ROUNDING = 1e-6
"""Added to the length of a draft before it is rounded down, as the authors do."""


class WeighedMatch(NamedTuple):
    """A match in the answers: the places after it, the number of its occurrences, and the size of a draft for it."""

    places: list[int]
    total: int
    num_drafted: int
    depth: int


class SuffixProposer(SequenceIndex):
    """Indexes the text of each request, and the answers of finished ones.

    Args:
        config: the four keys, and the memory for past answers.
        merge: makes a draft from several continuations.
        min_score: drafts with a lower score are dropped.
    """

    on_worker: ClassVar[bool] = False

    def __init__(self, config: SpeculativeConfig, merge: Merge, min_score: float) -> None:
        super().__init__()
        self._depth = config.suffix_decoding_max_tree_depth
        # For each length of a match, the number of tokens to draft.
        factor = config.suffix_decoding_max_spec_factor
        self._counts = [int(factor * length + ROUNDING) for length in range(self._depth + 1)]
        self._min_probability = config.suffix_decoding_min_token_prob
        self._merge, self._min_score = merge, min_score
        max_answers = config.suffix_decoding_max_cached_requests
        self._answers = AnswerIndex(config.suffix_decoding_max_bytes, max_answers, self._depth)
        self._keeps_answers = max_answers > 0
        self._finished: deque[tuple[AnswerText, array[int]]] = deque()  # answers, and the rest of each
        self._num_finished = 0  # tokens

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer of chains, or of trees with that `draft_shape`."""
        merge = tree if config.draft_shape == "tree" else chain
        return cls(config, merge, min_score(config, "suffix"))

    def index(self) -> Places:
        """See `SequenceIndex`."""
        return Places([size for size in OWN_SIZES if size <= self._depth], self._depth)

    def begin(self, key: int, request: Request) -> None:
        """See `SequenceListener`."""
        super().begin(key, request)
        if self._keeps_answers:
            self._sequences[key].answer = AnswerText(request.cache_salt, RESERVED)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft per row; empty if no indexed text contains its last token."""
        sequences = self.update(rows)
        own = [self._from_text(row, one) for row, one in zip(rows, sequences, strict=True)]
        best = own
        if len(rows) <= FEW:
            best = [self._or_searched(*one) for one in zip(rows, sequences, own, strict=True)]
        elif len(self._answers):
            best = self._or_from_answers(rows, sequences, own)
        return [found.draft if found.score >= self._min_score else NO_DRAFT for found in best]

    def _from_text(self, row: DraftRow, sequence: IndexedSequence) -> ScoredDraft:
        """Draft from the request's own text."""
        best = NO_SCORED_DRAFT
        if not sequence.is_indexed:
            return best
        tokens = row.token_ids
        for length, ends in sequence.places.by_length(tokens, tokens[-self._depth :]):
            count = min(row.k, self._counts[length])
            stop = min(count, row.depth)
            if count * len(ends) > best.score * (len(ends) + 1):
                texts = [tokens[end : end + stop] for end in ends]
                best = self._better(best, texts, len(texts) + 1, count)
            if self._counts[length - 1] <= best.score:
                break
        return best

    def _better(self, best: ScoredDraft, texts: Continuations, total: int, count: int) -> ScoredDraft:
        """Return *best* or, if the score is higher, the merged continuations *texts* of *total* occurrences."""
        merged = self._merge(texts, total, count, self._min_probability)
        return merged if merged.score > best.score else best

    def _or_searched(self, row: DraftRow, sequence: IndexedSequence, best: ScoredDraft) -> ScoredDraft:
        """Return *best* or, if the score is higher, a draft from the answers to all requests, for this row alone."""
        least = self._least(row.k, best.score)
        for match in self._answers.search(sequence.salt, row.token_ids, least):
            if self._counts[match.length] <= best.score:
                break
            for places, total, count, depth in self._candidates(row, sequence.num_shared, [match], best.score):
                best = self._better(best, self._answers.after(places, depth), total, count)
        return best

    def _or_from_answers(
        self, rows: Seq[DraftRow], sequences: Seq[IndexedSequence], own: Seq[ScoredDraft]
    ) -> list[ScoredDraft]:
        """Return for each row its *own* draft or, if the score is higher, one from the answers to all requests."""
        least = [self._least(row.k, one.score) for row, one in zip(rows, own, strict=True)]
        patterns = [row.token_ids[-self._depth :] for row in rows]
        found = self._answers.matches([one.salt for one in sequences], patterns, least)
        candidates = [
            self._candidates(row, sequence.num_shared, matches, one.score)
            for row, sequence, matches, one in zip(rows, sequences, found, own, strict=True)
        ]
        every = [one for row in candidates for one in row]
        votes = self._votes([one for one in every if self._is_voted(one)])
        texts = self._texts([one for one in every if not self._is_voted(one)])
        return [self._best_of(one, row, votes, texts) for one, row in zip(own, candidates, strict=True)]

    def _least(self, k: int, score: float) -> int:
        """Return the length of the shortest match whose draft may have a higher score."""
        return next((length for length in range(1, self._depth) if min(k, self._counts[length]) > score), self._depth)

    def _candidates(
        self, row: DraftRow, num_shared: int, matches: Seq[AnswerMatch], score: float
    ) -> list[WeighedMatch]:
        """Return what may be drafted after *matches* with a score above *score*.

        *num_shared* is the number of tokens of the row's own answer, whose end is one more occurrence.
        """
        found = []
        for length, places in matches:
            count, total = min(row.k, self._counts[length]), len(places) + (length <= num_shared)
            if count * len(places) > score * total:
                found.append(WeighedMatch(places, total, count, min(count, row.depth)))
        return found

    def _is_voted(self, one: WeighedMatch) -> bool:
        """Whether the draft of a match is a short chain, as are those of most matches: all are made at once."""
        return one.depth <= SHORT and (self._merge is chain or one.num_drafted == 1)

    def _votes(self, candidates: Seq[WeighedMatch]) -> Iterator[ScoredDraft]:
        """Return the drafts of candidates with short ones, in order."""
        if not candidates:
            return iter(())
        depth_G = np.array([one.depth for one in candidates], np.int64)
        fewest_G = np.maximum(1.0, self._min_probability * np.array([one.total for one in candidates]))
        texts_CPG = self._answers.together([one.places for one in candidates], int(depth_G.max()))
        votes = most_frequent(texts_CPG, depth_G, fewest_G)
        return (
            ScoredDraft(Draft(tuple(tokens[:length])), frequency / one.total)
            for tokens, length, frequency, one in zip(*votes, candidates, strict=True)
        )

    def _texts(self, candidates: Seq[WeighedMatch]) -> Iterator[list[int]]:
        """Return the continuations of all candidates, in order."""
        places = [place for one in candidates for place in one.places]
        return iter(self._answers.after(places, max((one.depth for one in candidates), default=0)))

    def _best_of(
        self,
        best: ScoredDraft,
        candidates: Seq[WeighedMatch],
        votes: Iterator[ScoredDraft],
        continuations: Iterator[list[int]],
    ) -> ScoredDraft:
        """Return *best* or, if the score is higher, the draft of a candidate; theirs are the next votes or texts."""
        for one in candidates:
            if self._is_voted(one):
                voted = next(votes)
                best = voted if voted.score > best.score else best
                continue
            places, total, count, depth = one
            texts = list(islice(continuations, len(places)))
            if count * len(places) > best.score * total:
                best = self._better(best, [text[:depth] for text in texts], total, count)
        return best

    def _index_new(self, budget: int) -> int:
        """See `SequenceIndex`; also add the new tokens to the index of all answers."""
        grown = [one for one in self._grown if one.answer is not None and not one.is_over]
        self._share([(one, one.unshared(one.tokens)) for one in grown])
        return super()._index_new(budget)

    def _share(self, parts: Seq[tuple[IndexedSequence, Seq[int]]]) -> None:
        """Append tokens to the answers of running sequences."""
        new = [(one, part[:PART]) for one, part in parts if part]
        self._answers.extend([(one.answer, part) for one, part in new if one.answer is not None])
        for one, part in new:
            one.num_shared += len(part)

    def prepare(self) -> None:
        """Index a slice of prompts, and the rest of one finished answer or of a few short ones."""
        super().prepare()
        budget = BUDGET
        while budget > 0 and self._finished:
            answer, part = self._finished.popleft()
            self._num_finished -= len(part)
            self._answers.extend([(answer, part)])
            budget -= len(part)

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """Queue the rest of the answer to be indexed; drop the oldest if too many tokens wait."""
        sequence = self._sequences.get(key)
        super().end(key, token_ids)
        if sequence is None or sequence.answer is None:
            return
        sequence.answer.reserved = 0
        rest = sequence.unshared(token_ids)
        for start in range(0, len(rest), PART):
            part = array("i", rest[start : start + PART])
            self._finished.append((sequence.answer, part))
            self._num_finished += len(part)
        while self._num_finished > MAX_FINISHED:
            self._num_finished -= len(self._finished.popleft()[1])
