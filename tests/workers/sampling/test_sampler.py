"""The sampling pipeline against its own definition, and rows alone against rows in a batch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from protos.messages import Sampling
from runtime.text.token_options import pack_ids
from tests.support.sampling import VOCAB, draw, logits, table
from workers.sampling.noise import gumbel, row_keys
from workers.sampling.sample import SamplingLimits, distribution, greedy, sample, top_distribution, without_replacement
from workers.sampling.sample_native import NativeSampler
from workers.sampling.sampler import Sampler
from workers.verification.rejection_math import gumbel_argmax

OFF = SamplingLimits(np.ones(1, np.float32), np.zeros(1, np.int64), np.ones(1), np.zeros(1))


@pytest.mark.parametrize("step", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("vocab", [3, 61, 1500])
@pytest.mark.parametrize(
    "bound",
    [
        {},
        {"top_k": 1},
        {"top_k": 5},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"top_p": 0.9999},
        {"min_p": 0.02},
        {"min_p": 1e-7, "top_p": 0.9},
        {"top_k": 400, "top_p": 0.99},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.01},
    ],
)
def test_native_code_equals_the_definition(vocab: int, step: float, bound: dict[str, Any]) -> None:
    rows = 256
    values = logits(rows, vocab, step=step)
    values[::7, : vocab // 2] = -torch.inf
    table = {name: np.repeat(getattr(OFF, name), rows) for name in ("temperature", "top_k", "top_p", "min_p")}
    table["temperature"] = np.linspace(0.3, 2, rows, dtype=np.float32)
    for name, value in bound.items():
        table[name][rows // 4 :] = value
    table["top_k"] = np.where(table["top_k"] < vocab, table["top_k"], 0)
    limits = SamplingLimits(**table)
    seeds, at = np.arange(rows) % 5, np.arange(rows)
    expected = sample(values, torch.from_numpy(row_keys(seeds, at)), limits)
    assert NativeSampler(seeds.astype(np.uint64), limits).sample(values, at, at).tolist() == expected.tolist()


def test_without_native_code_few_logits_are_sampled_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorting and noise take many times the memory of the logits: on a GPU, the KV cache would have less."""
    slots = table(*[Sampling(seed=row, top_p=0.9) for row in range(20)])
    values, sizes = logits(20), list[int]()

    def counted(logits_NV: torch.Tensor, keys_N: torch.Tensor, limits: SamplingLimits) -> torch.Tensor:
        sizes.append(len(logits_NV))
        return sample(logits_NV, keys_N, limits)

    monkeypatch.setattr(Sampler, "_native", lambda _sampler: None)
    monkeypatch.setattr("workers.sampling.sampler.sample", counted)
    whole = draw(slots, values)
    monkeypatch.setattr("workers.sampling.sample.MAX_LOGITS", 8 * VOCAB)
    assert draw(slots, values) == whole
    assert sizes == [20, 8, 8, 4]


def test_greedy_takes_the_lowest_of_equals() -> None:
    values = logits(20, step=4.0)
    lowest = [int(np.flatnonzero(row == row.max())[0]) for row in values.numpy()]
    assert greedy(values).tolist() == lowest
    assert draw(table(*[Sampling(seed=1, temperature=0.0)] * 20), values) == lowest


MIXED = (
    Sampling(seed=1, temperature=0.0),
    Sampling(seed=2),
    Sampling(seed=3, temperature=0.7, top_p=0.9),
    Sampling(seed=4, top_k=7),
    Sampling(seed=5, min_p=0.05),
    Sampling(seed=6, repetition_penalty=1.3, top_p=0.8),
    Sampling(seed=7, temperature=0.0, logit_bias={3: 2.5}),
    Sampling(seed=8, bad_words=((5,), (6, 7))),
    Sampling(seed=9, allowed_ids=pack_ids((1, 2, 3, 4))),
    Sampling(seed=10, min_tokens=9, stop_ids=(0, 1)),
    Sampling(seed=11, presence_penalty=1.0, frequency_penalty=0.5),
)


