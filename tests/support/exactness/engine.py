"""Real rounds over models with known distributions: only the two forward passes are tables.

Everything between logits and emitted tokens is the engine's own: slot tables, the sampler with logits processors and
grammars, the draft worker and its proposer, the target worker, the executor. `TableModel` is a language model whose
logits are a row of a table, picked by a hash of the text before, or by the last token alone. It reads that text from a
paged cache of its own, so a stale, foreign or misplaced entry changes the distribution.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from proposers.draft_model import DraftModelProposer
from protos.config.engine import SpeculativeConfig
from protos.grammars.fork import Vocabulary
from protos.grammars.host import GrammarHost
from protos.layers import LayerShape
from protos.messages import NewSequence, RoundPlan, Row, Sampling, WorkerInfo
from tests.support.exactness.statistics import Ints, Probs
from workers.attention.batch import Batch
from workers.distributed.groups import Solo
from workers.draft.early_stop import make_early_stop
from workers.draft.engine import DraftEngine
from workers.draft.sampling import make_draft_sampler
from workers.draft.worker import DraftWorker
from workers.sampling.grammar_masks import GrammarMasks
from workers.sampling.grammar_slots import SlotGrammars
from workers.sampling.grammar_state import FollowLimits
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.target_rank import TargetRank, UniExecutor
from workers.verification.factory import make_acceptance_rule

Table = npt.NDArray[np.float32]
ROOT = 0
FACTOR = 0x5851F42D4C957F2D


def extend(codes: Ints, tokens: Ints) -> Ints:
    """Return the hashes of texts one token longer; int64 with wrap-around."""
    words = (codes ^ (codes >> 29)) * FACTOR + tokens + 1
    return words ^ (words >> 31)


def code_of(text: Seq[int]) -> int:
    """Return the hash of a text."""
    code = np.array([ROOT], np.int64)
    for token in text:
        code = extend(code, np.array([token], np.int64))
    return int(code[0])


@dataclass(frozen=True)
class TableModel:
    """Logits `[M, V]`, float32. `order` 1: the row is the last token. 0: it depends on the whole text."""

    rows_MV: Table
    order: int = 0

    @property
    def vocab(self) -> int:
        """Number of tokens."""
        return self.rows_MV.shape[1]

    def pick(self, codes_N: Ints, tokens_N: Ints) -> Ints:
        """Return the table row after texts with these hashes and last tokens."""
        return tokens_N if self.order else (codes_N & 0xFFFFFF) % len(self.rows_MV)

    def after(self, text: Seq[int]) -> Table:
        """Return the logits `[V]` after a text."""
        return self.rows_MV[self.pick(np.array([code_of(text)]), np.array([text[-1]]))[0]]


class TableForward:
    """Runs a `TableModel` over paged memory, as a target's `ModelRunner` or a draft's `DraftForward`."""

    layers: tuple[LayerShape, ...] = (LayerShape(1, 1, 1),)
    max_model_len, dtype, device = 4096, torch.float32, torch.device("cpu")
    recurrent = ()
    module = None

    def __init__(self, model: TableModel, slots: SlotTable, num_blocks: int) -> None:
        self.model, self.slots, self.num_blocks = model, slots, num_blocks
        self.loaded = self.cache = self
        self.vocab_size = model.vocab
        self.fed = 0
        self._store: Ints = np.full(num_blocks * slots.block_size, -1, np.int64)
        self._logits_MV = torch.from_numpy(model.rows_MV)

    def move(self, moves_M2: Ints) -> None:
        """See `KVCache.move`."""
        self._store[moves_M2[:, 1]] = self._store[moves_M2[:, 0]]

    def clear(self) -> None:
        """Clear the memory."""
        self._store[:] = -1

    def run(self, batch: Batch, wanted_N: Ints) -> tuple[torch.Tensor, None]:
        """See `ModelRunner.run`."""
        self.fed += len(batch.tokens_T)
        codes_T = self._write(batch) if not self.model.order else batch.tokens_T
        return self._logits_MV[self.model.pick(codes_T[wanted_N], batch.tokens_T[wanted_N])], None

    def forward(self, batch: Batch, wanted_N: Ints, features_TX: torch.Tensor | None = None) -> torch.Tensor:
        """See `DraftForward.forward`."""
        return self.run(batch, wanted_N)[0]

    def resumes_at(self, slots_R: Ints, generations_R: Ints, held_R: Ints) -> Ints:
        """See `DraftForward`."""
        return held_R

    def measure(self, max_tokens: int) -> Iterator[tuple[int, float]]:
        """See `DraftForward.measure`."""
        return iter(())

    def _write(self, batch: Batch) -> Ints:
        """Write the hash of every text that ends with a fed token into its KV entry; return the hashes."""
        places_T, slots_T = batch.places_T, batch.slots_T
        own_T, before_T = self._flat(slots_T, places_T), self._flat(slots_T, np.maximum(_before(batch), 0))
        codes_T = np.zeros_like(own_T)
        rank_T = places_T - np.repeat(batch.starts_R, batch.lengths_R)
        for rank in range(int(rank_T.max()) + 1):  # parents are fed before their children
            at = np.flatnonzero(rank_T == rank)
            known = np.where(_before(batch)[at] < 0, ROOT, self._store[before_T[at]])
            codes_T[at] = extend(known, batch.tokens_T[at])
            self._store[own_T[at]] = codes_T[at]
        return codes_T

    def _flat(self, slots_T: Ints, places_T: Ints) -> Ints:
        index_T, offset_T = np.divmod(places_T, self.slots.block_size)
        return self.slots.blocks[slots_T, index_T].astype(np.int64) * self.slots.block_size + offset_T


def _before(batch: Batch) -> Ints:
    """Return the entry of each token's predecessor; in a tree, of the last visible ancestor."""
    before_T: Ints = batch.places_T - 1
    tree_masks = batch.tree_masks
    if tree_masks is None:
        return before_T
    first_T = np.repeat(tree_masks.first_R, batch.lengths_R)
    inside_T = batch.places_T - first_T
    in_tree_T = (inside_T >= 0) & (np.repeat(tree_masks.sizes_R, batch.lengths_R) > 0)
    seen_T = tree_masks.visible_TW[:, 0] & ~(np.uint64(1) << np.maximum(inside_T, 0).astype(np.uint64))
    last_T = np.frexp(seen_T.astype(np.float64))[1] - 1  # -1 if no node of the tree is visible
    return np.where(in_tree_T, first_T + last_T, before_T)


