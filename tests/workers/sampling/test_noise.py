"""The keyed noise: its bits against SplitMix64's published values, its distribution, and independent neighbours."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from protos.seeds import INCREMENT, MASK, mix, mix_seed
from workers.sampling.noise import ACCEPT, DRAFT, fraction_bits, gumbel, mix_, path_keys, row_keys, signed, stream_seeds
from workers.sampling.noise import uniform as uniform_of

FALSE_ALARM = 1e-6


def uniform(seeds: np.ndarray, index: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return (fraction_bits(row_keys(seeds, index), ids) + 0.5) * 2.0**-52


def test_mix_is_splitmix64() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]  # the first outputs for seed 1234567
    assert [mix((1234567 + n * INCREMENT) & MASK) for n in range(1, 6)] == published


def test_arrays_and_tensors_mix_as_integers_do() -> None:
    words = np.array([0, 1, 2**63 - 1, -(2**63), -1, 123456789], np.int64)
    expected = [signed(mix(word & MASK)) for word in words.tolist()]
    assert mix_(words.copy()).tolist() == expected
    assert mix_(torch.from_numpy(words.copy())).tolist() == expected


def test_noise_is_finite_at_the_ends_of_the_bits() -> None:
    ends = (np.array([0, 2**52 - 1]) + 0.5) * 2.0**-52
    assert ends.min() > 0
    assert ends.max() < 1
    noise = -np.log(-np.log1p(-ends))
    assert np.isfinite(noise).all()
    assert -3.7 < noise.min() < noise.max() < 36.8


@pytest.mark.parametrize(
    ("seeds", "index", "ids"),
    [
        (np.zeros(1), np.zeros(1), np.arange(200_000)),
        (np.zeros(1), np.arange(200_000), np.zeros(1)),
        (np.arange(200_000), np.zeros(1), np.zeros(1)),
        (np.arange(200_000) << 43, np.full(1, 7), np.full(1, 4095)),
    ],
)
def test_distribution_along_each_coordinate(seeds: np.ndarray, index: np.ndarray, ids: np.ndarray) -> None:
    seeds, index, ids = (part.astype(np.int64) for part in np.broadcast_arrays(seeds, index, ids))
    values = uniform(seeds, index, ids)
    assert stats.chisquare(np.histogram(values, 256, (0, 1))[0]).pvalue > FALSE_ALARM
    low = fraction_bits(row_keys(seeds, index), ids) & 255
    assert stats.chisquare(np.bincount(low, minlength=256)).pvalue > FALSE_ALARM
    noise = gumbel(torch.from_numpy(row_keys(seeds, index)), torch.from_numpy(ids))
    assert stats.kstest(noise.numpy(), stats.gumbel_r.cdf).pvalue > FALSE_ALARM


NEIGHBOURS = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, -1, 0), (0, 1, -1), (1, 0, -1), (0, 0, 64)]


@pytest.mark.parametrize("step", NEIGHBOURS)
def test_neighbours_are_independent(step: tuple[int, int, int]) -> None:
    seeds, index, ids = (part.ravel() for part in np.meshgrid(np.arange(40) + 5, np.arange(60) + 5, np.arange(80) + 5))
    here, there = uniform(seeds, index, ids), uniform(seeds + step[0], index + step[1], ids + step[2])
    table = np.histogram2d(here, there, 16, [(0, 1), (0, 1)])[0]
    assert stats.chisquare(table.ravel()).pvalue > FALSE_ALARM
    assert abs(np.corrcoef(here, there)[0, 1]) < 5 / math.sqrt(len(here))


def test_seeds_of_samples() -> None:
    assert mix_seed(77, 0) == 77
    assert mix_seed(2**64 - 1, 0) == 2**64 - 1
    seeds = {mix_seed(seed, sample) for seed in range(200) for sample in range(100)}
    assert len(seeds) == 200 * 100
    assert max(seeds) < 2**64
    assert {signed(mix_seed(2**64 - 5, 3)) & MASK} == {mix_seed(2**64 - 5, 3)}


def streams() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Pairs of numbers that must tell nothing of each other, 200,000 of each."""
    seeds, index, ids = (part.ravel() for part in np.meshgrid(np.arange(50) + 5, np.arange(50) + 5, np.arange(80) + 5))
    drafts = stream_seeds(seeds, DRAFT, np.full_like(seeds, 3))
    here = uniform(drafts, index, ids)
    return {
        "draft and target": (here, uniform(seeds, index, ids)),
        "draft and acceptance": (here, uniform(stream_seeds(seeds, ACCEPT, np.full_like(seeds, 3)), index, ids)),
        "draft in the next round": (here, uniform(stream_seeds(seeds, DRAFT, np.full_like(seeds, 4)), index, ids)),
        "nodes of one depth": (
            uniform_of(path_keys(row_keys(drafts, index), ids[:, None]), np.full(1, 7)),
            uniform_of(path_keys(row_keys(drafts, index), ids[:, None] + 1), np.full(1, 7)),
        ),
    }


@pytest.mark.parametrize("pair", streams())
def test_streams_are_independent(pair: str) -> None:
    here, there = streams()[pair]
    table = np.histogram2d(here, there, 16, [(0, 1), (0, 1)])[0]
    assert stats.chisquare(table.ravel()).pvalue > FALSE_ALARM
    assert abs(np.corrcoef(here, there)[0, 1]) < 5 / math.sqrt(len(here))


def test_a_path_of_no_tokens_leaves_the_key() -> None:
    keys = row_keys(np.arange(9), np.arange(9))
    assert path_keys(keys, np.empty((9, 0), np.int64)).tolist() == keys.tolist()
