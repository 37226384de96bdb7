"""Matches one sequence's output with a grammar: which tokens it allows after committed and draft tokens."""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protos.draft import Draft
from protos.guidance import GrammarError, error_message

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = npt.NDArray[np.uint8]


class GrammarMatcher:
    """Holds a matcher's state after some output of one sequence, and moves to other outputs by rolling back.

    Every method raises `GrammarError` if the matcher fails or exceeds a limit; it cannot be used afterwards.

    Args:
        matcher: in its initial state; owned by this object.
        vocab_size: number of ids that may be sampled.
        endings: ids that end the output, the model's own first; allowed exactly where the grammar may end.
    """

    def __init__(self, matcher: "LLMatcher", vocab_size: int, endings: Seq[int]) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size
        self._endings = frozenset(endings)
        self._ending_bits = _bits_of(endings, vocab_size)
        self._eos_id = next(iter(endings), 0)
        self._fed: list[int] = []

    @property
    def num_fed(self) -> int:
        """How many tokens of output are matched."""
        return len(self._fed)

    def allowed(self, start: int, tokens: Seq[int]) -> Bits:
        """Return the ids allowed after an output, a bit each, the least significant first; uint8 `[ceil(V / 8)]`.

        If the grammar forbids the output itself, all ids: the output is never sampled, so the mask is not used.

        Args:
            start: number of matched tokens that are unchanged.
            tokens: the output from there on.
        """
        at = self._move(start, tokens)
        if at == len(tokens):
            return self._allowed_here()
        has_ended = tokens[at] in self._endings
        return self._ending_bits if has_ended else np.full_like(self._ending_bits, 0xFF)

    def prune(self, start: int, tokens: Seq[int], draft: Draft) -> Draft:
        """Return *draft*, which follows an output as in `allowed`, without tokens that the grammar forbids."""
        if draft.probes:
            return draft  # all probes are read, in order
        if self._move(start, tokens) != len(tokens):
            return draft
        if draft.is_chain:
            return draft.first(self._valid(draft.tokens))
        return _without(draft, self._forbidden(draft))

    def _move(self, start: int, tokens: Seq[int]) -> int:
        """Match `tokens`, as far as the grammar allows; return how many."""
        matched = self._fed[start:]
        common = next(
            (i for i, pair in enumerate(zip(matched, tokens, strict=False)) if pair[0] != pair[1]),
            min(len(matched), len(tokens)),
        )
        if common < len(matched):
            self._check(self._matcher.rollback(len(matched) - common))
            del self._fed[start + common :]
        rest = self._before_end(tokens[common:])
        if rest:
            taken = self._matcher.try_consume_tokens(rest)
            self._check(not self._matcher.is_error())
            self._fed += rest[:taken]
        return self.num_fed - start

    def _before_end(self, tokens: Seq[int]) -> list[int]:
        """Return *tokens* up to the first that ends the output."""
        ends = (i for i, token in enumerate(tokens) if token in self._endings)
        return list(tokens[: next(ends, len(tokens))])

    def _allowed_here(self) -> Bits:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._ending_bits)]
        self._check(not self._matcher.is_error())
        return bits | self._ending_bits if self._matcher.is_accepting() else bits

    def _valid(self, tokens: Seq[int]) -> int:
        """Return how many of *tokens* the grammar allows here, including one that ends the output."""
        text = self._before_end(tokens)
        if self._matcher.is_stopped():  # it accepts no more tokens, not even the end
            return int(not text)
        ended = text if len(text) == len(tokens) else [*text, self._eos_id]
        count = int(self._matcher.validate_tokens(ended))
        self._check(not self._matcher.is_error())
        return count

    def _forbidden(self, draft: Draft) -> set[int]:
        """Return the nodes of a tree that the grammar forbids, and the nodes below them."""
        paths: list[list[int]] = []
        forbidden: set[int] = set()
        for node, (parent, token) in enumerate(zip(draft.node_parents(), draft.tokens, strict=True)):
            path = [*(paths[parent] if parent >= 0 else []), token]
            paths.append(path)
            if parent in forbidden or self._valid(path) < len(path):
                forbidden.add(node)
        return forbidden

    def _check(self, is_ok: bool) -> None:
        if not is_ok:
            raise GrammarError(error_message(self._matcher))


def _bits_of(ids: Seq[int], vocab_size: int) -> Bits:
    """Return the bit mask of some ids."""
    chosen_V = np.zeros(vocab_size, np.bool_)
    chosen_V[[i for i in ids if i < vocab_size]] = True
    return np.packbits(chosen_V, bitorder="little")


def _without(draft: Draft, nodes: set[int]) -> Draft:
    """Return a tree without *nodes*, which contain all nodes below them."""
    kept = [node for node in range(len(draft)) if node not in nodes]
    place = {-1: -1} | {node: i for i, node in enumerate(kept)}
    parents = tuple(place[draft.parents[node]] for node in kept)
    return Draft(tuple(draft.tokens[node] for node in kept), parents).first(len(kept))
