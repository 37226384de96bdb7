"""Log-probabilities of raw logits against plain numpy; ranks, ties and slices."""

import numpy as np
import pytest
import torch

import workers.sampling.logprobs
from workers.sampling.logprobs import token_logprobs


def logits(rows: int, vocab: int, step: float = 0.0) -> torch.Tensor:
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 3
    return (values / step).round() * step if step else values


@pytest.mark.parametrize("step", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("top", [0, 1, 5, 20, -1])
def test_against_numpy(top: int, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.sampling.logprobs, "SLICE_ELEMENTS", 7 * 40)  # several slices, the last one short
    values = logits(30, 40, step)
    chosen = [row % 40 for row in range(30)]
    exact = values.numpy().astype(np.float64)
    exact -= np.log(np.exp(exact).sum(1, keepdims=True))
    for row, entry in enumerate(token_logprobs(values, chosen, top)):
        best = sorted(range(40), key=lambda i, row=row: (-values[row, i].item(), i))[: 40 if top < 0 else top]
        assert entry.token_ids == [chosen[row], *best]
        np.testing.assert_allclose(entry.logprobs, exact[row, entry.token_ids], atol=1e-5)
        assert entry.ranks == [1 + int((values[row] > values[row, i]).sum()) for i in entry.token_ids]


def test_more_than_the_vocabulary_and_none_requested() -> None:
    assert len(token_logprobs(logits(1, 4), [2], 9)[0].token_ids) == 5
    assert token_logprobs(logits(0, 4), [], 3) == []


def test_a_row_of_nan_raises_nothing() -> None:
    values = logits(2, 6, 1.0)
    values[0, 2] = torch.nan
    clean = token_logprobs(values[1:], [1], 3)
    assert token_logprobs(values, [1, 1], 3)[1:] == clean
