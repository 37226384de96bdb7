"""The two consoles of the command line: results on stdout, progress and errors on stderr."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


def show_progress_once() -> Callable[[str], None]:
    """Return what prints a line of progress, but for lines that it has printed: engines of one kind start alike."""
    shown: set[str] = set()

    def show(line: str) -> None:
        if line not in shown:
            shown.add(line)
            show_progress(line)

    return show


def write(text: str) -> None:
    """Print generated text unformatted, without buffering."""
    OUT.print(text, end="", markup=False, highlight=False, emoji=False)


def show_warnings() -> None:
    """Print logged warnings on stderr."""
    handler = RichHandler(console=ERR, show_time=False, show_path=False, show_level=False, markup=False)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s")


@contextmanager
def progress_bar(text: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr, or *text* and *total* alone if that is a file; yield what advances it by one."""
    from tqdm import tqdm  # noqa: PLC0415 - only where a bar is shown

    is_hidden = not (ERR.is_terminal or ERR.is_dumb_terminal)
    if is_hidden:
        show_progress(f"{text}: {total} to do")
    with tqdm(total=total, desc=text, dynamic_ncols=True, disable=is_hidden) as bar:

        def advance() -> None:
            bar.update(1)

        yield advance
