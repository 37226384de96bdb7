"""The keys of compiled entries: a hash of all that the machine code and its constants depend on."""

import hashlib
from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path

import torch
import transformers

from workers.cache_folder import compiler_version, processor

SOURCES = Path(__file__).parents[2]
PACKAGES = ("proposers", "protos", "workers")
CHECKPOINT = ("*.json", "*.safetensors", "*.bin", "*.pt")


def recipe(folders: Seq[Path], *parts: object) -> str:
    """Return a key.

    Args:
        folders: checkpoints, of which every byte is read: weights are constants of the machine code.
        parts: whatever else the graphs depend on, such as the dtype.
    """
    digest = hashlib.sha256()
    cpp = torch._inductor.config.cpp
    compilers = [compiler_version(name) for name in cpp.cxx if name is not None]
    machine = (processor(), torch.get_num_threads(), cpp.dynamic_threads, *compilers)
    versions = (torch.__version__, transformers.__version__, _sources())
    for part in (*machine, *versions, *parts, *map(_content, folders)):
        digest.update(f"{part}".encode() + b"\0")
    return digest.hexdigest()[:32]


@cache
def _sources() -> str:
    """Hash this program's sources that run in a forward, or decide how it is compiled."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((SOURCES / package).rglob("*.py")):
            digest.update(str(path.relative_to(SOURCES)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _content(folder: Path) -> str:
    """Hash the files of a checkpoint."""
    files = sorted(path for pattern in CHECKPOINT for path in folder.glob(pattern))
    return " ".join(_file(path, path.stat().st_size, path.stat().st_mtime_ns) for path in files)


@cache
def _file(path: Path, _size: int, _changed: int) -> str:
    with path.open("rb") as file:
        return f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}"
