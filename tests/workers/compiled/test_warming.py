"""Warm-up: what is compiled when, what runs meanwhile, and that a second start compiles nothing."""

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from protos.config.engine import EngineConfig, ModelConfig, to_json
from protos.worker_messages import Allocate
from workers.compile import CompileError
from workers.compiled import child, store, warming
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


@pytest.fixture
def failing_child(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Return a function after which children run in this process, and fail with its argument."""

    class Failing(FakeChild):
        def wait(self) -> str | None:
            order = {"part": "target", "key": self.key, "nice": 0, "parent": os.getppid(), "dynamic_threads": False}
            sizes = {"threads": torch.get_num_threads(), "max_model_len": 32, "vocab_size": 97}
            line = json.dumps({**order, **sizes, "config": to_json(AT_ONCE)})
            monkeypatch.setattr("sys.stdin", io.StringIO(line + "\n"))
            with pytest.raises(SystemExit) as end:
                child.main()
            return str(end.value.code)

    def fail_with(error: Exception) -> None:
        def compiles(config: EngineConfig, allocate: Allocate, folder: Path) -> None:
            (folder / "any.so").write_text("half an entry")
            raise error

        monkeypatch.setattr(child, "_compile_target", compiles)

    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setattr(child.torch._inductor.config.cpp, "dynamic_threads", False)
    monkeypatch.setattr(warming, "Child", Failing)
    return fail_with


def test_what_cannot_be_compiled_is_tried_once(root: Path, failing_child: Callable[[Exception], None]) -> None:
    failing_child(CompileError("any cannot be compiled: no way"))
    warm, lines = start(Part())
    assert lines[-1] == "target: running eager: any cannot be compiled: no way"
    for config in (AT_ONCE, LATER):
        part = Part()
        warm, lines = start(part, config)
        assert (part.runs, warm.keys, warm.swap, FakeChild.count) == ("eager", None, None, 1)
        (line,) = lines
        assert line.startswith("target: running eager: any cannot be compiled: no way (kept from an earlier start; ")
        assert line.endswith(f"to try again, remove {root / ('a' * 32)})")
    start(Part("b" * 32))
    assert FakeChild.count == 2, "another key is another attempt"


def test_a_failure_gives_way_to_what_another_process_compiled(root: Path) -> None:
    key = "a" * 32
    store.write_failure(key, "no way")
    for text in ("compiled", "by a third"):
        folder = store.begin()
        (folder / "graph").write_text(text)
        store.publish(folder, key)
    assert (root / key / "graph").read_text() == "compiled"
    store.write_failure(key, "no way")
    assert store.read_failure(root / key) is None


@pytest.mark.parametrize(
    "error", [CompileError("disk full", may_pass=True), OSError("disk full")], ids=["in", "around"]
)
def test_a_failure_that_may_pass_is_tried_again(error: Exception, failing_child: Callable[[Exception], None]) -> None:
    failing_child(error)
    for count in (1, 2):
        _, lines = start(Part())
        assert lines[-1] == "target: running eager: disk full"
        assert FakeChild.count == count


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
