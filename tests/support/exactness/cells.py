"""The matrix of the exactness suite: sampling options, adversarial pairs, and the tokens of one cell."""

import zlib
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from msgspec import structs
from tokenizers import AddedToken, Tokenizer, decoders, models

from protos.grammars.fork import Vocabulary
from protos.grammars.host import GrammarHost
from protos.messages import Grammar, Sampling
from runtime.text.token_options import pack_ids
from tests.support.exactness.distribution import distribution
from tests.support.exactness.engine import Emitted, Shape, Table, TableModel, World, run_rows, tree_distribution
from tests.support.exactness.statistics import Finding, Ints, Probs, compare, counted
from workers.sampling.grammar_followers import MEMORY_BYTES, MODULE

VOCAB, EOS = 16, 0
LETTERS = "abcdefghijklmno"  # ids 1 .. 15
PROMPT, OUTPUT = (1, 2, 2, 9), (3, 3, 4, 9)
BATCH = 2000
LENGTH = 12
"""Tokens per row if the distribution depends on the last token alone."""
ENOUGH = 100_000
"""From this many tokens on, tokens are counted by the two before them, else by one, so that fewer cells are pooled."""
DEPTH = 2
"""Tokens per row if the distribution depends on the whole output."""

FORM = Grammar("regex", "([a-f][d-m])*")
"""Letters of the two halves of the alphabet alternate; the text may end after each pair."""

