"""A `DraftRunner` without a cache: every call runs the module over the whole row, with dense attention."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface

from protos.draft import DraftRow
from protos.draft_module import Level

NAME = "dense_for_tests"
_SEEN: list[torch.Tensor] = []  # the mask [T, T] of the current forward


def dense_attention(  # noqa: PLR0917 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    **_others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers: `[1, heads, T, size]` in, `[1, T, heads, size]` out."""
    share = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~_SEEN[-1], -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, dense_attention)


@contextmanager
def seen(mask_TT: torch.Tensor) -> Iterator[None]:
    """Use the mask in attention within this block."""
    _SEEN.append(mask_TT)
    try:
        yield
    finally:
        _SEEN.pop()


@dataclass
class FakeParts:
    """`protos.draft_module.DraftWeights` from tensors in memory."""

    stored: dict[str, torch.Tensor]
    config: Mapping[str, Any]
    target_config: Mapping[str, Any]
    embedding_weight_VH: torch.Tensor
    head_weight_VH: torch.Tensor
    folder: Path | None = None
    attention: str = NAME
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def tensors(self, prefix: str = "") -> dict[str, torch.Tensor]:
        """Return the tensors whose names begin with *prefix*, which is removed."""
        return {name.removeprefix(prefix): weight for name, weight in self.stored.items() if name.startswith(prefix)}

    def embedding(self) -> torch.nn.Module:
        """Return the target's."""
        return torch.nn.Embedding.from_pretrained(self.embedding_weight_VH)

    def head(self) -> Any:
        """Return the target's."""
        return lambda states: states @ self.head_weight_VH.T


@dataclass
class Text:
    """One row: its known tokens, the target's features `[len - 1, F]` of all but the last, and the draft."""

    tokens: list[int]
    features: torch.Tensor | None = None
    drafted: list[tuple[int, int, torch.Tensor | None]] = field(default_factory=list)  # token, parent, features


class DenseRunner:
    """Rows are texts by slot; `noise[slot][step]` is added to log q; zeros are greedy."""

    def __init__(self, module: Any, texts: Seq[Text], noise: torch.Tensor) -> None:
        self.module, self.texts, self.noise_SKV = module, texts, noise
        self.sampled: list[int] = []

    draws_by_path = False

    def newest(self, rows: Seq[DraftRow]) -> torch.Tensor:
        return torch.tensor([self.texts[row.slot].tokens[-1] for row in rows])

    def features(self, rows: Seq[DraftRow]) -> torch.Tensor:
        return torch.stack([self.texts[row.slot].features[-1] for row in rows])

    def catch_up(self, rows: Seq[DraftRow]) -> torch.Tensor:
        for row in rows:
            self.texts[row.slot].drafted.clear()
        return torch.stack([self._run(self.texts[row.slot], 1, sees_all=False)[0] for row in rows])

    def extend(
        self, rows: Seq[DraftRow], token_ids: torch.Tensor, step: int, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        outputs = []
        for r, row in enumerate(rows):
            text = self.texts[row.slot]
            assert len(text.drafted) == step
            text.drafted.append((int(token_ids[r]), step - 1, None if features is None else features[r]))
            outputs.append(self._run(text, 1, sees_all=False)[0])
        return torch.stack(outputs)

    def grow(self, rows: Seq[DraftRow], level: Level) -> torch.Tensor:
        assert (level.row_N.diff() >= 0).all()
        outputs = []
        for r, row in enumerate(rows):
            text, members = self.texts[row.slot], (level.row_N == r).nonzero()[:, 0].tolist()
            before = len(text.drafted)
            for n in members:
                assert -1 <= level.parents_N[n] < before
                beside = None if level.features_NX is None else level.features_NX[n]
                text.drafted.append((int(level.tokens_N[n]), int(level.parents_N[n]), beside))
            assert len(text.drafted) <= row.room
            if members:
                outputs.append(self._run(text, len(members), sees_all=False))
        return torch.cat(outputs)

    def block(
        self,
        rows: Seq[DraftRow],
        row_N: torch.Tensor,
        tokens_N: torch.Tensor,
        features_NX: torch.Tensor | None = None,
        *,
        sees_all: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        behind, outputs = [], []
        for r, row in enumerate(rows):
            text, members = self.texts[row.slot], (row_N == r).nonzero()[:, 0].tolist()
            assert len(members) <= row.room + self.module.shift
            text.drafted = [
                (int(tokens_N[n]), i - 1, None if features_NX is None else features_NX[n])
                for i, n in enumerate(members)
            ]
            states = self._run(text, len(members) + 1, sees_all=sees_all)
            text.drafted = []
            behind.append(states[0])
            outputs.append(states[1:])
        return torch.stack(behind), torch.cat(outputs)

    def sample(self, rows: Seq[DraftRow], logits: torch.Tensor, step: int) -> torch.Tensor:
        noise_RV = torch.stack([self.noise_SKV[row.slot, step] for row in rows])
        assert logits.dtype == torch.float32
        return (logits.log_softmax(-1) + noise_RV).argmax(-1)

    def goes_on(self, rows: Seq[DraftRow]) -> list[bool]:
        return [True] * len(rows)

    def candidates(
        self,
        rows: Seq[DraftRow],
        row_N: torch.Tensor,
        logits_NV: torch.Tensor,
        depth: int,
        width: int,
        *,
        paths: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        log_q_NV = logits_NV.log_softmax(-1)
        slots_N = torch.tensor([rows[r].slot for r in row_N.tolist()])
        ids_NW = (log_q_NV + self.noise_SKV[slots_N, depth]).topk(width).indices
        return ids_NW, log_q_NV.gather(1, ids_NW)

    def _run(self, text: Text, wanted: int, *, sees_all: bool) -> torch.Tensor:
        """Return the hidden states of the last *wanted* entries of the row."""
        shift = self.module.shift
        known = text.tokens[shift:]
        tokens = torch.tensor([[*known, *(token for token, _, _ in text.drafted)]])
        depths: list[int] = []
        for _, parent, _ in text.drafted:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        positions = torch.tensor([[*range(len(known)), *(len(known) + depth for depth in depths)]])
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        mask[len(known) :, len(known) :] = self._among_drafted(text, sees_all=sees_all)
        features = None
        if text.features is not None:
            features = self.module.take_in(text.features)
            if text.drafted:
                features = torch.cat([features, torch.stack([beside for _, _, beside in text.drafted])])
            features = features.unsqueeze(0)
        with seen(mask), torch.inference_mode():
            return self.module(tokens, positions, features)[0, -wanted:]

    @staticmethod
    def _among_drafted(text: Text, *, sees_all: bool) -> torch.Tensor:
        count = len(text.drafted)
        mask = torch.full((count, count), sees_all)
        for node in range(count):
            at = node
            while at >= 0:
                mask[node, at] = True
                at = text.drafted[at][1]
        return mask
