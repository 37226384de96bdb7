"""Incremental detokenization: whole characters only, with stop strings."""

import codecs
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from tokenizers import Tokenizer, decoders

from protos.byte_level import BYTE_OF

if TYPE_CHECKING:
    from protos.messages import Request

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 5
MAX_HELD_TOKENS = 16
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""What vocabularies with byte fallback call the token of a byte."""
Utf8 = codecs.getincrementaldecoder("utf-8")
LONGEST_CHARACTER = 4
"""Bytes in UTF-8."""


class PieceDecoder(Protocol):
    """Turns tokens into whole characters, one token at a time."""

    def push(self, token_id: int) -> str:
        """Return the characters completed by this token, possibly none."""
        ...

    def flush(self) -> str:
        """Return incomplete characters as U+FFFD."""
        ...


class _TokenBytes(dict[int, bytes]):
    """Maps tokens of a byte-level vocabulary to their bytes; filled on demand."""

    def __init__(self, tokenizer: Tokenizer, hidden_ids: frozenset[int]) -> None:
        super().__init__(dict.fromkeys(hidden_ids, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        is_added = not BYTE_OF.keys() >= set(token)  # an added token is plain text
        found = self[token_id] = token.encode() if is_added else bytes([BYTE_OF[char] for char in token])
        return found


class _BytePieces:
    """For byte-level vocabularies: an incremental UTF-8 decoder over the bytes of tokens."""

    __slots__ = ("_bytes", "_utf8")

    def __init__(self, bytes_by_id: _TokenBytes) -> None:
        self._bytes = bytes_by_id
        self._utf8 = Utf8("replace")

    def push(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes[token_id])

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowPieces:
    """For other vocabularies: decodes a short window of context and new tokens, and returns the text they add.

    Args:
        decode: decodes tokens together.
        context: whole characters that precede the text.
        held: the last tokens of the prompt, which may be the beginning of the text's first character.
    """

    __slots__ = ("_decode", "_incomplete", "_num_context", "_shown", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int], held: Sequence[int]) -> None:
        self._decode = decode
        self._advance_to(list(context))
        self._window += held
        self._incomplete = decode(self._window) if held else ""

    def _advance_to(self, context: list[int]) -> None:
        self._window = context
        self._num_context = len(context)
        self._shown = len(self._decode(context))
        self._incomplete = ""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        num_held = len(self._window) - self._num_context
        text = self._decode(self._window)
        num_shown = self._num_shown(text)
        if len(text) <= num_shown or (text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            return ""
        self._advance_to(self._window[self._num_context :])
        return text[num_shown:]

    def flush(self) -> str:
        text = self._decode(self._window)
        return text[self._num_shown(text) :]

    def _num_shown(self, text: str) -> int:
        """Return how much of *text* precedes the tokens: with the held ones, if those did not become a character."""
        is_incomplete = self._incomplete and text.startswith(self._incomplete)
        return len(self._incomplete) if is_incomplete else self._shown


def _ends_of_characters(bytes_T: Sequence[int | None]) -> tuple[int, int]:
    """Return where the context of what follows *bytes_T* begins and ends; None is a token of another kind.

    Tokens of single bytes are decoded together: a part of a character would break all characters after it. So the
    context has no such part, and what it ends before is the beginning of one.
    """
    lead = len(bytes_T) - 1
    while lead > 0 and (byte := bytes_T[lead]) is not None and byte & 0xC0 == 0x80:
        lead -= 1
    character = bytes(byte for byte in bytes_T[max(lead, 0) :] if byte is not None)
    if not character:
        return max(0, len(bytes_T) - CONTEXT_TOKENS), len(bytes_T)
    utf8 = Utf8("replace")
    utf8.decode(character)
    (incomplete, _) = utf8.getstate()
    return _ends_of_characters(bytes_T[:lead]) if incomplete else (lead, len(bytes_T))


class Detokenizer:
    """The text of one sequence.

    Args:
        pieces: decodes tokens to whole characters.
        stop: stop strings, none of them empty.
        min_tokens: stop strings completed within this many tokens are ignored.
        include_stop: whether the text includes the stop string.
    """

    __slots__ = ("_first", "_held", "_include_stop", "_longest", "_min_tokens", "_pieces", "_ready", "_stop")

    def __init__(
        self, pieces: PieceDecoder, stop: tuple[str, ...] = (), min_tokens: int = 0, include_stop: bool = False
    ) -> None:
        self._pieces = pieces
        self._stop = stop
        self._first = {text[0] for text in stop}
        self._longest = max(map(len, stop), default=0)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._ready = ""
        self._held = ""

    def push(self, token_id: int) -> str | None:
        """Add a token; return the stop string it completes, if any. Nothing may be pushed after a stop string."""
        piece = self._pieces.push(token_id)
        if not self._stop:
            self._ready += piece
            return None
        self._min_tokens -= 1
        text = self._held + piece
        stop = self._find_stop(text, len(self._held)) if self._min_tokens < 0 and piece else None
        if stop is None:
            self._hold_back(text)
        return stop

    def _find_stop(self, text: str, num_old: int) -> str | None:
        """Cut *text* at the earliest stop string that ends after the first *num_old* characters; return the string."""
        start, stop = len(text), ""
        for wanted in self._stop:
            found = text.find(wanted, max(0, num_old - len(wanted) + 1), start + len(wanted) - 1)
            if found >= 0:
                start, stop = found, wanted
        if not stop:
            return None
        self._ready += text[: start + len(stop) * self._include_stop]
        self._held = ""
        self._pieces = _NoPieces()
        return stop

    def _hold_back(self, text: str) -> None:
        """Release *text* up to where a stop string may have begun."""
        if self._first.isdisjoint(text):
            self._ready += text
            self._held = ""
            return
        safe = len(text)
        for start in range(max(0, safe - self._longest + 1), safe):
            if text[start] in self._first and any(stop.startswith(text[start:]) for stop in self._stop):
                safe = start
                break
        self._ready += text[:safe]
        self._held = text[safe:]

    def take(self) -> str:
        """Return the text released since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> str:
        """Return the rest of the text; incomplete characters become U+FFFD."""
        text = self._ready + self._held + self._pieces.flush()
        self._ready = self._held = ""
        return text


