"""Compiles the C++ in `workers/native` once per machine, caches it in the user's home, and loads it with ctypes.

A compiler takes seconds, so an engine starts its compilers first of all and imports torch meanwhile: this module does
not import it.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import threading
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from workers.cache_folder import CacheFolderError, cache_folder, compiler_version, processor

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
BUILD_SECONDS = 120
NO_CONTRACTION = "-ffp-contract=off"
"""Compiler flag: do not fuse a product and a sum, which would round once instead of twice."""

QUANTIZED_KV = "-DQUANTIZED_KV"
"""Compiler flag: kernels of attention over int8 and fp8 caches instead of the others."""

_builds: dict[Path, "_Build"] = {}
"""Compilers that run, by the library that each makes."""
_lock = threading.Lock()


class KernelUnavailableError(Exception):
    """Native code does not work here; the message states why."""


def start_build(source: str, *flags: str) -> None:
    """Start compiling `native/SOURCE.cpp`, unless that was done before on this machine. Returns at once.

    `load_function` waits for it, and reports what fails.
    """
    with suppress(KernelUnavailableError), _lock:
        _begin(FOLDER / f"{source}.cpp", (*FLAGS, *flags))


@cache
def load_function(source: str, name: str, *flags: str) -> "ctypes._NamedFuncPointer":
    """Return function *name* of `native/SOURCE.cpp`, compiling it on first use on this machine (a few seconds).

    Args:
        source: the file's stem.
        name: of the function.
        flags: for the compiler, in addition to `FLAGS`; the same for all functions of a file.

    Raises:
        KernelUnavailableError: there is no compiler, or it failed.
    """
    try:
        library = ctypes.CDLL(str(_built(FOLDER / f"{source}.cpp", (*FLAGS, *flags))))
    except OSError as error:
        raise KernelUnavailableError(f"{source} cannot be loaded: {error}") from error
    function: ctypes._NamedFuncPointer = getattr(library, name)
    function.restype = None
    return function


@cache
def load_for_graphs(source: str, *flags: str) -> ctypes.CDLL:
    """Load `native/SOURCE.cpp`, which uses torch's C interface, so that compiled graphs find its functions by name.

    Raises:
        KernelUnavailableError: there is no compiler, or it failed, or this torch lacks what it uses.
    """
    torch = find_spec("torch")
    folders = [] if torch is None else torch.submodule_search_locations or []
    linked = [flag for folder in folders for flag in (f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib")]
    try:
        built = _built(FOLDER / f"{source}.cpp", (*FLAGS, *flags, *linked, "-Wl,--no-as-needed", "-ltorch_cpu"))
        return ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL | os.RTLD_NOW)
    except OSError as error:
        raise KernelUnavailableError(f"{source} cannot be loaded: {error}") from error


def _built(source: Path, flags: tuple[str, ...]) -> Path:
    """Return the library of *source*, once it is compiled."""
    with _lock:
        target = _begin(source, flags)
        build = _builds.pop(target, None)
        if build is not None:
            build.finish()
    return target


def _begin(source: Path, flags: tuple[str, ...]) -> Path:
    """Return the path of the library of *source*; start a compiler if there is neither the library nor a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise KernelUnavailableError("there is no C++ compiler")
    target = _folder() / f"{source.stem}-{_fingerprint(source, compiler, flags)}.so"
    if target not in _builds and not target.is_file():
        _builds[target] = _Build([compiler, *flags, str(source)], target)
    return target


class _Build:
    """A compiler at work. The library becomes visible when it is complete, so several processes may build it at once.

    Args:
        command: without the output.
        target: the library.
    """

    def __init__(self, command: list[str], target: Path) -> None:
        self._target = target
        self._folder = tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True)
        self._made = Path(self._folder.name) / target.name
        try:
            self._compiler = subprocess.Popen(
                [*command, "-o", str(self._made)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,  # the compiler is several processes, which `stop` ends together
            )
        except OSError as error:
            self._folder.cleanup()
            raise KernelUnavailableError(f"the C++ compiler failed: {error}") from error
        atexit.register(self.stop)

    def finish(self) -> None:
        """Wait for the compiler, and put the library in its place."""
        try:
            _, errors = self._compiler.communicate(timeout=BUILD_SECONDS)
            if self._compiler.returncode:
                lines = errors.strip().splitlines() or ["no message"]
                reason = next((line for line in lines if "error" in line), lines[0])
                raise KernelUnavailableError(f"the C++ compiler failed: {reason}")
            self._made.replace(self._target)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelUnavailableError(f"the C++ compiler failed: {error}") from error
        finally:
            self.stop()

    def stop(self) -> None:
        """End the compiler, unless it has ended, and remove what it wrote."""
        atexit.unregister(self.stop)
        if self._compiler.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._compiler.pid, signal.SIGKILL)
            self._compiler.wait()
        if self._compiler.stderr is not None:
            self._compiler.stderr.close()
        self._folder.cleanup()


def _folder() -> Path:
    try:
        return cache_folder()
    except CacheFolderError as error:
        raise KernelUnavailableError(str(error)) from error


def _fingerprint(source: Path, compiler: str, flags: tuple[str, ...]) -> str:
    """Hash what the machine code depends on: source, flags, compiler, processor."""
    digest = hashlib.sha256(source.read_bytes())
    for header in sorted(FOLDER.glob("*.h")):
        digest.update(header.read_bytes())
    for part in (compiler, compiler_version(compiler), *flags, platform.machine(), processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]
