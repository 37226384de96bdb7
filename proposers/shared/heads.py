"""Shared by proposers whose modules are heads: a few layers on the target's newest state, without attention.

Each head predicts one token. The state that it reads is updated from head to head with the token drafted in between: a
chain has one token per head, a tree several, each read by the next head.
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
from proposers.shared.dynamic_tree import TreeShape
from proposers.shared.static_tree import StaticTree, TreeLevel
from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, Module, on_a_worker
from protos.layers import LayerShape

logger = logging.getLogger(__name__)

ANY_LENGTH = 1 << 30
"""Context length of modules without positions."""


class Block(nn.Linear):
    """A residual block of a head: x + silu(W x + b), or R x + c + silu(W x + b) where it narrows."""

    def __init__(self, reads: int, width: int, *, bias: bool = True) -> None:
        super().__init__(reads, width, bias=bias)
        self.res = nn.Identity() if reads == width else nn.Linear(reads, width)

    def forward(self, states_NX: torch.Tensor) -> torch.Tensor:
        """Return `[N, width]`."""
        passed_NX: torch.Tensor = self.res(states_NX)
        return passed_NX + F.silu(super().forward(states_NX))


class HeadsModule(nn.Module):
    """Base of modules of heads without attention, which are never fed tokens. See `protos.draft_module.Module`.

    Args:
        num_heads: see `Heads`.
        vocab_size: the target's.
        dtype: of the computation.
    """

    layers: tuple[LayerShape, ...] = ()
    shift = 0
    max_model_len = ANY_LENGTH
    is_grounded = True

    def __init__(self, num_heads: int, vocab_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads, self.vocab_size, self.dtype = num_heads, vocab_size, dtype

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        """Return the features in the dtype of the computation."""
        return features_TF.to(self.dtype)

    def begin(self, features_RX: torch.Tensor) -> torch.Tensor:
        """Return the target's states as they are."""
        return features_RX


