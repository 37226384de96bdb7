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

from proposers.shared.answer_ring import NOTHING, AnswerRing, AnswerText, Ids, Places, small_pages

Hashes = npt.NDArray[np.uint64]
Stamps = npt.NDArray[np.uint32]

SIZES = (12, 5, 2, 1)
"""Sizes of the n-grams that are linked. A match of some length is searched among the largest size in it."""
CHAIN = 16
"""Most places of a chain that are visited, most recent first."""
NO_PLACES = (0,) * CHAIN
"""Place 0, before the first text, has no ids."""
_FACTORS = np.random.default_rng(0).integers(0, 1 << 64, SIZES[0] + 1, np.uint64) | np.uint64(1)
"""Random factors of the tokens of an n-gram, newest first, and at last of the tenant."""
_GRAMS = np.array(SIZES) - 1
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
        self._num_heads = 1 << (self._size.bit_length() - 1)
        # Of all n-gram sizes, one after the other.
        self._heads = small_pages(len(SIZES) * self._num_heads, np.int32)
        self._links = small_pages(len(SIZES) * self._size, np.int32)
        self._stamps = small_pages(self._size, np.uint32)  # when a place was linked
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
        hash_LN = _hashes(self._ring.owner[places].astype(np.uint64), newest_DN)
        self._stamp(places)
        level_P, index_P = is_inside_DN[_GRAMS].nonzero()
        self._link(level_P, hash_LN[level_P, index_P], places[index_P])

    def _stamp(self, places: Places) -> None:
        self._stamps[places] = (np.arange(len(places)) + self._now + 1).astype(np.uint32)
        self._now = (self._now + len(places)) % (1 << 32)

    def _link(self, level_P: Places, hash_P: Hashes, place_P: Places) -> None:
        """Put the places of n-grams at the heads of their chains, the last one of each size first."""
        if not len(place_P):
            return
        head_P = self._head(level_P, hash_P)
        order = head_P.argsort(kind="stable")
        head_P, place_P, link_P = head_P[order], place_P[order], (level_P * self._size + place_P)[order]
        starts = np.ones(len(place_P), bool)
        starts[1:] = head_P[1:] != head_P[:-1]
        before_P = np.empty(len(place_P), np.int64)
        before_P[1:] = place_P[:-1]
        before_P[starts] = self._heads[head_P[starts]]
        self._links[link_P] = before_P
        ends = np.append(starts[1:], True)
        self._heads[head_P[ends]] = place_P[ends]

    def _head(self, level_G: Places, hash_G: Hashes) -> Places:
        """Return the index of the head of the chain of each n-gram."""
        head_G: Places = level_G * self._num_heads + (hash_G >> self._bits).astype(np.int64)
        return head_G

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
        hash_LR = _hashes(tenant_R.astype(np.uint64), wanted_RD.T)
        place_CG = self._chains(hash_LR[level_G, row_G], level_G)
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
        link_G = level_G * self._size
        place_CG = np.empty((CHAIN, len(hash_G)), np.int64)
        place_CG[0] = self._heads[self._head(level_G, hash_G)]
        for before_G, place_G in pairwise(place_CG):
            place_G[:] = self._links.take(link_G + before_G)
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


def _hashes(tenant_N: Hashes, newest_DN: Ids) -> Hashes:
    """Return the hashes `[L, N]` of the n-grams of each size before N places, whose tokens are given newest first.

    They are sums of products with random factors (multilinear hashing), the tenant's included: their highest bits are
    spread evenly.
    """
    products_DN = newest_DN[: SIZES[0]].astype(np.uint64) * _FACTORS[:-1, None]
    sums_DN = products_DN.cumsum(axis=0, dtype=np.uint64)
    hash_LN: Hashes = sums_DN[_GRAMS] + tenant_N * _FACTORS[-1]
    return hash_LN
