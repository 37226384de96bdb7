"""ReDrafter (Cheng et al. 2024, arXiv 2403.09919): one recurrent head, drafting by beam search.

s_0 = 0, and a token updates s' = silu(W emb(token) + U s + b), or emb(token) + s. The next token is predicted from the
target's state and s' by a few blocks x + silu(W x + b) and an output layer, of which only the 50 best ids are kept.
Beams share prefixes, so the nodes of all beams form a tree, of which the most likely nodes are drafted.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from proposers.formats import recurrent as checkpoint
from proposers.shared.decoder import fill, stored
from proposers.shared.dynamic_tree import TreeNodes, TreeShape
from proposers.shared.heads import Block, HeadsModule, HeadsProposer
from proposers.shared.static_tree import StaticTree
from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, DraftWeights
from protos.layers import FeatureSpec

TOP_K = 50
"""Ids that may extend a beam."""
WIDTH, LENGTH = 10, 4
"""Default number of beams and their length, as published."""


class RecurrentNet(nn.Module):
    """The checkpoint's tensors, under its names."""

    def __init__(self, spec: checkpoint.RecurrentSpec) -> None:
        super().__init__()
        if spec.has_input:
            self.input_proj = nn.Linear(2 * spec.width, spec.exit)
        if spec.is_rnn:
            self.rnn_u = nn.Linear(spec.width, spec.width)
            self.rnn_w = nn.Linear(spec.width, spec.width, bias=False)
        self.blocks = nn.Sequential(*(Block(spec.exit, spec.exit) for _ in range(spec.num_blocks)))
        self.head = nn.Linear(spec.exit, spec.vocab_size, bias=False)


