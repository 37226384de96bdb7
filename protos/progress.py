"""How long operations report what they are doing."""

from collections.abc import Callable

ProgressCallback = Callable[[str], None]
"""Called with one line of text when a stage begins."""
