"""Triton's interpreter, completed: it multiplies matrices of bfloat16 as if their bits were integers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest


def as_float32(handle: Any) -> Any:
    """Return the numbers of an interpreted tensor, bfloat16 as float32."""
    from triton import language as tl

    if handle.dtype.scalar != tl.bfloat16:
        return handle
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@pytest.fixture(autouse=True, scope="package")
def dots_of_bfloat16() -> Iterator[None]:
    from triton.runtime.interpreter import InterpreterBuilder

    dot = InterpreterBuilder.create_dot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            InterpreterBuilder,
            "create_dot",
            lambda self, a, b, *others: dot(self, as_float32(a), as_float32(b), *others),
        )
        yield
