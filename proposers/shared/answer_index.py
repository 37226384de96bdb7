"""The suffix cache: answers in a bounded ring buffer, indexed by n-grams while they grow. numpy, all rows at once.

For n-grams of several sizes, every place of every text is linked to the previous place with the same hash (and of the
same tenant): a hash chain from the most recent place back, as in Lempel-Ziv compressors. Links are never removed: every
match is compared with the stored tokens, so links into evicted or overwritten texts cost a comparison and no more.
"""

from collections.abc import Sequence as Seq
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from proposers.shared.answer_ring import NOTHING, AnswerRing, AnswerText, Ids, Places

Hashes = npt.NDArray[np.uint64]
Stamps = npt.NDArray[np.uint32]

SIZES = (12, 5, 2, 1)
"""Sizes of the n-grams that are linked. A match of some length is searched among the largest size in it."""
CHAIN = 16
"""Most places of a chain that are visited, most recent first."""
NO_PLACES = (0,) * CHAIN
"""Place 0, before the first text, has no ids."""
_MULTIPLIER, _MIXER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_TOKEN_BYTES = 4 + 4 + 4 + len(SIZES) * (4 + 4)


class AnswerMatch(NamedTuple):
    """The places after the occurrences of a row's last *length* tokens, most recent first."""

    length: int
    places: list[int]