@given(st.lists(st.integers(0, len(MIXED) - 1), min_size=1, max_size=24), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_row_alone_is_the_row_among_others(kinds: list[int], seed: int) -> None:
    slots = table(*MIXED, outputs=[[6, 3, 3]] * len(MIXED))
    slots.tokens[:, 5:9] = [6, 8, 8, 1]
    rows, index = np.array(kinds), 5 + np.arange(len(kinds)) % 4
    values = logits(len(kinds), 131, seed)
    before = values.clone()
    together = Sampler(slots, 131).sample(values, rows, index).tolist()
    alone = [
        Sampler(slots, 131).sample(values[i : i + 1], rows[i : i + 1], index[i : i + 1]).item()
        for i in range(len(kinds))
    ]
    assert together == alone
    assert torch.equal(values, before)


def test_failed_rows_disturb_no_other() -> None:
    requests = [sampling for sampling in MIXED for _ in range(4)]
    values = logits(len(requests))
    expected = draw(table(*requests), values)
    broken = values.clone()
    broken[1::4, 9] = torch.nan
    broken[2::4] = -torch.inf
    broken[3::4] = torch.nan
    found = draw(table(*requests), broken)
    assert found[::4] == expected[::4]
    assert all(found[i] == -1 for i in range(len(found)) if i % 4)


def test_nothing_left_to_choose_is_a_failed_row() -> None:
    requests = [Sampling(seed=1, temperature=t, allowed_ids=pack_ids((4,)), bad_words=((4,),)) for t in (0.0, 1.0)]
    assert draw(table(*requests), logits(2)) == [-1, -1]


def test_columns_after_the_vocabulary_are_never_chosen() -> None:
    values = logits(8)
    values[:, 50:] = 100.0
    for sampling in MIXED:
        slots = table(*[sampling] * 8)
        sampler = Sampler(slots, 50)
        assert max(sampler.sample(values, np.arange(8), slots.known_len).tolist()) < 50


def test_the_best_are_what_is_likely_with_this_noise() -> None:
    requests = [
        Sampling(seed=7, temperature=0.0),
        Sampling(seed=8, temperature=0.7),
        Sampling(seed=9, temperature=1.3, top_k=5),
    ]
    slots, values = table(*requests), logits(3)
    sampler, rows, index = Sampler(slots, VOCAB), np.arange(3), slots.known_len + 2
    ids, log_q = sampler.candidates(values, rows, index, 8)
    assert ids[:, 0].tolist() == sampler.sample(values, rows, index).tolist()
    for row, request in enumerate(requests):
        scores = values[row].double()
        if request.temperature:
            key = torch.from_numpy(row_keys(np.array([request.seed]), index[row : row + 1]))
            noise = gumbel(key, torch.arange(VOCAB))
            allowed = scores >= (scores.topk(request.top_k).values[-1] if request.top_k else -torch.inf)
            scores = torch.where(allowed, scores / request.temperature + noise, -torch.inf)
        wanted = scores.log_softmax(0)
        count = request.top_k or 8
        assert ids[row, :count].tolist() == wanted.sort(descending=True).indices[:count].tolist()
        assert torch.allclose(log_q[row].double(), wanted[ids[row]], atol=1e-5)


def test_the_best_of_a_large_vocabulary_begin_with_what_is_sampled() -> None:
    rows, vocab = 40, 5000
    requests = [
        Sampling(seed=row, temperature=0.5 + row / 40, top_k=40 * (row % 2), top_p=0.9 if row % 3 else 1.0)
        for row in range(rows)
    ]
    slots, values = table(*requests), logits(rows, vocab)
    sampler, index = Sampler(slots, vocab), slots.known_len + 2
    for some in (np.arange(rows), np.arange(0, rows, 6)):  # none of the latter has limits
        ids, _ = sampler.candidates(values[some], some, index[some], 4)
        assert ids[:, 0].tolist() == sampler.sample(values[some], some, index[some]).tolist()


@pytest.mark.parametrize("vocab", [61, 1500])
def test_the_distribution_is_what_is_sampled_by(vocab: int) -> None:
    slots = table(*MIXED * 8, outputs=[[6, 3, 3]] * len(MIXED) * 8)
    slots.tokens[:, 5:9] = [6, 8, 8, 1]
    rows = np.arange(len(MIXED) * 8)
    index, values = 5 + rows % 4, logits(len(rows), vocab)
    before = values.clone()
    sampler = Sampler(slots, vocab)
    found = sampler.distribution(values, rows, index)
    assert torch.equal(values, before)
    assert torch.allclose(found.sum(1), torch.ones(len(rows), dtype=torch.float64))
    keys = torch.from_numpy(row_keys(sampler.seeds(rows), index))
    expected = gumbel_argmax(found, gumbel(keys[:, None], torch.arange(vocab)))
    assert expected.tolist() == sampler.sample(values, rows, index).tolist()


def test_rows_that_fail_have_no_distribution() -> None:
    values = logits(len(MIXED))
    values[1::3, 9], values[2::3] = torch.nan, -torch.inf
    slots = table(*MIXED)
    found = Sampler(slots, VOCAB).distribution(values, np.arange(len(MIXED)), slots.known_len)
    assert found.sum(1).round(decimals=9).tolist() == [float(row % 3 == 0) for row in range(len(MIXED))]


def test_a_short_distribution_is_that_of_the_likeliest_and_draws_without_replacement() -> None:
    values, limits = (
        logits(2),
        SamplingLimits(np.array([0.7, 1.0], np.float32), np.array([3, 0]), np.ones(2), np.zeros(2)),
    )
    ids, q = top_distribution(values, limits, 8)
    whole = distribution(values, limits).float()
    assert q.dtype == torch.float32
    assert torch.allclose(q[0, :3], whole[0].topk(3).values)
    assert (q[0, 3:] == 0).all()
    assert ids.tolist() == (values.topk(8).indices).tolist()
    assert torch.allclose(q[1], whole[1, ids[1]] / whole[1, ids[1]].sum())
    keys = torch.from_numpy(row_keys(np.arange(60_000), np.zeros(60_000, np.int64)))
    pairs = without_replacement(ids[1].expand(60_000, -1), q[1].expand(60_000, -1), keys, 2)
    first, second = ((pairs[:, [j]] == ids[1]).long().argmax(1) for j in range(2))
    assert (first != second).all()
    expected = q[1][:, None] * q[1] / (1 - q[1])[:, None]
    expected.fill_diagonal_(0)
    counts = torch.bincount(8 * first + second, minlength=64).view(8, 8).double()
    likely = expected * 60_000 >= 5
    statistic = ((counts - expected * 60_000)[likely] ** 2 / (expected * 60_000)[likely]).sum()
    assert stats.chi2.sf(float(statistic), int(likely.sum()) - 1) > 1e-6
