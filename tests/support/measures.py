"""Measures of the code's structure; `python -m tests.support.measures [ROOT]` prints them."""

import ast
import io
import re
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ("protos", "proposers", "workers", "runtime", "cluster", "demo", "slipstream.py")
"""Installed modules."""
EVERYTHING = (*SOURCE, "benchmarks", "tests")
LONG = 300

WORDS: Mapping[str, str] = {
    "squad": r"squads?",
    "gang": r"gangs?",
    "roster": r"rosters?",
    "nobody, somebody": r"nobody|somebody",
    "whoever": r"whoever|whatever",
    "guess": r"guess(?:es|ed|ing)?",
    "law": r"laws?",
    "behind": r"behind",
    "say, says, said": r"says?|said",
    "walking": r"walking",
    "judge": r"judg(?:e|es|ed|ing)",
    "DESIGN": r"DESIGN",
}
"""Words that the project's prose avoids, as regular expressions of whole words."""

Graph = dict[str, set[str]]


def files(parts: tuple[str, ...] = EVERYTHING, root: Path = ROOT) -> list[Path]:
    """Return the Python files of *parts*, generated code left out."""
    found = (
        path for part in parts for path in ([root / part] if part.endswith(".py") else (root / part).rglob("*.py"))
    )
    return sorted(path for path in found if "_pb2" not in path.name)


def folder_sizes(root: Path = ROOT) -> Counter[str]:
    """Return how many Python files each folder has, largest first."""
    return Counter(path.parent.relative_to(root).as_posix() for path in files(root=root))


def long_files(root: Path = ROOT) -> dict[str, int]:
    """Return files of more than 300 lines, and how many they have."""
    lengths = {
        path.relative_to(root).as_posix(): len(path.read_text("utf-8").splitlines()) for path in files(root=root)
    }
    return {name: length for name, length in sorted(lengths.items()) if length > LONG}


def duplicated_classes(root: Path = ROOT) -> dict[str, list[str]]:
    """Return class names that are defined in more than one module of the source, and the modules."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in files((*SOURCE, "benchmarks"), root):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(root).as_posix())
    return {name: places for name, places in sorted(found.items()) if len(places) > 1}


def import_graph(root: Path = ROOT, *, lazy: bool) -> Graph:
    """Return which modules of the source each one imports; with *lazy*, inside functions and for types, too."""
    modules = {_module(path, root): path for path in files(SOURCE, root)}
    return {name: _imported(path, modules, lazy=lazy) - {name} for name, path in modules.items()}


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, modules: Mapping[str, Path], *, lazy: bool) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    nodes: Iterator[ast.AST] = ast.walk(tree) if lazy else iter(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            whole = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
            found |= whole or {str(node.module)}
    return found & modules.keys()


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of modules, each of which imports the next. *graph* must have no circle."""

    @cache
    def chain(name: str) -> list[str]:
        return [name, *max((chain(other) for other in sorted(graph[name])), key=len, default=[])]

    return max((chain(name) for name in graph), key=len)


def circles(graph: Graph) -> list[set[str]]:
    """Return the sets of modules that import one another."""
    reach = {name: _reachable(graph, name) for name in graph}
    found = {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}
    return [set(each) for each in found]


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += graph[name]
    return seen


def prose(path: Path) -> str:
    """Return the comments and docstrings of a Python file, or the whole of any other."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return text
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    return "\n".join([*comments, *_docstrings(ast.parse(text))])


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield every string that stands alone as a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def word_counts(root: Path = ROOT) -> dict[str, int]:
    """Return how often each of `WORDS` stands in comments, docstrings and documents."""
    documents = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    text = "\n".join(prose(path) for path in [*files(root=root), *documents] if path.name != "measures.py")
    return {name: len(re.findall(rf"\b(?:{word})\b", text)) for name, word in WORDS.items()}


def main() -> None:
    """Print all measures of the given folder, by default of this repository."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    eager, whole = (import_graph(root, lazy=lazy) for lazy in (False, True))
    name, size = folder_sizes(root).most_common(1)[0]
    show: Callable[[str], None] = print
    show(f"largest folder: {name}, {size} files")
    show(f"circles: {circles(whole)}")
    if not circles(eager):
        chain = longest_chain(eager)
        show(f"longest import chain: {len(chain)}: {' > '.join(chain)}")
    show(f"duplicated class names: {duplicated_classes(root)}")
    show(f"files above {LONG} lines: {long_files(root)}")
    show(f"words: {word_counts(root)}")


if __name__ == "__main__":
    main()
