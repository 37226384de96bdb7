"""Compilers of kernels: started early and all at once, waited for where a kernel is needed, and never left behind."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import assemble
from protos.config.engine import EngineConfig, KVCacheDtype, ModelConfig, SpeculativeConfig
from tests.support.models import tiny_pairs
from tests.support.processes import wait_gone, wait_until
from workers.invariant import native
from workers.native import build, early
from workers.native.build import FLAGS, KernelUnavailableError, load_function, start_build

ROOT = Path(__file__).parents[2]
SOURCE = """
extern "C" void double_it(long* number) { *number *= 2; }
"""
COMPILER = """#!/bin/sh
echo "$@" >> {log}
while [ ! -e {go} ]; do sleep 0.02; done
{then}
"""
"""Logs its call, and compiles, or does something else, once the file `go` exists."""


class Machine:
    """A cache folder, sources, and a compiler that waits until it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.sources = folder, folder / "cache", folder / "sources"
        self.log, self.go = folder / "log", folder / "go"
        for made in (folder / "bin", self.cache, self.sources):
            made.mkdir()
        for name in ("one", "two"):
            (self.sources / f"{name}.cpp").write_text(SOURCE)
        self.compiler(f'exec {shutil.which("c++") or shutil.which("g++")} "$@"')

    def compiler(self, then: str) -> None:
        """Install the compiler."""
        file = self.folder / "bin" / "c++"
        file.write_text(COMPILER.format(log=self.log, go=self.go, then=then))
        file.chmod(0o755)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(self.cache), "PYTHONPATH": str(ROOT)}

    def started(self, count: int) -> list[str]:
        """Wait for *count* compilers; return their commands."""
        wait_until(lambda: self.log.exists() and len(self.log.read_text().splitlines()) >= count, 60)
        return self.log.read_text().splitlines()

    @property
    def built(self) -> list[str]:
        """What is in the cache folder, without hashes."""
        return sorted(path.name.split("-")[0] for path in (self.cache / "slipstream").iterdir())

    def run(self, code: str) -> "subprocess.Popen[str]":
        """Run *code* in a process that has the machine's sources."""
        start = (
            f"from pathlib import Path; from workers.native import build; build.FOLDER = Path({str(self.sources)!r})"
        )
        command = [sys.executable, "-c", f"{start}\n{code}"]
        return subprocess.Popen(command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine(tmp_path)
    for name in ("PATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, made.environment[name])
    monkeypatch.setattr(build, "FOLDER", made.sources)
    load_function.cache_clear()
    yield made
    load_function.cache_clear()


def doubled(source: str) -> int:
    number = ctypes.c_long(21)
    load_function(source, "double_it")(ctypes.byref(number))
    return number.value


def test_compilers_run_at_once_and_each_is_waited_for(machine: Machine) -> None:
    for source in ("one", "two", "one"):
        start_build(source)
    machine.started(2)
    machine.go.touch()
    assert [doubled("one"), doubled("two")] == [42, 42]
    assert len(machine.started(2)) == 2
    assert machine.built == ["one", "two"]


def test_what_is_built_is_not_built_again(machine: Machine) -> None:
    machine.go.touch()
    doubled("one")
    load_function.cache_clear()
    start_build("one")
    assert doubled("one") == 42
    assert len(machine.started(1)) == 1


def test_another_version_of_the_compiler_builds_anew(machine: Machine) -> None:
    machine.go.touch()
    doubled("one")
    load_function.cache_clear()
    machine.compiler(f'exec {shutil.which("g++")} "$@"  # of a later release')
    assert doubled("one") == 42
    assert len(machine.started(2)) == 2


@pytest.mark.parametrize("is_early", [False, True])
def test_a_failing_compiler_is_reported_where_the_kernel_is_needed(machine: Machine, *, is_early: bool) -> None:
    machine.compiler("echo 'no such option' >&2; exit 1")
    machine.go.touch()
    if is_early:
        start_build("one")
    with pytest.raises(KernelUnavailableError, match=r"^the C\+\+ compiler failed: no such option$"):
        load_function("one", "double_it")
    assert machine.built == []


def test_a_compiler_that_hangs_is_ended(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BUILD_SECONDS", 0.1)
    with pytest.raises(KernelUnavailableError, match="timed out"):
        load_function("one", "double_it")
    assert machine.built == []


def test_without_a_compiler_or_a_folder_nothing_is_started(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    start_build("one")
    monkeypatch.setenv("PATH", "/nowhere")
    start_build("one")
    assert not machine.log.exists()


def test_processes_that_build_the_same_at_once(machine: Machine) -> None:
    code = "build.start_build('one'); build.load_function('one', 'double_it'); print('loaded')"
    processes = [machine.run(code) for _ in range(2)]
    machine.started(2)
    machine.go.touch()
    assert [process.communicate(timeout=60)[0] for process in processes] == ["loaded\n"] * 2
    assert machine.built == ["one"]


def test_a_process_that_ends_ends_its_compilers(machine: Machine) -> None:
    machine.compiler(f"sleep 1000 & echo $$ $! > {machine.folder / 'pids'}; wait")
    machine.go.touch()
    with machine.run("build.start_build('one'); input()") as process:
        wait_until((machine.folder / "pids").exists, 60)
        assert len(machine.built) == 1, "a folder for what is being made"
        process.communicate("\n", timeout=60)
    wait_gone([int(pid) for pid in (machine.folder / "pids").read_text().split()])
    assert machine.built == []


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_an_engine_starts_the_compilers_of_all_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: KVCacheDtype, *, invariant: bool, has_draft: bool
) -> None:
    target, draft = tiny_pairs.build(tmp_path, "llama")
    model = ModelConfig(str(target), device="cpu", kv_cache_dtype=stored, batch_invariant=invariant, enforce_eager=True)
    speculative = SpeculativeConfig("draft_model", model=str(draft), num_speculative_tokens=2) if has_draft else None
    started: list[tuple[str, ...]] = []
    needed: set[tuple[str, ...]] = set()
    built = build._built

    def record(source: Path, flags: tuple[str, ...]) -> Path:
        assert started, "a kernel was loaded before its compiler was started"
        needed.add((source.stem, *flags[len(FLAGS) :]))
        return built(source, flags)

    monkeypatch.setattr(early, "start_build", lambda *kernel: started.append(kernel))
    monkeypatch.setattr(build, "_built", record)
    clear()
    assemble.build(EngineConfig(model, speculative=speculative), report=lambda line: None).shutdown()
    clear()
    assert needed == set(started)


def clear() -> None:
    load_function.cache_clear()
    native._function.cache_clear()


@pytest.mark.parametrize("source", sorted(path.stem for path in build.FOLDER.glob("*.cpp")))
@pytest.mark.parametrize("flags", [(), (build.QUANTIZED_KV,)], ids=["", "quantised KV"])
def test_every_kernel_compiles(source: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one did not, engines would run without it: slower, and with dequantised weights."""
    command = ["c++", *FLAGS, build.NO_CONTRACTION, *flags, "-fsyntax-only", str(build.FOLDER / f"{source}.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_gpus_need_no_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[tuple[str, ...]] = []
    monkeypatch.setattr(early, "start_build", lambda *kernel: started.append(kernel))
    config = EngineConfig(ModelConfig("m"))
    monkeypatch.setattr(early, "GPU_FILES", (str(tmp_path),))
    for device in ("cuda", "auto"):
        early.start_compilers(replace(config, model=replace(config.model, device=device)))
    assert not started
    monkeypatch.setattr(early, "GPU_FILES", ("/nowhere",))
    early.start_compilers(config)
    assert started == [("paged_attention",), ("sample",)]


def test_commands_without_an_engine_start_no_compiler(machine: Machine) -> None:
    command = [sys.executable, "-m", "slipstream", "serve", "--help"]
    subprocess.run(command, env=machine.environment, cwd=ROOT, capture_output=True, timeout=60, check=True)
    assert not machine.log.exists()
    assert not (machine.cache / "slipstream").exists()
