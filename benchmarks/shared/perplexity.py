"""The perplexity of a model on held-out texts, in the chunks and with the kernels that an engine uses."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from demo import corpus
from protos.config.engine import ModelConfig
from workers.attention.batch import Batch, Ints
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

CONTEXT, CHUNK, BLOCK = 1000, 100, 16
"""Tokens of a text, of a chunk of its first half, and of a block of the cache."""


def heldout(tokenizer: Path, count: int) -> list[list[int]]:
    """Return the first `CONTEXT` tokens of *count* files of the standard library that the demo was not trained on."""
    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    files = corpus.read(corpus.split(corpus.stdlib_root())[1])
    encoded = (encoder.encode(text, add_special_tokens=False).ids[:CONTEXT] for text in files)
    return list(islice((ids for ids in encoded if len(ids) == CONTEXT), count))


def perplexity(model: Path, texts: list[list[int]], **options: Any) -> float:
    """Return the perplexity of texts of `CONTEXT` tokens on a CPU; *options* are those of `ModelConfig`."""
    loaded = load(ModelConfig(model=str(model), device="cpu", **options))
    num_blocks = -(-CONTEXT // BLOCK)
    slots = SlotTable(1, CONTEXT, BLOCK)
    slots.blocks[0, :num_blocks] = np.arange(num_blocks)
    runner = ModelRunner(loaded, slots, num_blocks, BLOCK)
    with torch.inference_mode():
        losses = [_loss(runner, np.array(ids)) for ids in texts]
    return float(np.exp(np.mean(losses)))


def _loss(runner: ModelRunner, ids_N: Ints) -> float:
    """Return the mean loss per token; half of the text is fed in chunks, the rest three tokens at a time."""
    total, at = 0.0, 0
    while at < len(ids_N) - 1:
        length = min(CHUNK if at < CONTEXT // 2 else 3, len(ids_N) - 1 - at)
        batch = Batch(np.zeros(1, np.int64), np.array([at]), np.array([length]), ids_N[at : at + length])
        logits_NV = runner.forward(batch, np.arange(length))
        total += float(F.cross_entropy(logits_NV, torch.from_numpy(ids_N[at + 1 : at + 1 + length]), reduction="sum"))
        at += length
    return total / (len(ids_N) - 1)
