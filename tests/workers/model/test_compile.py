"""Compiler options depend on dtype and size of the weights, free memory and processor."""

import pytest
import torch

from workers import compile as compiling
from workers.compile import CACHED_BYTES, GENERATED, Weights, cpu_computes

ROOMY, TIGHT = 1 << 40, CACHED_BYTES
"""Free memory."""


def test_every_processor_computes_in_fp32() -> None:
    assert cpu_computes(torch.float32)


@pytest.mark.parametrize(("num_bytes", "suit"), [(CACHED_BYTES, True), (CACHED_BYTES + 1, False)])
def test_one_token_has_packed_weights_of_its_own_only_where_both_copies_stay_in_the_cache(
    num_bytes: int, suit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "cpu_computes", lambda dtype: True)
    assert Weights(torch.bfloat16, num_bytes, ROOMY).suit_one_token is suit
    assert Weights(torch.bfloat16, num_bytes, TIGHT).suit_one_token  # nothing is packed


@pytest.mark.parametrize(
    ("computes", "free", "is_packed"), [(True, ROOMY, True), (True, TIGHT, False), (False, ROOMY, False)]
)
def test_weights_are_packed_where_onednn_takes_them(
    computes: bool, free: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "cpu_computes", lambda dtype: computes)
    monkeypatch.setattr(compiling, "has_amx", lambda: False)
    any_number, single = Weights(torch.bfloat16, CACHED_BYTES, free).options
    assert ["freezing" in options for options in (any_number, single)] == [is_packed] * 2
    assert ("max_autotune_gemm" in single) == is_packed and "max_autotune_gemm" not in any_number


@pytest.mark.parametrize(("dtype", "amx"), [("bfloat16", True), ("bfloat16", False), ("float32", True)])
def test_products_of_several_tokens_are_generated_with_amx(
    dtype: str, amx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "has_amx", lambda: amx)
    monkeypatch.setattr(compiling, "cpu_computes", lambda _: True)
    options = Weights(getattr(torch, dtype), CACHED_BYTES, ROOMY).options
    assert [GENERATED.items() <= each.items() for each in options] == [amx and dtype == "bfloat16", True]
    larger = Weights(torch.bfloat16, CACHED_BYTES + 1, ROOMY).options
    assert not any(GENERATED.items() <= each.items() for each in larger)
