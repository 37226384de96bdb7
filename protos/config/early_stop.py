"""The option `assistant_confidence_threshold`, the name that `transformers` has for it."""

from collections.abc import Collection

NAME = "assistant_confidence_threshold"


def checked(threshold: float | None, methods: Collection[str], stopping: Collection[str], *, may_branch: bool) -> None:
    """Refuse a threshold where nothing would stop by it.

    Args:
        threshold: from 0 to 1; None: not given.
        methods: of the configuration.
        stopping: methods that draft token by token, with a forward of the draft for each.
        may_branch: whether drafts are trees.

    Raises:
        ValueError: names the methods, or the shape.
    """
    if threshold is None:
        return
    if set(stopping).isdisjoint(methods):
        raise ValueError(
            f"{NAME} is for {', '.join(sorted(stopping))}, which draft token by token; got {', '.join(methods)}"
        )
    if may_branch:
        raise ValueError(f"{NAME} is for chains: set draft_shape to 'chain', or leave {NAME} out")
