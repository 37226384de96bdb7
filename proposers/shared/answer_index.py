"""The suffix cache: finished outputs in a ring buffer of bounded size, indexed by n-grams. numpy, all rows at once.

For n-grams of several sizes, every place of every text is linked to the previous place with the same hash (and of the
same tenant): a hash chain from the most recent place back, as in Lempel-Ziv compressors. Links are never removed: every
match is compared with the stored tokens, so links into evicted or overwritten texts cost a comparison and no more.
"""

from collections import Counter, deque
from collections.abc import Sequence as Seq
from itertools import chain, count, islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

SIZES = (12, 5, 2)
"""Sizes of the n-grams that are linked. The longest match is searched among the largest size that occurs."""
CHAIN = 16
"""Most places of a chain that are visited, most recent first."""
NOTHING = -1
_MULTIPLIER, _MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_TOKEN_BYTES = 4 + 4 + len(SIZES) * (4 + 4)


class AnswerMatch(NamedTuple):
    """The longest match of one row: its length, and the places after its occurrences, most recent first."""

    length: int
    places: list[int]


class AnswerIndex:
    """The outputs of the last requests, separated by tenant.

    Args:
        max_bytes: of all arrays together; memory is used as texts are added.
        max_texts: most texts kept.
        reach: longer matches count as this long.
    """

    def __init__(self, max_bytes: int, max_texts: int, reach: int) -> None:
        self._size = max_bytes // _TOKEN_BYTES  # in tokens
        self._reach, self._max_texts = reach, max_texts
        self._bits = np.uint64(64 - (self._size.bit_length() - 1))
        num_heads = 1 << (self._size.bit_length() - 1)
        # Place 0 means none. Zeros cost no memory until they are written to.
        self._ids = np.zeros(self._size, np.int32)
        self._owner = np.zeros(self._size, np.int32)  # the tenant's number
        self._heads = np.zeros((len(SIZES), num_heads), np.int32)
        self._links = np.zeros((len(SIZES), self._size), np.int32)
        self._texts: deque[tuple[int, int, str]] = deque()  # first place, end, and salt; oldest first
        self._numbers: dict[str, int] = {}  # of tenants with texts
        self._num_texts: Counter[str] = Counter()
        self._new_numbers = count(1)
        self._next = self._first = reach + 1  # the places before the first text are read, too
        self._ids[: self._first] = NOTHING
        self._lines = np.lib.stride_tricks.sliding_window_view(self._ids, reach)
        # For each match length, the level of the largest n-gram in it; none if it is too short.
        self._level = np.searchsorted([-size for size in SIZES], -np.arange(reach + 1))

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_bytes(self) -> int:
        """Most bytes that all arrays together can use."""
        return sum(array.nbytes for array in (self._ids, self._owner, self._heads, self._links))

    def add(self, salt: str, token_ids: Seq[int]) -> None:
        """Add a text of the tenant with this *salt*; evict the oldest texts if there is no room."""
        ids = np.array(token_ids[-(self._size - self._first - 1) :], np.int32)
        start = self._make_room(len(ids) + 1)
        end = start + len(ids)
        number = self._enter(start, end + 1, salt)
        self._ids[start:end] = ids
        self._ids[end] = NOTHING
        self._owner[start : end + 1] = number
        hashes = _hashes(np.array(number), _newest_first(ids))
        for level, size in enumerate(SIZES):
            if len(ids) > size:  # there is nothing to propose after the last token
                self._link(level, hashes[size][size - 1 : -1], np.arange(start + size, end))

    def _enter(self, first: int, end: int, salt: str) -> int:
        """Register a text and return its tenant's number, a new one if the tenant has no other text."""
        self._texts.append((first, end, salt))
        self._num_texts[salt] += 1
        return self._numbers.setdefault(salt, next(self._new_numbers))

    def _evict(self) -> None:
        """Evict the oldest text, and its tenant if it has no other."""
        first, end, salt = self._texts.popleft()
        self._owner[first:end] = 0
        self._num_texts[salt] -= 1
        if not self._num_texts[salt]:
            del self._num_texts[salt], self._numbers[salt]

    def _make_room(self, size: int) -> int:
        start = self._next if self._next + size <= self._size else self._first
        while self._texts and (len(self._texts) >= self._max_texts or self._overlaps(start, size)):
            self._evict()
        self._next = start + size
        return start

    def _overlaps(self, start: int, size: int) -> bool:
        """Whether the oldest text overlaps the place of the next one, or precedes it in the ring."""
        first, end, _ = self._texts[0]
        is_passed = start < self._next <= first
        return is_passed or (first < start + size and end > start)

    def _link(self, level: int, hashes: Hashes, places: Places) -> None:
        """Put *places* at the heads of their chains, the last one first."""
        heads, links = self._heads[level], self._links[level]
        bucket_P = (hashes >> self._bits).astype(np.int64)
        order = np.argsort(bucket_P, kind="stable")
        bucket_P, places = bucket_P[order], places[order]
        starts = np.ones(len(places), bool)
        starts[1:] = bucket_P[1:] != bucket_P[:-1]
        before = np.empty(len(places), np.int64)
        before[1:] = places[:-1]
        before[starts] = heads[bucket_P[starts]]
        links[places] = before
        ends = np.append(starts[1:], True)
        heads[bucket_P[ends]] = places[ends]

    def longest(self, salts: Seq[str], patterns: Seq[Seq[int]]) -> list[AnswerMatch]:
        """Return for each row where the longest suffix of its pattern occurs in its tenant's texts.

        Args:
            salts: of the rows' tenants, `R`.
            patterns: the last tokens of each row, `R` times at most *reach*.
        """
        wanted_RD = self._reversed(patterns)
        tenant_R = np.array([self._numbers.get(salt, NOTHING) for salt in salts], np.int64)
        hashes = _hashes(tenant_R, wanted_RD.T)
        place_CG = self._chains(np.stack([hashes[size] for size in SIZES], 1).reshape(-1))
        is_tenants_CG = self._is_tenants(place_CG, tenant_R.repeat(len(SIZES)))
        gram_P, at_P = np.divmod(np.flatnonzero(is_tenants_CG.T), CHAIN)
        row_P, level_P = np.divmod(gram_P, len(SIZES))
        place_P = place_CG[at_P, gram_P]
        length_P = self._lengths(place_P, wanted_RD[:, self._reach - 1 :: -1].take(row_P, 0))
        # Matches longer than a level's n-grams are found at the level above, too: count each once.
        length_P[self._level[length_P] != level_P] = 0
        return _longest(len(patterns), row_P, place_P, length_P)

    def _reversed(self, patterns: Seq[Seq[int]]) -> Ids:
        wanted_RD = np.full((len(patterns), max(self._reach, SIZES[0])), NOTHING - 1, np.int32)
        if all(len(pattern) >= self._reach for pattern in patterns):
            tokens = chain.from_iterable(pattern[: -self._reach - 1 : -1] for pattern in patterns)
            wanted_RD[:, : self._reach] = np.fromiter(tokens, np.int32).reshape(-1, self._reach)
            return wanted_RD
        for wanted, pattern in zip(wanted_RD, patterns, strict=True):
            newest = pattern[-self._reach :]
            wanted[: len(newest)] = newest[::-1]
        return wanted_RD

    def _chains(self, hash_G: Hashes) -> Places:
        """Return the first places `[C, G]` of the chains of n-grams, sizes alternating; 0 after their ends."""
        level_G = np.arange(len(hash_G)) % len(SIZES)
        links, link_G = self._links.reshape(-1), level_G * self._size
        place_CG = np.empty((CHAIN, len(hash_G)), np.int64)
        place_CG[0] = self._heads[level_G, (hash_G >> self._bits).astype(np.int64)]
        for before_G, place_G in pairwise(place_CG):
            place_G[:] = links.take(link_G + before_G)
        return place_CG

    def _is_tenants(self, place_CG: Places, tenant_G: Places) -> npt.NDArray[np.bool_]:
        """Return which places belong to the tenants, up to where a chain reaches an overwritten place."""
        is_tenants_CG: npt.NDArray[np.bool_] = (self._owner.take(place_CG - 1) == tenant_G) & (place_CG > 0)
        age_CG = self._next - place_CG
        age_CG[age_CG < 0] += self._size
        is_tenants_CG[1:] &= np.logical_and.accumulate(age_CG[1:] > age_CG[:-1], 0)
        return is_tenants_CG

    def _lengths(self, place_P: Places, wanted_PD: Ids) -> Places:
        """Return how many tokens before each place equal the wanted ones, counted from the newest."""
        differs_PD = (self._lines[place_P - self._reach] != wanted_PD)[:, ::-1]
        length_P: Places = differs_PD.argmax(1)
        length_P[(length_P == 0) & ~differs_PD[:, 0]] = self._reach  # nothing differs
        return length_P

    def after(self, places: Seq[int], most: int) -> list[list[int]]:
        """Return at most *most* ids from each place on, up to the end of its text."""
        line_PC = self._ids.take(np.array(places, np.int64)[:, None] + np.arange(most), mode="clip")
        lines: list[list[int]] = line_PC.tolist()
        for i in (line_PC == NOTHING).any(1).nonzero()[0].tolist():
            lines[i] = lines[i][: lines[i].index(NOTHING)]
        return lines


