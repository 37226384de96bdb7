"""The datastore of `rest`: token sequences, and their places sorted by the tokens before each. numpy only.

The file, little-endian, is mapped into memory and never read as a whole:

    0   8 bytes   "SLIPREST"
    8   uint32    version, 1
    12  uint32    bytes of a token: 2 where every id is below 65535, else 4
    16  uint64    N, tokens
    24  uint64    P, places
    32  32 bytes  fingerprint of the tokenizer: see `fingerprint`
    64  N tokens  text after text, each followed by the largest number of this width
    ..  uint32    P places, from the next multiple of 8 on

A place is the index of a token of a text, except its first. The places are sorted by the `DEPTH` tokens before them,
newest first (a suffix array): the longest suffix of a context that occurs is found by one binary search, among the
neighbours of the context's own position.
"""

import hashlib
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from proposers.shared.arrays import text_at
from protos.errors import ConfigError

MAGIC, VERSION = b"SLIPREST", 1
HEADER = struct.Struct("<8sIIQQ32s")
DEPTH = 16
NEIGHBOURS = 16
"""Number of places read on either side of a context's position."""
FEW_CONTEXTS, FEW_PLACES = 4, 16
"""So many contexts are looked up one by one, and so many places read: numpy takes as long for them."""
SAMPLE = 1 << 14
"""About this many places have their sort keys in memory, to narrow down searches."""
_SHORT_END, _LONG_END = 0xFFFF, 0xFFFFFFFF

Ids = npt.NDArray[np.int64]
Step = Callable[[int], object]
"""Called with the number of finished sorting passes, of `DEPTH.bit_length()`."""


class DatastoreMatch(NamedTuple):
    """Length of the longest match of one row, and the places after its occurrences."""

    length: int
    places: list[int]


def fingerprint(vocabulary: Mapping[str, int]) -> bytes:
    """Return SHA-256 over all tokens in the order of their ids: equal for tokenizers with the same vocabulary."""
    digest = hashlib.sha256()
    for token, index in sorted(vocabulary.items(), key=lambda item: (item[1], item[0])):
        digest.update(f"{index}\0{token}\0".encode())
    return digest.digest()


def write(path: Path, texts: Iterable[Seq[int]], tokenizer: bytes, step: Step = lambda done: None) -> int:
    """Write a datastore of *texts* for the tokenizer with this fingerprint; return how many tokens it has.

    Raises:
        ConfigError: there are no texts, or too many for places of 32 bits.
    """
    parts = [np.append(np.asarray(text, np.int64), -1) for text in texts if len(text) > 1]
    ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if not 0 < len(ids) < _LONG_END:
        raise ConfigError(f"a datastore holds 1 to {_LONG_END - 1} tokens, got {len(ids)}")
    width = 2 if int(ids.max()) < _SHORT_END else 4
    places = _sorted_places(ids, step)
    tokens = ids.astype("<u2" if width == 2 else "<u4")  # -1 becomes the largest number
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, width, len(tokens), len(places), tokenizer))
        file.write(tokens.tobytes())
        file.write(bytes(-file.tell() % 8))
        file.write(places.astype("<u4").tobytes())
    return len(tokens)


def _sorted_places(ids: Ids, step: Step) -> Ids:
    """Sort the places by the tokens before them, doubling the number of tokens compared."""
    end = ids.max() + 1
    # Place i reads token i - 1. Ends of texts precede the first.
    rank = np.concatenate(([end], np.where(ids < 0, end, ids)))[: len(ids)]
    compared = 1
    step(1)
    while compared < DEPTH:
        before = np.full_like(rank, rank[0])
        before[compared:] = rank[:-compared]
        pair = rank * (int(rank.max()) + 1) + before
        order = np.argsort(pair, kind="stable")
        rises = np.empty(len(pair), np.int64)
        rises[0], rises[1:] = 0, pair[order[1:]] != pair[order[:-1]]
        rank[order] = np.cumsum(rises)
        compared *= 2
        step(compared.bit_length())
    order = np.argsort(rank, kind="stable")
    continues = (ids >= 0) & np.concatenate(([False], ids[:-1] >= 0))
    return order[continues[order]]


