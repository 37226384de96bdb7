"""The embedded demo: a small Llama that writes Python, a draft model for it, and draft heads."""

from pathlib import Path

HERE = Path(__file__).parent
PROMPTS = HERE / "prompts.jsonl"
"""Beginnings of Python files, one per line, for the demo target to continue."""


def pair() -> tuple[Path, Path]:
    """Return the folders of the demo target and the demo draft."""
    return HERE / "target", HERE / "draft"


def head(method: str) -> Path:
    """Return the folder of the demo target's heads for *method*, such as "medusa" or "eagle3"."""
    return HERE / "heads" / method
