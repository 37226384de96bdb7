"""Every limit on the security page names its test, and every known hole says what became of it."""

import re
from collections import Counter

import pytest

from tests.support.documents import ROOT

PAGE = (ROOT / "docs/security.md").read_text("utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py):(test_\w+)`")
HOLE = re.compile(r"CVE-\d{4}-\d{4,6}")


def rows(heading: str) -> list[str]:
    """Return the rows of the tables below a heading, down to the next of its level."""
    level = heading.partition(" ")[0]
    _, _, rest = PAGE.partition(f"\n{heading}\n")
    text = re.split(rf"^{level} ", rest, maxsplit=1, flags=re.M)[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [line for line in lines if not line.startswith(("| Input ", "| Vulnerability "))]


LIMITS, HOLES = rows("## Limits of the inputs"), rows("## Known holes of others")


@pytest.mark.parametrize("row", LIMITS, ids=[row.split("|")[1].strip() for row in LIMITS])
def test_every_limit_names_its_test(row: str) -> None:
    assert TEST.search(row.rpartition(" | ")[2]), row


@pytest.mark.parametrize("row", HOLES, ids=[row.split("|")[1].strip() for row in HOLES])
def test_every_hole_names_its_test_or_why_it_cannot_happen(row: str) -> None:
    answer = row.split("|")[3]
    assert HOLE.search(row.split("|")[1]), row
    assert TEST.search(answer) or "cannot happen: " in answer or "this project saves none" in answer, row


def test_named_tests_are_run() -> None:
    """`tests/docs/test_links.py` checks that a name is in its file; here, that it is a function of a test."""
    named = TEST.findall(PAGE)
    assert len(named) > 50
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text("utf-8"), re.M), (path, name)


def test_every_hole_is_named_once() -> None:
    found = Counter(hole for row in HOLES for hole in HOLE.findall(row.split("|")[1]))
    assert len(found) >= 60
    assert max(found.values()) == 1, found.most_common(3)


def test_reports_go_to_a_private_advisory() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    assert "Report a vulnerability" in text
    assert not re.search(r"[\w.]+@[\w.]+", text), "no address that nobody reads"
