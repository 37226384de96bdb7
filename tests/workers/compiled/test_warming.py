"""Warm-up: what is compiled when, what runs meanwhile, and that a second start compiles nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from protos.config.engine import EngineConfig, ModelConfig
from protos.worker_messages import Allocate
from workers.compile import CompileError
from workers.compiled import store, warming
from workers.compiled.warming import warm_up

LATER = replace(EngineConfig(ModelConfig("m")), model=ModelConfig("m", compile_in_background=True))
AT_ONCE = EngineConfig(ModelConfig("m"))
ALLOCATE = Allocate(4, 32, 97)


class Part:
    """Runs a model: eagerly until it loads what was compiled."""

    def __init__(self, key: str | None = "a" * 32, *, differs: bool = False) -> None:
        self._key, self._differs, self.runs = key, differs, "eager"

    def key(self) -> str | None:
        return self._key

    def compile_into(self, folder: Path, trial: Callable[[], None]) -> None:
        raise AssertionError("only the child compiles")

    def load_compiled(self, folder: Path) -> None:
        if self._differs:
            raise CompileError("results differ")
        self.runs = (folder / "code").read_text()


class FakeChild:
    """Compiles when it is waited for, as a child process does; counts."""

    count = 0
    failure: str | None = None
    is_done = False

    def __init__(self, config: EngineConfig, allocate: Allocate, part: str, key: str, nice: int = 0) -> None:
        self.key, self.nice = key, nice
        FakeChild.count += 1

    def has_ended(self) -> bool:
        return FakeChild.is_done

    def wait(self) -> str | None:
        if FakeChild.failure is None:
            folder = store.begin()
            (folder / "code").write_text("compiled")
            store.publish(folder, self.key)
        return FakeChild.failure

    def kill(self) -> None: ...


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(warming, "Child", FakeChild)
    monkeypatch.setattr(warming, "has_compiler", lambda: True)
    FakeChild.count, FakeChild.failure, FakeChild.is_done = 0, None, False
    yield tmp_path / "slipstream" / "compiled"


def start(part: Part, config: EngineConfig = AT_ONCE) -> tuple[warming.Warm, list[str]]:
    lines: list[str] = []
    return warm_up(config, ALLOCATE, {"target": part}, lines.append), lines


def test_a_second_start_compiles_nothing() -> None:
    first, second = Part(), Part()
    warm, lines = start(first)
    assert (first.runs, FakeChild.count) == ("compiled", 1)
    assert warm.keys == ("a" * 32,)
    assert "compiling the target, once for this machine" in lines[0]
    warm, lines = start(second)
    assert (second.runs, FakeChild.count) == ("compiled", 1)
    assert len(lines) == 1
    assert "loaded in" in lines[0]


def test_a_damaged_entry_is_compiled_again(root: Path) -> None:
    start(Part())
    (root / ("a" * 32) / "code").write_text("evil")
    part = Part()
    start(part)
    assert (part.runs, FakeChild.count) == ("compiled", 2)


def test_another_key_is_another_entry() -> None:
    start(Part("a" * 32))
    start(Part("b" * 32))
    assert FakeChild.count == 2


def test_in_the_background_the_part_runs_eager_until_the_swap() -> None:
    part = Part()
    warm, lines = start(part, LATER)
    assert warm.swap is not None
    assert warm.keys is None
    assert part.runs == "eager"
    assert "running eager while compiling the target" in lines[0]
    assert not warm.swap.is_ready
    FakeChild.is_done = True
    assert warm.swap.is_ready
    assert warm.swap.finish().keys == ("a" * 32,)
    assert part.runs == "compiled"
    warm, _ = start(Part(), LATER)
    assert warm.swap is None
    assert FakeChild.count == 1


def test_what_cannot_be_compiled_runs_eager_and_says_why() -> None:
    FakeChild.failure = "any cannot be compiled: no way"
    part = Part()
    warm, lines = start(part)
    assert (part.runs, warm.keys) == ("eager", None)
    assert lines[-1] == "target: running eager: any cannot be compiled: no way"


def test_other_results_than_eager_are_not_used() -> None:
    part = Part(differs=True)
    warm, lines = start(part)
    assert (part.runs, warm.keys) == ("eager", None)
    assert lines[-1] == "target: running eager: results differ"


def test_what_has_no_key_is_never_compiled() -> None:
    warm, _ = start(Part(None))
    assert FakeChild.count == 0
    assert warm.keys is None


def test_without_a_compiler_it_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "has_compiler", lambda: False)
    _, lines = start(Part())
    assert "there is none" in lines[0]
    assert FakeChild.count == 0


def test_costs_are_kept_only_where_all_parts_run_compiled() -> None:
    parts = {"target": Part(None), "draft": Part()}
    for config in (AT_ONCE, AT_ONCE):
        assert warm_up(config, ALLOCATE, parts, lambda line: None).keys is None
    assert warm_up(AT_ONCE, ALLOCATE, {}, lambda line: None).keys is None
    both = {"target": Part("b" * 32), "draft": Part()}
    assert warm_up(AT_ONCE, ALLOCATE, both, lambda line: None).keys == ("b" * 32, "a" * 32)