LAST = {
    "plain": Sampling(seed=0),
    "cold": Sampling(seed=0, temperature=0.6),
    "hot": Sampling(seed=0, temperature=1.5),
    "greedy": Sampling(seed=0, temperature=0.0),
    "top_k": Sampling(seed=0, top_k=4),
    "top_p": Sampling(seed=0, top_p=0.8),
    "min_p": Sampling(seed=0, min_p=0.1),
    "logit_bias": Sampling(seed=0, logit_bias={3: 2.0, 5: -1.0, 1: -100.0}),
    "allowed": Sampling(seed=0, allowed_ids=pack_ids((1, 3, 5, 8, 13))),
    "usual": Sampling(seed=0, temperature=0.7, top_p=0.9),
}
"""Options under which the distribution depends on the last token alone."""
HISTORY = {
    "repetition": Sampling(seed=0, repetition_penalty=1.6),
    "presence": Sampling(seed=0, presence_penalty=1.2),
    "frequency": Sampling(seed=0, frequency_penalty=0.9),
    "bad_words": Sampling(seed=0, bad_words=((6,), (9, 7), (4, 9, 3), (9, 5, 8))),
    "min_tokens": Sampling(seed=0, min_tokens=5, stop_ids=(2, 3)),
    "grammar": Sampling(seed=0, grammar=FORM),
    "penalties": Sampling(seed=0, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "everything": Sampling(
        seed=0,
        temperature=1.3,
        top_k=9,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={1: 1.0, 7: -1.0},
        min_tokens=6,
        stop_ids=(0,),
        bad_words=((2,), (3, 4)),
        allowed_ids=pack_ids(tuple(range(14))),
    ),
}
"""Options under which the distribution depends on more of the output."""
OPTIONS = LAST | HISTORY


def random_logits(*shape: int, seed: int, spread: float = 1.5) -> Table:
    """Return reproducible logits."""
    return np.random.default_rng(seed).normal(0, spread, shape).astype(np.float32)


def _only(table: Table, keep: Ints) -> Table:
    return np.where(keep, table, -np.inf).astype(np.float32)


IDS, TARGET = np.arange(VOCAB), random_logits(VOCAB, VOCAB, seed=1)
TIES = np.repeat(random_logits(VOCAB, 4, seed=4), 4, axis=1)
PAIRS: dict[str, tuple[Table, Table]] = {
    "same": (TARGET, TARGET),
    "near": (TARGET, TARGET + random_logits(VOCAB, VOCAB, seed=2, spread=0.5)),
    "unrelated": (TARGET, random_logits(VOCAB, VOCAB, seed=3)),
    "opposite": (TARGET, -TARGET),
    "disjoint": (_only(TARGET, IDS % 2 == 0), _only(TARGET, IDS % 2 == 1)),
    "overlapping": (_only(TARGET, IDS < 10), _only(TARGET, IDS > 4)),
    "one-hot draft": (TARGET, _only(TARGET, IDS == 5)),
    "least likely": (TARGET, _only(TARGET, TARGET.min(1, keepdims=True) == TARGET)),
    "peaked draft": (TARGET, 3 * random_logits(VOCAB, VOCAB, seed=3)),
    "lacks the best": (TARGET, _only(TARGET, TARGET.max(1, keepdims=True) != TARGET)),
    "one-hot target": (np.where((3 * IDS[:, None] + 1) % VOCAB == IDS, np.float32(12), TARGET), TARGET),
    "near ties": (TIES + 1e-5 * random_logits(VOCAB, VOCAB, seed=5), TIES + 1e-5 * random_logits(VOCAB, VOCAB, seed=6)),
}
"""Logits of target and draft by last token. -inf is a probability of zero."""

CHAIN, TREE = Shape(3), Shape(6, 2, 2)


@cache
def letter_grammars() -> GrammarHost:
    """Return what follows grammars over letters and EOS."""
    ids = {"<e>": EOS} | {letter: i for i, letter in enumerate(LETTERS, 1)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<e>", special=True)])
    letters = Vocabulary(tokenizer.to_str(), VOCAB, (EOS,), MEMORY_BYTES)
    return GrammarHost(MODULE, lambda: letters)


@dataclass(frozen=True)
class Cell:
    """One cell: an acceptance rule, an option, a pair and a draft shape."""

    rule: str
    option: str = "plain"
    pair: str = "near"
    shape: Shape = CHAIN

    def __str__(self) -> str:
        return f"{self.rule}, {self.option}, {self.pair}, {self.shape}"

    @property
    def world(self) -> World:
        """The engine."""
        target, draft = (TableModel(table, order=1) for table in PAIRS[self.pair])
        return World(target, draft, self.rule, self.shape, letter_grammars(), EOS)

    @property
    def sampling(self) -> Sampling:
        """The option's parameters, without seeds."""
        return OPTIONS[self.option]

    def emit(self, first: int, count: int, world: World | None = None) -> Emitted:
        """Run *count* rows, the first of them the cell's row number *first*: no two cells share a seed."""
        base = zlib.crc32(str(self).encode()) << 24
        samplings = [structs.replace(self.sampling, seed=base + first + i) for i in range(count)]
        has_history = self.option in HISTORY
        return run_rows(
            world or self.world,
            samplings,
            PROMPT,
            DEPTH if has_history else LENGTH,
            output=OUTPUT if has_history else PROMPT[-1:],
        )

    def check(self, tokens: int, world: World | None = None) -> tuple[Finding, Emitted]:
        """Return the test results of at least *tokens* tokens, and counts of draft tokens."""
        judge = _ByHistory(self) if self.option in HISTORY else _ByLast(self, 2 if tokens >= ENOUGH else 1)
        rows = -(-tokens // judge.length)
        size = min(rows, BATCH)
        total = Emitted(np.zeros((0, judge.length), np.int64))
        for first in range(0, rows, size):
            emitted = self.emit(first, size, world)
            judge.add(emitted.tokens_NL)
            total = replace(
                emitted,
                proposed=total.proposed + emitted.proposed,
                accepted=total.accepted + emitted.accepted,
                rounds=total.rounds + emitted.rounds,
            )
        return compare(judge.counts_CV, judge.p_CV), total


class _ByLast:
    """Counts tokens by the one or two before them; the distribution depends on the last of those."""

    length = LENGTH

    def __init__(self, cell: Cell, seen: int) -> None:
        target = PAIRS[cell.pair][0]
        p_VV = np.stack([distribution(cell.sampling, target[last], (), (last,)) for last in range(VOCAB)])
        self.p_CV: Probs = np.tile(p_VV, (VOCAB ** (seen - 1), 1))
        self.counts_CV: Ints = np.zeros_like(self.p_CV, np.int64)

    def add(self, tokens_NL: Ints) -> None:
        before = np.full((len(tokens_NL), 2), PROMPT[-1])
        text = np.column_stack((before, tokens_NL))
        contexts = (text[:, :-2] * VOCAB + text[:, 1:-1]) % len(self.counts_CV)
        self.counts_CV += counted(contexts.ravel(), tokens_NL.ravel(), self.counts_CV.shape)


class _ByHistory:
    """Counts tokens by all of the output before them."""

    length = DEPTH

    def __init__(self, cell: Cell) -> None:
        target = PAIRS[cell.pair][0]

        def after(history: tuple[int, ...]) -> Probs:
            output = (*OUTPUT, *history)
            return distribution(_with_form(cell.sampling, output), target[output[-1]], output, PROMPT)

        self._distributions = tree_distribution(after, VOCAB, DEPTH)
        self.p_CV: Probs = np.concatenate(self._distributions)
        self.counts_CV: Ints = np.zeros_like(self.p_CV, np.int64)

    def add(self, tokens_NL: Ints) -> None:
        base, contexts = 0, np.zeros(len(tokens_NL), np.int64)
        for place, table in enumerate(self._distributions):
            self.counts_CV += counted(base + contexts, tokens_NL[:, place], self.counts_CV.shape)
            base += len(table)
            contexts = contexts * VOCAB + tokens_NL[:, place]


def _with_form(sampling: Sampling, output: Seq[int]) -> Sampling:
    """Return *sampling* with the ids that `FORM` allows after *output*."""
    if sampling.grammar is None:
        return sampling
    return structs.replace(sampling, grammar=None, allowed_ids=pack_ids(allowed_by_form(output)))


def allowed_by_form(output: Seq[int]) -> tuple[int, ...]:
    """Return the ids that `FORM` allows after *output*, without the grammar library; all after a text it forbids."""
    halves: tuple[Callable[[int], bool], ...] = (lambda i: i in range(1, 7), lambda i: i in range(4, 14))
    for place, token in enumerate(output):
        if token == EOS and place % 2 == 0:
            return (EOS,)
        if not halves[place % 2](token):
            return tuple(range(VOCAB))
    half = halves[len(output) % 2]
    ends = (EOS,) if len(output) % 2 == 0 else ()
    return (*ends, *(i for i in range(1, VOCAB) if half(i)))
