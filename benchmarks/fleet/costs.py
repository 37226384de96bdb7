"""What a replica's steps cost, as its engine measured them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class ReplicaCosts:
    """Seconds of steps, and how many draft tokens are accepted.

    Attributes:
        target_s: seconds of the target's forward by tokens fed: `protos.messages.StepCosts`.
        draft_s: seconds of one drafted token of all rows, by rows.
        overhead_s: seconds of a step for planning, sampling and committing.
        row_s: the same for each row of it.
        acceptance: rate at which a draft token is accepted after accepted ones.
        machine: where this was measured.
    """

    target_s: Mapping[int, float]
    draft_s: Mapping[int, float]
    overhead_s: float = 0.0
    row_s: float = 0.0
    acceptance: float = 0.0
    machine: str = ""

    def step_s(self, tokens: int, rows: int, k: int, drafting: int) -> float:
        """Return the seconds of a step that feeds *tokens* for *rows*, *drafting* of them with *k* draft tokens."""
        return (
            self.overhead_s
            + self.row_s * rows
            + _at(self._target_T, tokens)
            + (k * _at(self._draft_R, drafting) if drafting else 0.0)
        )

    @cached_property
    def _target_T(self) -> list[float]:
        return _curve(self.target_s)

    @cached_property
    def _draft_R(self) -> list[float]:
        return _curve(self.draft_s)

    def write(self, path: Path) -> None:
        """Write the costs as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> ReplicaCosts:
    """Return the costs in a file of `ReplicaCosts.write`."""
    given = json.loads(path.read_text(encoding="utf-8"))
    sizes = {name: {int(size): seconds for size, seconds in given[name].items()} for name in ("target_s", "draft_s")}
    return ReplicaCosts(**{**given, **sizes})


def _curve(seconds: Mapping[int, float]) -> list[float]:
    """Return the seconds of each size from 0 to the largest measured one, linear between measured sizes."""
    sizes = sorted(seconds)
    return [float(value) for value in np.interp(range(sizes[-1] + 1), sizes, [seconds[size] for size in sizes])]


def _at(curve: list[float], size: int) -> float:
    """Return the seconds of a size; above the largest measured one as many times more as the size is."""
    last = len(curve) - 1
    return curve[size] if size <= last else curve[last] * size / last
