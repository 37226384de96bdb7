"""Modules and names that docstrings and comments of the source mention exist."""

import re
from pathlib import Path

import pytest

from tests.docs.test_links import TOP, names
from tests.support.documents import ROOT, SPAN

DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")
SOURCE = ("benchmarks", "cluster", "demo", "proposers", "protos", "runtime", "workers")
FILES = [path for folder in SOURCE for path in sorted((ROOT / folder).rglob("*.py"))]


def missing(text: str) -> list[str]:
    """Return the dotted names in code spans of *text* that begin like a module of the repository and lead nowhere."""
    spans = [span for line in text.splitlines() for span in SPAN.findall(line)]
    return [span for span in spans if DOTTED.fullmatch(span) and not leads_somewhere(span)]


def leads_somewhere(dotted: str) -> bool:
    """Whether *dotted* is a package, a module, or a name in one; True for what is not of the repository."""
    parts = dotted.split(".")
    if parts[0] not in TOP or not (ROOT / parts[0]).is_dir():
        return True
    for length in range(len(parts), 0, -1):
        path, rest = ROOT.joinpath(*parts[:length]), ".".join(parts[length:])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return not rest or rest in names(file)
        if path.is_dir():
            return not rest
    return False


@pytest.mark.parametrize("folder", SOURCE)
def test_what_docstrings_mention_exists(folder: str) -> None:
    found = {str(file.relative_to(ROOT)): missing(file.read_text("utf-8")) for file in _files(folder)}
    wrong = {name: texts for name, texts in found.items() if texts}
    assert not wrong, wrong


def _files(folder: str) -> list[Path]:
    return [file for file in FILES if file.relative_to(ROOT).parts[0] == folder and "_pb2" not in file.name]


@pytest.mark.parametrize(
    ("dotted", "exists"),
    [
        ("runtime.core.controller", True),
        ("runtime.core", True),
        ("runtime.core.controller.Controller", True),
        ("runtime.core.controller.Controller.step", True),
        ("runtime.core.controller.Nothing", False),
        ("runtime.core.nothing", False),
        ("runtime.nothing.Controller", False),
        ("cluster.ray.cluster", True),
        ("torch.nothing", True),
        ("policy.current", True),
    ],
)
def test_what_is_missing_is_noticed(dotted: str, exists: bool) -> None:
    assert leads_somewhere(dotted) == exists
