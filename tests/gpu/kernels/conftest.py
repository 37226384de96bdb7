"""Triton's interpreter, completed; and kernels on a GPU where `TRITON_INTERPRET` is 0.

The interpreter multiplies matrices of bfloat16 as if their bits were integers, and cuts float32 to bfloat16, which
GPUs round.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.gpu.on_device import on_device
from workers.gpu.kernels import attention, cache, layer, linear, penalties, quantized, sampling

if os.environ["TRITON_INTERPRET"] == "0":  # before the tests import them
    attention.paged_attention = on_device(attention.paged_attention)
    cache.write_cache = on_device(cache.write_cache)
    sampling.sample_tokens = on_device(sampling.sample_tokens)
    penalties.count_ = on_device(penalties.count_)
    penalties.penalise_ = on_device(penalties.penalise_)
    quantized.product = on_device(quantized.product)
    linear.linear = on_device(linear.linear)
    for each in (layer.rms_norm, layer.add_rms_norm, layer.rotate_, layer.swiglu):
        setattr(layer, each.__name__, on_device(each))


def as_float32(handle: Any) -> Any:
    """Return the numbers of an interpreted tensor, bfloat16 as float32."""
    from triton import language as tl

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def as_bfloat16(handle: Any) -> Any:
    """Return the numbers of an interpreted tensor of float32, rounded to the nearest bfloat16, to even between two."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    bits = handle.data.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = np.isnan(handle.data)
    return TensorHandle(np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16), tl.bfloat16)


@pytest.fixture(autouse=True, scope="package")
def bfloat16_as_on_a_gpu() -> Iterator[None]:
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def rounding_cast(self: Any, source: Any, dtype: Any) -> Any:
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            return as_bfloat16(source)
        return cast(self, source, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder,
            "create_dot",
            lambda self, a, b, *others: dot(self, as_float32(a), as_float32(b), *others),
        )
        patch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
        yield


@pytest.fixture
def dots_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add up every element of a product in the same order.

    numpy's library does so in an order that depends on the processor and on the element's place in the matrix, so that
    a row of numbers would not have the same product in another row.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def in_order(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        a_NB, b_BM = (as_float32(handle).data.astype(d.data.dtype) for handle in (a, b))
        return TensorHandle((a_NB[:, :, None] * b_BM).sum(axis=1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", in_order)
