"""Which states of the prefix cache a forward reads and writes."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class KeptStates(NamedTuple):
    """The recurrent states of the prefix cache that a forward's R rows begin with, and the N that it keeps.

    Attributes:
        from_R: int64, the number of the state that each row begins with; -1: its slot's own.
        rows_N, positions_N, numbers_N: int64; each row and position after which a state is kept, and its number.
    """

    from_R: Ints
    rows_N: Ints
    positions_N: Ints
    numbers_N: Ints
