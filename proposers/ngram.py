"""Prompt lookup: what followed these n tokens the last time is likely to follow them again.

Saxena 2023, "Prompt Lookup Decoding"; vLLM's `ngram` with `prompt_lookup_min` and `prompt_lookup_max`.
"""

from array import array
from collections.abc import Sequence as Seq
from typing import ClassVar, Self

from protos.config import SpeculativeConfig
from protos.interfaces import DraftRow, Needs
from protos.learned import DraftRunner
from protos.messages import Draft

_ID = "i"
_WIDTH = array(_ID).itemsize


class NgramProposer:
    """Looks the last n tokens up in the sequence itself, longest n first, most recent match first."""

    needs: ClassVar[Needs] = "none"
    on_worker: ClassVar[bool] = False

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n, self.max_n = min_n, max_n

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer that matches `prompt_lookup_min` to `prompt_lookup_max` tokens."""
        return cls(config.prompt_lookup_min, config.prompt_lookup_max)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return for each row the tokens that followed the match, at most `row.k`; none without a match."""
        return [Draft(tuple(self._continuation(row.token_ids, row.k))) for row in rows]

    def _continuation(self, tokens: Seq[int], k: int) -> Seq[int]:
        text = array(_ID, tokens).tobytes()
        for n in range(min(self.max_n, len(tokens) - 1), self.min_n - 1, -1):
            found = _last_match(text, n * _WIDTH)
            if found >= 0:
                return tokens[found + n : found + n + k]
        return ()


def _last_match(text: bytes, width: int) -> int:
    """Return the token index of the last place before the end where the final *width* bytes stand, or -1."""
    pattern, end = text[-width:], len(text) - _WIDTH
    while (at := text.rfind(pattern, 0, end)) >= 0:
        if at % _WIDTH == 0:
            return at // _WIDTH
        end = at + width - 1
    return -1
