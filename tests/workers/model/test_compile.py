"""Compiler options depend on dtype and size of the weights, free memory and processor."""

import pytest
import torch

from workers import compile as compiling
from workers.compile import CACHED_BYTES, Weights, cpu_computes

ROOMY, TIGHT = 1 << 40, CACHED_BYTES
"""Free memory."""


def test_every_processor_computes_in_fp32() -> None:
    assert cpu_computes(torch.float32)


@pytest.mark.parametrize(
    ("computes", "free", "is_packed"), [(True, ROOMY, True), (True, TIGHT, False), (False, ROOMY, False)]
)
def test_weights_are_packed_where_onednn_takes_them(
    computes: bool, free: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "cpu_computes", lambda dtype: computes)
    any_number, single = Weights(torch.bfloat16, CACHED_BYTES, free).options
    assert ["freezing" in options for options in (any_number, single)] == [is_packed] * 2
    assert ("max_autotune_gemm" in single) == is_packed and "max_autotune_gemm" not in any_number
