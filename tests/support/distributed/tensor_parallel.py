"""Models split over ranks in threads, and their logits against the unsplit model's."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from protos.config.engine import ModelConfig
from protos.layers import LayerShape
from tests.support.distributed.ranks import in_memory
from tests.workers.model.test_models import BLOCK, PREFIX, SLOTS, fill, paged_logits, reference_logits, sequences
from workers.distributed.groups import Group
from workers.model.loaded import LoadedModel
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

VOCAB = 97  # neither 2 nor 4 divide it
TOLERANCE = 2e-5  # largest error of a logit, in fp32, relative to the largest logit; the same as for one rank
BLOCKS = 40


def share(folder: Path, group: Group, **options: Any) -> LoadedModel:
    return load(ModelConfig(model=str(folder), device="cpu", **options), group)


def runner_of(folder: Path, group: Group, rows: list[np.ndarray], **options: Any) -> ModelRunner:
    slots = SlotTable(SLOTS, 64, BLOCK)
    fill(slots, rows, BLOCKS)
    return ModelRunner(share(folder, group, **options), slots, BLOCKS, BLOCK)


def check(
    folder: Path,
    ranks: int,
    vocab: int = VOCAB,
    *,
    meant: Path | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> list[tuple[LayerShape, ...]]:
    """Compare logits of *ranks* ranks, fed in chunks, with the unsplit model's; return each rank's cache shapes.

    *meant*: a checkpoint of the same weights that `transformers` loads, if it does not load *folder* itself.
    *tolerance*: see `TOLERANCE`. *options* are those of `ModelConfig`.
    """
    rows = sequences(vocab)
    expected = reference_logits(meant or folder, rows, "eager")

    def work(group: Group) -> tuple[list[torch.Tensor], tuple[LayerShape, ...]]:
        runner = runner_of(folder, group, rows, **options)
        assert (runner.loaded.vocab_size, runner.loaded.ranks) == (vocab, ranks)
        return paged_logits(runner, rows), runner.loaded.layers

    (found, _), *others = results = in_memory(ranks, work)
    for slot, (mine, reference) in enumerate(zip(found, expected, strict=True)):
        wanted = reference[PREFIX:] if slot == 2 else reference
        assert torch.isfinite(mine).all()
        assert (mine - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item()), slot
    assert all(logits.shape[1] == 0 for parts, _ in others for logits in parts), "only rank 0 gets logits"
    return [layers for _, layers in results]
