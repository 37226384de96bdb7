"""The code's structure keeps within limits: folder and file sizes, import chains and circles, class names."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import measures, request_path

MAX_FILES_PER_FOLDER = 20
MAX_IMPORT_CHAIN = 14
MAX_LONG_FILES = 3
MAX_FILES_OF_A_REQUEST = 30
MAX_FILES_OF_THE_POLICY = 11


def crowded_folders(root: Path = measures.ROOT) -> dict[str, int]:
    return {name: size for name, size in measures.folder_sizes(root).items() if size > MAX_FILES_PER_FOLDER}


def import_circles(root: Path = measures.ROOT) -> list[set[str]]:
    """Return circles of modules, imports inside functions and for types included."""
    return measures.circles(measures.import_graph(root, lazy=True))


def chain_above_limit(root: Path = measures.ROOT) -> list[str]:
    chain = measures.longest_chain(measures.import_graph(root, lazy=False))
    return chain if len(chain) > MAX_IMPORT_CHAIN else []


def duplicated_classes(root: Path = measures.ROOT) -> dict[str, list[str]]:
    return measures.duplicated_classes(root)


def too_many_long_files(root: Path = measures.ROOT) -> dict[str, int]:
    found = measures.long_files(root)
    return found if len(found) > MAX_LONG_FILES else {}


CHECKS = [crowded_folders, import_circles, chain_above_limit, duplicated_classes, too_many_long_files]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_layout_keeps_its_limits(check: Callable[[], object]) -> None:
    assert not check()


def test_a_request_passes_few_files() -> None:
    """The default policy is counted apart: the path knows it by its interface only."""
    files = request_path.trace()
    assert "workers/target_rank.py" in files
    policy = [name for name in files if name.startswith("runtime/policy/")]
    assert len(policy) <= MAX_FILES_OF_THE_POLICY, policy
    assert len(files) - len(policy) <= MAX_FILES_OF_A_REQUEST, sorted(files)


def plant_crowd(root: Path) -> None:
    plant(root, {f"workers/m{i}.py": "" for i in range(MAX_FILES_PER_FOLDER + 1)})


def plant_circle(root: Path) -> None:
    lazy = "def f() -> None:\n    import workers.a\n"
    plant(root, {"workers/a.py": "import workers.b\n", "workers/b.py": lazy})


def plant_chain(root: Path) -> None:
    plant(root, {f"workers/m{i}.py": f"import workers.m{i + 1}\n" for i in range(MAX_IMPORT_CHAIN)})
    plant(root, {f"workers/m{MAX_IMPORT_CHAIN}.py": ""})


def plant_duplicate(root: Path) -> None:
    plant(root, {"workers/a.py": "class Planted: ...\n", "runtime/a.py": "class Planted: ...\n"})


def plant_long_files(root: Path) -> None:
    plant(root, {f"tests/f{i // 10}/m{i}.py": "x = 1\n" * (measures.LONG + 1) for i in range(MAX_LONG_FILES + 1)})


def plant(root: Path, sources: dict[str, str]) -> None:
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("check", "violate"),
    list(zip(CHECKS, [plant_crowd, plant_circle, plant_chain, plant_duplicate, plant_long_files], strict=True)),
    ids=lambda each: each.__name__,
)
def test_a_planted_violation_is_found(
    check: Callable[[Path], object], violate: Callable[[Path], None], tmp_path: Path
) -> None:
    plant(tmp_path, {"slipstream.py": ""})
    assert not check(tmp_path)
    violate(tmp_path)
    assert check(tmp_path)
