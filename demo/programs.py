"""Small programs for the demo's target to learn from: complete, correct, and in simple words.

`programs.txt` holds templates, separated by lines of ``%%``. The first holds the words of all programs; the others are
programs. A template has lines of these forms before its code::

    @ name: a | b      the word $name is one of these; the same throughout one program
    @ a b: a b | x y   the same for words that go together
    ? text             a request that the program answers
    > expression       true when the program is right

and in its code ``{{a|b}}`` stands for one of several texts. The source is made of such programs alone, several in one
file, and conversations in the demo's chat format.
"""

import random
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TEMPLATES = Path(__file__).with_name("programs.txt")
NUM_TEXTS = 6000
ALONE, CHAT = 0.3, 0.3
"""Shares of texts that hold one program, and of those that are conversations."""
_CHOICE = re.compile(r"{{(.*?)}}", re.DOTALL)

Words = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Template:
    """A program whose words are not chosen yet."""

    words: Words
    requests: tuple[str, ...]
    checks: tuple[str, ...]
    code: str


@dataclass(frozen=True)
class Program:
    """A program: the modules that it imports, its code, a request for it, and expressions that are true after it."""

    imports: tuple[str, ...]
    code: str
    request: str
    checks: tuple[str, ...]

    @property
    def source(self) -> str:
        """The program as one text."""
        return _source([self])


@cache
def templates() -> tuple[Template, ...]:
    """Return all templates, each with the common words."""
    common, *programs = (_parse(block) for block in TEMPLATES.read_text(encoding="utf-8").split("%%\n"))
    return tuple(Template({**common.words, **t.words}, t.requests, t.checks, t.code) for t in programs)


def _parse(block: str) -> Template:
    lines = block.splitlines()
    start = next((i for i, line in enumerate(lines) if line[:2] not in ("@ ", "? ", "> ", "# ")), len(lines))
    words = {}
    for line in lines[:start]:
        if line.startswith("@ "):
            name, _, choices = line[2:].partition(":")
            words[name.strip()] = tuple(choice.strip() for choice in choices.split("|"))
    of_kind = {kind: tuple(line[2:] for line in lines[:start] if line[0] == kind) for kind in "?>"}
    return Template(words, of_kind["?"], of_kind[">"], "\n".join(lines[start:]))


def program(template: Template, chance: random.Random) -> Program:
    """Return *template* with words chosen by *chance*."""
    chosen = dict(_chosen(template.words, chance))

    def fill(text: str) -> str:
        one = _CHOICE.sub(lambda match: chance.choice(match[1].split("|")), text)
        return string.Template(one).safe_substitute(chosen)

    lines = fill(template.code).splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith(("import ", "from ")))
    code = "\n".join(lines[first:]).strip("\n")
    request = fill(chance.choice(template.requests))
    return Program(tuple(lines[:first]), code, request, tuple(map(fill, template.checks)))


def _chosen(words: Words, chance: random.Random) -> Iterator[tuple[str, str]]:
    for names, choices in words.items():
        choice = chance.choice(choices)
        yield from zip(names.split(), choice.split(), strict=True) if " " in names else [(names, choice)]


def texts(count: int = NUM_TEXTS, seed: int = 0) -> Iterator[str]:
    """Yield *count* texts, the same for the same *seed*."""
    chance = random.Random(seed)
    for _ in range(count):
        kind = chance.random()
        few = 1 if kind < ALONE + CHAT else chance.randint(2, 6)
        programs = [program(template, chance) for template in chance.sample(templates(), few)]
        programs.sort(key=lambda one: "__main__" in one.code)
        yield _conversation(programs[0]) if kind < CHAT else _source(programs)


def _source(programs: list[Program]) -> str:
    imports = sorted({line for one in programs for line in one.imports})
    return "\n\n\n".join((["\n".join(imports)] if imports else []) + [one.code for one in programs]) + "\n"


def _conversation(one: Program) -> str:
    return f"# user: {one.request}\n# assistant:\n{one.source}"
