"""The embedded demo pair: a small Llama that writes Python, and a draft that guesses what it will write."""

from pathlib import Path


def pair() -> tuple[Path, Path]:
    """Return the folders of the demo target and the demo draft."""
    here = Path(__file__).parent
    return here / "target", here / "draft"
