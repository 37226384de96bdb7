"""Sampling and acceptance of graphs equal their definitions on the host."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protos.draft import Draft
from workers.gpu.choosing import CHOOSERS, Chooser, accepted, choose, chooser_for
from workers.sampling.noise import row_keys
from workers.sampling.sample import DeviceLimits, Limits, greedy, sample
from workers.verification.acceptance import accept

ROWS, VOCAB = 12, 61


def some_limits(chooser: Chooser) -> Limits:
    """Return the limits of rows of every kind that *chooser* is for, greedy ones among them."""
    temperature = np.zeros(ROWS, np.float32)
    top_k, top_p, min_p = np.zeros(ROWS, np.int64), np.ones(ROWS), np.zeros(ROWS)
    if chooser != "greedy":
        temperature[::2] = np.linspace(0.3, 1.7, ROWS // 2)
        temperature[1] = 1e-6
    if chooser == "limited":
        top_k[::3], top_p[::4], min_p[::6] = 7, 0.8, 0.05
    return Limits(temperature, top_k, top_p, min_p)


def on_device(limits: Limits) -> DeviceLimits:
    fields = (limits.temperature, limits.top_k, limits.top_p, limits.min_p)
    return DeviceLimits(*(torch.from_numpy(field) for field in fields))


def some_logits(step: float) -> torch.Tensor:
    """Return logits with ties, an infinite row and a NaN."""
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    logits = (logits / step).round() * step
    logits[2, :30] = -torch.inf
    logits[4] = -torch.inf
    logits[6, 5] = torch.nan
    logits[7, 5] = torch.nan
    return logits


@pytest.mark.parametrize("step", [1e-3, 1.0])
@pytest.mark.parametrize("chooser", CHOOSERS)
def test_ids_are_those_of_the_definition(chooser: Chooser, step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    limits, logits = some_limits(chooser), some_logits(step)
    keys = torch.from_numpy(row_keys(np.arange(ROWS) * 977, np.arange(ROWS)))
    expected = greedy(logits)
    for row in np.flatnonzero(limits.temperature >= 1e-5).tolist():
        at = np.array([row])
        expected[row] = sample(logits[row : row + 1], keys[row : row + 1], limits.at(at))[0]
    assert chooser_for(limits) == chooser
    assert torch.equal(choose(chooser, logits, keys, on_device(limits)), expected)
    monkeypatch.setattr("workers.gpu.choosing.MAX_LOGITS", 5 * VOCAB)
    assert torch.equal(choose(chooser, logits, keys, on_device(limits)), expected)
    assert expected[4] == expected[6] == expected[7] == -1


@given(st.lists(st.tuples(st.lists(st.integers(-1, 2), min_size=5, max_size=5), st.integers(0, 4)), min_size=1))
def test_chains_are_accepted_as_on_the_host(rows: list[tuple[list[int], int]]) -> None:
    draft = [0, 1, 0, 2]
    sampled, tokens = torch.tensor([ids for ids, _ in rows]), torch.tensor([[9, *draft]] * len(rows))
    found = accepted(sampled, tokens, torch.tensor([length for _, length in rows], dtype=torch.int32))
    expected = [len(accept(Draft(tuple(draft[:length])), ids)) for ids, length in rows]
    assert found.tolist() == expected