@dataclass(frozen=True)
class Shape:
    """The draft's shape: up to *k* nodes; a chain if *width* is 1, else a tree of *depth* levels."""

    k: int
    width: int = 1
    depth: int = 1

    def config(self, rule: str, **more: object) -> SpeculativeConfig:
        """Return the configuration for this shape."""
        tree = {"eagle_topk": self.width, "num_steps": self.depth} if self.width > 1 else {}
        return SpeculativeConfig(
            method="draft_model", model="-", num_speculative_tokens=self.k, rejection_sample_method=rule, **tree, **more
        )


@dataclass(frozen=True)
class World:
    """A target, a draft, the draft's shape and the acceptance rule."""

    target: TableModel
    draft: TableModel
    rule: str = "coupled"
    shape: Shape = Shape(2)
    grammars: GrammarHost | None = None
    eos: int = 0
    options: dict[str, object] = field(default_factory=dict)
    least_survival: float = 0.0

    def stopping(self, threshold: float | str, least_survival: float = 0.0) -> "World":
        """Return this world with drafts that end by their confidence."""
        options = {**self.options, "assistant_confidence_threshold": threshold}
        return replace(self, options=options, least_survival=least_survival)

    def executor(self, num_slots: int, max_len: int, block_size: int, num_blocks: int) -> UniExecutor:
        """Return an engine's executor without the engine."""
        slots = SlotTable(num_slots, max_len, block_size, self.shape.k)
        sampler = Sampler(slots, self.target.vocab)
        config = self.shape.config(self.rule, **self.options)
        drafter = DraftWorker(
            TableForward(self.draft, slots, num_blocks),
            slots,
            sampler,
            max_catch_up=1 << 20,
            draft_sampler=make_draft_sampler(config, sampler),
            early_stop=make_early_stop(config, sampler),
        )
        proposer = DraftModelProposer.create(config, drafter)
        host = self.grammars or GrammarHost("", _no_words)
        grammars = SlotGrammars(slots, self.target.vocab, (self.eos,), host, FollowLimits(round_s=60, patience_s=60))
        masked = sampler.with_grammars(GrammarMasks(slots, grammars))
        target = TargetWorker(
            TableForward(self.target, slots, num_blocks), slots, masked, rule=make_acceptance_rule(config, masked)
        )
        info = WorkerInfo(num_blocks, block_size, max_len, self.target.vocab, (self.eos,), speculates=True)
        return UniExecutor(info, TargetRank(Solo(), target, DraftEngine(drafter, proposer)))


