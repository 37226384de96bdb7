"""The series that a server's `/metrics` has."""

import time
from collections.abc import Callable

PUBLISHED_S = 0.6
"""Statistics of earlier requests reach the server within this time."""


def series(text: str) -> set[str]:
    """Return the names and labels of all samples."""
    return {line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")}


def settled_series(read: Callable[[], str]) -> set[str]:
    """Return the series once the statistics of earlier requests are among them."""
    time.sleep(PUBLISHED_S)
    return series(read())
