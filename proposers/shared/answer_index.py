"""The suffix cache: answers in a bounded ring buffer, indexed by n-grams while they grow.

Every match is compared with the stored tokens: the places in an n-gram's chain may be those of another one, or
overwritten. Many rows are searched at once with numpy, and so are many tokens added; few of them are done one by one,
with the same results.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from proposers.shared.answer_ring import NOTHING, AnswerRing, AnswerText
from proposers.shared.arrays import Ids, Places, text_at
from proposers.shared.hash_chains import CHAIN, SIZES, TOKEN_BYTES, HashChains, hashes

FEW = 16
"""So many tokens are added one by one, and so many places read: numpy takes as long for them."""
NO_PLACES = (0,) * CHAIN
"""Place 0, before the first text, has no ids."""


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
        size = max_bytes // (4 + 4 + TOKEN_BYTES)  # in tokens
        self._reach = reach
        self._ring, self._chains = AnswerRing(size, max_texts, reach), HashChains(size)
        # Single elements are read faster through these.
        self._ids, self._owner = self._ring.ids.data, self._ring.owner.data
        # The longest match that the n-grams of each size are searched for.
        self._longest = [reach, *(size - 1 for size in SIZES[:-1])]

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def num_bytes(self) -> int:
        """Most bytes that all arrays together can use."""
        return self._ring.ids.nbytes + self._ring.owner.nbytes + self._chains.num_bytes

    def add(self, salt: str, token_ids: Seq[int]) -> None:
        """Add a complete text of the tenant with this *salt*; evict the oldest texts if there is no room."""
        self.extend([(AnswerText(salt), token_ids)])

    def extend(self, parts: Seq[tuple[AnswerText, Seq[int]]]) -> None:
        """Append tokens to texts, and index them; evict the oldest texts if there is no room."""
        most = self._ring.most
        written = [span for text, token_ids in parts for span in self._ring.append(text, token_ids[-most:])]
        if sum([end - first for first, end in written]) <= FEW:
            for first, end in written:
                for place in range(first, end):
                    self._link_one(place)
            return
        place_N = np.concatenate([np.arange(first, end) for first, end in written])
        newest_DN = self._ring.ids.take(place_N - np.arange(1, SIZES[0] + 1)[:, None])
        is_inside_DN = np.logical_and.accumulate(newest_DN != NOTHING, 0)
        self._chains.link(place_N, newest_DN, is_inside_DN, self._ring.owner[place_N])

    def _link_one(self, place: int) -> None:
        newest = self._ids[place - SIZES[0] : place].tolist()[::-1]
        if NOTHING in newest:
            newest = newest[: newest.index(NOTHING)]
        self._chains.link_one(place, newest, self._owner[place])

    def search(self, salt: str, pattern: Seq[int], least: int) -> Iterator[AnswerMatch]:
        """Yield what `matches` returns for one row. Shorter suffixes are searched when the next match is asked for."""
        tenant, least = self._ring.number(salt), max(least, 1)
        newest = pattern[: -self._reach - 1 : -1]
        for level, places in self._chains.chains_of(newest, tenant):
            size, longest = SIZES[level], self._longest[level]
            if least <= longest:
                own = [place for place in places if self._owner[place - 1] == tenant]
                yield from _by_length([self._length(place, newest[:longest]) for place in own], own, max(least, size))

    def _length(self, place: int, newest: Seq[int]) -> int:
        """Return how many tokens before *place* equal the *newest* ones."""
        ids, length = self._ids, 0
        for token in newest:
            if ids[place - 1 - length] != token:
                break
            length += 1
        return length

    def matches(self, salts: Seq[str], patterns: Seq[Seq[int]], least: Seq[int]) -> list[list[AnswerMatch]]:
        """Return for each row where suffixes of its pattern occur in its tenant's texts, the longest first.

        Of several suffixes with the same places, only the longest is returned.

        Args:
            salts: of the rows' tenants, `R`.
            patterns: the last tokens of each row, `R` times at most *reach*.
            least: lengths of the shortest suffixes wanted, `R`, from 1 on.
        """
        row_G, level_G = (np.maximum(least, 1)[:, None] <= np.array(self._longest)).nonzero()
        wanted_RD = self._reversed(patterns)
        tenant_R = np.array([self._ring.number(salt) for salt in salts], np.int64)
        place_CG = self._chains.find(level_G, hashes(tenant_R, wanted_RD.T)[level_G, row_G])
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

    def _lengths(self, place_CG: Places, wanted_RD: Ids, tenant_R: Places, row_G: Places, level_G: Places) -> Places:
        """Return the lengths `[C, G]` of the matches at *place_CG*, 0 where the n-gram does not match."""
        is_tenants_CG = self._is_tenants(place_CG, tenant_R[row_G])
        length_CG = np.zeros(place_CG.shape, np.int64)
        gram_P = is_tenants_CG.nonzero()[1]
        newest_RD = wanted_RD[:, self._reach - 1 :: -1]
        length_P = self._matched(place_CG[is_tenants_CG], newest_RD.take(row_G[gram_P], 0))
        length_P[length_P < np.array(SIZES)[level_G[gram_P]]] = 0
        length_CG[is_tenants_CG] = np.minimum(length_P, np.array(self._longest)[level_G[gram_P]])
        return length_CG

    def _is_tenants(self, place_CG: Places, tenant_G: Places) -> npt.NDArray[np.bool_]:
        """Return which places belong to the tenants, up to where a chain reaches an overwritten place."""
        is_tenants_CG: npt.NDArray[np.bool_] = (self._ring.owner.take(place_CG - 1) == tenant_G) & (place_CG > 0)
        return is_tenants_CG & self._chains.are_intact(place_CG)

    def _matched(self, place_P: Places, wanted_PD: Ids) -> Places:
        """Return how many tokens before each place equal the wanted ones, counted from the newest."""
        differs_PD = (self._ring.lines[place_P - self._reach] != wanted_PD)[:, ::-1]
        length_P: Places = differs_PD.argmax(1)
        length_P[(length_P == 0) & ~differs_PD[:, 0]] = self._reach  # nothing differs
        return length_P

    def after(self, places: Seq[int], most: int) -> list[list[int]]:
        """Return at most *most* ids from each place on, up to the end of its text."""
        if len(places) <= FEW:
            return [text_at(self._ids, place, most, NOTHING) for place in places]
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
