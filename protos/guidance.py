"""The grammar library (llguidance), used by frontends and target with the same limits.

It is imported when the first grammar is used. A matcher never raises because of its grammar: it enters a permanent
error state, which `error_message` describes.
"""

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import msgspec

from protos.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LONGEST_REASON = 240


class GrammarError(Exception):
    """A grammar cannot be compiled or matched; the message is one line, for users."""


def vocabulary(tokenizer_json: str, vocab_size: int, eos_ids: Seq[int]) -> "LLTokenizer":
    """Return the library's tokenizer: the bytes of each token.

    Args:
        tokenizer_json: the content of a tokenizer.json.
        vocab_size: of the model; the tokenizer may have fewer or more ids.
        eos_ids: ids that end an answer, at least one.

    Raises:
        GrammarError: the tokenizer cannot be read, or *eos_ids* is empty.
    """
    if not eos_ids:
        raise GrammarError("the model has no end-of-sequence token, which structured output must end with")
    try:
        from llguidance import LLTokenizer  # noqa: PLC0415 - only if a grammar is used

        tokenizer_json = _without_padding(tokenizer_json)
        known = LLTokenizer(tokenizer_json, eos_token=list(eos_ids))
        if known.vocab_size >= vocab_size:
            return known
        return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_ids))
    except ImportError:
        raise GrammarError("structured output needs llguidance, which is not installed") from None
    except (ValueError, RuntimeError, OverflowError) as error:
        raise GrammarError(f"structured output is not available with this tokenizer: {_line(str(error))}") from None


def _without_padding(tokenizer_json: str) -> str:
    """Remove padding and truncation, which would change the tokens of a text."""
    tokenizer = msgspec.json.decode(tokenizer_json)
    if not tokenizer.get("padding") and not tokenizer.get("truncation"):
        return tokenizer_json
    return msgspec.json.encode({**tokenizer, "padding": None, "truncation": None}).decode()


def matcher(grammar: Grammar, tokenizer: "LLTokenizer") -> "LLMatcher":
    """Return a matcher of *grammar* before the first token.

    Raises:
        GrammarError: the grammar is invalid, or over a limit.
    """
    from llguidance import LLMatcher  # noqa: PLC0415

    found = LLMatcher(tokenizer, _read(grammar), log_level=0, limits=_limits())
    if found.is_error():
        raise GrammarError(error_message(found))
    return found


def _read(grammar: Grammar) -> str:
    from llguidance import LLMatcher  # noqa: PLC0415

    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def _limits() -> "LLParserLimits":
    """Return the parser's limits: the library's own, except for the number of states, which take 1 to 2 kB each."""
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


def error_message(found: "LLMatcher") -> str:
    """Return the reason for a matcher's error state, in one line."""
    message = _line(found.get_error())
    return "no text can satisfy it, or none that ends" if message in ("", "NoExtensionBias") else message


def _line(text: str) -> str:
    """Return the text of an error message in one line, without the marked source."""
    lines = [line.strip() for line in text.splitlines()]
    message = [line for line in lines if line and not line.startswith(("<", "^", "|")) and " | " not in line[:8]]
    whole = "; ".join(message)
    return whole if len(whole) <= LONGEST_REASON else f"{whole[:LONGEST_REASON]}..."
