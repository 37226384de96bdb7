"""Slots and logits for tests of the sampling pipeline."""

from typing import Any

import numpy as np
import torch

from protos.messages import Sampling
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable

VOCAB = 61


def table(
    *requests: Sampling,
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    length: int = 64,
) -> SlotTable:
    slots = SlotTable(len(requests), length, 16)
    for slot, sampling in enumerate(requests):
        prompt, output = (prompts or [[1, 2]] * len(requests))[slot], (outputs or [[]] * len(requests))[slot]
        slots.sampling[slot] = sampling
        slots.tokens[slot, : len(prompt) + len(output)] = prompt + output
        slots.known_len[slot], slots.prompt_len[slot] = len(prompt) + len(output), len(prompt)
        slots.generation[slot] = 1
    return slots


def logits(rows: int, vocab: int = VOCAB, seed: int = 0, *, step: float = 0.0) -> torch.Tensor:
    """Random logits; with a *step* they are its multiples, so that many tie."""
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return (values / step).round() * step if step else values


def draw(slots: SlotTable, values: torch.Tensor, extra: int = 0, **kwargs: Any) -> list[int]:
    """Sample one token for every slot, *extra* tokens after the known ones."""
    rows = np.arange(len(values))
    return Sampler(slots, values.shape[1], **kwargs).sample(values, rows, slots.known_len[rows] + extra).tolist()
