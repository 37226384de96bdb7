"""Compares a loaded model over the paged cache with `transformers`' own attention, on a few tokens.

A family whose attention does something that the attention interface does not show (another mask, a bias, a difference
of two softmaxes) would be served with wrong tokens. So every target proves itself when it is loaded: two rows, one fed
in two chunks, then a draft tree on it. Sliding windows are narrowed for the check, so that they matter on few tokens.
With recurrent layers, two chains take the place of the tree, the second after rolling back the first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from protos.errors import ModelError
from workers.attention.backend import NAME
from workers.attention.batch import Batch, Ints, TreeMask, TreeMasks
from workers.model.loaded import LoadedModel
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

FIRST, CHUNK, SECOND = 20, 12, 9
"""Tokens of the first row, of its first chunk, and of the second row."""
TREE = TreeMask(FIRST, (FIRST, FIRST, FIRST + 1), (0b001, 0b010, 0b101))
"""Three nodes after the first row: two children of its last token, and a child of the first of them."""
WINDOW = 6
BLOCK, BLOCKS = 8, 8
TOLERANCES = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest error of a token's logits relative to their standard deviation, in the median over the tokens of a part.

The median, because rounding can send a token to another expert. Rounding of 32 layers in bf16 makes a few hundredths,
and 0.12 in a Mixtral of random weights on a GPU; the families that this check refuses are wrong by 0.5 and more.
"""
PARTS = [CHUNK, FIRST - CHUNK, SECOND, len(TREE.positions)]


def self_check(loaded: LoadedModel, name: str) -> None:
    """Raise `ModelError`, with the numbers, if *loaded* does not compute what `transformers` computes.

    With several ranks, all call it, and the one with logits compares. Models with a context of fewer than 24 tokens
    are not checked.
    """
    if loaded.max_model_len < FIRST + len(TREE.positions) + 1:
        return
    ids_N = np.arange(FIRST + SECOND + len(TREE.positions)) * 7919 % max(2, loaded.vocab_size - 4) + 3
    first, second, tree = np.split(ids_N % loaded.vocab_size, [FIRST, FIRST + SECOND])
    with _narrow_windows(loaded.model, loaded.max_model_len), torch.inference_mode():
        ours = _paged(loaded, first, second, tree)
        theirs = _plain(loaded, first, second, tree)
    if loaded.group.rank == 0:
        _compare(ours.float(), theirs.float(), name, loaded)


def _compare(ours_TV: torch.Tensor, theirs_TV: torch.Tensor, name: str, loaded: LoadedModel) -> None:
    error_T = (ours_TV - theirs_TV).abs().amax(-1) / theirs_TV.std(-1).clamp(min=1e-6)
    error = max(float(part.median()) for part in torch.split(error_T, PARTS))
    limit = TOLERANCES.get(loaded.dtype, 0.01)
    if not error <= limit:
        raise ModelError(
            f"{name} (model_type {loaded.model_type!r}) cannot be served: over the paged cache its logits differ from "
            f"transformers' by {error:.2g} standard deviations (at most {limit} in {loaded.dtype}), so its attention "
            "does more than the attention interface shows; skip_self_check serves it all the same"
        )


def _paged(loaded: LoadedModel, first: Ints, second: Ints, tree: Ints) -> torch.Tensor:
    """Return the logits `[T, V]` of the first row, the second, and the tree, fed as when serving."""
    slots = SlotTable(2, FIRST + SECOND, BLOCK, len(TREE.positions))
    slots.known_len[:] = FIRST, SECOND
    slots.blocks[:] = np.arange(slots.blocks.size, dtype=np.int32).reshape(slots.blocks.shape) % BLOCKS
    # Not quantised: the attention of the family is checked, not how K and V are stored.
    runner = ModelRunner(replace(loaded, kv_dtype=loaded.dtype), slots, BLOCKS, BLOCK)
    begun = _feed(runner, [0, 1], [0, 0], [first[:CHUNK], second])
    rest = _feed(runner, [0], [CHUNK], [first[CHUNK:]])
    drafted = _rolled_back(runner, tree) if loaded.recurrent else _feed(runner, [0], [FIRST], [tree], TREE)
    return torch.cat([begun[:CHUNK], rest, begun[CHUNK:], drafted])


def _rolled_back(runner: ModelRunner, tree: Ints) -> torch.Tensor:
    """Return the logits of the nodes of `TREE`, fed as two chains after the first row."""
    left, right, below = tree
    path = _feed(runner, [0], [FIRST], [np.array([left, below])])
    other = _feed(runner, [0], [FIRST], [np.array([right])])
    return torch.cat([path[:1], other, path[1:]])


def _feed(
    runner: ModelRunner, slots: list[int], starts: list[int], rows: list[Ints], mask: TreeMask | None = None
) -> torch.Tensor:
    starts_R, lengths_R = np.array(starts), np.array([len(row) for row in rows])
    masks = None if mask is None else TreeMasks.of([mask], starts_R + lengths_R, lengths_R)
    batch = Batch(np.array(slots), starts_R, lengths_R, np.concatenate(rows), masks)
    return runner.forward(batch, np.arange(len(batch.tokens_T))).clone()


def _plain(loaded: LoadedModel, first: Ints, second: Ints, tree: Ints) -> torch.Tensor:
    """Return the same logits by `transformers`' own attention and masks, one sequence at a time."""
    left, right, below = tree
    loaded.model.set_attn_implementation("eager")  # type: ignore[operator]
    try:
        path = _logits(loaded, [*first, left, below])
        other = _logits(loaded, [*first, right])
        return torch.cat(
            [path[:FIRST], _logits(loaded, [*second]), path[FIRST, None], other[FIRST:], path[FIRST + 1 :]]
        )
    finally:
        loaded.model.set_attn_implementation(NAME)  # type: ignore[operator]


def _logits(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    ids_1T = torch.tensor([ids], device=loaded.device)
    logits_TV: torch.Tensor = loaded.model(input_ids=ids_1T, use_cache=False).logits[0]
    return logits_TV


@contextmanager
def _narrow_windows(model: Any, max_model_len: int) -> Iterator[None]:
    """Narrow every sliding window of the model that can matter to `WINDOW` tokens."""
    windows = ((part, _window(part)) for part in (model.config, *model.modules()))
    holders = [part for part, window in windows if isinstance(window, int) and window < max_model_len]
    kept = [(part, part.sliding_window) for part in holders]
    for part, _ in kept:
        part.sliding_window = WINDOW
    try:
        yield
    finally:
        for part, window in kept:
            part.sliding_window = window


def _window(part: Any) -> Any:
    return getattr(part, "sliding_window", None)
