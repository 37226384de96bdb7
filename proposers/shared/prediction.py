"""OpenAI's `prediction`: text that the user expects as the answer, followed while the answer matches it.

The answer is expected to begin like the prediction. After a mismatch, it is expected to continue where its newest
tokens next occur in the prediction, at or after the position reached.
"""

from collections.abc import Sequence as Seq

from proposers.shared.ngram_index import Places

REACH = 16
SIZES = (4, 2)
"""After a mismatch, two tokens of the answer must match the prediction; longer matches are preferred."""


class Prediction:
    """One request's prediction, and the position of the answer in it."""

    def __init__(self, token_ids: Seq[int]) -> None:
        self._ids = list(token_ids)
        self._places = Places(SIZES, REACH)
        self._at = 0  # where the answer is expected to continue
        self._is_followed = True
        self._num_seen = 0

    def prepare(self, budget: int) -> int:
        """Index at most *budget* more tokens of the prediction; return how many."""
        return self._places.add(self._ids, budget)

    def follow(self, output: Seq[int], k: int) -> list[int]:
        """Return at most *k* ids expected after *output*, the whole answer so far; none while it does not match."""
        new = list(output[self._num_seen :])
        self._num_seen = len(output)
        if self._is_followed and self._ids[self._at : self._at + len(new)] == new:
            self._at += len(new)
        elif new:
            self._find(list(output[-REACH:]))
        return self._ids[self._at : self._at + k] if self._is_followed else []

    def _find(self, newest: list[int]) -> None:
        """Search for the newest tokens: take the nearest match from here on, else the last one before."""
        ends = self._places.longest(self._ids, newest).ends
        self._is_followed = bool(ends)
        if ends:
            self._at = min((end for end in ends if end >= self._at), default=ends[0])
