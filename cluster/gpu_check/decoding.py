"""How fast an engine decodes, as it is measured and reported."""

from dataclasses import dataclass

PROMPT, SHORT, LONG = 128, 16, 144
"""Tokens of prompts, and of two runs, whose difference is the decoding alone."""
PLAIN = "plain"


@dataclass(frozen=True)
class DecodingSpeed:
    """One engine at one batch size.

    Attributes:
        model, method, batch: what was measured.
        tokens_per_s: generated tokens a second, of all rows.
        share_of_bound: of plain decoding: the time in which the device can read weights and KV cache, over the
            step's; None for others.
        speedup: over plain decoding at this batch size; None for that itself.
        accepted: share of draft tokens that were accepted.
        phases_ms: milliseconds of a step in drafting, waiting for the draft, the target's forward, and verification.
    """

    model: str
    method: str
    batch: int
    tokens_per_s: float
    share_of_bound: float | None = None
    speedup: float | None = None
    accepted: float | None = None
    phases_ms: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
