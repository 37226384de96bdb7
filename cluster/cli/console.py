"""The two consoles of the command line: results on stdout, everything said about them on stderr."""

import logging

from rich.console import Console
from rich.logging import RichHandler

OUT = Console(soft_wrap=True)
ERR = Console(stderr=True, soft_wrap=True)


def show_error(message: str) -> None:
    """Say what went wrong, in one line."""
    ERR.print(f"slipstream: error: {' '.join(message.splitlines())}", style="red", markup=False, highlight=False)


def say(line: str) -> None:
    """Tell progress."""
    ERR.print(line, style="dim", markup=False, highlight=False)


def write(text: str) -> None:
    """Show generated text as it is, at once."""
    OUT.print(text, end="", markup=False, highlight=False, emoji=False)


def show_warnings() -> None:
    """Let warnings of all parts reach stderr in the same form."""
    handler = RichHandler(console=ERR, show_time=False, show_path=False, show_level=False, markup=False)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s")
