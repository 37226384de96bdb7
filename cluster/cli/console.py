"""The two consoles of the command line: results on stdout, progress and errors on stderr."""

import logging

from rich.console import Console
from rich.logging import RichHandler

OUT = Console(soft_wrap=True)
ERR = Console(stderr=True, soft_wrap=True)


def show_error(message: str) -> None:
    """Print an error in one line."""
    ERR.print(f"slipstream: error: {' '.join(message.splitlines())}", style="red", markup=False, highlight=False)


def show_progress(line: str) -> None:
    """Print a line of progress."""
    ERR.print(line, style="dim", markup=False, highlight=False)


def write(text: str) -> None:
    """Print generated text unformatted, without buffering."""
    OUT.print(text, end="", markup=False, highlight=False, emoji=False)


def show_warnings() -> None:
    """Print logged warnings on stderr."""
    handler = RichHandler(console=ERR, show_time=False, show_path=False, show_level=False, markup=False)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s")
