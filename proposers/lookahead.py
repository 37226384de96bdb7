"""Lookahead decoding: the target itself says what it will say, by Jacobi iteration beside its ordinary work.

Fu et al. 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding". Each round carries two
branches in one draft. The *window* has N - 1 levels of W tokens: what the last iterations thought would stand 1 to
W + N - 2 places ahead. They are probes: never accepted, but the target says what follows each. Every column with what
follows it is an n-gram of the target's own making, and is kept in a pool. The *verification branch* is the n-grams
of the pool that begin with the newest token, merged into a tree; what is accepted comes from there.

As a tree the window is a chain of its first level, with a chain of the column's other levels below each of its tokens:
so a token sees the text, the first level up to its column, and the earlier levels of its column.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random
from typing import ClassVar, NamedTuple, Self

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner
from protos.errors import ConfigError
from protos.interfaces import SequenceListener
from protos.messages import Request

MAX_KEYS = 1024
"""First tokens that a pool keeps n-grams for; those that were added to longest ago leave."""

Gram = tuple[int, ...]


class LookaheadShape(NamedTuple):
    """W columns, N - 1 levels, and at most G n-grams for each first token."""

    columns: int
    levels: int
    guesses: int


class Pool:
    """The n-grams that were found, by their first token: at most *most* for each, the newest first to be tried."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._grams: dict[int, dict[Gram, None]] = {}

    def add(self, first: int, rest: Gram) -> None:
        """Keep that *rest* follows *first*."""
        grams = self._grams.pop(first, {})
        grams.pop(rest, None)
        grams[rest] = None
        if len(grams) > self._most:
            del grams[next(iter(grams))]
        self._grams[first] = grams
        if len(self._grams) > MAX_KEYS:
            del self._grams[next(iter(self._grams))]

    def behind(self, first: int) -> list[Gram]:
        """Return what follows *first*, newest first."""
        return list(reversed(self._grams.get(first, {})))


class LookaheadNodes:
    """A draft under construction: branches, and then probes, so that these are cut first."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._parents: list[int] = []
        self._num_probes = 0
        self._places: dict[tuple[int, int], int] = {}

    def branch(self, gram: Gram, most: int) -> None:
        """Add a path from the root that may be accepted, merged with those that begin alike, up to *most* nodes."""
        node = -1
        for token in gram:
            key = (node, token)
            if key not in self._places:
                if len(self.tokens) >= most:
                    return
                self._places[key] = len(self.tokens)
                self.tokens.append(token)
                self._parents.append(node)
            node = self._places[key]

    def ask(self, levels: Seq[Seq[int]]) -> None:
        """Add a window that is asked about: a chain of its first level, and each further one below that above it."""
        columns = len(levels[0])
        first = len(self.tokens)
        self._parents += (-1, *range(first, first + columns - 1))
        self._parents += range(first, first + columns * (len(levels) - 1))
        for level in levels:
            self.tokens += level
        self._num_probes = columns * len(levels)

    @property
    def draft(self) -> Draft:
        """All of it."""
        num_branched = len(self.tokens) - self._num_probes
        probes = (False,) * num_branched + (True,) * self._num_probes
        return Draft(tuple(self.tokens), tuple(self._parents), probes)


@dataclass(slots=True, eq=False)
class Ahead:
    """One sequence's window and pool.

    Attributes:
        levels: up to N - 1 lines of W tokens; entry c of line l is expected c + l + 1 places behind the newest token.
        num_asked: probes of the draft that is under way.
        text: what is known of the sequence; tokens out of it stand where nothing better is known.
    """

    shape: LookaheadShape
    pool: Pool
    dice: Random
    levels: list[list[int]]
    text: Seq[int]
    num_asked: int = 0

    @classmethod
    def of(cls, text: Seq[int], shape: LookaheadShape, seed: int) -> "Ahead":
        """Begin with one level of tokens drawn from the *text*."""
        ahead = cls(shape, Pool(shape.guesses), Random(seed), [[]], text)
        ahead._fill()
        return ahead

    def draft(self, text: Seq[int], k: int) -> Draft:
        """Return the pool's guesses, and the window as probes where *k* leaves room for all of it."""
        self.text = text
        size = sum(map(len, self.levels))
        room = k - size if size < k else k
        nodes = LookaheadNodes()
        for gram in self.pool.behind(text[-1]):
            nodes.branch(gram, room)
        self.num_asked = size if size < k else 0
        if self.num_asked:
            nodes.ask(self.levels)
        return nodes.draft

    def learn(self, num_new: int, probed: Seq[int]) -> None:
        """Take in what the target says behind the probes, and move on by the *num_new* tokens that were committed."""
        columns = self.shape.columns
        if probed and len(probed) == self.num_asked:
            newest = list(probed[-columns:])
            if len(self.levels) == self.shape.levels:
                self._keep(newest)
                del self.levels[0]
                num_new -= 1  # without their first entries, all columns begin a place further on
            self.levels.append(newest)
        self.num_asked = 0
        self.levels = [level[num_new:] for level in self.levels]
        self._fill()

    def _keep(self, newest: list[int]) -> None:
        for first, *rest in zip(*self.levels, newest, strict=True):
            self.pool.add(first, tuple(rest))

    def _fill(self) -> None:
        for level in self.levels:
            level.extend(self.dice.choices(self.text, k=self.shape.columns - len(level)))


class LookaheadProposer(SequenceListener):
    """Follows every sequence with a window and a pool of its own."""

    on_worker: ClassVar[bool] = False

    def __init__(self, shape: LookaheadShape) -> None:
        self._shape = shape
        self._ahead: dict[int, Ahead] = {}

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """Return a proposer with the window that *config* asks for, narrowed to its `num_speculative_tokens`.

        Raises:
            ConfigError: not even one column fits beside one guess, or other methods come behind this one.
        """
        if "lookahead" in config.methods[:-1]:
            raise ConfigError("method 'lookahead' always has something to ask, so none behind it would: put it last")
        levels, room = config.lookahead_ngram - 1, config.num_speculative_tokens
        columns = min(config.lookahead_window, room // levels - 1)
        if columns < 1:
            raise ConfigError(
                f"method 'lookahead' with lookahead_ngram {config.lookahead_ngram} needs "
                f"num_speculative_tokens of at least {2 * levels}, got {room}"
            )
        return cls(LookaheadShape(columns, levels, config.lookahead_guesses))

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft a row, of at most `row.k` nodes: the pool's guesses, and probes."""
        return [self._of(row).draft(row.token_ids, row.k) for row in rows]

    def _of(self, row: DraftRow) -> Ahead:
        """Return the row's window; a new one for a row that nobody told of in `begin`."""
        return self._ahead.get(row.key) or Ahead.of(row.token_ids, self._shape, row.key)

    def begin(self, key: int, request: Request) -> None:
        """See `SequenceListener`."""
        self._ahead[key] = Ahead.of(request.prompt_token_ids, self._shape, key)

    def grow(self, key: int, token_ids: Seq[int], probed: Seq[int]) -> None:
        """See `SequenceListener`."""
        ahead = self._ahead.get(key)
        if ahead is not None:
            ahead.learn(len(token_ids), probed)

    def end(self, key: int, token_ids: Seq[int]) -> None:
        """See `SequenceListener`."""
        self._ahead.pop(key, None)
