"""The demo's text: the Python standard library's own source, cut into training and held-out files, and small programs.

The held-out files are listed in ``demo/heldout.txt`` so that benchmarks and tests can draw prompts
the models have never seen, whatever Python version trained them.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from demo import programs

HELDOUT_LIST = Path(__file__).with_name("heldout.txt")

# Tables of numbers and generated text, which are no use for learning Python.
_SKIPPED_FOLDERS = {
    "site-packages",
    "test",
    "tests",
    "encodings",
    "pydoc_data",
    "lib2to3",
    "idlelib",
    "idle_test",
    "__pycache__",
    "turtledemo",
}
_HELDOUT_SHARE = 20  # one file in twenty


def stdlib_root() -> Path:
    """Return the folder that holds the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def text_files(root: Path) -> list[Path]:
    """Return every ``.py``, ``.txt`` and ``.md`` file below *root* worth learning from, sorted by name."""
    found = (path for suffix in ("*.py", "*.txt", "*.md") for path in root.rglob(suffix))
    return sorted(path for path in found if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1]))


def is_heldout(name: str) -> bool:
    """Return whether the file *name* (relative to its root) is held out, by a fixed hash."""
    return hashlib.sha256(name.encode()).digest()[0] % _HELDOUT_SHARE == 0


def split(root: Path) -> tuple[list[Path], list[Path]]:
    """Return the training files and the held-out files below *root*."""
    files = text_files(root)
    heldout = [path for path in files if is_heldout(path.relative_to(root).as_posix())]
    kept_back = set(heldout)
    return [path for path in files if path not in kept_back], heldout


def read(paths: list[Path]) -> Iterator[str]:
    """Yield the text of each file; bytes that are not UTF-8 are replaced."""
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="replace")


def training_texts(root: Path) -> list[str]:
    """Return the texts of the training files below *root*; those of the standard library with `demo.programs`."""
    texts = list(read(split(root)[0]))
    return [*texts, *programs.texts()] if root == stdlib_root() else texts
