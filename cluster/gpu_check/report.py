"""The result of a check on GPUs, as a table and as JSON."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cluster.gpu_check.decoding import PLAIN, DecodingSpeed

BOUND_SHARE, SPEEDUPS = 0.8, {1: 2.5, 32: 1.5}
"""Goals for 8B on one GPU: of the bandwidth bound at batch 1, and with four of five draft tokens accepted."""
GOAL_MODEL = "8B"
HEAD = "| model | engine | batch | tokens/s | of the bound | speed-up | accepted | ms of a step |"
PHASES = "Milliseconds of a step: drafting, waiting for the draft, the target's forward, verification."
RULE = "|---|---|---|---|---|---|---|---|"


@dataclass(frozen=True)
class CheckResult:
    """One check: what it says, or why it failed."""

    name: str
    passed: bool
    text: str


@dataclass
class GpuReport:
    """All results.

    Attributes:
        environment: the device, and versions.
        bytes_per_s: of copies in the device's memory.
        checks: identity and faults.
        speed: a row for each engine and batch size.
        notes: what was not measured, and why.
    """

    environment: dict[str, Any]
    bytes_per_s: float = 0.0
    checks: list[CheckResult] = field(default_factory=list)
    speed: list[DecodingSpeed] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check passed. Speeds do not count."""
        return all(check.passed for check in self.checks)

    def write(self, path: Path) -> None:
        """Write everything as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"passed": self.passed, **asdict(self), "goals": self.goals()}
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def goals(self) -> list[str]:
        """Return a line for each goal that was measured: what was wanted, what was found."""
        found = []
        for row in self.speed:
            if row.model != GOAL_MODEL:
                continue
            if row.method == PLAIN and row.batch == 1 and row.share_of_bound is not None:
                found.append(_goal("of the bandwidth bound at batch 1", row.share_of_bound, BOUND_SHARE))
            if row.speedup is not None and row.batch in SPEEDUPS:
                found.append(_goal(f"times plain decoding at batch {row.batch}", row.speedup, SPEEDUPS[row.batch]))
        return found

    def table(self) -> list[str]:
        """Return the speeds as a Markdown table."""
        return [PHASES, "", HEAD, RULE, *map(_line, self.speed)] if self.speed else []


def _goal(what: str, found: float, wanted: float) -> str:
    return f"{'met' if found >= wanted else 'MISSED'}: {GOAL_MODEL}: {found:.2f} {what}, {wanted:g} wanted"


def _line(row: DecodingSpeed) -> str:
    share = "" if row.share_of_bound is None else f"{row.share_of_bound:.0%}"
    speedup = "" if row.speedup is None else f"{row.speedup:.2f}"
    accepted = "" if row.accepted is None else f"{row.accepted:.0%}"
    phases = ", ".join(f"{ms:.2f}" for ms in row.phases_ms) if any(row.phases_ms) else ""
    start = f"| {row.model} | {row.method} | {row.batch} | {row.tokens_per_s:.0f} |"
    return f"{start} {share} | {speedup} | {accepted} | {phases} |"