class Recurrent(HeadsModule):
    """See `proposers.shared.heads.Heads`. The states are the target's and the recurrent one, `[N, 2H]`.

    The same head is used at every step.
    """

    compiled_methods: ClassVar[Mapping[str, int]] = {"step": 1, "logits": 1}

    def __init__(self, spec: checkpoint.RecurrentSpec, net: RecurrentNet, weights: DraftWeights) -> None:
        super().__init__(MAX_SPECULATIVE_TOKENS, spec.vocab_size, weights.dtype)
        self.net, self.spec, self.embed = net, spec, weights.embedding()

    def begin(self, features_RX: torch.Tensor) -> torch.Tensor:
        """Return the target's states, with zeros for the recurrent ones."""
        return torch.cat([features_RX, torch.zeros_like(features_RX)], 1)

    def step(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> torch.Tensor:
        """Return the states with the recurrent ones updated by the tokens."""
        context_NH, state_NH = states_NS.chunk(2, 1)
        token_NH = self.embed(tokens_N)
        if self.spec.is_rnn:
            return torch.cat([context_NH, F.silu(self.net.rnn_w(token_NH) + self.net.rnn_u(state_NH))], 1)
        return torch.cat([context_NH, token_NH + state_NH], 1)

    def logits(self, states_NS: torch.Tensor, head: int) -> torch.Tensor:
        """Return fp32 logits `[N, V]`, -inf except for the `TOP_K` best."""
        read_NE = self.net.input_proj(states_NS) if self.spec.has_input else states_NS
        logits_NV: torch.Tensor = self.net.head(self.net.blocks(read_NE)).float()
        least_N1 = logits_NV.topk(min(TOP_K, logits_NV.shape[1]), 1).values[:, -1:]
        return logits_NV.masked_fill(logits_NV < least_N1, -torch.inf)


class RecurrentProposer(HeadsProposer):
    """Drafts by beam search with W beams, or chains or static trees without it.

    Args:
        runner: runs a `Recurrent` module.
        tree: the shape without beam search.
        width: W; 0 to draft *tree*.
        length: tokens per beam.
    """

    method: ClassVar[str] = "recurrent"
    decay: ClassVar[float] = 0.95

    def __init__(self, runner: DraftRunner, tree: StaticTree, width: int = 0, length: int = LENGTH) -> None:
        super().__init__(runner, tree)
        self.width, self.length = width, length

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        """See `protos.draft_module.LearnedProposer`: beam search, unless the config has a chain or a static tree."""
        proposer = super().create(config, runner)
        beams = config.draft_shape != "chain" and not config.speculative_token_tree
        width = config.eagle_topk if config.eagle_topk > 1 else WIDTH
        return cls(proposer.runner, proposer.tree, width, config.num_steps or LENGTH) if beams else proposer

    @property
    def beams(self) -> TreeShape | None:
        """See `HeadsProposer`."""
        return TreeShape(self.width, self.length) if self.width else None

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the state that the target's head reads, for the newest token."""
        return FeatureSpec("last")

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> Recurrent:
        """See `protos.draft_module.LearnedProposer`."""
        spec, tensors = stored(checkpoint, weights)
        with torch.device("meta"):
            net = RecurrentNet(spec)
        fill(net, tensors, weights)
        return Recurrent(spec, net, weights)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return a draft of at most `row.k` nodes for each row."""
        return self._beams(rows) if self.width else super().propose(rows)

    def _beams(self, rows: Seq[DraftRow]) -> list[Draft]:
        beams = RecurrentBeams(self.runner, rows, self.width)
        for depth in range(min(self.length, max(row.max_chain for row in rows))):
            beams.extend(depth)
        return beams.nodes.best(rows)


class RecurrentBeams:
    """Beam search for all rows of a round at once. Beams of a row are distinct, so each step of a beam is a node.

    Args:
        runner: runs a `Recurrent` module.
        rows: R of them.
        width: beams per row.
    """

    def __init__(self, runner: DraftRunner, rows: Seq[DraftRow], width: int) -> None:
        self.runner, self.rows, self.width = runner, rows, width
        self.module: Recurrent = runner.module
        self.length_R1 = torch.tensor([[row.max_chain] for row in rows], device=runner.newest(rows).device)
        self.tokens_RW = runner.newest(rows)[:, None]
        self.states_RWS = self.module.begin(runner.features(rows))[:, None]
        self.places_RW = torch.full_like(self.tokens_RW, -1)  # among the nodes
        self.scores_RW = torch.zeros_like(self.tokens_RW, dtype=torch.float32)
        no_nodes = self.tokens_RW[:, :0]
        self.nodes = TreeNodes(no_nodes, no_nodes, self.scores_RW[:, :0])

    def extend(self, depth: int) -> None:
        """Extend each beam by its best tokens, and keep the best beams."""
        count, width = self.tokens_RW.shape
        states_NS = self.module.step(self.states_RWS.flatten(0, 1), self.tokens_RW.flatten(), depth)
        row_N = torch.arange(count, device=states_NS.device).repeat_interleave(width)
        logits_NV = self.module.logits(states_NS, depth)
        tokens_NC, scores_NC = self.runner.candidates(
            self.rows,
            row_N,
            logits_NV,
            depth,
            min(self.width, logits_NV.shape[1]),
            paths=lambda: self.nodes.paths(row_N, self.places_RW.flatten(), depth),
        )
        scores_RWC = scores_NC.view(count, width, -1) + self.scores_RW[:, :, None]
        self.scores_RW, best_RW = scores_RWC.flatten(1).topk(min(self.width, scores_RWC[0].numel()), 1)
        sources_RW = best_RW // scores_RWC.shape[2]
        self.tokens_RW = tokens_NC.view(count, -1).gather(1, best_RW)
        self.states_RWS = states_NS.view(count, width, -1)[torch.arange(count)[:, None], sources_RW]
        first = self.nodes.tokens_RM.shape[1]
        scores_RW = self.scores_RW.masked_fill(self.length_R1 <= depth, -torch.inf)
        self.nodes.add(self.tokens_RW, self.places_RW.gather(1, sources_RW), scores_RW)
        self.places_RW = torch.arange(first, first + best_RW.shape[1], device=best_RW.device).expand_as(best_RW)
