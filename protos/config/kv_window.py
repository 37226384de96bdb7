"""The options `draft_kv_window` and `draft_kv_sinks`: which positions of its KV cache a draft reads."""

from collections.abc import Collection
from typing import NamedTuple

NAME = "draft_kv_window"
SINKS_NAME = "draft_kv_sinks"
DEFAULT_SINKS = 4
"""First positions that stay visible, as many as in StreamingLLM (Xiao et al. 2023)."""
SELF_WINDOW = "self_window"
"""The method in which the target drafts over a window of its own cache."""
WITH_KV = frozenset({"draft_model", "eagle", "eagle3", "mtp", "p_eagle", "pard", SELF_WINDOW})
"""Methods whose draft attends causally over a KV cache."""


class KVWindow(NamedTuple):
    """What a draft reads of its K and V: StreamingLLM's window with attention sinks (Xiao et al. 2023).

    A token at position p attends to position j if j <= p, and p - j < `size` or j < `sinks`. Positions are those in
    the text: there is no renumbering.

    Attributes:
        size: number of positions before and with its own; at least 1.
        sinks: number of first positions; 0: none.
    """

    size: int
    sinks: int


def kv_window(size: int | None, sinks: int | None) -> KVWindow | None:
    """Return the window that two options describe; None: the draft reads everything."""
    return None if size is None else KVWindow(size, DEFAULT_SINKS if sinks is None else sinks)


def checked(size: int | None, sinks: int | None, methods: Collection[str]) -> None:
    """Refuse a window where nothing would read it. Raises `ValueError`, which names the methods."""
    if size is None and sinks is not None:
        raise ValueError(f"{SINKS_NAME} needs {NAME}, got {SINKS_NAME} {sinks} alone: without a window all is read")
    if size is None and SELF_WINDOW in methods:
        raise ValueError(
            f"method {SELF_WINDOW!r} needs {NAME}: the target would draft at the cost of decoding, got none"
        )
    if size is not None and WITH_KV.isdisjoint(methods):
        raise ValueError(
            f"{NAME} is for {', '.join(sorted(WITH_KV))}, whose drafts read a KV cache; got {', '.join(methods)}"
        )
