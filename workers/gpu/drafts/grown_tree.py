"""All nodes of trees that grow on the device, and how the best of them become the round's draft there."""

from typing import NamedTuple

import torch

from workers.gpu.inputs import RoundInputs


class GrownNodes(NamedTuple):
    """M nodes in each of R rows, in the order in which they were added.

    Attributes:
        tokens_RM: int64.
        parents_RM: int64, indices of their parents; -1 for the root.
        scores_RM: float32; -inf where there is no node.
        depths_RM: int64, 1 for children of the root.
    """

    tokens_RM: torch.Tensor
    parents_RM: torch.Tensor
    scores_RM: torch.Tensor
    depths_RM: torch.Tensor

    def with_more(self, others: "GrownNodes") -> "GrownNodes":
        """Return all nodes; those of *others* come last."""
        return GrownNodes(*(torch.cat(pair, 1) for pair in zip(self, others, strict=True)))


def write_best(inputs: RoundInputs, nodes: GrownNodes) -> None:
    """Write the best nodes of each row, at most `drafted_R`, as its draft, where the target reads drafts.

    Among equal scores those added first are taken, which parents are. The number of nodes is written to `drafted_R`.
    The round's input must have a chain of `drafted_R` tokens in each row.
    """
    found, queries = inputs.on_device, inputs.size.queries
    count_R, columns_RM = _columns(nodes, found["drafted_R"], queries)
    tokens_RQ = _spread(nodes.tokens_RM, columns_RM, queries)
    parents_RQ = _spread(_parent_columns(nodes, columns_RM), columns_RM, queries)
    depths_RQ = _spread(nodes.depths_RM, columns_RM, queries)
    found["tokens_RQ"][:, 1:].copy_(tokens_RQ[:, 1:])
    found["parents_RQ"].copy_(parents_RQ)
    found["drafted_R"].copy_(count_R)
    found["keys_RQ"].copy_(found["keys_RQ"].gather(1, depths_RQ))
    _write_places(inputs, count_R, depths_RQ)
    found["visible_TW"].copy_(_ancestors(parents_RQ, count_R).view(-1, 1))


def _columns(nodes: GrownNodes, most_R: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many nodes are kept in each row, and the column of each; *queries* for those that are not kept."""
    scores_RM = torch.where(nodes.scores_RM > -torch.inf, nodes.scores_RM, -torch.inf)  # leaves no NaN
    rank_RM = scores_RM.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    count_R = torch.minimum((scores_RM > -torch.inf).sum(1), most_R)
    is_kept_RM = rank_RM < count_R[:, None]
    return count_R, torch.where(is_kept_RM, is_kept_RM.cumsum(1), queries)


def _parent_columns(nodes: GrownNodes, columns_RM: torch.Tensor) -> torch.Tensor:
    """Return the column of each node's parent; that of the root is 0. Only those of kept nodes mean anything."""
    of_parent_RM = columns_RM.gather(1, nodes.parents_RM.clamp_min(0))
    return torch.where(nodes.parents_RM < 0, 0, of_parent_RM)


def _spread(values_RM: torch.Tensor, columns_RM: torch.Tensor, queries: int) -> torch.Tensor:
    """Return the values of kept nodes by column, `[R, Q]`; 0 where there is none. One more column takes the rest."""
    spread_RX = values_RM.new_zeros(len(values_RM), queries + 1)
    return spread_RX.scatter_(1, columns_RM, values_RM)[:, :queries]


def _write_places(inputs: RoundInputs, count_R: torch.Tensor, depths_RQ: torch.Tensor) -> None:
    """Write what the target's forward reads of the kept nodes but for their tokens and masks."""
    found = inputs.on_device
    starts_R = found["starts_R"]
    is_fed_RQ = (torch.arange(depths_RQ.shape[1], device=count_R.device) <= count_R[:, None]) & (
        found["lengths_R"][:, None] > 0
    )
    positions_RQ = starts_R[:, None] + depths_RQ
    found["lengths_R"].copy_(is_fed_RQ.sum(1))
    found["positions_RQ"].copy_(torch.where(is_fed_RQ, positions_RQ, 0))
    found["cache_index_RQ"].copy_(torch.where(is_fed_RQ, found["cache_index_RQ"], -1))
    found["rows_RQ"].copy_(torch.where(is_fed_RQ, found["rows_RQ"], -1))
    found["first_R"].copy_(starts_R + 1)
    found["sizes_R"].copy_(count_R)
    found["tree_positions_RQ"][:, :-1].copy_(positions_RQ[:, 1:])


def _ancestors(parents_RQ: torch.Tensor, count_R: torch.Tensor) -> torch.Tensor:
    """Return for each column the bits of the nodes that it attends to: its ancestors and itself."""
    columns_Q = torch.arange(parents_RQ.shape[1], device=parents_RQ.device)
    own_Q = torch.ones_like(columns_Q) << (columns_Q - 1).clamp_min(0)
    is_node_RQ = (columns_Q > 0) & (columns_Q <= count_R[:, None])
    words_RQ = torch.where(is_node_RQ, own_Q, 0)
    for _ in range((parents_RQ.shape[1] - 1).bit_length()):  # each turn doubles how far up the ancestors are known
        words_RQ = words_RQ | words_RQ.gather(1, parents_RQ)
        parents_RQ = parents_RQ.gather(1, parents_RQ)
    return words_RQ
