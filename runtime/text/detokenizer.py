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
MAX_INCOMPLETE_BYTES = 3
"""Of a character in UTF-8."""
REPLACED = dict.fromkeys(range(0xDC80, 0xDD00), REPLACEMENT)
"""What "surrogateescape" makes of bytes of no character."""


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
        context: the tokens that precede the text.
    """

    __slots__ = ("_decode", "_num_context", "_shown", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self.follow(context)

    def follow(self, context: Sequence[int]) -> None:
        """Take *context* for what precedes the next token."""
        self._window = list(context)
        self._num_context = len(context)
        self._shown = len(self._decode(context))

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        num_held = len(self._window) - self._num_context
        text = self._decode(self._window)
        if len(text) <= self._shown or (text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            return ""
        return self._show(text)

    def flush(self) -> str:
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        added = text[self._shown :]
        if added:
            self.follow(self._window[self._num_context :])
        return added


class _FallbackPieces:
    """For vocabularies with byte fallback: an incremental UTF-8 decoder over tokens of bytes, a window over others.

    A byte of no character becomes one U+FFFD. (The tokenizer replaces all bytes in a row if one is of no character; but
    those before it were already shown when it comes.)

    Args:
        byte_tokens: the bytes that tokens stand for.
        others: pieces of the other tokens.
        prompt: the end of the prompt, in which the first character may begin.
    """

    __slots__ = ("_byte_tokens", "_of_prompt", "_others", "_utf8")

    def __init__(self, byte_tokens: dict[int, bytes], others: _WindowPieces, prompt: Sequence[int]) -> None:
        self._byte_tokens = byte_tokens
        self._others = others
        self._utf8 = Utf8("surrogateescape")
        for token_id in prompt:
            byte = byte_tokens.get(token_id)
            self._utf8.decode(byte or b"", byte is None)
        (begun, _) = self._utf8.getstate()
        self._of_prompt = begun.decode(errors="surrogateescape")

    def push(self, token_id: int) -> str:
        byte = self._byte_tokens.get(token_id)
        if byte is not None:
            self._others.follow([token_id])
            return self._characters(byte)
        text = self._others.push(token_id) or self._others.flush()
        return self._characters(b"", is_end=True) + text if text else ""

    def flush(self) -> str:
        return self._characters(b"", is_end=True)

    def _characters(self, data: bytes, *, is_end: bool = False) -> str:
        """Return the characters that *data* completes; at the end of a row of bytes, also what is left of one."""
        text = self._utf8.decode(data, is_end)
        if self._of_prompt and text:
            text = text.removeprefix(self._of_prompt)
            self._of_prompt = ""
        return text.translate(REPLACED)


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


def _tokens_of_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the tokens that stand for single bytes, with byte fallback; else none."""
    ids = {tokenizer.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
    return {i: byte for i, byte in ids.items() if i is not None and tokenizer.decode([i]) != tokenizer.id_to_token(i)}


class DetokenizerFactory:
    """Makes the `Detokenizer` of a request. Holds the parts of the vocabulary that all requests share.

    Args:
        tokenizer: `PreTrainedTokenizerFast.backend_tokenizer`, or None if none was loaded.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._byte_level = tokenizer is not None and isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._token_bytes: dict[bool, _TokenBytes] = {}
        self._byte_tokens = {} if tokenizer is None else _tokens_of_bytes(tokenizer)

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
        decode = lambda ids: str(tokenizer.decode(ids, skip_special_tokens=skip_special))  # noqa: E731
        window = _WindowPieces(decode, prompt[-CONTEXT_TOKENS:])
        if not self._byte_tokens:
            return window
        return _FallbackPieces(self._byte_tokens, window, prompt[-MAX_INCOMPLETE_BYTES:])

    def _bytes_of(self, skip_special: bool) -> _TokenBytes:
        bytes_by_id = self._token_bytes.get(skip_special)
        if bytes_by_id is None:
            tokenizer: Any = self._tokenizer
            added = tokenizer.get_added_tokens_decoder()
            hidden = frozenset(i for i, token in added.items() if token.special and skip_special)
            bytes_by_id = self._token_bytes[skip_special] = _TokenBytes(tokenizer, hidden)
        return bytes_by_id