class Datastore:
    """A file written by `write`, open for look-ups.

    Raises:
        ConfigError: it cannot be read, or is not a datastore.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.fingerprint, width, self._num_tokens, num_places = _read_header(path)
            start = HEADER.size + self._num_tokens * width
            kind = "<u2" if width == 2 else "<u4"
            # Plain arrays: look-ups in a memmap are slower.
            tokens = np.asarray(np.memmap(path, kind, "r", HEADER.size, (self._num_tokens,)))
            self._places = np.asarray(np.memmap(path, "<u4", "r", start + -start % 8, (num_places,)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the datastore {path}: {error}") from None
        self._end = _SHORT_END if width == 2 else _LONG_END
        self._tokens = tokens if self._num_tokens > DEPTH else np.pad(tokens, (0, DEPTH), constant_values=self._end)
        self._lines = np.lib.stride_tricks.sliding_window_view(self._tokens, DEPTH)
        # Pad with the separator of texts before the first text.
        head = np.concatenate((np.full(DEPTH, self._end, self._tokens.dtype), self._tokens[:DEPTH]))
        self._first_lines = np.lib.stride_tricks.sliding_window_view(head, DEPTH)
        self._step = max(1, len(self._places) // SAMPLE)
        self._sample_keys = _keys(self._before(self._places[:: self._step]))
        # Single elements are read faster through these.
        self._token_view, self._place_view = self._tokens.data, self._places.data
        self._key_view = self._sample_keys.data

    def __len__(self) -> int:
        return self._num_tokens

    def longest(self, contexts: Seq[Seq[int]]) -> list[DatastoreMatch]:
        """Return for each context the longest suffix of at most `DEPTH` tokens that occurs, and some of its places."""
        if len(contexts) <= FEW_CONTEXTS:
            return [self._longest(context) for context in contexts]
        wanted_RD = self._reversed(contexts)
        nearest_RN = self._search(wanted_RD)[:, None] + np.arange(-NEIGHBOURS, NEIGHBOURS)
        is_inside_RN = (nearest_RN >= 0) & (nearest_RN < len(self._places))
        place_RN = self._places[np.clip(nearest_RN, 0, len(self._places) - 1)]
        differs_RND = self._before(place_RN) != wanted_RD[:, None]
        length_RN = differs_RND.argmax(2)
        length_RN[(length_RN == 0) & ~differs_RND[..., 0]] = DEPTH  # nothing differs
        length_RN *= is_inside_RN
        longest_R = length_RN.max(1)
        is_best_RN = (length_RN == longest_R[:, None]) & is_inside_RN
        places = iter(place_RN[is_best_RN].tolist())
        return [
            DatastoreMatch(longest, list(islice(places, number)))
            for longest, number in zip(longest_R.tolist(), is_best_RN.sum(1).tolist(), strict=True)
        ]

    def _longest(self, context: Seq[int]) -> DatastoreMatch:
        """Do what `longest` does for one context. Matches get shorter on either side of its position."""
        newest = list(context[: -DEPTH - 1 : -1])
        position = self._position(newest + [-1] * (DEPTH - len(newest)))
        below = self._place_view[max(0, position - NEIGHBOURS) : position].tolist()
        above = self._place_view[position : position + NEIGHBOURS].tolist()
        longest = max([self._match(place, newest) for place in below[-1:] + above[:1]], default=0)
        first = next((i for i, one in enumerate(reversed(below)) if self._match(one, newest) < longest), len(below))
        end = next((i for i, one in enumerate(above) if self._match(one, newest) < longest), len(above))
        return DatastoreMatch(longest, below[len(below) - first :] + above[:end])

    def _match(self, place: int, newest: Seq[int]) -> int:
        """Return how many tokens before *place* equal the *newest* ones of a context."""
        tokens, most = self._token_view, min(place, len(newest))
        return next((i for i in range(most) if tokens[place - 1 - i] != newest[i]), most)

    def _position(self, wanted: list[int]) -> int:
        """Return the position of a context, newest token first, among the sorted places: 0 to their number."""
        key = wanted[0]
        for token in wanted[1:3]:
            key = key << 21 | max(0, token)
        low = max(0, bisect_left(self._key_view, key) - 1) * self._step
        high = min(bisect_right(self._key_view, key) * self._step, len(self._place_view))
        return bisect_left(self._place_view, wanted, low, high, key=self._line)

    def _line(self, place: int) -> list[int]:
        """Return the tokens before *place*, newest first."""
        line: list[int] = self._token_view[max(0, place - DEPTH) : place].tolist()[::-1]
        return line if len(line) == DEPTH else line + [self._end] * (DEPTH - len(line))

    def _reversed(self, contexts: Seq[Seq[int]]) -> Ids:
        """Return `[R, DEPTH]`: each context's last tokens, newest first, padded with -1, which equals no token."""
        wanted_RD = np.full((len(contexts), DEPTH), -1, np.int64)
        for wanted, context in zip(wanted_RD, contexts, strict=True):
            newest = context[-DEPTH:]
            wanted[: len(newest)] = newest[::-1]
        return wanted_RD

    def _before(self, place_: npt.NDArray[np.uint32]) -> Ids:
        """Return the tokens before places of any shape, newest first, in an additional last dimension."""
        is_early_ = place_ < DEPTH
        before_D = self._lines[np.where(is_early_, 0, place_ - np.uint32(DEPTH))]
        if is_early_.any():
            before_D[is_early_] = self._first_lines[place_[is_early_]]
        return before_D[..., ::-1].astype(np.int64)

    def _search(self, wanted_RD: Ids) -> Ids:
        """Return the position of each context among the sorted places: `[R]`, 0 to their number."""
        low_R, high_R = self._bounds(wanted_RD)
        rows_R = np.arange(len(wanted_RD))
        while (low_R < high_R).any():
            middle_R = np.minimum((low_R + high_R) // 2, len(self._places) - 1)
            before_RD = self._before(self._places[middle_R])
            first_R = (before_RD != wanted_RD).argmax(1)
            is_less_R = (before_RD[rows_R, first_R] < wanted_RD[rows_R, first_R]) & (low_R < high_R)
            low_R = np.where(is_less_R, middle_R + 1, low_R)
            high_R = np.where(is_less_R, high_R, middle_R)
        return low_R

    def _bounds(self, wanted_RD: Ids) -> tuple[Ids, Ids]:
        """Return bounds of each context's position among the sorted places, from the sampled ones."""
        key_R = _keys(wanted_RD)
        low_R = np.maximum(np.searchsorted(self._sample_keys, key_R) - 1, 0) * self._step
        high_R = np.searchsorted(self._sample_keys, key_R, "right") * self._step
        return low_R, np.minimum(high_R, len(self._places))

    def after(self, places: Seq[int], most: int) -> list[list[int]]:
        """Return at most *most* ids from each place on, up to the end of its text."""
        if len(places) <= FEW_PLACES:
            return [text_at(self._token_view, place, most, self._end) for place in places]
        index_PC = np.array(places, np.int64).reshape(-1, 1) + np.arange(most)
        line_PC = self._tokens.take(index_PC, mode="clip")
        lines: list[list[int]] = line_PC.tolist()
        for i in (line_PC == self._end).any(1).nonzero()[0].tolist():
            lines[i] = lines[i][: lines[i].index(self._end)]
        return lines


def _keys(newest_ND: Ids) -> npt.NDArray[np.uint64]:
    """Return sort keys of the first three tokens of each line, which must be less than 2 ** 21; `[N]`."""
    first_N, second_N, third_N = np.clip(newest_ND[:, :3], 0, (1 << 21) - 1).astype(np.uint64).T
    key_N: npt.NDArray[np.uint64] = first_N << np.uint64(42) | second_N << np.uint64(21) | third_N
    return key_N


def _read_header(path: Path) -> tuple[bytes, int, int, int]:
    """Return fingerprint, bytes of a token, number of tokens and of places."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[:8] != MAGIC:
        raise ValueError("it was not written by `slipstream build-datastore`")
    _, version, width, num_tokens, num_places, tokenizer = HEADER.unpack(head)
    if version != VERSION or width not in (2, 4):
        raise ValueError(f"it has version {version}, this program reads {VERSION}; build it again")
    wanted = HEADER.size + num_tokens * width
    wanted += -wanted % 8 + 4 * num_places
    if path.stat().st_size != wanted:
        raise ValueError(f"it has {path.stat().st_size} bytes and must have {wanted}; build it again")
    return tokenizer, width, num_tokens, num_places
