"""A process that follows the sequences of one grammar, so that slow or large ones can be left behind and killed.

Forked for `workers.sampling.grammar_followers` (`protos.grammars.fork`). It first reads `Begin`, then answers each
`Follow` with one or two `Followed`.
"""

import signal
import time
from typing import TYPE_CHECKING

import msgspec

from protos.draft import Draft
from protos.grammars.fork import ForkConnection, fork_for_each
from protos.guidance import GrammarError
from protos.guidance import matcher as compile_grammar
from protos.messages import Grammar
from workers.sampling.matcher import GrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

FREE_S = 0.02
"""Seconds of a processor that a step may take without counting against a sequence's budget."""


class Begin(msgspec.Struct, frozen=True):
    """The grammar, the number of ids that may be sampled, and each sequence's budget in seconds of a processor."""

    grammar: Grammar
    vocab_size: int
    budget_s: float


class Follow(msgspec.Struct, frozen=True):
    """Asks which ids are allowed after some outputs of a sequence, and which tokens of a draft are.

    Attributes:
        sequence: a number of the sequence; one that is new begins before its first token.
        endings: ids that end the output; they are the same each time.
        start: number of matched tokens that are unchanged.
        tokens: the committed output from there on.
        tails: draft tokens after it; a mask is wanted after each of them.
        draft: to be pruned, if any; masks after the tokens of a chain follow.
        ended: numbers of sequences that are over.
    """

    sequence: int
    endings: tuple[int, ...]
    start: int
    tokens: list[int]
    tails: list[tuple[int, ...]]
    draft: Draft | None = None
    ended: list[int] = []


class Followed(msgspec.Struct, frozen=True):
    """The answer: a mask for each tail (`GrammarMatcher.allowed`), or a draft without what is forbidden.

    Attributes:
        sequence: its number.
        tails: of the masks. There are fewer than asked for if the matcher failed.
        num_fed: number of output tokens that are matched.
        reason: why it failed; the next question begins at 0.
        is_last: whether another answer to the same question follows.
    """

    sequence: int
    tails: list[tuple[int, ...]]
    masks: list[bytes] = []
    draft: Draft | None = None
    num_fed: int = 0
    reason: str | None = None
    is_last: bool = True


class Sequences:
    """Follows the sequences of one grammar."""

    def __init__(self, begin: Begin, words: "LLTokenizer") -> None:
        self._begin = begin
        self._matchers: dict[int, GrammarMatcher] = {}
        self._spent_s: dict[int, float] = {}
        self._compiled: LLMatcher | None = None
        self._refusal = ""
        try:
            self._compiled = compile_grammar(begin.grammar, words)
        except GrammarError as error:
            self._refusal = str(error)

    def answer(self, asked: Follow, connection: ForkConnection) -> None:
        """Answer a question; the kernel ends this process if that takes longer than the sequence's budget."""
        for sequence in asked.ended:
            self._matchers.pop(sequence, None)
            self._spent_s.pop(sequence, None)
        began, spent_s = time.process_time(), self._spent_s.get(asked.sequence, 0.0)
        signal.setitimer(signal.ITIMER_PROF, max(self._begin.budget_s - spent_s, FREE_S) + FREE_S)
        connection.write(self._followed(asked, connection))
        took_s = time.process_time() - began
        signal.setitimer(signal.ITIMER_PROF, 0)
        if took_s > FREE_S:
            self._spent_s[asked.sequence] = spent_s + took_s

    def _followed(self, asked: Follow, connection: ForkConnection) -> Followed:
        tails, masks = list(asked.tails), []
        try:
            matcher = self._matcher(asked)
            if asked.draft is not None:
                draft = matcher.prune(asked.start, asked.tokens, asked.draft)
                connection.write(Followed(asked.sequence, [], draft=draft, is_last=False))
                tails = _tails(draft)
            for tail in tails:
                masks.append(matcher.allowed(asked.start, [*asked.tokens, *tail]).tobytes())
        except GrammarError as error:
            self._matchers.pop(asked.sequence, None)
            return Followed(asked.sequence, tails[: len(masks)], masks, reason=str(error))
        return Followed(asked.sequence, tails, masks, num_fed=matcher.num_fed)

    def _matcher(self, asked: Follow) -> GrammarMatcher:
        if self._compiled is None:
            raise GrammarError(self._refusal)
        matcher = self._matchers.get(asked.sequence)
        if matcher is None:
            matcher = GrammarMatcher(self._compiled.deep_copy(), self._begin.vocab_size, asked.endings)
            self._matchers[asked.sequence] = matcher
        return matcher


def _tails(draft: Draft) -> list[tuple[int, ...]]:
    """Return the texts after which masks will be needed: every prefix of a chain, and the root of a tree."""
    return [draft.tokens[:count] for count in range(len(draft) + 1)] if draft.is_chain else [()]


def serve(connection: ForkConnection, words: "LLTokenizer") -> None:
    """Follow the sequences of the grammar that *connection* begins with."""
    begin = connection.read(Begin)
    signal.setitimer(signal.ITIMER_PROF, begin.budget_s)
    sequences = Sequences(begin, words)
    while True:
        sequences.answer(connection.read(Follow), connection)


def main() -> None:
    """Run the process that forks."""
    fork_for_each(serve)
