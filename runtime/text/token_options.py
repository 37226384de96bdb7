"""What sampling parameters mean in a vocabulary: `bad_words`, allowed tokens, and numbers of log-probabilities."""

from collections.abc import Sequence

import numpy as np

from protos.errors import InvalidRequestError
from protos.validation import shown
from runtime.text.tokenizer import Tokenizer

TokenIds = tuple[int, ...]


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer | None) -> tuple[TokenIds, ...]:
    """Return the token sequences that spell *words* at the start of a text and, if they differ, within it.

    Raises:
        InvalidRequestError: there is no tokenizer, or it has no tokens for a word.
    """
    if tokenizer is None:
        raise InvalidRequestError("bad_words are text, but skip_tokenizer_init is set", "bad_words")
    spellings = [_spellings(word, tokenizer) for word in words]
    for word, found in zip(words, spellings, strict=True):
        if not found:
            raise InvalidRequestError(f"bad_words has {shown(word)}, which the tokenizer cannot spell", "bad_words")
    return tuple(dict.fromkeys(token_ids for found in spellings for token_ids in found))


def _spellings(word: str, tokenizer: Tokenizer) -> list[TokenIds]:
    text = word.lstrip() or word  # white space alone is a word, too
    bare, spaced = (tuple(tokenizer.encode(prefix + text, add_special_tokens=False)) for prefix in ("", " "))
    # As in vLLM: the spelling with a space counts if the space is merged into the first token.
    is_merged = bare and spaced and len(spaced) == len(bare) and spaced[0] != bare[0]
    return [token_ids for token_ids in (bare, spaced if is_merged else ()) if token_ids]


def check_number(allowed: TokenIds, vocab_size: int) -> None:
    """Raise `InvalidRequestError` if *allowed* has more ids than there are."""
    if len(allowed) > vocab_size:
        raise InvalidRequestError(
            f"allowed_token_ids must have at most {vocab_size} ids, the size of the vocabulary, got {len(allowed)}",
            "allowed_token_ids",
        )


def check_allowed(allowed: TokenIds, bad_words: Sequence[TokenIds], stop_ids: TokenIds) -> None:
    """Raise `InvalidRequestError` if no token of *allowed* can ever be sampled."""
    never = {word[0] for word in bad_words if len(word) == 1}.union(stop_ids)
    if never.issuperset(allowed):
        raise InvalidRequestError(
            f"allowed_token_ids leaves no token to choose: all {len(allowed)} are bad words, or stop tokens before "
            "min_tokens",
            "allowed_token_ids",
        )


def num_logprobs(requested: int, vocab_size: int, limit: int, param: str) -> int:
    """Return how many log-probabilities *param* requests; -1 are those of the whole vocabulary.

    Raises:
        InvalidRequestError: they are more than *limit*, which -1 lifts.
    """
    if -1 < limit < (vocab_size if requested == -1 else requested):
        all_of_them = f", all {vocab_size}" if requested == -1 else ""
        raise InvalidRequestError(f"{param} must be at most {limit}, got {requested}{all_of_them}", param)
    return vocab_size if requested == -1 else min(requested, vocab_size)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Return a set of ids as `Sampling.allowed_ids`: a bit for each id, the least significant first."""
    bits_V = np.zeros(max(token_ids) + 1, np.uint8)
    bits_V[np.asarray(token_ids)] = 1
    return np.packbits(bits_V, bitorder="little").tobytes()
