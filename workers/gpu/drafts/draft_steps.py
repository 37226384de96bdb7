"""The forwards of a draft inside a graph: known tokens, one draft token of each row, or a level of its tree.

The draft shares the target's block tables, so the round's input has all that they need. Shapes depend on the captured
size alone.
"""

from typing import NamedTuple

import torch

from workers.gpu.drafts.protocol import GraphedModel
from workers.gpu.inputs import RoundInputs
from workers.gpu.metadata import DeviceMetadata


class GrownLevel(NamedTuple):
    """The W nodes of a level that may be fed in each of R rows; those that are fed come first.

    Attributes:
        depth: of the nodes, 1 for children of the root.
        tokens_RW: int64.
        features_RWX: fed with them; None if there are none.
        before_R: nodes of the row that were fed before.
        counts_R: nodes that are fed now.
        words_RWX: int64, bits: which of the nodes fed, in the order of feeding, a node attends to.
        depths_RA: int64; the depth minus one of each node fed so far, in that order, those of this level included.
    """

    depth: int
    tokens_RW: torch.Tensor
    features_RWX: torch.Tensor | None
    before_R: torch.Tensor
    counts_R: torch.Tensor
    words_RWX: torch.Tensor
    depths_RA: torch.Tensor


class _Rows(NamedTuple):
    """Rows that feed at most L tokens each, at a stride of L; the first one is at `offsets_R` of that.

    Attributes:
        starts_R: place of the first token.
        lengths_R: tokens that are fed.
        offsets_R: of the first token.
        is_fed_RL: which tokens are.
        places_RL: of all of them.
    """

    starts_R: torch.Tensor
    lengths_R: torch.Tensor
    offsets_R: torch.Tensor
    is_fed_RL: torch.Tensor
    places_RL: torch.Tensor


class DraftSteps:
    """Feeds a draft for rounds of one size.

    Args:
        model: the draft.
        inputs: of the size.
    """

    def __init__(self, model: GraphedModel, inputs: RoundInputs) -> None:
        self._model, self._inputs = model, inputs
        rows, device = inputs.size.rows, inputs.on_device["tokens_RQ"].device
        self._rows_R = torch.arange(rows, dtype=torch.int32, device=device)
        self._nothing_R = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def _last_R(self) -> torch.Tensor:
        """The place that each row's newest known token is fed at."""
        return self._inputs.on_device["starts_R"] - self._model.shift

    def catch_up(self) -> torch.Tensor:
        """Feed the known tokens that the rows lack, and the newest one; return its output, `[R, X]`."""
        found = self._inputs.on_device
        known_RC, is_drafting_R = found["known_RC"], found["drafted_R"] > 0
        most = known_RC.shape[1]
        lacking_R = torch.where(is_drafting_R, found["lacking_R"], 0)
        back_C = torch.arange(1 - most, 1, dtype=torch.int32, device=known_RC.device)
        rows = _Rows(
            starts_R=self._last_R - lacking_R,
            lengths_R=torch.where(is_drafting_R, 1 + lacking_R, 0),
            offsets_R=self._rows_R * most + (most - 1) - lacking_R,
            is_fed_RL=(back_C >= -lacking_R[:, None]) & is_drafting_R[:, None],
            places_RL=(self._last_R[:, None] + back_C).clamp_min(0),
        )
        features_TX = self._model.known_features(self._inputs)
        newest_R = torch.arange(most - 1, known_RC.numel(), most, device=known_RC.device)
        return self._model.forward(
            known_RC.view(-1), rows.places_RL.long().view(-1), newest_R, self._metadata(rows), features_TX
        )

    def extend(self, step: int, features_RX: torch.Tensor | None) -> torch.Tensor:
        """Feed draft token *step* - 1 of the rows that want another; return its output, `[R, X]`."""
        found = self._inputs.on_device
        goes_on_R, place_R = found["drafted_R"] > step, self._last_R + step
        rows = _Rows(place_R, goes_on_R.int(), self._rows_R, goes_on_R[:, None], place_R[:, None])
        return self._model.forward(
            found["tokens_RQ"][:, step],
            place_R.long(),
            self._rows_R.long(),
            self._metadata(rows),
            features_RX,
        )

    def grow(self, level: GrownLevel) -> torch.Tensor:
        """Feed a level of trees; return the output of its nodes, `[R * W, X]`."""
        width = level.tokens_RW.shape[1]
        ranks_W = torch.arange(width, dtype=torch.int32, device=level.tokens_RW.device)
        first_R = self._last_R + 1
        rows = _Rows(
            starts_R=first_R + level.before_R,
            lengths_R=level.counts_R,
            offsets_R=self._rows_R * width,
            is_fed_RL=ranks_W < level.counts_R[:, None],
            places_RL=(first_R + level.before_R)[:, None] + ranks_W,
        )
        metadata = self._metadata(rows, first_R, level)
        positions_RW = (first_R[:, None] + (level.depth - 1)).expand(-1, width).long()
        all_N = torch.arange(level.tokens_RW.numel(), device=first_R.device)
        features_NX = None if level.features_RWX is None else level.features_RWX.flatten(0, 1)
        return self._model.forward(level.tokens_RW.reshape(-1), positions_RW.reshape(-1), all_N, metadata, features_NX)

    def _metadata(
        self, rows: _Rows, first_R: torch.Tensor | None = None, level: GrownLevel | None = None
    ) -> DeviceMetadata:
        tables_RB, length = self._inputs.on_device["tables_RB"], rows.is_fed_RL.shape[1]
        if level is None or first_R is None:
            first_R, sizes_R, depths_RA = rows.starts_R + rows.lengths_R, self._nothing_R, self._nothing_R[:, None]
            words_TW = self._rows_R.new_zeros(rows.is_fed_RL.numel(), 1, dtype=torch.int64)
        else:
            sizes_R, depths_RA = level.before_R + level.counts_R, level.depths_RA
            words_TW = level.words_RWX.reshape(-1, level.words_RWX.shape[2])
        return DeviceMetadata(
            starts_R=rows.starts_R,
            lengths_R=rows.lengths_R,
            offsets_R=rows.offsets_R,
            tables_RB=tables_RB,
            rows_T=torch.where(rows.is_fed_RL, self._rows_R[:, None], -1).view(-1),
            cache_index_T=torch.where(rows.is_fed_RL, self._cache_index(rows.places_RL), -1).view(-1),
            first_R=first_R,
            sizes_R=sizes_R,
            positions_RA=(first_R[:, None] + depths_RA).int(),
            visible_TW=words_TW,
            first_valid_R=self._inputs.on_device["lowest_R"],
            block_size=self._inputs.block_size,
            max_length=length,
            max_blocks=tables_RB.shape[1],
        )

    def _cache_index(self, places_RL: torch.Tensor) -> torch.Tensor:
        """Return where K and V of places go, int64."""
        tables_RB, size = self._inputs.on_device["tables_RB"], self._inputs.block_size
        at_RL = (places_RL // size).clamp_max(tables_RB.shape[1] - 1).long()
        return tables_RB.gather(1, at_RL).long() * size + places_RL % size
