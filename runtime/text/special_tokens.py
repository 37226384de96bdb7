"""What users write in a conversation is text, even where it spells a special token: only the template may write those.

Otherwise a message could end itself and begin another, in the system's name. Prompts of completions are whole templates
of their users, and are read as they stand.
"""

import re
import secrets
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as BareTokenizer

from runtime.text.tokenizer import Tokenizer


class PlainSpecials:
    """Finds special tokens spelt out in messages, and encodes them as the text they are.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _pattern(self) -> "re.Pattern[str] | None":
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        spelt = sorted({token.content for token in added if token.special}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spelt))) if spelt else None

    @cached_property
    def _blind(self) -> BareTokenizer:
        """The same tokenizer, to which nothing is special."""
        blind = BareTokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        blind.encode_special_tokens = True
        return blind

    def hide(self, told: Any, hidden: "Hidden") -> Any:
        """Return *told*, as read from JSON, with a mark of *hidden* in place of each special token in its texts."""
        if isinstance(told, str):
            return told if self._pattern is None else self._pattern.sub(hidden.mark, told)
        if isinstance(told, Mapping):
            return {self.hide(key, hidden): self.hide(value, hidden) for key, value in told.items()}
        return [self.hide(part, hidden) for part in told] if isinstance(told, list | tuple) else told

    def encode(self, rendered: str, hidden: "Hidden") -> list[int]:
        """Return the ids of *rendered*, which the template wrote around the marks."""
        ids: list[int] = []
        for piece in hidden.split(rendered):
            spelt = hidden.spelt.get(piece)
            if spelt is not None:
                ids += self._blind.encode(spelt, add_special_tokens=False).ids
            elif piece:
                ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids


class Hidden:
    """The marks in one conversation. Nobody can guess them, so that nobody can write one."""

    def __init__(self) -> None:
        self.spelt: dict[str, str] = {}
        self._nonce = secrets.token_hex(8)

    def mark(self, found: "re.Match[str]") -> str:
        """Return a new mark for what was *found*."""
        mark = f"q{self._nonce}n{len(self.spelt)}q"
        self.spelt[mark] = found[0]
        return mark

    def split(self, rendered: str) -> list[str]:
        """Return the marks in *rendered* and what stands between them."""
        return re.split(f"(q{self._nonce}n[0-9]+q)", rendered)

    def restored(self, rendered: str) -> str:
        """Return *rendered* with what the marks stand for."""
        return "".join(self.spelt.get(piece, piece) for piece in self.split(rendered))