class AnswerIndex:
    """The answers to the last requests, separated by tenant.

    Args:
        max_bytes: of all arrays together; memory is used as texts are added.
        max_texts: most texts kept.
        reach: longer matches count as this long.
    """

    def __init__(self, max_bytes: int, max_texts: int, reach: int) -> None:
        self._size = max_bytes // _TOKEN_BYTES  # in tokens
        self._reach = reach
        self._ring = AnswerRing(self._size, max_texts, reach)
        self._bits = np.uint64(64 - (self._size.bit_length() - 1))
        num_heads = 1 << (self._size.bit_length() - 1)
        self._heads = np.zeros((len(SIZES), num_heads), np.int32)
        self._links = np.zeros((len(SIZES), self._size), np.int32)
        self._stamps = np.zeros(self._size, np.uint32)  # when a place was linked
        self._now = 0
        # The longest match that the n-grams of each size are searched for.
        self._longest = np.array([reach, *(size - 1 for size in SIZES[:-1])])

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def num_bytes(self) -> int:
        """Most bytes that all arrays together can use."""
        arrays = (self._ring.ids, self._ring.owner, self._heads, self._links, self._stamps)
        return sum(array.nbytes for array in arrays)

    def add(self, salt: str, token_ids: Seq[int]) -> None:
        """Add a complete text of the tenant with this *salt*; evict the oldest texts if there is no room."""
        self.extend([(AnswerText(salt), token_ids)])

    def extend(self, parts: Seq[tuple[AnswerText, Seq[int]]]) -> None:
        """Append tokens to texts, and index them; evict the oldest texts if there is no room."""
        most = self._ring.most
        written = [span for text, token_ids in parts for span in self._ring.append(text, token_ids[-most:])]
        if not written:
            return
        places = np.concatenate([np.arange(first, end) for first, end in written])
        newest_DN = self._ring.ids.take(places - np.arange(1, SIZES[0] + 1)[:, None])
        is_inside_DN = np.logical_and.accumulate(newest_DN != NOTHING, 0)
        hashes = _hashes(self._ring.owner[places].astype(np.int64), newest_DN)
        self._stamp(places)
        for level, size in enumerate(SIZES):
            is_inside_N = is_inside_DN[size - 1]
            self._link(level, hashes[size][is_inside_N], places[is_inside_N])

    def _stamp(self, places: Places) -> None:
        self._stamps[places] = (np.arange(len(places)) + self._now + 1).astype(np.uint32)
        self._now = (self._now + len(places)) % (1 << 32)

    def _link(self, level: int, hashes: Hashes, places: Places) -> None:
        """Put *places* at the heads of their chains, the last one first."""
        if not len(places):
            return
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

    def matches(self, salts: Seq[str], patterns: Seq[Seq[int]], least: Seq[int]) -> list[list[AnswerMatch]]:
        """Return for each row where suffixes of its pattern occur in its tenant's texts, the longest first.

        Of several suffixes with the same places, only the longest is returned.

        Args:
            salts: of the rows' tenants, `R`.
            patterns: the last tokens of each row, `R` times at most *reach*.
            least: lengths of the shortest suffixes wanted, `R`, from 1 on.
        """
        row_G, level_G = (np.maximum(least, 1)[:, None] <= self._longest).nonzero()
        wanted_RD = self._reversed(patterns)
        tenant_R = np.array([self._ring.number(salt) for salt in salts], np.int64)
        hashes = _hashes(tenant_R, wanted_RD.T)
        hash_G = np.stack([hashes[size] for size in SIZES], 1)[row_G, level_G]
        place_CG = self._chains(hash_G, level_G)
        length_CG = self._lengths(place_CG, wanted_RD, tenant_R, row_G, level_G)
        is_found_G = length_CG.max(0, initial=0) >= np.maximum(least, 1)[row_G]
        found: list[list[AnswerMatch]] = [[] for _ in patterns]
        grams = (part.T[is_found_G].tolist() for part in (row_G, length_CG, place_CG))
        for row, lengths, places in zip(*grams, strict=True):
            found[row] += _by_length(lengths, places, max(least[row], 1))
        return found

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

    def _chains(self, hash_G: Hashes, level_G: Places) -> Places:
        """Return the first places `[C, G]` of the chains of n-grams of these sizes; 0 after their ends."""
        links, link_G = self._links.reshape(-1), level_G * self._size
        place_CG = np.empty((CHAIN, len(hash_G)), np.int64)
        place_CG[0] = self._heads[level_G, (hash_G >> self._bits).astype(np.int64)]
        for before_G, place_G in pairwise(place_CG):
            place_G[:] = links.take(link_G + before_G)
        return place_CG

    def _lengths(self, place_CG: Places, wanted_RD: Ids, tenant_R: Places, row_G: Places, level_G: Places) -> Places:
        """Return the lengths `[C, G]` of the matches at *place_CG*, 0 where the n-gram does not match."""
        is_tenants_CG = self._is_tenants(place_CG, tenant_R[row_G])
        length_CG = np.zeros(place_CG.shape, np.int64)
        gram_P = is_tenants_CG.nonzero()[1]
        newest_RD = wanted_RD[:, self._reach - 1 :: -1]
        length_P = self._matched(place_CG[is_tenants_CG], newest_RD.take(row_G[gram_P], 0))
        length_P[length_P < np.array(SIZES)[level_G[gram_P]]] = 0
        length_CG[is_tenants_CG] = np.minimum(length_P, self._longest[level_G[gram_P]])
        return length_CG

    def _is_tenants(self, place_CG: Places, tenant_G: Places) -> npt.NDArray[np.bool_]:
        """Return which places belong to the tenants, up to where a chain reaches an overwritten place."""
        is_tenants_CG: npt.NDArray[np.bool_] = (self._ring.owner.take(place_CG - 1) == tenant_G) & (place_CG > 0)
        age_CG = np.uint32(self._now) - self._stamps.take(place_CG)
        is_tenants_CG[1:] &= np.logical_and.accumulate(age_CG[1:] > age_CG[:-1], 0)
        return is_tenants_CG

    def _matched(self, place_P: Places, wanted_PD: Ids) -> Places:
        """Return how many tokens before each place equal the wanted ones, counted from the newest."""
        differs_PD = (self._ring.lines[place_P - self._reach] != wanted_PD)[:, ::-1]
        length_P: Places = differs_PD.argmax(1)
        length_P[(length_P == 0) & ~differs_PD[:, 0]] = self._reach  # nothing differs
        return length_P

    def after(self, places: Seq[int], most: int) -> list[list[int]]:
        """Return at most *most* ids from each place on, up to the end of its text."""
        return self._ring.after(places, most)

    def together(self, places: Seq[Seq[int]], most: int) -> Ids:
        """Return the next *most* ids from each of G times P places on, `[most, P, G]`; `NOTHING` if there are fewer.

        After the end of a text, and a first `NOTHING`, other ids may follow.
        """
        flat_GP = [place for some in places for place in (*some, *NO_PLACES[len(some) :])]
        place_PG = np.array(flat_GP, np.int64).reshape(len(places), CHAIN).T
        return self._ring.ids.take(np.arange(most)[:, None, None] + place_PG, mode="clip")


def _by_length(lengths: list[int], places: list[int], least: int) -> list[AnswerMatch]:
    """Return the places of matches of each length from *least* on, which include those of longer ones."""
    found = sorted({length for length in lengths if length >= least}, reverse=True)
    return [
        AnswerMatch(size, [place for length, place in zip(lengths, places, strict=True) if length >= size])
        for size in found
    ]


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
