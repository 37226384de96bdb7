"""Where the last few tokens stood before: an index over one text that is kept as the text grows. Standard library only.

For each of some sizes n it remembers where every n-gram ended last, and for each such place the one before; so adding a
token costs a dict entry a size, and the places of a gram are walked most recent first. Grams are told apart by their
hash, and looked at again when they are found.
"""

from array import array
from collections.abc import Sequence as Seq
from typing import NamedTuple

MAX_PLACES = 16
"""Of more places than these the most recent are looked at."""


class Match(NamedTuple):
    """How long the longest match is, and the places behind it, most recent first."""

    length: int
    ends: list[int]


NO_MATCH = Match(0, [])


class _Grams:
    """The places of the grams of one size. A place is the index behind a gram's last token; 0 is none."""

    __slots__ = ("_before", "_last", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: dict[int, int] = {}
        self._before = array("i", bytes(size * array("i").itemsize))  # before the first gram ends, none does

    def add(self, tokens: Seq[int], stop: int) -> None:
        """Add the grams of *tokens* that end at `stop` at most and were not added yet."""
        size, last, before = self.size, self._last, self._before
        first, number = len(before), stop + 1 - len(before)
        if number <= 0:
            return
        columns = [tokens[start : start + number] for start in range(first - size, first)]
        for end, key in enumerate(map(hash, zip(*columns, strict=True)), first):
            before.append(last.get(key, 0))
            last[key] = end

    def ends(self, tokens: Seq[int], gram: Seq[int], most: int) -> list[int]:
        """Return the *most* recent places of *gram*, a part of *tokens* or the like."""
        size, before = self.size, self._before
        end = self._last.get(hash(tuple(gram)), 0)
        ends: list[int] = []
        while end and len(ends) < most:
            if tokens[end - size : end] == gram:
                ends.append(end)
            end = before[end]
        return ends


class Places:
    """The places of the grams of several sizes in one text, which the caller owns and lets grow.

    Attributes:
        num_added: how many places were taken in.

    Args:
        sizes: of the grams, largest first. A match is looked for by the largest size of which there is any; so no
            longest match is missed, except among more places of a smaller size than are looked at.
        reach: longer matches than this count as this long.
        most: so many places are looked at, where there are more.
    """

    def __init__(self, sizes: Seq[int], reach: int, most: int = MAX_PLACES) -> None:
        self._most = most
        self._grams = [_Grams(size) for size in sizes]
        self._reach = reach
        self.num_added = 0

    def add(self, tokens: Seq[int], budget: int) -> int:
        """Take in at most *budget* more places of *tokens*, but not that behind the last; return how many."""
        stop = min(len(tokens) - 1, self.num_added + budget)
        added = max(0, stop - self.num_added)
        if added:
            for grams in self._grams:
                grams.add(tokens, stop)
            self.num_added = stop
        return added

    def longest(self, tokens: Seq[int], pattern: Seq[int]) -> Match:
        """Return where in *tokens* the longest suffix of *pattern* stands; nothing if it is smaller than every size.

        *tokens* are those that were added, and *pattern* a sequence of the same type.
        """
        for grams in self._grams:
            if len(pattern) >= grams.size:
                ends = grams.ends(tokens, pattern[-grams.size :], self._most)
                if ends:
                    wanted = pattern[-self._reach :]
                    # Behind a smaller gram nothing long can match, or a larger one would have.
                    whole = _whole(tokens, ends, wanted) if grams is self._grams[0] else []
                    return Match(len(wanted), whole) if whole else _lengthened(tokens, ends, wanted, grams.size)
        return NO_MATCH


def _whole(tokens: Seq[int], ends: list[int], wanted: Seq[int]) -> list[int]:
    """Return those places before which all of *wanted* stands."""
    size = len(wanted)
    return [end for end in ends if tokens[end - size : end] == wanted]


def _lengthened(tokens: Seq[int], ends: list[int], wanted: Seq[int], length: int) -> Match:
    """Return those places before which most of *wanted* stands; the last *length* tokens do before all."""
    while length < len(wanted):
        token = wanted[-1 - length]
        longer = [end for end in ends if end > length and tokens[end - 1 - length] == token]
        if not longer:
            break
        ends, length = longer, length + 1
    return Match(length, ends)
