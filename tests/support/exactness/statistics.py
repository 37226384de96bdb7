"""The statistics of the exactness suite: were the tokens sampled from the expected distribution?

Two tests. Chi-square, with cells pooled to an expectation of at least 5, detects small, systematic errors. The
total-variation bound, sqrt(K / (2 pi N)) + sqrt(ln(1e9) / (2 N)) for K cells and N samples, detects gross ones and
assumes nothing about cells, but misses a rule that is 2 % too lenient.

False alarms: the tests of one matrix together fail wrongly with probability at most `FALSE_ALARM`. Each has that level
divided by their number (Bonferroni); the seeds are fixed, so results are reproducible.

Power. For p' instead of p, chi-square over N samples is noncentral with lambda = N sum (p' - p)^2 / p, and
detects it with probability P(chi2'(df, lambda) > threshold): `power`. With df = 15, alpha = 1e-6 / 500 the threshold
is 81, and lambda = 120 is detected 98 times in 100. A rule that accepts 2 % of all wrong tokens moves a cell by some
0.2 % of all samples, so 1e6 samples give lambda of several thousand; resampling from p instead of from the residual
moves several per cent and is detected with 20,000.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from cluster.check.statistics import chi_square_quantile, chi_square_tail, tv_bound

Probs = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FALSE_ALARM = 1e-6
SMALLEST_CELL = 5.0
TV_FALSE_ALARM = 1e-9


@dataclass(frozen=True)
class Finding:
    """The results of both tests.

    Attributes:
        samples: tokens counted.
        p_value: of chi-square; 0 if a token of probability 0 was emitted.
        tv, tv_bound: total variation of counts and distribution, and the bound exceeded once in 1e9 exact runs.
    """

    samples: int
    p_value: float
    tv: float
    tv_bound: float

    def is_wrong(self, num_tests: int) -> bool:
        """Return whether one of the tests fails, at the level of *num_tests* tests."""
        return self.p_value <= FALSE_ALARM / num_tests or self.tv > self.tv_bound

    def __str__(self) -> str:
        return f"{self.samples} samples, p = {self.p_value:.3g}, TV {self.tv:.5f} (bound {self.tv_bound:.5f})"


def compare(counts_CV: Ints, p_CV: Probs) -> Finding:
    """Compare the tokens counted in each of C contexts with the distribution there; empty contexts are skipped.

    The statistics of the contexts are added, with their degrees of freedom: given a context's number of tokens, its
    counts are multinomial, however the rounds ended. An error that is the same in all contexts is
    detected sooner in their sum, which varies less than a multinomial of its mean: the p-value is twice the smaller.
    """
    totals_C = counts_CV.sum(1)
    was_C = totals_C > 0
    counts_CV, p_CV, totals_C = counts_CV[was_C], p_CV[was_C], totals_C[was_C]
    samples = int(totals_C.sum())
    expected_CV = p_CV * totals_C[:, None]
    tv = float(np.abs(counts_CV - expected_CV).sum() / (2 * samples))
    p_value = chi_square(counts_CV, expected_CV)
    if len(counts_CV) > 1:
        p_value = min(1.0, 2 * min(p_value, chi_square(counts_CV.sum(0)[None], expected_CV.sum(0)[None])))
    if counts_CV[p_CV == 0].any():
        p_value = 0.0
    return Finding(samples, p_value, tv, tv_bound(int((p_CV > 0).sum()), samples, TV_FALSE_ALARM))


def chi_square(counts_CV: Ints, expected_CV: Probs) -> float:
    """Return the p-value; the small cells of a context are pooled, and pooled with its largest if still small."""
    small_CV = expected_CV < SMALLEST_CELL
    pooled_C = np.where(small_CV, expected_CV, 0).sum(1)
    seen_C = np.where(small_CV, counts_CV, 0).sum(1)
    large_CV = np.where(small_CV, 0.0, expected_CV)
    counted_CV = np.where(small_CV, 0, counts_CV).astype(np.float64)
    joins_C = (pooled_C < SMALLEST_CELL) & ~small_CV.all(1)
    rows = np.flatnonzero(joins_C)
    most = large_CV[rows].argmax(1)
    large_CV[rows, most] += pooled_C[rows]
    counted_CV[rows, most] += seen_C[rows]
    observed = np.column_stack((counted_CV, np.where(joins_C, 0, seen_C)))
    wanted = np.column_stack((large_CV, np.where(joins_C, 0, pooled_C)))
    used = wanted > 0
    freedom = int(used.sum()) - len(wanted)
    if freedom <= 0:
        return 1.0
    statistic = float(((observed - wanted)[used] ** 2 / wanted[used]).sum())
    return chi_square_tail(statistic, freedom)


def power(promised: Probs, real: Probs, samples: int, num_tests: int) -> float:
    """Return the probability that chi-square rejects *samples* of *real* `[K]` if *promised* `[K]` is expected."""
    expected = promised * samples
    kept = expected >= SMALLEST_CELL
    cells = np.append(promised[kept], promised[~kept].sum()), np.append(real[kept], real[~kept].sum())
    used = cells[0] > 0
    distance = float(((cells[1] - cells[0])[used] ** 2 / cells[0][used]).sum() * samples)
    freedom = int(used.sum()) - 1
    threshold = chi_square_quantile(FALSE_ALARM / num_tests, freedom)
    return float(stats.ncx2.sf(threshold, freedom, distance))


def counted(contexts_N: Ints, tokens_N: Ints, shape: tuple[int, int]) -> Ints:
    """Return the counts of tokens by context, int64 of *shape* `[C, V]`."""
    num_contexts, vocab = shape
    return np.bincount(contexts_N * vocab + tokens_N, minlength=num_contexts * vocab).reshape(shape)


def joint(distribution_of: Seq[Probs]) -> Probs:
    """Return the distribution of whole texts, flat, from a table `[V^i, V]` per position i, histories in order."""
    found = np.ones(1)
    for table in distribution_of:
        found = (found[:, None] * table).ravel()
    return found
