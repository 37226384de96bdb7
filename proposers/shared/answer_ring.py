"""A ring buffer of token texts: finished answers, and answers that still grow. numpy.

Texts are stored in chunks of consecutive places, so that what comes before and after a place is read without following
links. A chunk of a text that goes on starts with a copy of the last tokens before it, and ends with a copy of the first
tokens after it. When the ring is full, the oldest chunks are evicted.
"""

from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from proposers.shared.arrays import Ids, small_pages

NOTHING = -1
RESERVED = 256
"""Places that a growing text reserves at a time."""
MAX_TAIL = 64
"""Most tokens of the next chunk that a chunk ends with: as many as a draft can have."""


@dataclass(slots=True, eq=False)
class AnswerChunk:
    """Consecutive places of one text.

    Attributes:
        first, end: all its places, a last one without a token included.
        next: the place of the text's next token.
        body_end: where the text's own tokens end; a copy of those of the next chunk may follow.
        is_kept: False once it is evicted.
    """

    text: "AnswerText"
    first: int
    end: int
    next: int
    body_end: int
    is_kept: bool = True


@dataclass(slots=True, eq=False)
class AnswerText:
    """One answer of the tenant with this *salt*.

    Attributes:
        reserved: least size of its chunks: 0 for a text that is complete.
        chunks: its newest two chunks.
        num_kept: number of its chunks in the ring.
    """

    salt: str
    reserved: int = 0
    chunks: deque[AnswerChunk] = field(default_factory=lambda: deque(maxlen=2))
    num_kept: int = 0


class AnswerRing:
    """The newest texts of all tenants.

    Args:
        size: number of places.
        max_texts: most texts kept.
        reach: number of tokens before a place that can be read, also at the start of a chunk.

    Attributes:
        ids: the token at each place.
        owner: the number of the tenant of each place.
        lines: line p has the *reach* tokens from place p on.
    """

    def __init__(self, size: int, max_texts: int, reach: int) -> None:
        self._size, self._reach, self._max_texts = size, reach, max_texts
        # Place 0 means none.
        self.ids = small_pages(size, np.int32)
        self.owner = small_pages(size, np.int32)
        self._chunks: deque[AnswerChunk] = deque()  # oldest first
        self._numbers: dict[str, int] = {}  # of tenants with chunks
        self._num_chunks: Counter[str] = Counter()
        self._new_numbers = count(1)
        self._num_texts = 0
        self._next = self._first = reach + 1  # the places before the first text are read, too
        self.ids[: self._first] = NOTHING
        self.lines = np.lib.stride_tricks.sliding_window_view(self.ids, reach)

    def __len__(self) -> int:
        return self._num_texts

    @property
    def most(self) -> int:
        """Number of tokens of the longest chunk."""
        return self._size - self._first - self._reach - min(self._reach, MAX_TAIL) - 1

    def number(self, salt: str) -> int:
        """Return the number of the tenant with this *salt*; `NOTHING` if it has no texts."""
        return self._numbers.get(salt, NOTHING)

    def append(self, text: AnswerText, token_ids: Seq[int]) -> list[tuple[int, int]]:
        """Append tokens to *text*, at most `most`; return the new places, as first place and end of each chunk."""
        written = []
        rest = token_ids
        while rest:
            chunk = text.chunks[-1] if text.chunks and text.chunks[-1].is_kept else None
            if chunk is None or chunk.next == chunk.body_end:
                chunk = self._open(text, len(rest))
            start, end = chunk.next, min(chunk.next + len(rest), chunk.body_end)
            self.ids[start:end] = rest[: end - start]
            self._write_tail(text, start, end)
            chunk.next = end
            written.append((start, end))
            rest = rest[end - start :]
        return written

    def _write_tail(self, text: AnswerText, start: int, end: int) -> None:
        """Copy the first tokens of the newest chunk to the end of the one before."""
        if len(text.chunks) < 2:
            return
        before = text.chunks[0]
        room = before.end - 1 - before.next
        if room > 0 and before.is_kept:
            copied = min(room, end - start)
            self.ids[before.next : before.next + copied] = self.ids[start : start + copied]
            before.next += copied

    def _open(self, text: AnswerText, least: int) -> AnswerChunk:
        """Make a chunk for at least *least* more tokens of *text*."""
        last = text.chunks[-1] if text.chunks and text.chunks[-1].is_kept else None
        head: Ids = self.ids[:0] if last is None else self.ids[last.body_end - self._reach : last.body_end].copy()
        tail = min(self._reach, MAX_TAIL) if text.reserved else 0
        body = max(least, text.reserved)
        if not text.num_kept:
            self._evict_texts()
        start = self._make_room(len(head) + body + tail + 1)
        body_start = start + len(head)
        chunk = AnswerChunk(text, start, body_start + body + tail + 1, body_start, body_start + body)
        self.ids[start:body_start] = head
        self.ids[body_start : chunk.end] = NOTHING
        self._enter(chunk)
        return chunk

    def _enter(self, chunk: AnswerChunk) -> None:
        """Register a chunk, and its tenant if it has no other."""
        text = chunk.text
        self._num_texts += not text.num_kept
        text.num_kept += 1
        text.chunks.append(chunk)
        self._chunks.append(chunk)
        self._num_chunks[text.salt] += 1
        self.owner[chunk.first : chunk.end] = self._numbers.setdefault(text.salt, next(self._new_numbers))

    def _evict_texts(self) -> None:
        """Evict the oldest texts until there may be one more."""
        while self._num_texts >= self._max_texts:
            self._evict()

    def _evict(self) -> None:
        """Evict the oldest chunk, and its tenant if it has no other."""
        chunk = self._chunks.popleft()
        chunk.is_kept = False
        chunk.text.num_kept -= 1
        self._num_texts -= not chunk.text.num_kept
        self.owner[chunk.first : chunk.end] = 0
        salt = chunk.text.salt
        self._num_chunks[salt] -= 1
        if not self._num_chunks[salt]:
            del self._num_chunks[salt], self._numbers[salt]

    def _make_room(self, size: int) -> int:
        start = self._next if self._next + size <= self._size else self._first
        while self._chunks and self._overlaps(start, size):
            self._evict()
        self._next = start + size
        return start

    def _overlaps(self, start: int, size: int) -> bool:
        """Whether the oldest chunk overlaps the place of the next one, or precedes it in the ring."""
        oldest = self._chunks[0]
        is_passed = start < self._next <= oldest.first
        return is_passed or (oldest.first < start + size and oldest.end > start)

    def after(self, places: Seq[int], most: int) -> list[list[int]]:
        """Return at most *most* ids from each place on, up to the end of its text."""
        if not places:
            return []
        line_PC = self.ids.take(np.array(places, np.int64)[:, None] + np.arange(most), mode="clip")
        lines: list[list[int]] = line_PC.tolist()
        for i in (line_PC.min(1) == NOTHING).nonzero()[0].tolist():
            lines[i] = lines[i][: lines[i].index(NOTHING)]
        return lines
