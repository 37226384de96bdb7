"""Imports run one way, light parts load no heavy packages, and other packages of our names are detected."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import shadowing

ROOT = Path(__file__).parents[2]
EVERYTHING = {"protos", "proposers", "workers", "runtime", "cluster", "demo", "slipstream"}
ALLOWED = {
    "protos": {"protos"},
    "proposers": {"protos", "proposers"},
    "workers": {"protos", "proposers", "workers"},
    "runtime": {"protos", "proposers", "runtime"},
    "cluster": EVERYTHING,
    "demo": {"demo", "slipstream"},
    "slipstream": EVERYTHING,
}
# Packages that a part must not import, not even inside a function.
NEVER = {
    "protos": {"ray", "transformers"},
    "proposers": {"ray"},
    "workers": {"ray"},
    "runtime": {"ray", "torch"},
    "cluster": set(),
    "demo": {"ray"},
    "slipstream": {"ray", "torch", "transformers"},
}
RAY_FILES = ("cluster/ray/", "cluster/ray_serve/", "cluster/serve.py")


def source_files() -> list[Path]:
    return [ROOT / "slipstream.py", *sorted(p for part in ALLOWED for p in (ROOT / part).rglob("*.py"))]


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the top-level name of every import in *path*."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield (node.module or "").split(".")[0], node


def typing_lines(path: Path) -> set[int]:
    """Return the lines of statements under `if TYPE_CHECKING:`, which never run."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {statement.lineno for block in blocks for statement in block.body}


def test_every_part_is_covered() -> None:
    parts = {part_of(path) for path in source_files()}
    assert parts == set(ALLOWED), "a folder of the layout is missing or new"


def test_imports_run_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {part_of(path)} must not import {name}"
        for path in source_files()
        for name, node in imports_of(path)
        if name in EVERYTHING - ALLOWED[part_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def test_parts_name_no_package_they_must_not_know() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {part_of(path)} must not import {name}"
        for path in source_files()
        for name, node in imports_of(path)
        if name in NEVER[part_of(path)] and node.lineno not in typing_lines(path)
    ]
    assert not wrong, "\n".join(wrong)


def test_ray_is_named_only_where_it_belongs() -> None:
    files = [p.relative_to(ROOT).as_posix() for p in source_files() if any(n == "ray" for n, _ in imports_of(p))]
    assert all(name.startswith(RAY_FILES) for name in files), files


def test_every_installed_part_is_packaged_and_shadow_checked() -> None:
    assert set(shadowing.NAMES) == EVERYTHING


def run_python(code: str, *, cwd: Path = ROOT, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run *code* in a fresh interpreter that finds Slipstream in *path* first."""
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def modules_of(*parts: str) -> list[str]:
    """Return the dotted names of all modules in *parts*, but for those that need ray or generated code's packages."""
    found = [path.relative_to(ROOT) for part in parts for path in sorted((ROOT / part).rglob("*.py"))]
    wanted = [path for path in found if not path.as_posix().startswith(RAY_FILES) and path.name != "__main__.py"]
    return [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in wanted]


IMPORT_ALL = """
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
loaded = sorted({unwanted!r} & set(sys.modules))
assert not loaded, loaded
"""


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (modules_of("runtime"), {"torch", "ray", "transformers"}),
        (modules_of("protos"), {"torch", "ray", "transformers"}),
        (["slipstream"], {"torch", "ray", "transformers"}),
        (["cluster.cli.main"], {"torch", "ray", "transformers"}),
        (["proposers.registry", "proposers.ngram"], {"torch", "ray", "transformers"}),
    ],
    ids=["runtime", "protos", "slipstream", "cli", "model-free proposers"],
)
def test_light_parts_load_nothing_heavy(modules: list[str], unwanted: set[str]) -> None:
    ran = run_python(IMPORT_ALL.format(modules=modules, unwanted=unwanted))
    assert ran.returncode == 0, ran.stderr


def test_everything_imports_with_ray_blocked() -> None:
    modules = modules_of("protos", "proposers", "workers", "runtime", "cluster", "demo")
    blocked = "import sys\nsys.modules['ray'] = None\n"
    ran = run_python(blocked + IMPORT_ALL.format(modules=["slipstream", *modules], unwanted=set()))
    assert ran.returncode == 0, ran.stderr


def stranger(folder: Path, name: str, *, package: bool = True) -> Path:
    (folder / name).mkdir()
    if package:
        (folder / name / "__init__.py").touch()
    return folder / name


def test_no_stranger_here() -> None:
    shadowing.check()


@pytest.mark.parametrize("name", ["runtime", "workers", "demo"])
def test_a_package_of_the_same_name_is_named(tmp_path: Path, name: str) -> None:
    place = stranger(tmp_path, name)
    load = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import cluster.shadowing as s; s.check()"
    ran = run_python(load, cwd=tmp_path, path=tmp_path)
    last = ran.stderr.strip().splitlines()[-1]
    assert "ConfigError" in last
    assert f"`{name}` is {place / '__init__.py'}" in last


def test_a_stranger_imported_first_is_named(tmp_path: Path) -> None:
    place = stranger(tmp_path, "runtime")
    load = f"import sys, runtime; sys.path.insert(0, {str(ROOT)!r}); import cluster.shadowing as s; s.check()"
    ran = run_python(load, cwd=tmp_path, path=tmp_path)
    assert str(place) in ran.stderr.strip().splitlines()[-1]


def test_even_protos_shadowed_gives_the_message(tmp_path: Path) -> None:
    place = stranger(tmp_path, "protos")
    load = f"import sys; sys.path.insert(1, {str(ROOT)!r}); import cluster.shadowing as s; s.check()"
    ran = run_python(load, cwd=tmp_path, path=tmp_path)
    last = ran.stderr.strip().splitlines()[-1]
    # Where Slipstream is installed as editable, its own `protos.errors` is found all the same.
    assert last.startswith(("ImportError: Slipstream lives in", "protos.errors.ConfigError: Slipstream lives in"))
    assert str(place) in last
