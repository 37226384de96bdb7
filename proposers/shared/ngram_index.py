"""An n-gram index over one growing text, which finds earlier occurrences of its last tokens. Standard library only.

For several sizes n it stores the last place where each n-gram ended, and for each place the previous one: adding a
token costs one dict entry per size, and the places of an n-gram are visited most recent first. N-grams are looked up by
hash, and compared when found.
"""

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

MAX_PLACES = 16
"""Most places that are visited per look-up, most recent first."""


class Match(NamedTuple):
    """Length of the longest match, and the places after its occurrences, most recent first."""

    length: int
    ends: list[int]


NO_MATCH = Match(0, [])


class _Grams:
    """The places of the n-grams of one size. A place is the index after an n-gram's last token; 0 is none."""

    __slots__ = ("_before", "_last", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._last: dict[int, int] = {}
        self._before = array("i", bytes(size * array("i").itemsize))  # before the first gram ends, none does

    def add(self, tokens: Seq[int], stop: int) -> None:
        """Add the n-grams of *tokens* that end at *stop* or before and were not added yet."""
        size, last, before = self.size, self._last, self._before
        first, number = len(before), stop + 1 - len(before)
        if number <= 0:
            return
        columns = [tokens[start : start + number] for start in range(first - size, first)]
        for end, key in enumerate(map(hash, zip(*columns, strict=True)), first):
            before.append(last.get(key, 0))
            last[key] = end

    def ends(self, tokens: Seq[int], gram: Seq[int], most: int) -> list[int]:
        """Return at most *most* places of *gram*, most recent first."""
        size, before = self.size, self._before
        end = self._last.get(hash(tuple(gram)), 0)
        ends: list[int] = []
        newest, is_single = gram[-1], size == 1
        while end and len(ends) < most:
            if tokens[end - 1] == newest and (is_single or tokens[end - size : end] == gram):
                ends.append(end)
            end = before[end]
        return ends


class Places:
    """The places of the n-grams of several sizes in one text, which the caller owns and may extend.

    Args:
        sizes: of the n-grams, largest first. The largest size with an occurrence is used, so the longest match is found
            unless it lies beyond the visited places of a smaller size.
        reach: longer matches count as this long.
        most: most places that are visited.

    Attributes:
        num_added: number of places indexed.
    """

    def __init__(self, sizes: Seq[int], reach: int, most: int = MAX_PLACES) -> None:
        self._most = most
        self._grams = [_Grams(size) for size in sizes]
        self._reach = reach
        self.num_added = 0

    def add(self, tokens: Seq[int], budget: int) -> int:
        """Index at most *budget* more places of *tokens*, except the one after the last token; return how many."""
        stop = min(len(tokens) - 1, self.num_added + budget)
        added = max(0, stop - self.num_added)
        if added:
            for grams in self._grams:
                grams.add(tokens, stop)
            self.num_added = stop
        return added

    def longest(self, tokens: Seq[int], pattern: Seq[int]) -> Match:
        """Return where in *tokens* the longest suffix of *pattern* occurs; no match if it is shorter than every size.

        *tokens* are those that were added; *pattern* is a sequence of the same type.
        """
        for grams in self._grams:
            if len(pattern) >= grams.size:
                ends = grams.ends(tokens, pattern[-grams.size :], self._most)
                if ends:
                    wanted = pattern[-self._reach :]
                    # A match of the whole pattern is only possible if the largest n-gram occurs.
                    whole = _whole(tokens, ends, wanted) if grams is self._grams[0] else []
                    return Match(len(wanted), whole) if whole else _lengthened(tokens, ends, wanted, grams.size)
        return NO_MATCH

    def by_length(self, tokens: Seq[int], pattern: Seq[int]) -> Iterator[Match]:
        """Yield where suffixes of *pattern* occur, the longest first; of several with the same places only the longest.

        Unlike `longest`, this goes on with shorter suffixes. Arguments as for `longest`.
        """
        longest = self._reach
        for grams in self._grams:
            if len(pattern) >= grams.size and longest >= grams.size:
                ends = grams.ends(tokens, pattern[-grams.size :], self._most)
                yield from reversed(_lengthening(tokens, ends, pattern[-longest:], grams.size))
            longest = min(longest, grams.size - 1)


def _lengthening(tokens: Seq[int], ends: list[int], wanted: Seq[int], length: int) -> list[Match]:
    """Return the places of matches with *wanted*, from *length* tokens on, whenever a longer match has fewer places."""
    found: list[Match] = []
    while ends:
        longer: list[int] = []
        if length < len(wanted):
            token = wanted[-1 - length]
            longer = [end for end in ends if end > length and tokens[end - 1 - length] == token]
        if len(longer) < len(ends):
            found.append(Match(length, ends))
        ends, length = longer, length + 1
    return found


def _whole(tokens: Seq[int], ends: list[int], wanted: Seq[int]) -> list[int]:
    """Return those places that all of *wanted* precedes."""
    size = len(wanted)
    return [end for end in ends if tokens[end - size : end] == wanted]


def _lengthened(tokens: Seq[int], ends: list[int], wanted: Seq[int], length: int) -> Match:
    """Return the places of the longest match with *wanted*, whose last *length* tokens precede all of *ends*."""
    while length < len(wanted):
        token = wanted[-1 - length]
        longer = [end for end in ends if end > length and tokens[end - 1 - length] == token]
        if not longer:
            break
        ends, length = longer, length + 1
    return Match(length, ends)
