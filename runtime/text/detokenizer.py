"""Incremental detokenization: whole characters only, with stop strings."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders

from protos.byte_level import BYTE_OF
from runtime.text.pieces import (
    CONTEXT_TOKENS,
    MAX_INCOMPLETE_BYTES,
    FallbackPieces,
    JoinedPieces,
    JoinedTexts,
    PieceDecoder,
    Utf8,
    WindowPieces,
    joins,
    tokens_of_bytes,
)

if TYPE_CHECKING:
    from protos.messages import Request

CONTINUING = range(0x80, 0xC0)
"""Bytes of a character in UTF-8 after its first one."""


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
    """For byte-level vocabularies: an incremental UTF-8 decoder over the bytes of tokens.

    A character that *before*, the last tokens of the prompt, begins is whole where the answer continues it.
    """

    __slots__ = ("_bytes", "_is_prompts", "_utf8")

    def __init__(self, bytes_by_id: _TokenBytes, before: Sequence[int]) -> None:
        self._bytes = bytes_by_id
        self._utf8 = Utf8("replace")
        self._utf8.decode(b"".join([bytes_by_id[token_id] for token_id in before]))
        self._is_prompts = bool(self._utf8.getstate()[0])

    def push(self, token_id: int) -> str:
        data = self._bytes[token_id]
        if self._is_prompts and data:
            self._is_prompts = False
            if data[0] not in CONTINUING:
                self._utf8.reset()
        return self._utf8.decode(data)

    def flush(self) -> str:
        return "" if self._is_prompts else self._utf8.decode(b"", True)


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
        self._joins = tokenizer is not None and joins(tokenizer)
        self._token_bytes: dict[bool, _TokenBytes] = {}
        self._texts: dict[bool, JoinedTexts] = {}
        self._byte_tokens = {} if tokenizer is None else tokens_of_bytes(tokenizer)

    def __call__(self, request: "Request") -> Detokenizer | None:
        """Return a detokenizer, or None if text is not requested or there is no tokenizer."""
        params = request.params
        if self._tokenizer is None or not params.detokenize:
            return None
        pieces = self._pieces(params.skip_special_tokens, request.prompt_token_ids)
        return Detokenizer(pieces, params.stop, params.min_tokens, params.include_stop_str_in_output)

    def _pieces(self, skip_special: bool, prompt: Sequence[int]) -> PieceDecoder:
        if self._byte_level:
            return _BytePieces(self._bytes_of(skip_special), prompt[-MAX_INCOMPLETE_BYTES:])
        texts = self._texts_of(skip_special, prompt) if self._joins else None
        if texts is not None:
            others: WindowPieces | JoinedPieces = JoinedPieces(texts)
        else:
            others = WindowPieces(partial(self._decode, skip_special), prompt[-CONTEXT_TOKENS:])
        if not self._byte_tokens:
            return others
        return FallbackPieces(self._byte_tokens, others, prompt[-MAX_INCOMPLETE_BYTES:])

    def _decode(self, skip_special: bool, ids: Sequence[int]) -> str:
        tokenizer: Any = self._tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special))

    def _texts_of(self, skip_special: bool, prompt: Sequence[int]) -> JoinedTexts | None:
        """Return the texts of tokens after *prompt*; None if its end has no text: then the first token is another."""
        decode = partial(self._decode, skip_special)
        last = next((token for token in reversed(prompt[-CONTEXT_TOKENS:]) if decode([token])), None)
        if last is None:
            return None
        if skip_special not in self._texts:
            self._texts[skip_special] = JoinedTexts(decode, last)
        return self._texts[skip_special]

    def _bytes_of(self, skip_special: bool) -> _TokenBytes:
        bytes_by_id = self._token_bytes.get(skip_special)
        if bytes_by_id is None:
            tokenizer: Any = self._tokenizer
            added = tokenizer.get_added_tokens_decoder()
            hidden = frozenset(i for i, token in added.items() if token.special and skip_special)
            bytes_by_id = self._token_bytes[skip_special] = _TokenBytes(tokenizer, hidden)
        return bytes_by_id
