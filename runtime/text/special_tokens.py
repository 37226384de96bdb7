"""Encodes special tokens that are written out in chat messages as ordinary text.

Otherwise a message could end itself and begin another one in the role of the system. Prompts of completions are not
escaped: there users write the whole template themselves.
"""

import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from runtime.text.tokenizer import Tokenizer


class SpecialTokenEscaper:
    """Finds special tokens written out in messages, and encodes them as text.

    `escape` replaces them by marks before the chat template is rendered; `encode` tokenises the rendered text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _pattern(self) -> "re.Pattern[str] | None":
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        contents = sorted({token.content for token in added if token.special}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, contents))) if contents else None

    @cached_property
    def _text_tokenizer(self) -> BackendTokenizer:
        """The same tokenizer, but it encodes special tokens as text."""
        copy = BackendTokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def escape(self, value: Any, marks: "SpecialTokenMarks") -> Any:
        """Return *value*, as read from JSON, with each special token in its texts replaced by a new mark."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(marks.add, value)
        if isinstance(value, Mapping):
            return {self.escape(key, marks): self.escape(item, marks) for key, item in value.items()}
        return [self.escape(item, marks) for item in value] if isinstance(value, list | tuple) else value

    def encode(self, rendered: str, marks: "SpecialTokenMarks") -> list[int]:
        """Return the ids of *rendered*: marks as the text they stand for, special tokens elsewhere as themselves."""
        ids: list[int] = []
        for piece in marks.split(rendered):
            text = marks.texts.get(piece)
            if text is not None:
                ids += self._text_tokenizer.encode(text, add_special_tokens=False).ids
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False, verbose=False)
        return ids


class SpecialTokenMarks:
    """The marks in one conversation. They contain a random nonce, so messages cannot forge them."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._nonce = secrets.token_hex(8)

    def add(self, match: "re.Match[str]") -> str:
        """Return a new mark for the text of *match*."""
        mark = f"q{self._nonce}n{len(self.texts)}q"
        self.texts[mark] = match[0]
        return mark

    def split(self, rendered: str) -> list[str]:
        """Return the marks in *rendered* and the text between them."""
        return re.split(f"(q{self._nonce}n[0-9]+q)", rendered)

    def restore(self, rendered: str) -> str:
        """Return *rendered* with marks replaced by their texts."""
        return "".join(self.texts.get(piece, piece) for piece in self.split(rendered))
