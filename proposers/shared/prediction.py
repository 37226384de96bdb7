"""OpenAI's `prediction`: text that the user expects as the answer, followed for as long as the answer keeps to it.

The answer is expected to begin like the prediction. Where it turns off, the next place where its newest tokens stand in
the prediction, at or behind the one it had reached, is where it is expected to go on.
"""

from collections.abc import Sequence as Seq

from proposers.shared.ngram_index import Places

REACH = 16
SIZES = (4, 2)
"""An answer that turned off has to say two tokens of the prediction to be back; more of them tell the place better."""


class Prediction:
    """One request's prediction, and how far the answer has come in it."""

    def __init__(self, token_ids: Seq[int]) -> None:
        self._ids = list(token_ids)
        self._places = Places(SIZES, REACH)
        self._at = 0  # where the answer is expected to go on
        self._is_followed = True
        self._num_seen = 0

    def prepare(self, budget: int) -> int:
        """Take in at most *budget* more tokens of the prediction; return how many."""
        return self._places.add(self._ids, budget)

    def follow(self, output: Seq[int], k: int) -> list[int]:
        """Return at most *k* ids that are expected behind *output*, everything that was answered; none while astray."""
        new = list(output[self._num_seen :])
        self._num_seen = len(output)
        if self._is_followed and self._ids[self._at : self._at + len(new)] == new:
            self._at += len(new)
        elif new:
            self._find(list(output[-REACH:]))
        return self._ids[self._at : self._at + k] if self._is_followed else []

    def _find(self, newest: list[int]) -> None:
        """Look for where the newest tokens stand: the nearest such place from here on, else the last one before."""
        ends = self._places.longest(self._ids, newest).ends
        self._is_followed = bool(ends)
        if ends:
            self._at = min((end for end in ends if end >= self._at), default=ends[0])
