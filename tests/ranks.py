"""Ranks of a group as threads of one process."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from workers.groups import Group, connect_store, form, open_store

Result = TypeVar("Result")


def on_ranks(size: int, work: Callable[[Group], Result], *, timeout_s: float = 60.0) -> list[Result]:
    """Run *work* on every rank of a gloo group, a thread each, and return what they returned.

    Raises what the first rank raised that raised anything.
    """
    _store, address = open_store()

    def rank_of(rank: int) -> Result:
        group = form("tp", connect_store(address), rank, size, timeout_s=timeout_s)
        try:
            return work(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank_of, range(size)))
