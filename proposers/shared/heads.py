"""What proposers share whose modules are heads: no attention, a few layers on the target's newest state.

A head guesses one token. What it reads is handed on from head to head, with the token guessed in between: so a chain
is one token a head, and a tree is several, each read by the next head.
"""

import logging
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import ClassVar, Literal, Protocol, Self

import torch
import torch.nn.functional as F
from torch import nn

from proposers.shared.chains import Chains
from proposers.shared.static_tree import StaticTree, TreeLevel
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, Module, on_a_worker
from protos.layers import LayerShape

logger = logging.getLogger(__name__)

ANY_LENGTH = 1 << 30
"""Context of modules that know no positions."""


class Block(nn.Linear):
    """A residual block of a head: silu(W x + b) and what it passes on, x, or R x + c where it narrows."""

    def __init__(self, reads: int, width: int, *, bias: bool = True) -> None:
        super().__init__(reads, width, bias=bias)
        self.res = nn.Identity() if reads == width else nn.Linear(reads, width)

    def forward(self, states_NX: torch.Tensor) -> torch.Tensor:
        """Return `[N, width]`."""
        passed_NX: torch.Tensor = self.res(states_NX)
        return passed_NX + F.silu(super().forward(states_NX))


class HeadsModule(nn.Module):
    """The parts of `protos.draft_module.Module` that are the same for all heads without attention, which are never fed.

    Args:
        num_heads: see `Heads`.
        vocab_size: the target's.
        dtype: what to compute in.
    """

    layers: tuple[LayerShape, ...] = ()
    shift = 0
    max_model_len = ANY_LENGTH
    is_grounded = True

    def __init__(self, num_heads: int, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.vocab_size, self.dtype = num_heads, vocab_size, dtype

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return them as what is computed in."""
        return features_TF.to(self.dtype)

    def begin(self, features_RX: torch.Tensor) -> torch.Tensor:
        """Return the target's states as they are."""
        return features_RX


class Heads(Module, Protocol):
    """A module of heads.

    Attributes:
        num_heads: tokens it can guess one behind another.
        is_grounded: whether a guess depends on the guesses before it.
    """

    num_heads: int
    is_grounded: bool

    def begin(self, features_RX: torch.Tensor) -> torch.Tensor:
        """Return what the first head starts from, `[R, S]`, by what the target knows of each row, `[R, X]`."""
        ...

    def step(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> torch.Tensor:
        """Return what *head* reads behind a token, `[N, S']`, from what the head before it read."""
        ...

    def logits(self, states_NS: torch.Tensor, head: int) -> torch.Tensor:
        """Return fp32 logits over the target's vocabulary, `[N, V]`."""
        ...


class HeadsProposer:
    """Drafts chains, or trees of a settled shape.

    Args:
        runner: of a `Heads` module.
        tree: the shape; no deeper than there are heads.

    Attributes:
        method: what users call it.
        usual: what it drafts where nothing is said.
        decay: each head is taken to be right so much less often than the one before.
    """

    on_worker: ClassVar[bool] = True
    method: ClassVar[str]
    usual: ClassVar[Literal["chain", "tree"]] = "tree"
    decay: ClassVar[float]

    def __init__(self, runner: DraftRunner, tree: StaticTree) -> None:
        self.runner, self.tree = runner, tree
        self.module: Heads = runner.module

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """See `protos.draft_module.LearnedProposer`."""
        runner = on_a_worker(runner, cls.method)
        return cls(runner, cls.tree_of(config, runner.module.num_heads))

    @classmethod
    def tree_of(cls, config: SpeculativeConfig, num_heads: int) -> StaticTree:
        """Return the shape that *config* asks for, as far as there are heads; says so where there are too few.

        A tree that is not given is the one whose nodes are right most often.
        """
        given, most = config.speculative_token_tree, config.num_speculative_tokens
        shape = cls.usual if config.draft_shape == "auto" else config.draft_shape
        if given:
            tree = StaticTree.of(given, num_heads, cls.decay).first(most)
        elif shape == "chain":
            tree = StaticTree.chain(min(most, num_heads))
        else:
            tree = StaticTree.best(most, num_heads, cls.decay)
        asked = max(map(len, given)) if given else most
        if tree.is_chain and asked > num_heads:
            logger.warning(
                "the %s checkpoint has %d heads: drafts are %d tokens long, not %d",
                cls.method,
                num_heads,
                tree.depth,
                asked,
            )
        return tree

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a chain or a tree of `row.k` nodes for each row, of fewer where there are not so many heads."""
        return self._chains(rows) if self.tree.is_chain else self._trees(rows)

    def begin(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """Return what the first head starts from."""
        return self.module.begin(self.runner.features(rows))

    def _chains(self, rows: Seq[DraftRow]) -> list[Draft]:
        chains = Chains(rows, self.tree.depth)
        states_RS, ids_R = self.begin(chains.rows), self.runner.newest(chains.rows)
        for step in range(chains.steps):
            active = chains.active(step)
            states_RS = self.module.step(states_RS[: len(active)], ids_R[: len(active)], step)
            ids_R = self.runner.sample(active, self.module.logits(states_RS, step), step)
            chains.add(ids_R)
        return chains.drafts()

    def _trees(self, rows: Seq[DraftRow]) -> list[Draft]:
        """All rows make the guesses of the largest tree among them, as deep as their own goes, and keep their first."""
        ranked = sorted(rows, key=lambda row: -row.k)
        trees = [self.tree.first(row.k) for row in ranked]
        apart = self.module.is_grounded or self.runner.draws_by_path
        levels = trees[0].levels if apart else trees[0].flat_levels
        found_RJ = [[0] * len(trees[0].choices) for _ in ranked]
        for level, ids_RM in zip(levels, self._guesses(ranked, [tree.depth for tree in trees], levels), strict=True):
            for found_J, ids_M in zip(found_RJ, ids_RM.tolist(), strict=False):
                for node, token in zip(level.nodes, ids_M, strict=True):
                    found_J[node] = token
        drafts = {
            row.slot: tree.draft(found_J[: len(tree.choices)])
            for row, tree, found_J in zip(ranked, trees, found_RJ, strict=True)
        }
        return [drafts[row.slot] for row in rows]

    def _guesses(self, ranked: Seq[DraftRow], depths: Seq[int], levels: Seq[TreeLevel]) -> Iterator[torch.Tensor]:
        """Yield the ids of each level, `[R, M]`, for the first R rows: those whose trees are so deep."""
        states_RPS, ids_RP = self.begin(ranked)[:, None], self.runner.newest(ranked)[:, None]
        paths_RPD = ids_RP[:, :, None][:, :, :0]
        for depth, level in enumerate(levels):
            count, points = sum(own > depth for own in depths), ids_RP.shape[1]
            states_NS = self.module.step(states_RPS[:count].flatten(0, 1), ids_RP[:count].flatten(), depth)
            row_N = torch.arange(count, device=ids_RP.device).repeat_interleave(points)
            logits_NV = self.module.logits(states_NS, depth)
            ids_NW, _ = self.runner.candidates(
                ranked[:count], row_N, logits_NV, depth, level.width, paths=partial(paths_RPD[:count].flatten, 0, 1)
            )
            ids_RM = ids_NW.view(count, points, -1)[:, level.froms_M, level.ranks_M]
            yield ids_RM
            states_RPS = states_NS.view(count, points, -1)[:, level.froms_M[level.points_P]]
            ids_RP = ids_RM[:, level.points_P]
            if self.runner.draws_by_path:
                paths_RPD = torch.cat([paths_RPD[:count, level.froms_M[level.points_P]], ids_RP[:, :, None]], 2)
