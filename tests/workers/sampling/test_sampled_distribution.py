"""Exactness in distribution: what sampling and acceptance emit has the request's distribution, whatever the draft.

Every test compares counts over many seeds with a distribution computed from the definitions (transformers' processors
where there are any). Together the tests of this file raise a false alarm with probability at most 1e-6: each is held to
1e-6 divided by their number. The quick form takes 20,000 draws (4,000 where every row is edited again and again),
the full form 200,000.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace
from scipy import stats

from protos.draft import Draft
from protos.messages import Sampling
from runtime.text.token_options import pack_ids
from tests.support.exactness.distribution import distribution as reference
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.verification.acceptance import accept

Law = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NUM_TESTS = 200  # more than there are
FALSE_ALARM = 1e-6 / NUM_TESTS
SLOTS = 20_000
FEWER_DRAWS = [pytest.param(4_000, id="quick"), pytest.param(200_000, id="full", marks=pytest.mark.full)]
DRAWS = [pytest.param(20_000, id="quick"), pytest.param(200_000, id="full", marks=pytest.mark.full)]
PROMPT, OUTPUT = [1, 2, 2, 9], [3, 3, 4, 9]

OPTIONS = {
    "plain": Sampling(seed=0),
    "cold": Sampling(seed=0, temperature=0.6),
    "hot": Sampling(seed=0, temperature=1.5),
    "greedy": Sampling(seed=0, temperature=0.0),
    "top_k": Sampling(seed=0, top_k=4),
    "top_p": Sampling(seed=0, top_p=0.8),
    "min_p": Sampling(seed=0, min_p=0.1),
    "repetition": Sampling(seed=0, repetition_penalty=1.6),
    "presence": Sampling(seed=0, presence_penalty=1.2),
    "frequency": Sampling(seed=0, frequency_penalty=-0.7),
    "logit_bias": Sampling(seed=0, logit_bias={3: 2.0, 5: -1.0, 0: -100.0}),
    "bad_words": Sampling(seed=0, bad_words=((6,), (9, 7), (4, 9, 3))),
    "allowed": Sampling(seed=0, allowed_ids=pack_ids((1, 3, 5, 8, 13))),
    "min_tokens": Sampling(seed=0, min_tokens=5, stop_ids=(2, 3)),
}
COMBINED = {
    "usual": Sampling(seed=0, temperature=0.7, top_p=0.9),
    "penalties": Sampling(seed=0, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "everything": Sampling(
        seed=0,
        temperature=1.3,
        top_k=9,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={1: 1.0, 7: -1.0},
        min_tokens=6,
        stop_ids=(0,),
        bad_words=((2,), (3, 4)),
        allowed_ids=pack_ids(tuple(range(14))),
    ),
}
EVERY = OPTIONS | COMBINED


def distribution(sampling: Sampling, raw_V: Law, output: list[int]) -> Law:
    return reference(sampling, raw_V, output, PROMPT)


def assert_distribution(counts: Ints, expected: Law) -> None:
    """Chi-square with the cells of few expected draws taken together; none may fall where the probability is 0."""
    total = int(counts.sum())
    assert not counts[expected == 0].any()
    small = expected * total < 5
    seen = np.append(counts[~small], counts[small].sum())
    wanted = np.append(expected[~small], expected[small].sum()) * total
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    if len(seen) > 1:
        assert stats.chisquare(seen, wanted * (total / wanted.sum())).pvalue > FALSE_ALARM


def worlds(sampling: Sampling, draws: int, output: list[int]) -> Iterator[SlotTable]:
    """Tables of sequences that differ in their seeds alone, *draws* sequences in all."""
    size = min(draws, SLOTS)
    for first in range(0, draws, size):
        slots = SlotTable(size, 16, 16, max_draft=8)
        known = PROMPT + output
        slots.tokens[:, : len(known)] = known
        slots.known_len[:], slots.prompt_len[:], slots.generation[:] = len(known), len(PROMPT), 1
        slots.sampling = [replace(sampling, seed=first + i) for i in range(size)]
        yield slots


def random_logits(*shape: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1.5, shape).astype(np.float32)


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("name", EVERY)
def test_one_token(name: str, draws: int) -> None:
    vocab, sampling = 64, EVERY[name]
    raw_V = random_logits(vocab, seed=7)
    counts = np.zeros(vocab, np.int64)
    for slots in worlds(sampling, draws, OUTPUT):
        chosen = Sampler(slots, vocab).sample(
            torch.from_numpy(raw_V).expand(SLOTS, vocab), np.arange(SLOTS), slots.known_len
        )
        counts += np.bincount(chosen.numpy(), minlength=vocab)
    assert_distribution(counts, distribution(sampling, raw_V.astype(np.float64), OUTPUT))


@pytest.mark.parametrize("name", EVERY)
def test_the_distribution_is_that_of_the_definitions(name: str) -> None:
    vocab, sampling = 64, EVERY[name]
    raw_V = random_logits(vocab, seed=7)
    slots = next(worlds(sampling, 1, OUTPUT))
    found_1V = Sampler(slots, vocab).distribution(torch.from_numpy(raw_V)[None], np.array([0]), slots.known_len[:1])
    assert np.abs(found_1V[0].numpy() - distribution(sampling, raw_V.astype(np.float64), OUTPUT)).max() < 1e-6


class Pair:
    """A target and a draft whose logits depend on the last token only, and rounds of speculation between them."""

    def __init__(self, target_VV: npt.NDArray[np.float32], draft_VV: npt.NDArray[np.float32], k: int) -> None:
        self.target, self.draft, self.k = torch.from_numpy(target_VV), torch.from_numpy(draft_VV), k
        self.vocab = len(target_VV)
        self.proposed = self.accepted = 0

    def run(self, slots: SlotTable, tokens: int) -> Ints:
        """Emit at least *tokens* tokens for every slot; return the first ones, `[S, tokens]`."""
        start = int(slots.known_len[0])
        drafter, sampler = Sampler(slots, self.vocab), Sampler(slots, self.vocab)
        while (slots.known_len < start + tokens).any():
            self.round(slots, np.flatnonzero(slots.known_len < start + tokens), drafter, sampler)
        return slots.tokens[:, start : start + tokens]

    def round(self, slots: SlotTable, rows: Ints, drafter: Sampler, sampler: Sampler) -> None:
        known = slots.known_len[rows]
        for step in range(self.k):
            last = slots.tokens[rows, known + step - 1]
            slots.tokens[rows, known + step] = drafter.sample(self.draft[last], rows, known + step).numpy()
        index = (known[:, None] + np.arange(self.k + 1)).ravel()
        rows_N = np.repeat(rows, self.k + 1)
        y_N = sampler.sample(self.target[slots.tokens[rows_N, index - 1]], rows_N, index).numpy()
        draft = slots.tokens[rows[:, None], known[:, None] + np.arange(self.k)]
        choices = y_N.reshape(-1, self.k + 1).tolist()
        drafts = [Draft(tuple(ids)) for ids in draft.tolist()]
        accepted = np.array([len(accept(*row)) for row in zip(drafts, choices, strict=True)])
        slots.tokens[rows_N, index] = y_N  # those after the accepted ones are overwritten later
        slots.known_len[rows] += accepted + 1
        self.proposed += self.k * len(rows)
        self.accepted += int(accepted.sum())


def joint(sampling: Sampling, target_VV: npt.NDArray[np.float32], output: list[int]) -> Law:
    """The distribution of the next two tokens, `[V, V]`."""
    first = distribution(sampling, target_VV[output[-1]].astype(np.float64), output)
    return np.stack(
        [
            share * distribution(sampling, target_VV[token].astype(np.float64), [*output, token])
            for token, share in enumerate(first)
        ]
    )


def assert_joint(sampling: Sampling, pair: Pair, draws: int) -> None:
    counts = np.zeros((pair.vocab, pair.vocab), np.int64)
    for slots in worlds(sampling, draws, OUTPUT):
        np.add.at(counts, tuple(pair.run(slots, 2).T), 1)
    assert_distribution(counts.ravel(), joint(sampling, pair.target.numpy(), OUTPUT).ravel())


TARGET = random_logits(16, 16, seed=1)
DRAFTS = {
    "near": TARGET + random_logits(16, 16, seed=2) / 3,
    "unrelated": random_logits(16, 16, seed=3),
    "opposite": -TARGET,
    "uniform": np.zeros_like(TARGET),
    "one_token": np.where(np.arange(16) == 5, np.float32(30), np.zeros_like(TARGET)),
    "lacks_the_best": np.where(TARGET.max(1, keepdims=True) == TARGET, np.float32(-30), TARGET),
}


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("draft", DRAFTS)
def test_two_tokens_whatever_the_draft(draft: str, k: int, draws: int) -> None:
    pair = Pair(TARGET, DRAFTS[draft], k)
    assert_joint(OPTIONS["plain"], pair, draws)
    assert 0 < pair.accepted < pair.proposed


@pytest.mark.parametrize("draws", [pytest.param(200_000, id="full", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", OPTIONS)
def test_two_tokens_of_every_option(name: str, draws: int) -> None:
    assert_joint(EVERY[name], Pair(TARGET, DRAFTS["near"], 2), draws)


@pytest.mark.parametrize("draws", FEWER_DRAWS)
@pytest.mark.parametrize("name", COMBINED)
def test_two_tokens_of_combined_settings(name: str, draws: int) -> None:
    pair = Pair(TARGET, DRAFTS["near"], 2)
    assert_joint(COMBINED[name], pair, draws)
    assert 0 < pair.accepted < pair.proposed


@pytest.mark.parametrize("name", EVERY)
def test_speculation_changes_no_token(name: str) -> None:
    def run(draft: str, k: int) -> Ints:
        return Pair(TARGET, DRAFTS[draft], k).run(next(worlds(EVERY[name], 500, OUTPUT)), 6)

    plain = run("near", 0)
    assert np.array_equal(plain, run("near", 2))
    assert np.array_equal(plain, run("unrelated", 4))


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("draft", ["near", "unrelated", "opposite", "uniform"])
def test_match_probability(draft: str, draws: int) -> None:
    last = OUTPUT[-1]
    p, q = (distribution(OPTIONS["plain"], table[last].astype(np.float64), OUTPUT) for table in (TARGET, DRAFTS[draft]))
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(16))
    pair = Pair(TARGET, DRAFTS[draft], 1)
    for slots in worlds(OPTIONS["plain"], draws, OUTPUT):
        pair.run(slots, 1)
    assert stats.binomtest(pair.accepted, pair.proposed, expected).pvalue > FALSE_ALARM


def test_a_wrong_distribution_is_noticed() -> None:
    raw_V = random_logits(64, seed=7)
    slots = next(worlds(OPTIONS["plain"], SLOTS, OUTPUT))
    chosen = Sampler(slots, 64).sample(torch.from_numpy(raw_V).expand(SLOTS, 64), np.arange(SLOTS), slots.known_len)
    counts = np.bincount(chosen.numpy(), minlength=64)
    slightly_wrong = distribution(replace(OPTIONS["plain"], temperature=0.93), raw_V.astype(np.float64), OUTPUT)
    with pytest.raises(AssertionError):
        assert_distribution(counts, slightly_wrong)
