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
    threshold: float | Literal["auto"] | None, methods: Collection[str], stopping: Collection[str], trees: str | None
) -> None:
    """Refuse a threshold where nothing would stop by it.

    Args:
        threshold: None: not given.
        methods: of the configuration.
        stopping: methods that draft token by token, with a forward of the draft for each.
        trees: the acceptance rule of trees; None: drafts are chains.

    Raises:
        ValueError: names the methods, or the shape.
    """
    if threshold is None:
        return
    if set(stopping).isdisjoint(methods):
        raise ValueError(
            f"{NAME} is for {', '.join(sorted(stopping))}, which draft token by token; got {', '.join(methods)}"
        )
    if trees is not None and (threshold == "auto" or trees != "coupled"):
        raise ValueError(
            f"{NAME} {threshold!r} with rejection_sample_method {trees!r} is for chains; trees can have a number with "
            "'coupled': set draft_shape to 'chain', or leave one of them out"
        )