class Heads(Module, Protocol):
    """A module of heads.

    Attributes:
        num_heads: length of the longest chain that it can draft.
        is_grounded: whether a prediction depends on the draft tokens before it.
    """

    num_heads: int
    is_grounded: bool

    def begin(self, features_RX: torch.Tensor) -> torch.Tensor:
        """Return the initial states `[R, S]`, made of the target's features of each row, `[R, X]`."""
        ...

    def step(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> torch.Tensor:
        """Return the states that *head* reads, `[N, S']`, made of those of the head before it and the tokens."""
        ...

    def logits(self, states_NS: torch.Tensor, head: int) -> torch.Tensor:
        """Return fp32 logits over the target's vocabulary, `[N, V]`."""
        ...


class HeadsProposer:
    """Drafts chains or static trees.

    Args:
        runner: runs a `Heads` module.
        tree: the shape, at most as deep as the number of heads.

    Attributes:
        method: its name.
        default_shape: the shape for `draft_shape` "auto".
        decay: assumed acceptance rate of each head, relative to the one before.
    """

    on_worker: ClassVar[bool] = True
    method: ClassVar[str]
    default_shape: ClassVar[Literal["chain", "tree"]] = "tree"
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
        """Return the shape of *config*, limited to the number of heads, with a warning.

        The default tree has the nodes with the highest assumed acceptance rates.
        """
        given, max_nodes = config.speculative_token_tree, config.num_speculative_tokens
        shape = cls.default_shape if config.draft_shape == "auto" else config.draft_shape
        if given:
            tree = StaticTree.of(given, num_heads, cls.decay).first(max_nodes)
        elif shape == "chain":
            tree = StaticTree.chain(min(max_nodes, num_heads))
        else:
            tree = StaticTree.best(max_nodes, num_heads, cls.decay)
        depth = max(map(len, given)) if given else max_nodes
        if tree.is_chain and depth > num_heads:
            logger.warning(
                "the %s checkpoint has %d heads: drafts are %d tokens long, not %d",
                cls.method,
                num_heads,
                tree.depth,
                depth,
            )
        return tree

    @property
    def beams(self) -> TreeShape | None:
        """Number and length of the beams, where a beam search drafts instead of *tree*."""
        return None

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a chain or a tree of at most `row.k` nodes for each row."""
        return self._chains(rows) if self.tree.is_chain else self._trees(rows)

    def begin(self, rows: Seq[DraftRow]) -> torch.Tensor:
        """Return the initial states, `[R, S]`."""
        return self.module.begin(self.runner.features(rows))

    def _chains(self, rows: Seq[DraftRow]) -> list[Draft]:
        chains = Chains(rows, self.tree.depth)
        states_RS, ids_R = self.begin(chains.rows), self.runner.newest(chains.rows)
        for step in range(chains.steps):
            count = len(chains.active)
            states_RS = self.module.step(states_RS[:count], ids_R[:count], step)
            ids_R = self.runner.sample(chains.active, self.module.logits(states_RS, step), step)
            chains.add(ids_R)
        return chains.drafts()

    def _trees(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Draft the largest tree for all rows, each to the depth of its own, and keep the first nodes of each row."""
        ranked = sorted(rows, key=lambda row: -self._depth(row))
        largest = self.tree.first(max(row.k for row in rows))
        is_per_node = self.module.is_grounded or self.runner.draws_by_path
        depths = [self._depth(row) for row in ranked]
        levels = (largest.levels if is_per_node else largest.flat_levels)[: depths[0]]
        found_RJ = [[0] * len(largest.choices) for _ in ranked]
        for level, ids_RM in zip(levels, self._level_tokens(ranked, depths, levels), strict=True):
            for found_J, ids_M in zip(found_RJ, ids_RM.tolist(), strict=False):
                for node, token in zip(level.nodes, ids_M, strict=True):
                    found_J[node] = token
        drafts = {row.slot: self._draft(row, found_J) for row, found_J in zip(ranked, found_RJ, strict=True)}
        return [drafts[row.slot] for row in rows]

    def _depth(self, row: DraftRow) -> int:
        """Return the number of levels of a row's tree."""
        return min(self.tree.first(row.k).depth, row.depth)

    def _draft(self, row: DraftRow, found_J: Seq[int]) -> Draft:
        tree = self.tree.first(row.k)
        return tree.draft(found_J[: len(tree.choices)]).within(row.depth)

    def _level_tokens(self, ranked: Seq[DraftRow], depths: Seq[int], levels: Seq[TreeLevel]) -> Iterator[torch.Tensor]:
        """Yield the ids of each level, `[R, M]`, for the first R rows: those whose trees have this depth."""
        states_RPS, ids_RP = self.begin(ranked)[:, None], self.runner.newest(ranked)[:, None]
        paths_RPD = ids_RP[:, :, None][:, :, :0]
        for depth, level in enumerate(levels):
            count, num_inputs = sum(own > depth for own in depths), ids_RP.shape[1]
            states_NS = self.module.step(states_RPS[:count].flatten(0, 1), ids_RP[:count].flatten(), depth)
            row_N = torch.arange(count, device=ids_RP.device).repeat_interleave(num_inputs)
            logits_NV = self.module.logits(states_NS, depth)
            ids_NW, _ = self.runner.candidates(
                ranked[:count], row_N, logits_NV, depth, level.width, paths=partial(paths_RPD[:count].flatten, 0, 1)
            )
            ids_RM = ids_NW.view(count, num_inputs, -1)[:, level.input_M, level.ranks_M]
            yield ids_RM
            states_RPS = states_NS.view(count, num_inputs, -1)[:, level.input_M[level.next_inputs_P]]
            ids_RP = ids_RM[:, level.next_inputs_P]
            if self.runner.draws_by_path:
                paths_RPD = torch.cat([paths_RPD[:count, level.input_M[level.next_inputs_P]], ids_RP[:, :, None]], 2)
