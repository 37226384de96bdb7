"""The sampling kernels, interpreted, against `workers.sampling.sample`: the same ids."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.gpu.kernels import sampling
from workers.gpu.kernels.sampling import KernelLimits, sample_tokens
from workers.sampling.grammar_masks import masked
from workers.sampling.noise import row_keys
from workers.sampling.sample import SamplingLimits, greedy, sample

pytestmark = pytest.mark.usefixtures("one_thread", "small_blocks")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small vocabularies have several blocks, of several parts each."""
    monkeypatch.setattr(sampling, "BLOCK", 64)
    monkeypatch.setattr(sampling, "PART", 32)


@dataclass(frozen=True)
class Case:
    """Rows of logits that are multiples of *step*, so that some are equal, and their limits."""

    seed: int
    vocab: int
    step: float
    limits: tuple[tuple[float, int, float, float], ...]

    @property
    def logits_NV(self) -> torch.Tensor:
        dice = np.random.default_rng(self.seed)
        logits = dice.normal(0, 3, (len(self.limits), self.vocab))
        logits[dice.random(logits.shape) < 0.05] = -np.inf
        logits[:, 0] = 0.0
        return torch.from_numpy((np.round(logits / self.step) * self.step).astype(np.float32))

    @property
    def keys_N(self) -> torch.Tensor:
        dice = np.random.default_rng(self.seed)
        rows = len(self.limits)
        return torch.from_numpy(row_keys(dice.integers(-(2**63), 2**63 - 1, rows), dice.integers(0, 9999, rows)))


def wanted(case: Case, logits_NV: torch.Tensor) -> torch.Tensor:
    temperature, top_k, top_p, min_p = (np.array(part) for part in zip(*case.limits, strict=True))
    is_random_N = torch.from_numpy(temperature >= 1e-5)
    safe = np.where(temperature >= 1e-5, temperature, 1.0).astype(np.float32)
    limits = SamplingLimits(safe, top_k.astype(np.int64), top_p.astype(np.float64), min_p.astype(np.float64))
    return torch.where(is_random_N, sample(logits_NV, case.keys_N, limits), greedy(logits_NV))


def on_device(case: Case, **bits: torch.Tensor) -> KernelLimits:
    """As a graph would have them: limits that no row has are left out."""
    temperature, top_k, top_p, min_p = zip(*case.limits, strict=True)
    return KernelLimits(
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32) if any(top_k) else None,
        torch.tensor(top_p, dtype=torch.float64) if any(p < 1.0 for p in top_p) else None,
        torch.tensor(min_p, dtype=torch.float64) if any(min_p) else None,
        **bits,
    )


row_limits = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([0, 1, 2, 7, 50, 1000]),
    st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
)
cases = st.builds(
    Case,
    st.integers(0, 2**31),
    st.sampled_from([3, 63, 64, 65, 130]),
    st.sampled_from([1e-4, 0.5, 3.0]),
    st.lists(row_limits, min_size=1, max_size=3).map(tuple),
)


def check(case: Case) -> None:
    logits_NV = case.logits_NV
    assert torch.equal(sample_tokens(logits_NV, case.keys_N, on_device(case)), wanted(case, logits_NV))


@given(cases)
@settings(max_examples=10, deadline=None, derandomize=True)
def test_ids_are_those_of_the_definition(case: Case) -> None:
    check(case)


@pytest.mark.full
@given(cases)
@settings(max_examples=300, deadline=None)
def test_ids_are_those_of_the_definition_in_full(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_limits(temperature: float) -> None:
    check(Case(1, 300, 0.5, ((temperature, 0, 1.0, 0.0),) * 3))


def test_keys_and_limits_may_have_any_strides() -> None:
    """As a column of the keys of a round's rows, and as what the tokens of its only row share."""
    case = Case(2, 130, 0.5, ((0.9, 20, 0.8, 0.02),) * 4)
    limits, logits_NV = on_device(case), case.logits_NV
    keys_N = torch.stack((case.keys_N, case.keys_N + 1), 1)[:, 0]
    assert keys_N.stride(0) == 2
    shared = {name: value[:1].expand(4) for name, value in vars(limits).items() if value is not None}
    assert torch.equal(sample_tokens(logits_NV, keys_N, KernelLimits(**shared)), wanted(case, logits_NV))


@pytest.mark.full
@pytest.mark.parametrize("vocab", [32_000, 128_256])
def test_whole_vocabularies(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 4096)
    monkeypatch.setattr(sampling, "PART", 512)
    check(Case(5, vocab, 1e-4, ((0.8, 0, 1.0, 0.0),) * 8))
    check(Case(6, vocab, 0.25, ((1.0, 0, 0.95, 0.0), (0.7, 40, 0.9, 0.01), (1.3, 0, 1.0, 0.05))))


@pytest.mark.parametrize("top_p", [0.2, 0.7])
def test_of_equal_logits_top_p_leaves_the_lowest_ids(top_p: float) -> None:
    """Ten equal logits in two blocks: the first `10 * top_p` of them are sampled, and no other one."""
    logits_NV = torch.full((12, 80), -40.0)
    places = [3, 5, 8, 20, 40, 63, 64, 66, 70, 79]
    logits_NV[:, places] = 1.0
    case = Case(3, 80, 1.0, ((1.0, 0, top_p, 0.0),) * 12)
    found = sample_tokens(logits_NV, case.keys_N, on_device(case))
    assert torch.equal(found, wanted(case, logits_NV))
    assert set(found.tolist()) <= set(places[: round(10 * top_p)])


@pytest.mark.parametrize("limits", [(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 5, 0.9, 0.1)])
def test_rows_that_have_no_token(limits: tuple[float, int, float, float]) -> None:
    """NaN, infinity and no finite logit give -1; 0.0 and -0.0 are equal."""
    logits_NV = torch.randn(5, 70, generator=torch.Generator().manual_seed(0))
    logits_NV[0, 66], logits_NV[1, 2], logits_NV[2] = torch.nan, torch.inf, -torch.inf
    logits_NV[3] = -0.0
    logits_NV[3, 69] = 0.0
    case = Case(4, 70, 1.0, (limits,) * 5)
    found = sample_tokens(logits_NV, case.keys_N, on_device(case))
    assert found[:3].tolist() == [-1, -1, -1]
    assert torch.equal(found, wanted(case, logits_NV))


def test_grammar_masks_and_padded_columns() -> None:
    """Bits of a grammar for some rows; logits are columns of a wider tensor."""
    case = Case(8, 100, 0.5, ((0.9, 0, 0.8, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0)))
    wide_NV = torch.full((3, 128), 50.0)
    wide_NV[:, :100] = case.logits_NV
    dice = np.random.default_rng(2)
    bits_MB = dice.integers(0, 256, (2, 16), dtype=np.uint8)
    bits_MW = torch.from_numpy(bits_MB.view(np.int32))
    rows = [1, -1, 0]
    limits = on_device(case, bits_MW=bits_MW, bits_row_N=torch.tensor(rows, dtype=torch.int32))
    logits_NV = wide_NV[:, :100]
    expected = logits_NV.clone()
    for row, at in ((0, 1), (2, 0)):
        expected[row : row + 1] = masked(logits_NV[row : row + 1], [bits_MB[at]])
    assert torch.equal(sample_tokens(logits_NV, case.keys_N, limits), wanted(case, expected))