def _no_words() -> Vocabulary:
    raise AssertionError("no request has a grammar")


@dataclass
class Emitted:
    """The tokens of all rows, `tokens_NL`, and counts of draft tokens."""

    tokens_NL: Ints
    proposed: int = 0
    accepted: int = 0
    rounds: int = 0


DraftSizes = Callable[[Ints, Ints, Ints], Ints]
"""Maps the round's number and the rows' tokens and accepted draft tokens so far to the rows' draft sizes."""


def run_rows(
    world: World,
    samplings: Seq[Sampling],
    prompt: Seq[int],
    length: int,
    *,
    output: Seq[int] = (),
    draft_sizes: DraftSizes | None = None,
) -> Emitted:
    """Run one row per sampling until each has *length* tokens after *prompt* and *output*.

    There is no scheduler: every row that is not done is in every round, with the guesses that *guesses* gives it.
    """
    num, text = len(samplings), (*prompt, *output)
    known = len(text)
    max_len = known + length + world.shape.k + 2
    executor = world.executor(num, max_len, max_len + world.shape.k + 1, num)
    new = [NewSequence(slot, text, len(prompt), sampling, slot + 1) for slot, sampling in enumerate(samplings)]
    texts_NL = np.zeros((num, length + world.shape.k + 1), np.int64)
    done_N, accepted_N = np.zeros(num, np.int64), np.zeros(num, np.int64)
    emitted = Emitted(texts_NL[:, :length])
    fresh: list[Seq[int]] = [()] * num
    moves: list[int] = []
    rows_R = np.arange(num)
    while len(rows_R):
        k_R = (
            np.full(len(rows_R), world.shape.k)
            if draft_sizes is None
            else draft_sizes(rows_R, done_N[rows_R], accepted_N[rows_R])
        )
        first = emitted.rounds == 0
        rows = [
            Row(
                slot,
                0 if first else known + done - 1,
                known if first else 1,
                known + done,
                k,
                True,
                fresh[slot],
                (slot,) if first else (),
                (1,) if first else (),
            )
            for slot, done, k in zip(rows_R.tolist(), done_N[rows_R].tolist(), k_R.tolist(), strict=True)
        ]
        plan = RoundPlan(emitted.rounds, rows, new if first else (), 0, moves, True, world.least_survival)
        moves = []
        for verdict in executor.run(plan):
            slot, tokens = verdict.slot, verdict.token_ids
            assert verdict.failed is None, verdict.failed
            base = slot * executor.info.block_size + known + int(done_N[slot])
            moves += [place for i, node in enumerate(verdict.path) if node != i for place in (base + node, base + i)]
            fresh[slot] = tokens
            room = texts_NL.shape[1] - done_N[slot]
            texts_NL[slot, done_N[slot] : done_N[slot] + len(tokens)] = tokens[:room]
            done_N[slot] += len(tokens)
            accepted_N[slot] += len(verdict.path)
            emitted.proposed += verdict.proposed
        emitted.rounds += 1
        rows_R = np.flatnonzero(done_N < length)
    emitted.accepted = int(accepted_N.sum())
    return emitted


def tree_distribution(reference: Callable[[tuple[int, ...]], Probs], vocab: int, length: int) -> list[Probs]:
    """Return the distributions after outputs shorter than *length*: `[V^i, V]` per position i, histories in order."""
    histories: list[tuple[int, ...]] = [()]
    found = []
    for _ in range(length):
        found.append(np.stack([reference(history) for history in histories]))
        histories = [(*history, token) for history in histories for token in range(vocab)]
    return found