def _longest(num_rows: int, row_P: Places, place_P: Places, length_P: Places) -> list[AnswerMatch]:
    """Return the places of each row's longest matches, in the order given; *row_P* is ascending."""
    longest_R = np.zeros(num_rows, np.int64)
    np.maximum.at(longest_R, row_P, length_P)
    is_best_P = (length_P == longest_R[row_P]) & (length_P > 0)
    num_best_R = np.bincount(row_P[is_best_P], minlength=num_rows)
    places = iter(place_P[is_best_P].tolist())
    return [
        AnswerMatch(length, list(islice(places, number)))
        for length, number in zip(longest_R.tolist(), num_best_R.tolist(), strict=True)
    ]


def _newest_first(ids: Ids) -> Ids:
    """Return `[D, N]`: line j has the token j places before each of *ids*; `NOTHING` before the first."""
    lines_DN = np.full((SIZES[0], len(ids)), NOTHING, np.int32)
    for j in range(min(SIZES[0], len(ids))):
        lines_DN[j, j:] = ids[: len(ids) - j]
    return lines_DN


def _hashes(tenant_N: Places, newest_DN: Ids) -> dict[int, Hashes]:
    """Return for each n-gram size the hash of the last tokens of N places, newest first, and of the tenant."""
    state_N = np.zeros(newest_DN.shape[1], np.uint64) + tenant_N.astype(np.uint64)
    found = {}
    for size, token_N in enumerate(newest_DN[: SIZES[0]].astype(np.uint64), 1):
        state_N ^= token_N
        state_N *= _MULTIPLIER
        state_N ^= state_N >> np.uint64(29)
        if size in SIZES:
            found[size] = state_N * _MIXER
    return found
