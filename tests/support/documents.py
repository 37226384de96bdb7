"""Reads the documents (README, CONTRIBUTING, docs/): their code blocks, code spans, links and headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "demo/README.md",
)

FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^ *```$', re.M | re.S
)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)


@dataclass(frozen=True)
class Piece:
    """A code block, code span or link target of a document."""

    document: Path
    line: int
    text: str
    language: str = ""
    title: str = ""

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(*languages: str) -> list[Piece]:
    """Return the fenced blocks in these languages, of all documents."""
    return [piece for document in DOCUMENTS for piece in _blocks(document) if piece.language in languages]


def _blocks(document: Path) -> Iterator[Piece]:
    text = document.read_text("utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Piece(document, line, found["text"], found["language"], found["title"] or "")


def spans() -> list[Piece]:
    """Return the inline code of all documents, each on one line."""
    return [
        Piece(document, line, " ".join(text.split()))
        for document in DOCUMENTS
        for line, text in _matches(SPAN, prose(document))
    ]


def links() -> list[Piece]:
    """Return the targets of the links of all documents."""
    return [
        Piece(document, line, text)
        for document in DOCUMENTS
        for line, text in _matches(LINK, SPAN.sub("", prose(document)))
    ]


def prose(document: Path) -> str:
    """Return the text without fenced blocks, whose lines are left empty."""
    return FENCE.sub(lambda found: "\n" * found[0].count("\n"), document.read_text("utf-8"))


def anchors(document: Path) -> set[str]:
    """Return the anchors of the headings, as GitHub and mkdocs make them."""
    return {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
        for heading in HEADING.findall(prose(document))
    }


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    for found in pattern.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, found[1]
