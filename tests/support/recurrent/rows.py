"""Feeds rows of a model with recurrent layers in uneven chunks, with drafts that are rolled back."""

from pathlib import Path

import numpy as np
import torch

from protos.config.engine import ModelConfig
from workers.attention.batch import Batch
from workers.distributed.groups import Group
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

LENGTHS = (37, 21, 31, 9)
BLOCK = 4
K = 3
SIZES = (1, 2, 5, 9)


def sequences(vocab: int = 96) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, vocab, n) for n in LENGTHS]


def runner_of(
    folder: Path, rows: list[np.ndarray], group: Group | None = None, *, prefix_states: int = 0
) -> ModelRunner:
    """Return a runner whose slots hold *rows*, all of their tokens known."""
    loaded = load(ModelConfig(model=str(folder), device="cpu", dtype="float32"), group)
    slots = SlotTable(len(rows), 64, BLOCK, K)
    size = slots.blocks.shape[1]
    slots.blocks[:] = np.arange(slots.blocks.size).reshape(slots.blocks.shape)
    slots.num_blocks[:] = size
    for slot, row in enumerate(rows):
        slots.tokens[slot, : len(row)], slots.known_len[slot] = row, len(row)
    return ModelRunner(loaded, slots, slots.blocks.size, BLOCK, prefix_states=prefix_states)


def feed(runner: ModelRunner, slots: list[int], starts: list[int], lengths: list[int]) -> list[torch.Tensor]:
    """Feed tokens of some slots; return the logits of each, `[tokens, V]`."""
    batch = Batch.from_history(runner.slots.tokens, np.array(slots), np.array(starts), np.array(lengths))
    logits = runner.forward(batch, np.arange(len(batch.tokens_T))).clone()
    return list(logits.split(lengths))


def chunked(runner: ModelRunner, rows: list[np.ndarray]) -> list[torch.Tensor]:
    """Feed everything, a random number of tokens of some rows at a time; return the logits of each row."""
    rng = np.random.default_rng(3)
    done = [0] * len(rows)
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    while unfinished := [slot for slot, row in enumerate(rows) if done[slot] < len(row)]:
        slots = [slot for slot in unfinished if rng.random() < 0.7]
        if not slots:
            continue
        lengths = [min(int(rng.choice(SIZES)), len(rows[slot]) - done[slot]) for slot in slots]
        for slot, length, part in zip(
            slots, lengths, feed(runner, slots, [done[s] for s in slots], lengths), strict=True
        ):
            parts[slot].append(part)
            done[slot] += length
    return [torch.cat(part) for part in parts]


def drafted(runner: ModelRunner, rows: list[np.ndarray]) -> list[torch.Tensor]:
    """Feed each row a token or a few at a time, with drafts that are right up to a random token.

    Returns:
        The logits after each token from the first that was fed with a draft on.
    """
    rng = np.random.default_rng(4)
    known = [3] * len(rows)
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    started = [False] * len(rows)
    while unfinished := [slot for slot, row in enumerate(rows) if known[slot] < len(row)]:
        right = [int(min(rng.integers(0, K + 1), len(rows[slot]) - known[slot] - 1)) for slot in unfinished]
        starts, lengths = [], []
        for slot, good in zip(unfinished, right, strict=True):
            row, end = rows[slot], known[slot]
            k = int(rng.integers(good, K + 1))
            draft = np.full(k, 2)  # which no row has
            draft[:good] = row[end : end + good]
            runner.slots.tokens[slot, : end + k] = [*row[:end], *draft]
            runner.slots.known_len[slot] = end
            starts.append(end - 1 if started[slot] else 0)
            lengths.append(end + k - starts[-1])
        found = feed(runner, unfinished, starts, lengths)
        for slot, good, logits, start in zip(unfinished, right, found, starts, strict=True):
            parts[slot].append(logits[known[slot] - 1 - start :][: good + 1])
            known[slot] += good + 1
            started[slot] = True
    return [torch.cat(part) for part in parts]
