"""Chains of the places of n-grams, as in Lempel-Ziv compressors: each place is linked to the previous one of its hash.

Links are never removed. A place may have been overwritten since it was linked: what is found must be compared.

The tables of the heads of chains double while places are added, so that the first ones do not touch all of the memory:
where a page of it is written to first, that costs microseconds. Nothing is moved then. A chain that begins in the new
table goes on with the one of the same hash in the table before, which is half as large.

Many places are linked and found at once with numpy. For few of them, numpy's calls take longer than the work: there are
methods for one place and for one chain, with the same results.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
import numpy.typing as npt

from proposers.shared.arrays import Ids, Places, small_pages

Hashes = npt.NDArray[np.uint64]

SIZES = (12, 5, 2, 1)
"""Sizes of the n-grams that are linked, each of which is a level."""
CHAIN = 16
"""Most places of a chain that are visited, most recent first."""
FEWEST_BITS = 12
"""The first table of heads has two to the power of this."""
TOKEN_BYTES = 4 + len(SIZES) * (4 + 4)
"""Most bytes for each place."""
_FACTORS = np.random.default_rng(0).integers(0, 1 << 64, SIZES[0] + 1, np.uint64) | np.uint64(1)
"""Random factors of the tokens of an n-gram, newest first, and at last of the tenant."""
_TOKEN_FACTORS, _TENANT_FACTOR = _FACTORS[:-1].tolist(), int(_FACTORS[-1])
_GRAMS = np.array(SIZES) - 1
_HASHES, _STAMPS = (1 << 64) - 1, (1 << 32) - 1


class HashChains:
    """The chains of all levels and tenants.

    Args:
        size: number of places, from 0 on. Place 0 means none.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # Of all levels, one after the other. There are tables of 2 ** n heads: table n begins at head 2 ** n.
        self._num_heads = 1 << (size.bit_length() - 1)
        self._most_bits = self._num_heads.bit_length() - 2
        self._heads = small_pages(len(SIZES) * self._num_heads, np.int32)
        self._links = small_pages(len(SIZES) * size, np.int32)
        self._stamps = small_pages(size, np.uint32)  # when a place was linked
        self._bits = min(FEWEST_BITS, self._most_bits)  # the highest of a hash, which number its head
        self._now = 0
        # Single elements are read and written faster through these.
        self._level_heads = [level.data for level in self._heads.reshape(len(SIZES), -1)]
        self._level_links = [level.data for level in self._links.reshape(len(SIZES), -1)]
        self._stamp_data = self._stamps.data

    @property
    def num_bytes(self) -> int:
        """Most bytes that all arrays together can use."""
        return self._heads.nbytes + self._links.nbytes + self._stamps.nbytes

    def link(self, place_N: Places, newest_DN: Ids, is_inside_DN: npt.NDArray[np.bool_], tenant_N: Places) -> None:
        """Link places.

        Args:
            place_N: in the order in which they were written.
            newest_DN: the tokens before each, newest first, as many as the largest n-gram has.
            is_inside_DN: whether they belong to the same text.
            tenant_N: number of the tenant of each.
        """
        self._stamps[place_N] = (np.arange(len(place_N)) + self._now + 1).astype(np.uint32)
        self._count(len(place_N))
        hash_LN = hashes(tenant_N, newest_DN)
        level_P, index_P = is_inside_DN[_GRAMS].nonzero()
        if len(level_P):
            self._link(level_P, hash_LN[level_P, index_P], place_N[index_P])

    def _link(self, level_P: Places, hash_P: Hashes, place_P: Places) -> None:
        """Put the places of n-grams at the heads of their chains, the last one of each level first."""
        head_P = self._head(level_P, hash_P)
        order = head_P.argsort(kind="stable")
        head_P, place_P, link_P = head_P[order], place_P[order], (level_P * self._size + place_P)[order]
        starts = np.ones(len(place_P), bool)
        starts[1:] = head_P[1:] != head_P[:-1]
        before_P = np.empty(len(place_P), np.int64)
        before_P[1:] = place_P[:-1]
        before_P[starts] = self._firsts(head_P[starts])
        self._links[link_P] = before_P
        ends = np.append(starts[1:], True)
        self._heads[head_P[ends]] = place_P[ends]

    def _head(self, level_G: Places, hash_G: Hashes) -> Places:
        """Return the index of the head of the chain of each n-gram."""
        number_G = (hash_G >> np.uint64(64 - self._bits)).astype(np.int64)
        head_G: Places = level_G * self._num_heads + (1 << self._bits) + number_G
        return head_G

    def _firsts(self, head_G: Places) -> Places:
        """Return the first place of each chain; 0 where there is none."""
        place_G = self._heads.take(head_G).astype(np.int64)
        level_G, number_G = np.divmod(head_G, self._num_heads)
        for bits in range(1, self._bits - FEWEST_BITS + 1):
            none_G = np.flatnonzero(place_G == 0)
            if not len(none_G):
                break
            place_G[none_G] = self._heads.take(level_G[none_G] * self._num_heads + (number_G[none_G] >> bits))
        return place_G

    def find(self, level_G: Places, hash_G: Hashes) -> Places:
        """Return the first places `[C, G]` of the chains of n-grams, most recent first; 0 after their ends."""
        link_G = level_G * self._size
        place_CG = np.empty((CHAIN, len(hash_G)), np.int64)
        place_CG[0] = self._firsts(self._head(level_G, hash_G))
        for before_G, place_G in pairwise(place_CG):
            place_G[:] = self._links.take(link_G + before_G)
        return place_CG

    def are_intact(self, place_CG: Places) -> npt.NDArray[np.bool_]:
        """Return for the places of chains whether none before was overwritten, which would link to another chain."""
        is_intact_CG = np.ones(place_CG.shape, bool)
        age_CG = np.uint32(self._now) - self._stamps.take(place_CG)
        is_intact_CG[1:] = np.logical_and.accumulate(age_CG[1:] > age_CG[:-1], 0)
        return is_intact_CG

    def link_one(self, place: int, newest: Seq[int], tenant: int) -> None:
        """Link one place. Of *newest* are those tokens before it that belong to the same text."""
        self._count(1)
        self._stamp_data[place] = self._now
        for level, head in self._heads_of(newest, tenant):
            self._level_links[level][place] = self._first(level, head)
            self._level_heads[level][head] = place

    def chains_of(self, newest: Seq[int], tenant: int) -> Iterator[tuple[int, list[int]]]:
        """Yield each level whose n-grams are not longer than *newest*, and the intact places of the chain there."""
        for level, head in self._heads_of(newest, tenant):
            yield level, self._intact(level, self._first(level, head))

    def _intact(self, level: int, place: int) -> list[int]:
        links, stamps, before = self._level_links[level], self._stamp_data, -1
        found: list[int] = []
        while place and len(found) < CHAIN:
            age = (self._now - stamps[place]) & _STAMPS
            if age <= before:
                break
            found.append(place)
            place, before = links[place], age
        return found

    def _heads_of(self, newest: Seq[int], tenant: int) -> Iterator[tuple[int, int]]:
        """Yield the level of each n-gram that *newest* begins with, and the number of the head of its chain."""
        sums = list(accumulate(map(mul, newest, _TOKEN_FACTORS)))
        for level, size in enumerate(SIZES):
            if size <= len(sums):
                hash_ = (sums[size - 1] + tenant * _TENANT_FACTOR) & _HASHES
                yield level, (1 << self._bits) + (hash_ >> (64 - self._bits))

    def _first(self, level: int, head: int) -> int:
        """Return the first place of a chain; 0 if there is none."""
        heads = self._level_heads[level]
        while not heads[head] and head >> FEWEST_BITS > 1:
            head >>= 1
        return heads[head]

    def _count(self, num_places: int) -> None:
        """Count places that are linked. With more of them than heads, the next table is used."""
        self._now = (self._now + num_places) % (1 << 32)
        while self._bits < self._most_bits and self._now >> self._bits:
            self._bits += 1


def hashes(tenant_N: Places, newest_DN: Ids) -> Hashes:
    """Return the hashes `[L, N]` of the n-grams of each level before N places, whose tokens are given newest first.

    They are sums of products with random factors (multilinear hashing), the tenant's included: their highest bits are
    spread evenly.
    """
    products_DN = newest_DN[: SIZES[0]].astype(np.uint64) * _FACTORS[:-1, None]
    sums_DN = products_DN.cumsum(axis=0, dtype=np.uint64)
    hash_LN: Hashes = sums_DN[_GRAMS] + tenant_N.astype(np.uint64) * _FACTORS[-1]
    return hash_LN
