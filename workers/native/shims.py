"""Functions in C that compiled graphs call in place of operators, without torch's dispatcher and without Python."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shim:
    """The shim of one operator on CPUs.

    Attributes:
        operator: an overload.
        declaration: in C, as torch's compiler wants it.
        load: loads it for graphs that call it; called more than once. Raises `KernelUnavailableError`.
    """

    operator: Any
    declaration: str
    load: Callable[[], object]


SHIMS: list[Shim] = []
"""Those of all operators: the modules that define operators add them."""
