"""Nothing that comes from outside is run: the source unpickles and evaluates nothing, and trusts no checkpoint."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ("protos", "proposers", "workers", "runtime", "cluster")
UNPICKLERS = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
ONLY_ERRORS = {"workers/weights/files.py": {"UnpicklingError"}}
"""Files that may import `pickle`, and what they may use of it."""
EVALUATORS = {"eval", "exec", "compile", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load"}
GUARDS = ("runtime/http/server", "runtime/frontend/keys.py", "protos/sampling.py",
          "cluster/serving/tls.py", "workers/weights/hub.py")  # fmt: skip
"""Where an `assert` could be a check of what comes from outside."""
OLDEST_RAY = (2, 56)
"""CVE-2026-57516 is fixed in it."""


@cache
def sources() -> tuple[tuple[str, ast.Module], ...]:
    paths = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py")) if "_pb2" not in path.name]
    return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))) for path in paths)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def test_nothing_is_unpickled() -> None:
    for path, tree in sources():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is(node.value, "pickle")}
        assert used <= ONLY_ERRORS.get(path, set()), (path, used)
        assert not imported(tree) & UNPICKLERS or path in ONLY_ERRORS, path
        for name, call in calls(tree):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if name in ("torch.load", "numpy.load", "np.load"):
                safe = {"torch.load": "weights_only=True"}.get(name, "allow_pickle=False")
                assert f"{safe.partition('=')[0]}={given.get(safe.partition('=')[0], 'False')}" == safe, (path, name)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def test_nothing_is_evaluated() -> None:
    for path, tree in sources():
        for name, call in calls(tree):
            assert name not in EVALUATORS, (path, call.lineno, name)
            assert not [keyword for keyword in call.keywords if keyword.arg == "shell"], (path, call.lineno)


def test_code_of_checkpoints_is_never_trusted() -> None:
    seen = 0
    for path, tree in sources():
        for name, call in calls(tree):
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if "trust_remote_code" in given:
                seen += 1
                assert given["trust_remote_code"] == "False", (path, name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "trust_remote_code":
                        seen += 1
                        assert ast.unparse(value) == "False", path
    assert seen >= 4, "the pattern finds the calls"


def test_checks_of_security_are_no_assertions() -> None:
    for path, tree in sources():
        if path.startswith(GUARDS):
            assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], path


def test_ray_is_newer_than_its_known_holes() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (floor,) = (found for each in project["dependencies"] if (found := re.match(r"ray\[serve\]>=(\d+)\.(\d+)", each)))
    assert (int(floor[1]), int(floor[2])) >= OLDEST_RAY
