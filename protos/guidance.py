"""The grammar library (llguidance), as front ends and target read the same grammar: with one set of limits.

It is loaded where the first grammar is asked for. A matcher never raises for what a grammar does to it: it enters an
error state and stays there, which `trouble` tells.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import msgspec

from protos.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LONGEST_REASON = 240


class GrammarError(Exception):
    """A grammar cannot be followed; says why in a line that a user may read."""


def vocabulary(tokenizer_json: str, vocab_size: int, eos_ids: Seq[int]) -> "LLTokenizer":
    """Return a tokenizer as the library needs it: the bytes that each token stands for.

    Args:
        tokenizer_json: the content of a tokenizer.json.
        vocab_size: ids that the model can say; the tokenizer may know fewer or more.
        eos_ids: what ends an answer, one at least.

    Raises:
        GrammarError: it cannot be read, or nothing ends an answer.
    """
    if not eos_ids:
        raise GrammarError("the model has no end-of-sequence token, which structured output must end with")
    try:
        from llguidance import LLTokenizer  # noqa: PLC0415 - only where a grammar is asked for

        tokenizer_json = _bare(tokenizer_json)
        known = LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        if known.vocab_size >= vocab_size:
            return known
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))
    except ImportError:
        raise GrammarError("structured output needs llguidance, which is not installed") from None
    except (ValueError, RuntimeError, OverflowError) as error:
        raise GrammarError(f"structured output is not available with this tokenizer: {_line(str(error))}") from None


def _bare(tokenizer_json: str) -> str:
    """Leave out padding and truncation, which would add tokens to text, and take some away."""
    described = msgspec.json.decode(tokenizer_json)
    if not described.get("padding") and not described.get("truncation"):
        return tokenizer_json
    return msgspec.json.encode({**described, "padding": None, "truncation": None}).decode()


def matcher(grammar: Grammar, words: "LLTokenizer") -> "LLMatcher":
    """Return a matcher of *grammar* before the first token.

    Raises:
        GrammarError: it is no grammar, or over a limit.
    """
    from llguidance import LLMatcher  # noqa: PLC0415

    found = LLMatcher(words, _read(grammar), log_level=0, limits=_limits())
    if found.is_error():
        raise GrammarError(trouble(found))
    return found


def _read(grammar: Grammar) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415

    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _limits() -> "LLParserLimits":
    """Return the parser's limits: the library's own but for the states, of which each takes 1 to 2 kB."""
    from llguidance import LLParserLimits  # noqa: PLC0415

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )


def trouble(found: "LLMatcher") -> str:
    """Return why a matcher is in its error state, in a line."""
    said = _line(found.get_error())
    return "no text can satisfy it, or none that ends" if said in ("", "NoExtensionBias") else said


def _line(text: str) -> str:
    """Return what is said in *text*, without the drawings."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line and not line.startswith(("<", "^", "|")) and " | " not in line[:8]]
    whole = "; ".join(said)
    return whole if len(whole) <= LONGEST_REASON else f"{whole[:LONGEST_REASON]}..."
