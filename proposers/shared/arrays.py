"""Arrays of the indexes of texts."""

import mmap
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", np.int32, np.uint32)
Ids = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]


def small_pages(size: int, dtype: type[Number]) -> npt.NDArray[Number]:
    """Return zeros that cost no memory until they are written to, and little time then.

    For large arrays numpy asks for huge pages. The first write into each of those may take 10 ms, in which the kernel
    makes room for it.
    """
    pages = mmap.mmap(-1, size * np.dtype(dtype).itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype)


def text_at(ids: memoryview, place: int, most: int, end: int) -> list[int]:
    """Return at most *most* ids from *place* on, up to the id *end*."""
    text: list[int] = ids[place : place + most].tolist()
    return text[: text.index(end)] if end in text else text
