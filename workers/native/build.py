"""Compiles the C++ in `workers/native` once per machine, caches it in the user's home, and loads it with ctypes."""

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from workers.cache_folder import CacheFolderError, cache_folder, processor

FOLDER = Path(__file__).parent
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
BUILD_SECONDS = 120
NO_CONTRACTION = "-ffp-contract=off"
"""Compiler flag: do not fuse a product and a sum, which would round once instead of twice."""
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number that stands for a dtype in arguments of kernels."""


class KernelUnavailableError(Exception):
    """Native code does not work here; the message states why."""


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


def _built(source: Path, flags: tuple[str, ...]) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise KernelUnavailableError("there is no C++ compiler")
    target = _folder() / f"{source.stem}-{_fingerprint(source, compiler, flags)}.so"
    if not target.is_file():
        _compile([compiler, *flags], source, target)
    return target


def _compile(compile_: list[str], source: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [*compile_, str(source), "-o", str(built)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or ["no message"])[0]
            raise KernelUnavailableError(f"the C++ compiler failed: {reason}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelUnavailableError(f"the C++ compiler failed: {error}") from error
        built.replace(target)


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
    for part in (compiler, *flags, platform.machine(), processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]
