"""Text of tokens as they come, for vocabularies that are not byte-level: SentencePiece's, WordPiece's."""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer

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

Decode = Callable[[Sequence[int]], str]
"""Decodes tokens together."""


class PieceDecoder(Protocol):
    """Turns tokens into whole characters, one token at a time."""

    def push(self, token_id: int) -> str:
        """Return the characters completed by this token, possibly none."""
        ...

    def flush(self) -> str:
        """Return incomplete characters as U+FFFD."""
        ...


class JoinedTexts(dict[int, str]):
    """Maps tokens to their texts after another token, where these do not depend on it; filled on demand.

    Args:
        decode: decodes tokens together.
        other: a token that has text.
    """

    def __init__(self, decode: Decode, other: int) -> None:
        super().__init__()
        self._decode, self._other = decode, other
        self._start = len(decode([other]))

    def __missing__(self, token_id: int) -> str:
        found = self[token_id] = self._decode([self._other, token_id])[self._start :]
        return found


class JoinedPieces:
    """For vocabularies whose tokens have the same text wherever they stand. What precedes the tokens has text."""

    __slots__ = ("_texts",)

    def __init__(self, texts: JoinedTexts) -> None:
        self._texts = texts

    def push(self, token_id: int) -> str:
        """See `PieceDecoder`."""
        return self._texts[token_id]

    def flush(self) -> str:
        """See `PieceDecoder`."""
        return ""

    def follow(self, context: Sequence[int]) -> None:
        """Take *context* for what precedes the next token."""


class WindowPieces:
    """For other vocabularies: decodes a short window of context and new tokens, and returns the text they add.

    Args:
        decode: decodes tokens together.
        context: the tokens that precede the text.
    """

    __slots__ = ("_decode", "_num_context", "_shown", "_window")

    def __init__(self, decode: Decode, context: Sequence[int]) -> None:
        self._decode = decode
        self.follow(context)

    def follow(self, context: Sequence[int]) -> None:
        """Take *context* for what precedes the next token."""
        self._window = list(context)
        self._num_context = len(context)
        self._shown = len(self._decode(context))

    def push(self, token_id: int) -> str:
        """See `PieceDecoder`."""
        self._window.append(token_id)
        num_held = len(self._window) - self._num_context
        text = self._decode(self._window)
        if len(text) <= self._shown or (text.endswith(REPLACEMENT) and num_held < MAX_HELD_TOKENS):
            return ""
        return self._show(text)

    def flush(self) -> str:
        """See `PieceDecoder`."""
        return self._show(self._decode(self._window))

    def _show(self, text: str) -> str:
        added = text[self._shown :]
        if added:
            self.follow(self._window[self._num_context :])
        return added


class FallbackPieces:
    """For vocabularies with byte fallback: an incremental UTF-8 decoder over tokens of bytes, other pieces between.

    A byte of no character becomes one U+FFFD. (The tokenizer replaces all bytes in a row if one is of no character; but
    those before it were already shown when it comes.)

    Args:
        byte_tokens: the bytes that tokens stand for.
        others: pieces of the other tokens.
        prompt: the end of the prompt, in which the first character may begin.
    """

    __slots__ = ("_byte_tokens", "_is_in_bytes", "_of_prompt", "_others", "_utf8")

    def __init__(
        self, byte_tokens: Mapping[int, bytes], others: WindowPieces | JoinedPieces, prompt: Sequence[int]
    ) -> None:
        self._byte_tokens = byte_tokens
        self._others = others
        self._utf8 = Utf8("surrogateescape")
        for token_id in prompt:
            byte = byte_tokens.get(token_id)
            self._utf8.decode(byte or b"", byte is None)
        (begun, _) = self._utf8.getstate()
        self._of_prompt = begun.decode(errors="surrogateescape")
        self._is_in_bytes = bool(begun)

    def push(self, token_id: int) -> str:
        """See `PieceDecoder`."""
        byte = self._byte_tokens.get(token_id)
        if byte is not None:
            self._is_in_bytes = True
            self._others.follow([token_id])
            return self._characters(byte)
        text = self._others.push(token_id) or self._others.flush()
        return self.flush() + text if text and self._is_in_bytes else text

    def flush(self) -> str:
        """Return what is left of a character at the end of a row of bytes."""
        self._is_in_bytes = False
        return self._characters(b"", is_end=True)

    def _characters(self, data: bytes, *, is_end: bool = False) -> str:
        text = self._utf8.decode(data, is_end)
        if self._of_prompt and text:
            text = text.removeprefix(self._of_prompt)
            self._of_prompt = ""
        return text.translate(REPLACED)


def tokens_of_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Return the tokens that stand for single bytes, with byte fallback; else none."""
    ids = {tokenizer.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
    return {i: byte for i, byte in ids.items() if i is not None and tokenizer.decode([i]) != tokenizer.id_to_token(i)}


def joins(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer decodes every token by itself, but for the first one and for tokens of bytes."""
    decoder: Any = tokenizer.decoder
    if decoder is None:
        return False
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [part["type"] for part in parts]
    if "Fuse" in kinds:
        # What follows it changes the text as a whole: its first characters, or any.
        parts, whole = parts[: kinds.index("Fuse")], parts[kinds.index("Fuse") + 1 :]
        if any(part["type"] != "Strip" or part["stop"] for part in whole):
            return False
    return all(part["type"] in ("Replace", "ByteFallback", "Metaspace") for part in parts)
