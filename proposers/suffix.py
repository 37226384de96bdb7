"""Suffix decoding: draft the continuations of the longest suffix that occurred before.

Oliaro et al. 2024, "SuffixDecoding"; vLLM's `suffix` with its four `suffix_decoding_*` keys. The last tokens are looked
up in the request's own text, in the user's prediction of the answer, and in the answers to earlier requests of the same
tenant. The continuations of the longest match are merged by frequency; the longer the match, the longer the draft. The
source with the highest expected number of accepted tokens supplies the draft.
"""

from array import array
from collections import deque
from collections.abc import Sequence as Seq
from itertools import islice
from typing import ClassVar, Self

from proposers.shared.answer_index import AnswerIndex
from proposers.shared.continuations import NO_SCORED_DRAFT, Merge, ScoredDraft, chain, min_score, tree
from proposers.shared.ngram_index import Places
from proposers.shared.sequence_index import IndexedSequence, SequenceIndex
from protos.config.engine import SpeculativeConfig
from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.draft_module import DraftRunner

OWN_SIZES = (6, 2)
"""Sizes of the indexed n-grams of a request's own text: a match has at least two tokens."""

MAX_FINISHED = 1 << 20
"""Most tokens of finished answers that wait to be indexed."""
PART = 2048
"""Longer answers are indexed in parts, so that each fits into one round."""
BUDGET = 512
"""Tokens of answers indexed per round; the last answer may exceed it."""


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
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_probability = config.suffix_decoding_min_token_prob
        self._merge, self._min_score = merge, min_score
        max_answers = config.suffix_decoding_max_cached_requests
        self._answers = AnswerIndex(config.suffix_decoding_max_bytes, max_answers, self._depth)
        self._keeps_answers = max_answers > 0
        self._finished: deque[tuple[str, array[int]]] = deque()  # salts and answers
        self._num_finished = 0  # tokens

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer of chains, or of trees with that `draft_shape`."""
        merge = tree if config.draft_shape == "tree" else chain
        return cls(config, merge, min_score(config, "suffix"))

    def index(self) -> Places:
        """See `SequenceIndex`."""
        return Places([size for size in OWN_SIZES if size <= self._depth], self._depth)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft per row; empty if no indexed text contains its last two tokens."""
        sequences = self.update(rows)
        own = [self._from_request(row, one) for row, one in zip(rows, sequences, strict=True)]
        best = self._or_from_answers(rows, [one.salt for one in sequences], own) if len(self._answers) else own
        return [found.draft if found.score >= self._min_score else NO_DRAFT for found in best]

    def _from_request(self, row: DraftRow, sequence: IndexedSequence) -> ScoredDraft:
        """Draft from the user's prediction of the answer, or from the request's own text."""
        own = self._from_text(row, sequence)
        if sequence.prediction is None:
            return own
        predicted = sequence.predicted(row.k)
        return ScoredDraft(Draft(tuple(predicted)), float(len(predicted))) if len(predicted) >= own.score else own

    def _from_text(self, row: DraftRow, sequence: IndexedSequence) -> ScoredDraft:
        """Draft from the request's own text."""
        if not sequence.is_indexed:
            return NO_SCORED_DRAFT
        tokens = row.token_ids
        length, ends = sequence.places.longest(tokens, tokens[-self._depth :])
        count = self._count(row, length)
        texts = [tokens[end : end + count] for end in ends]
        return self._merge(texts, count, self._min_probability) if texts else NO_SCORED_DRAFT

    def _count(self, row: DraftRow, length: int) -> int:
        """Return the number of tokens to draft for a match of *length*."""
        return min(row.k, max(1, int(self._factor * length)))

    def _or_from_answers(self, rows: Seq[DraftRow], salts: Seq[str], own: Seq[ScoredDraft]) -> list[ScoredDraft]:
        """Return for each row its *own* draft or, if the score is higher, one from answers to earlier requests."""
        found = self._answers.longest(salts, [row.token_ids[-self._depth :] for row in rows])
        counts = [self._count(row, one.length) for row, one in zip(rows, found, strict=True)]
        # A draft's score is at most its length.
        candidates = [i for i, one in enumerate(found) if one.places and counts[i] > own[i].score]
        most = max((counts[i] for i in candidates), default=0)
        texts = iter(self._answers.after([place for i in candidates for place in found[i].places], most))
        best = list(own)
        for i in candidates:
            merged = self._merge(list(islice(texts, len(found[i].places))), counts[i], self._min_probability)
            if merged.score > own[i].score:
                best[i] = merged
        return best

    def prepare(self) -> None:
        """Index a slice of prompts, and part of one finished answer or a few short ones."""
        super().prepare()
        budget = BUDGET
        while budget > 0 and self._finished:
            salt, answer = self._finished.popleft()
            self._num_finished -= len(answer)
            self._answers.add(salt, answer)
            budget -= len(answer)

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """Queue the answer to be indexed; drop the oldest if too many wait."""
        sequence = self._sequences.get(key)
        super().end(key, token_ids)
        if sequence is None or not self._keeps_answers:
            return
        for start in range(sequence.prompt_len, len(token_ids), PART):
            part = array("i", token_ids[start : start + PART])
            self._finished.append((sequence.salt, part))
            self._num_finished += len(part)
        while self._num_finished > MAX_FINISHED:
            self._num_finished -= len(self._finished.popleft()[1])