class _NoPieces:
    """Pieces after a stop string: none."""

    def push(self, token_id: int) -> str:
        raise RuntimeError(f"token {token_id} was pushed after a stop string")

    def flush(self) -> str:
        return ""


class DetokenizerFactory:
    """Makes the `Detokenizer` of a request. Holds the parts of the vocabulary that all requests share.

    Args:
        tokenizer: `PreTrainedTokenizerFast.backend_tokenizer`, or None if none was loaded.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._byte_level = tokenizer is not None and isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._token_bytes: dict[bool, _TokenBytes] = {}

    def __call__(self, request: "Request") -> Detokenizer | None:
        """Return a detokenizer, or None if text is not requested or there is no tokenizer."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        pieces = self._pieces(params.skip_special_tokens, request.prompt_token_ids)
        return Detokenizer(pieces, params.stop, params.min_tokens, params.include_stop_str_in_output)

    def _pieces(self, skip_special: bool, prompt: Sequence[int]) -> PieceDecoder:
        if self._byte_level:
            return _BytePieces(self._bytes_of(skip_special))
        tokenizer: Any = self._tokenizer
        last = prompt[-CONTEXT_TOKENS - LONGEST_CHARACTER :]
        spelt = [BYTE.fullmatch(tokenizer.id_to_token(token_id) or "") for token_id in last]
        start, end = _ends_of_characters([int(byte[1], 16) if byte else None for byte in spelt])
        decode = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip_special))  # noqa: E731
        return _WindowPieces(decode, last[start:end], last[end:])

    def _bytes_of(self, skip_special: bool) -> _TokenBytes:
        bytes_by_id = self._token_bytes.get(skip_special)
        if bytes_by_id is None:
            tokenizer: Any = self._tokenizer
            added = tokenizer.get_added_tokens_decoder()
            hidden = frozenset(i for i, token in added.items() if token.special and skip_special)
            bytes_by_id = self._token_bytes[skip_special] = _TokenBytes(tokenizer, hidden)
        return bytes_by_id
