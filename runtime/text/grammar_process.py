"""A process that compiles and tries a grammar, so that slow or large ones can be killed.

Forked for `runtime.text.grammar_validator` (`protos.grammars.fork`), one for each grammar.
"""

import random
import signal
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import msgspec

from protos.grammars.fork import ForkConnection, Refusal, fork_for_each
from protos.guidance import GrammarError, error_message, matcher
from protos.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NUM_STEPS = 48
"""Tokens of a random path on which a grammar is tried: some grammars become expensive after the first tokens."""


class Trial(msgspec.Struct, frozen=True):
    """A grammar, and how many seconds of a processor may be spent on it."""

    grammar: Grammar
    cpu_s: float


def serve(connection: ForkConnection, words: "LLTokenizer") -> None:
    """Try a grammar. The kernel ends the process when its time is spent."""
    trial = connection.read(Trial)
    signal.setitimer(signal.ITIMER_PROF, trial.cpu_s)
    connection.write(Refusal(try_grammar(trial.grammar, words)))


def try_grammar(grammar: Grammar, words: "LLTokenizer") -> str | None:
    """Return why *grammar* cannot be used; None if it compiles and a random path through it succeeds."""
    try:
        return _follow(matcher(grammar, words))
    except GrammarError as error:
        return str(error)


def _follow(grammar: "LLMatcher") -> str | None:
    rng = random.Random(0)
    for _ in range(NUM_STEPS):
        bits = grammar.compute_bitmask()
        if grammar.is_error():
            return error_message(grammar)
        if grammar.is_stopped():
            return None
        if not grammar.try_consume_tokens([_random_id(bits, rng)]):
            return None  # it has ended
    return None


def _random_id(bits: Seq[int], rng: random.Random) -> int:
    """Return one of the ids whose bits are set, 0 if there is none."""
    nonzero = [index for index, byte in enumerate(bits) if byte]
    if not nonzero:
        return 0
    index = rng.choice(nonzero)
    return 8 * index + rng.choice([bit for bit in range(8) if bits[index] >> bit & 1])


def main() -> None:
    """Run the process that forks."""
    fork_for_each(serve)
