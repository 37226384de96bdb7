"""Forwards padded to a few sizes return the same as without padding."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protos.config.engine import ModelConfig
from protos.layers import FeatureSpec
from tests.support.models.tiny_models import build
from workers.attention.batch import Batch
from workers.attention.torch import TorchAttention
from workers.compile import SIZE_STEPS, Outputs, pad_to_sizes, padded_size
from workers.model.capture import Taps
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

BLOCK, BLOCKS = 8, 40
LENGTHS = ([33], [20, 1, 1, 30], [130, 5], [8, 4], [1])
"""Tokens of each row: a prompt, mixed rows, one too long for the kernel, a size that needs no padding, and one token
where there is no graph for it."""


def test_few_sizes() -> None:
    sizes = {padded_size(tokens) for tokens in range(1, 513)}
    assert len(sizes) == 64
    assert all(tokens <= padded_size(tokens) <= tokens * 1.125 for tokens in range(1, 5000))
    assert padded_size(SIZE_STEPS[-1][0] + 1) == SIZE_STEPS[-1][0] + 1


@pytest.mark.parametrize("in_torch", [False, True], ids=["kernel", "torch"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_the_filling_changes_nothing(tmp_path: Path, family: str, in_torch: bool) -> None:
    folder = build(family, tmp_path)
    plain, filled = (runner_of(folder, in_torch=in_torch) for _ in range(2))
    sizes: list[tuple[int, int]] = []
    run = filled._run

    def watched(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
        sizes.append((tokens_1T.shape[1], len(wanted_N)))
        return run(tokens_1T, positions_1T, wanted_N)

    filled._run = pad_to_sizes(watched, least=2)
    for lengths in LENGTHS:
        torch.testing.assert_close(outputs(filled, lengths), outputs(plain, lengths), atol=2e-5, rtol=1e-4)
    assert sizes == [(36, 17), (52, 26), (144, 72), (12, 6), (2, 2)]
    caches = [[*runner.cache.keys, *runner.cache.values] for runner in (filled, plain)]
    for ours, theirs in zip(*caches, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def runner_of(folder: Path, *, in_torch: bool) -> ModelRunner:
    loaded = load(ModelConfig(str(folder), dtype="float32"))
    slots = SlotTable(4, 160, BLOCK)
    slots.blocks[0, :20], slots.blocks[1:, :6] = range(20), np.arange(20, 38).reshape(3, 6)
    runner = ModelRunner(loaded, slots, BLOCKS, BLOCK, Taps(loaded.model, FeatureSpec("all", (1, 2))))
    for pages in (*runner.cache.keys, *runner.cache.values):
        pages.zero_()
    if in_torch:
        runner.attention = TorchAttention(runner.cache)
    return runner


def outputs(runner: ModelRunner, lengths: list[int]) -> Outputs:
    rows, tokens = np.arange(len(lengths)), np.arange(sum(lengths)) * 7 % runner.loaded.vocab_size
    batch = Batch(rows, np.zeros_like(rows), np.array(lengths), tokens)
    logits_NV, features_TF = runner.run(batch, np.arange(0, sum(lengths), 2))
    assert features_TF is not None
    assert len(features_TF) == sum(lengths)
    return logits_NV.clone(), features_TF.clone()
