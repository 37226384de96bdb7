"""Commands that the documents show: programs, options, targets, modules and files exist. Nothing is run."""

import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.cli import bench, main
from cluster.cli.options import API_KEY_VARIABLE
from proposers import registry
from protos.config import argument_names, speculation
from tests.docs.test_links import has_module
from tests.support.documents import ROOT, Piece, blocks, spans

COMMENT = re.compile(r"(?:^|\s+)# .*$")
ASSIGNMENT = re.compile(r"[A-Z][A-Z_]*=.*")
STARTS = ("slipstream ", "make ", "python -m ", ".venv/bin/", "serve deploy ", "serve run ", "ray up ", "kubectl ")
FOREIGN = frozenset({"curl", "helm", "pip", "grpcurl"})
"""Programs whose arguments are not checked."""
RAY_FLAGS = frozenset({"--no-restart", "--restart-only"})
"""Options of `ray up`."""
INSTALLED = re.compile("^(/opt|~)/slipstream/")
"""Where the image and the machines of `cluster-venv.yaml` have the repository."""
SHARED_OPTIONS = ("benchmarks/shared/measure.py", "tests/support/checkpoints/making.py")
EVERY_COMMAND = ("generate", "serve", "check", "simulate", "tune", "build-datastore", "env", "doctor")
BENCH_COMMANDS = ("serve", "compare")


def commands() -> list[Piece]:
    """Return every command: the lines of shell blocks, and spans that begin like one."""
    shown = [piece for block in blocks("bash") for piece in _lines(block)]
    return shown + [span for span in spans() if span.text.startswith(STARTS)]


def _lines(block: Piece) -> list[Piece]:
    lines = block.text.replace("\\\n", " ").splitlines()
    texts = [COMMENT.sub("", line).strip() for line in lines]
    return [Piece(block.document, block.line, text) for text in texts if text]


COMMANDS = commands()


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{command} {command.text[:60]}" for command in COMMANDS])
def test_commands_are_right(command: Piece) -> None:
    check(command.text)


def check(text: str) -> None:
    """Check one command line. Raises where something in it does not exist."""
    words = shlex.split(text)
    while ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    program = words[0].removeprefix(".venv/bin/")
    if program not in FOREIGN:
        CHECKS[program](words[1:])


def _slipstream(words: Sequence[str]) -> None:
    if list(words) in ([], ["--help"], ["--version"]):
        return
    name, *rest = words
    app = main.app
    if name == "bench" and rest and rest[0] in BENCH_COMMANDS:
        name, *rest = rest
        app = bench.app
    given, known = _parsed(app, name, rest)
    for option in ("speculative_config", "sc"):
        if option in given:
            speculation.read(json.loads(given[option]), registry.names())
    assert set(given) <= known


def _parsed(app: typer.Typer, name: str, words: Sequence[str]) -> tuple[dict[str, Any], set[str]]:
    """Return the options given to a command of *app* and those there are. Raises where one does not exist."""
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    context = command.context_class(command, info_name=name, **command.context_settings)
    given, _, _ = command.make_parser(context).parse_args(list(words))
    return given, {parameter.name for parameter in command.get_params(context)}


@cache
def flags() -> set[str]:
    """Return every option of every command of `slipstream`."""
    found = {"--version"}
    for app, names in ((main.app, EVERY_COMMAND), (bench.app, BENCH_COMMANDS)):
        for name in names:
            command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
            context = command.context_class(command, info_name=name)
            found |= {flag for option in command.get_params(context) for flag in (*option.opts, *option.secondary_opts)}
    return found


