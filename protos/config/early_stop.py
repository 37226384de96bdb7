"""The option `assistant_confidence_threshold`, the name that `transformers` has for it."""

from collections.abc import Collection
from typing import Annotated, Literal

from pydantic import BeforeValidator

NAME = "assistant_confidence_threshold"


def _number(given: object) -> object:
    """Return a probability, "auto" or None. Raises `ValueError` for anything else."""
    if given is None or given == "auto":
        return given
    try:
        number = float(str(given))
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ValueError("must be a number from 0 to 1, or 'auto'")
    return number


ConfidenceThreshold = Annotated[float | Literal["auto"] | None, BeforeValidator(_number)]
"""A least confidence; "auto": learnt while serving; None: drafts do not end early."""


def checked(
    threshold: float | Literal["auto"] | None, methods: Collection[str], stopping: Collection[str], *, may_branch: bool
) -> None:
    """Refuse a threshold where nothing would stop by it.

    Args:
        threshold: None: not given.
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
