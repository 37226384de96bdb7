"""Links, files and names that the documents mention exist."""

import ast
import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from tests.support.documents import DOCUMENTS, ROOT, Piece, anchors, links, spans

FILE = re.compile(r"([\w./-]+\.(?:py|md|ya?ml|toml|txt|proto|cpp|json|mjs))(?::([\w.]+))?")
FOLDER = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
MODULE = re.compile(r"([a-z_]+(?:\.\w+)+)(?::(\w+))?")
WRITTEN = ("benchmarks/results/", "demo/.work", "build/site")
"""What commands write."""
TOP = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
README_LINES = 200


def ids(pieces: list[Piece]) -> list[str]:
    return [f"{piece} {piece.text}" for piece in pieces]


LOCAL = [link for link in links() if not urlsplit(link.text).scheme]


@pytest.mark.parametrize("link", LOCAL, ids=ids(LOCAL))
def test_links_lead_somewhere(link: Piece) -> None:
    assert leads_somewhere(link)


def leads_somewhere(link: Piece) -> bool:
    name, _, anchor = link.text.partition("#")
    target = (link.document.parent / name).resolve() if name else link.document
    return target.is_file() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("target", ["docs/nothing.md", "docs/ray.md#nothing", "#nothing", "docs"])
def test_dead_links_are_noticed(target: str) -> None:
    assert not leads_somewhere(Piece(ROOT / "README.md", 1, target))


def test_there_are_links_in_every_direction() -> None:
    """A pattern that finds no links would make the test above pass."""
    found = {(link.document.name, link.text.partition("#")[0]) for link in LOCAL}
    assert {("README.md", "CONTRIBUTING.md"), ("README.md", "docs/ray.md"), ("serving.md", "ray.md")} <= found


def test_every_page_is_in_the_navigation_and_in_the_readme() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(_pages(config["nav"])) == pages
    readme = {Path(link.text.partition("#")[0]).name for link in LOCAL if link.document.name == "README.md"}
    assert pages <= readme


def _pages(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    assert isinstance(parts, list) or hasattr(parts, "__iter__")
    return [page for part in parts for page in _pages(part)]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_files_and_names_exist(document: Path) -> None:
    own = [span for span in spans() if span.document == document]
    missing = [f"{span}: {span.text}" for span in own if not _exists(span.text, document.parent)]
    assert not missing, missing


def _exists(text: str, folder: Path = ROOT) -> bool:
    """Whether what *text* names exists; True for what names no file, folder or module of the repository."""
    if text.startswith((*WRITTEN, "/")) or (folder / text).exists():
        return True
    if (found := FILE.fullmatch(text)) and ("/" in found[1] or found[2] or found[1].endswith((".py", ".toml", ".md"))):
        return _has(found[1], found[2]) or "NAME" in found[1]
    if (found := FOLDER.fullmatch(text)) and "/" in text and text.partition("/")[0] in TOP:
        return (ROOT / text).exists()
    if (found := MODULE.fullmatch(text)) and found[1].partition(".")[0] in TOP:
        return has_module(found[1], found[2])
    return True


def _has(path: str, name: str | None) -> bool:
    file = ROOT / path
    return file.is_file() and (name is None or name in names(file))


def has_module(module: str, name: str | None) -> bool:
    """A module, perhaps with a name in it: `package.module:name` or `package.module.name`."""
    path = ROOT / Path(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return name is None or name in names(file)
    file = path.parent.with_suffix(".py")
    return path.is_dir() or (name is None and file.is_file() and path.name in names(file))


@cache
def names(path: Path) -> set[str]:
    """Return the classes, functions, methods and variables of a Python file, and what its `__all__` names."""
    found: set[str] = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        found |= _names(node)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for inner in node.body for name in _names(inner)}
    return found


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        found = {target.id for target in node.targets if isinstance(target, ast.Name)}
        return found | set(ast.literal_eval(node.value)) if "__all__" in found else found
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return set()


@pytest.mark.parametrize(
    ("text", "exists"),
    [
        ("runtime/core/controller.py:Controller.step", True),
        ("runtime/core/controller.py:Controller.nothing", False),
        ("runtime/core/controller.py:Scheduler", False),  # which it imports
        ("runtime/core/nothing.py", False),
        ("slipstream.py:LLM", True),
        ("proposers/formats/", True),
        ("proposers/nothing/", False),
        ("benchmarks.engine", True),
        ("benchmarks.nothing", False),
        ("cluster.serve:build_app", True),
        ("cluster.serve:nothing", False),
        ("config.json", True),
        ("ibm-ai-platform/*-accelerator", True),
    ],
)
def test_what_is_missing_is_noticed(text: str, exists: bool) -> None:
    assert _exists(text) == exists
