"""The sizes of rounds that have a graph: rows padded to one of a few numbers, and a fixed number of tokens for each."""

from typing import Literal, NamedTuple

Chooser = Literal["greedy", "drawn", "limited"]
"""What the rows of a round need at most: the most likely tokens, noise, or top-k, top-p and min-p as well."""


MOST_ROWS = 256
"""Rows of the largest size that is captured."""


class Size(NamedTuple):
    """A captured size: *rows*, padding included, of *queries* tokens each (the newest one, and draft tokens)."""

    rows: int
    queries: int


StepKey = tuple[Size, Chooser]
"""What a graph is captured for."""


def row_sizes(most: int) -> list[int]:
    """Return the numbers of rows that are captured: powers of two below *most*, and *most*."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def padded(num_rows: int, sizes: list[int]) -> int | None:
    """Return the smallest of *sizes*, ascending, that has room for *num_rows*; None if none has."""
    return next((size for size in sizes if size >= num_rows), None)