def _make(words: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    targets, variables = set(re.findall(r"^([\w-]+):", text, re.M)), set(re.findall(r"^(\w+) [?:]?=", text, re.M))
    for word in words:
        name, is_variable, _ = word.partition("=")
        assert name in (variables if is_variable else targets), word


def _python(words: Sequence[str]) -> None:
    option, module, *rest = words
    assert option == "-m", words
    if module == "pytest":
        paths = [word for word in rest if word.startswith("tests")]
        assert all((ROOT / path).exists() for path in paths), paths
        return
    found = importlib.util.find_spec(module)
    assert found is not None, module
    assert found.origin is not None, module
    _check_options(Path(found.origin), rest)


def _check_options(path: Path, words: Sequence[str]) -> None:
    """Options are strings in the script, that of a package included, or in the files where several have theirs."""
    run = path.with_name("__main__.py")
    of_package = [run] if path.name == "__init__.py" and run.exists() else []
    files = [path, *of_package, *(ROOT / shared for shared in SHARED_OPTIONS)]
    texts = [file.read_text() for file in files]
    known = set(re.findall(r'"(--[\w-]+)"', "".join(texts)))
    assert {word for word in words if word.startswith("--")} <= known, words


def _serve(words: Sequence[str]) -> None:
    action, what, *rest = words
    if action == "deploy":
        _check_file(what)
        return
    module, _, name = what.partition(":")
    assert action == "run", action
    assert has_module(module, name), what
    assert {word.partition("=")[0] for word in rest} <= argument_names.NAMES


def _ray(words: Sequence[str]) -> None:
    action, *rest = words
    assert action in ("up", "exec"), action
    path, *commands = [word for word in rest if word not in RAY_FLAGS]
    _check_file(path)
    for command in commands:
        check(command)


def _kubectl(words: Sequence[str]) -> None:
    action, *rest = words
    if action == "apply":
        assert rest[0] == "-k", rest
        assert (ROOT / rest[1] / "kustomization.yaml").is_file(), rest
    else:
        assert action == "create", action


def _docker(words: Sequence[str]) -> None:
    action, option, path, *rest = words
    assert (action, option) == ("build", "-f")
    _check_file(path)
    known = set(re.findall(r"^ARG (\w+)", (ROOT / path).read_text(), re.M))
    given = {value.partition("=")[0] for word, value in pairwise(rest) if word == "--build-arg"}
    assert given <= known


def _check_file(path: str) -> None:
    assert (ROOT / INSTALLED.sub("", path)).is_file(), path


CHECKS: Mapping[str, Callable[[Sequence[str]], None]] = {
    "slipstream": _slipstream,
    "make": _make,
    "python": _python,
    "serve": _serve,
    "ray": _ray,
    "kubectl": _kubectl,
    "docker": _docker,
}

FLAGS = [span for span in spans() if re.match(r"--?[a-z]", span.text) and "demo/" not in str(span)]


@pytest.mark.parametrize("span", FLAGS, ids=[f"{span} {span.text}" for span in FLAGS])
def test_options_in_the_text_exist(span: Piece) -> None:
    if span.document.name.startswith("benchmarks"):
        known = {
            flag
            for path in (ROOT / "benchmarks").rglob("*.py")
            for flag in re.findall(r'"(--[\w-]+)"', path.read_text())
        }
    else:
        known = flags() | RAY_FLAGS
    words = [word for word in span.text.replace("=", " ").split() if re.match(r"--?[a-z]", word)]
    assert set(words) <= known, set(words) - known


def test_the_variable_for_keys_is_the_one_that_is_read() -> None:
    assert any(span.text == API_KEY_VARIABLE for span in spans())


@pytest.mark.parametrize(
    "text",
    [
        "slipstream serve --no-such-option 3",
        "slipstream no-such-command",
        """slipstream serve m --speculative-config '{"metod": "ngram"}'""",
        "slipstream bench serve --no-such-option",
        "slipstream bench compare --no-such-option",
        "make no-such-target",
        "make test NO_SUCH_VARIABLE=1",
        "python -m benchmarks.no_such_module",
        "python -m benchmarks.engine --no-such-option",
        ".venv/bin/python -m pytest tests/no_such_folder",
        "serve deploy cluster/no-such.yaml",
        "serve run cluster.serve:no_such_name",
        "serve run cluster.serve:build_app no_such_argument=1",
        'ray exec cluster/cluster.yaml "serve deploy /opt/slipstream/cluster/no-such.yaml"',
        "kubectl apply -k cluster/no-such",
        "docker build -f cluster/no-such/Dockerfile .",
        "no-such-program",
    ],
)
def test_what_is_wrong_is_noticed(text: str) -> None:
    assert not is_right(text)


def is_right(text: str) -> bool:
    try:
        check(text)
    except Exception:  # whichever check it was
        return False
    return True


def test_there_are_commands_of_every_kind() -> None:
    programs = {shlex.split(command.text)[0].removeprefix(".venv/bin/") for command in COMMANDS}
    assert CHECKS.keys() <= programs
