"""The sizes of rounds that have a graph: rows padded to one of a few numbers, and a fixed number of tokens for each."""

from typing import Literal, NamedTuple

SamplerKind = Literal["greedy", "drawn", "limited"]
"""What sampling the rows of a round needs at most: the most likely tokens, noise, or top-k, top-p and min-p as well."""


MOST_ROWS = 256
"""Rows of the largest size that is captured."""


class Size(NamedTuple):
    """A captured size: *rows*, padding included, of *queries* tokens each (the newest one, and draft tokens)."""

    rows: int
    queries: int


LINE = 3
"""The most numbers of a row's result for each of its tokens; see `workers.gpu.target_step.TargetStep`."""
TOKENS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of the forwards that are captured alone. Larger ones take the device longer than the host."""
MOST_WANTED = 256
"""Logits of such a forward at most."""


class ForwardSize(NamedTuple):
    """A captured forward has room for so many tokens, of *rows* of any length; *wanted* of them have logits."""

    tokens: int
    rows: int
    wanted: int

    def has_room_for(self, needed: "ForwardSize") -> bool:
        """Whether it is not smaller in anything."""
        return self.tokens >= needed.tokens and self.rows >= needed.rows and self.wanted >= needed.wanted


StepKey = tuple[Size, SamplerKind]
"""What a graph is captured for."""


def row_sizes(most: int) -> list[int]:
    """Return the numbers of rows that are captured: powers of two below *most*, and *most*."""
    return sorted({*(1 << power for power in range(most.bit_length())), most})


def padded(num_rows: int, sizes: list[int]) -> int | None:
    """Return the smallest of *sizes*, ascending, that has room for *num_rows*; None if none has."""
    return next((size for size in sizes if size >= num_rows), None)


def forward_sizes(most_rows: int, most_tokens: int) -> list[ForwardSize]:
    """Return the forwards that are captured, the largest first, for rounds of so many rows and tokens at most."""
    rows = min(most_rows, MOST_ROWS)
    fitting = {min(tokens, most_tokens) for tokens in TOKENS}
    return [ForwardSize(each, min(each, rows), min(each, MOST_WANTED)) for each in sorted(fitting, reverse=True)]
