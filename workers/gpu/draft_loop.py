"""The whole chain of a draft model as a program: K forwards, and the sampling between them, on static buffers.

The draft shares the target's block tables, noise and sampling parameters, and its tokens go where the target reads
them. So it needs little of its own: whether a row's token before the newest one has to be fed, too. It has where the
last round's draft was accepted in full: its last token was sampled, but never fed.
"""

import torch
import torch.nn.functional as F

from workers.gpu.attention_torch import DeviceAttention
from workers.gpu.choosing import choose
from workers.gpu.inputs import RoundInputs
from workers.gpu.metadata import DeviceMetadata
from workers.gpu.sizes import Chooser
from workers.model.runner import ModelRunner


class DraftLoop:
    """Drafts chains for rounds of one size, as long as the size has room for.

    Args:
        runner: of the draft model.
        attention: over its KV cache.
        inputs: of the size; the draft tokens are written into its `tokens_RQ`.
        vocab_size: of the target.
    """

    def __init__(self, runner: ModelRunner, attention: DeviceAttention, inputs: RoundInputs, vocab_size: int) -> None:
        self._runner, self._attention, self._inputs, self._vocab_size = runner, attention, inputs, vocab_size
        rows = inputs.size.rows
        device = runner.device
        self._rows_R = torch.arange(rows, dtype=torch.int32, device=device)
        self._rows_R2 = self._rows_R[:, None].expand(rows, 2).contiguous()
        self._newest_R = torch.arange(1, 2 * rows, 2, device=device)
        self._nothing_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self._words_T1 = torch.zeros(2 * rows, 1, dtype=torch.int64, device=device)
        self._all_R = torch.arange(rows, device=device)

    def run(self, chooser: Chooser) -> None:
        """Run the loop."""
        found, limits = self._inputs.on_device, self._inputs.limits(1)
        logits_RV = self._catch_up()
        for step in range(self._inputs.size.queries - 1):
            if step:
                logits_RV = self._extend(step)
            ids_R = choose(chooser, self._fit(logits_RV), found["keys_RQ"][:, step], limits)
            found["tokens_RQ"][:, step + 1].copy_(ids_R.clamp_min(0))

    def _catch_up(self) -> torch.Tensor:
        """Feed the newest token, and where it is wanted the one before; return logits after the newest, `[R, V]`."""
        found = self._inputs.on_device
        drafts_R = found["drafted_R"] > 0
        before_R = (found["has_previous_R"] > 0) & drafts_R
        index_R2 = torch.stack((found["previous_index_R"], found["cache_index_RQ"][:, 0]), 1)
        is_fed_R2 = torch.stack((before_R, drafts_R), 1)
        tokens_R2 = torch.stack((found["previous_R"], found["tokens_RQ"][:, 0]), 1)
        before_R = before_R.int()
        starts_R = found["starts_R"]
        positions_R2 = torch.stack((starts_R - before_R, starts_R), 1).long()
        rows = self._metadata(
            starts_R - before_R,
            torch.where(drafts_R, 1 + before_R, 0),
            (2 * self._rows_R + 1 - before_R),
            torch.where(is_fed_R2, self._rows_R2, -1).view(-1),
            torch.where(is_fed_R2, index_R2, -1).view(-1),
            max_length=2,
        )
        return self._forward(tokens_R2, positions_R2, self._newest_R, rows)

    def _extend(self, step: int) -> torch.Tensor:
        """Feed draft token *step* - 1 of the rows that want another; return logits `[R, V]`."""
        found = self._inputs.on_device
        goes_on_R = found["drafted_R"] > step
        rows = self._metadata(
            found["starts_R"] + step,
            goes_on_R.int(),
            self._rows_R,
            torch.where(goes_on_R, self._rows_R, -1),
            torch.where(goes_on_R, found["cache_index_RQ"][:, step], -1),
            max_length=1,
        )
        return self._forward(found["tokens_RQ"][:, step], found["positions_RQ"][:, step], self._all_R, rows)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, wanted_R: torch.Tensor, rows: DeviceMetadata
    ) -> torch.Tensor:
        self._attention.use(rows)
        tokens_1T = tokens.clamp_max(self._runner.loaded.vocab_size - 1).reshape(1, -1)
        logits_RV: torch.Tensor = self._runner.call(tokens_1T, positions.reshape(1, -1), wanted_R, self._attention)[0]
        return logits_RV

    def _metadata(
        self,
        starts_R: torch.Tensor,
        lengths_R: torch.Tensor,
        offsets_R: torch.Tensor,
        rows_T: torch.Tensor,
        cache_index_T: torch.Tensor,
        *,
        max_length: int,
    ) -> DeviceMetadata:
        tables_RB = self._inputs.on_device["tables_RB"]
        return DeviceMetadata(
            starts_R=starts_R,
            lengths_R=lengths_R,
            offsets_R=offsets_R,
            tables_RB=tables_RB,
            rows_T=rows_T,
            cache_index_T=cache_index_T,
            first_R=starts_R + lengths_R,
            sizes_R=self._nothing_R,
            positions_RA=self._nothing_R[:, None],
            visible_TW=self._words_T1[: len(rows_T)],
            first_valid_R=self._nothing_R,
            block_size=self._runner.block_size,
            max_length=max_length,
            max_blocks=tables_RB.shape[1],
        )

    def _fit(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Cut or pad to the target's vocabulary: ids that either lacks are never proposed."""
        missing = self._vocab_size - logits_RV.shape[1]
        if missing > 0:
            return F.pad(logits_RV, (0, missing), value=-torch.inf)
        return logits_RV[:, : self._vocab_size]
