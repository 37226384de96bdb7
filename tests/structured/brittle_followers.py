"""Processes that follow grammars and, after draft tokens or for some grammars, fail or do not come back."""

from collections.abc import Sequence as Seq
from typing import Any

from protos.draft import Draft
from protos.grammars.fork import fork_for_each
from protos.grammars.host import GrammarHost
from protos.guidance import GrammarError
from tests.support.structured import FORMS, word_list
from workers.sampling import grammar_process
from workers.sampling.matcher import Bits, GrammarMatcher

STUCK = FORMS["regex"].grammar
"""Never followed: the process spins."""
FAILS_AFTER_DRAFTS = FORMS["choice"].grammar
SPINS_AFTER_DRAFTS = FORMS["lark"].grammar


class Brittle(GrammarMatcher):
    """Fails or spins where the process's grammar says so."""

    grammar: Any = None

    def allowed(self, start: int, tokens: Seq[int]) -> Bits:
        """Spin, or return what is allowed."""
        if self.grammar == STUCK:
            spin()
        return super().allowed(start, tokens)

    def prune(self, start: int, tokens: Seq[int], draft: Draft) -> Draft:
        """Spin or fail."""
        if self.grammar == SPINS_AFTER_DRAFTS:
            spin()
        if self.grammar == FAILS_AFTER_DRAFTS:
            raise GrammarError("over a limit")
        return super().prune(start, tokens, draft)


def spin() -> None:
    while True:
        pass


def main() -> None:
    """Run the process that forks."""
    compile_grammar = grammar_process.compile_grammar

    def compiled(grammar: Any, words: Any) -> Any:
        Brittle.grammar = grammar
        return compile_grammar(grammar, words)

    grammar_process.compile_grammar = compiled
    grammar_process.GrammarMatcher = Brittle  # type: ignore[misc]
    fork_for_each(grammar_process.serve)


def brittle_host() -> GrammarHost:
    return GrammarHost("tests.structured.brittle_followers", word_list)
