"""Reads a checkpoint's config and tensor names without loading it. Needs no torch, runs no code.

Of pickled files, only the strings are read, opcode by opcode; nothing is unpickled.
"""

import json
import logging
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from protos.errors import ModelError
from protos.hub import client_errors, folder_of, unreachable

logger = logging.getLogger(__name__)

CONFIG = "config.json"
INDEX, SAVED_INDEX = "model.safetensors.index.json", "pytorch_model.bin.index.json"
"""The names of all tensors, of safetensors and of what torch saved."""
LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""


@dataclass(frozen=True)
class Peek:
    """A checkpoint: a folder, or a Hub id, of which only small files are fetched.

    Missing, unreachable or unreadable parts are empty: loading the checkpoint reports the error.
    """

    model: str
    revision: str | None = None
    cache: str | None = None

    @cached_property
    def folder(self) -> Path | None:
        """The folder, which may be on another machine alone; None for a Hub id."""
        try:
            return folder_of(self.model)
        except ModelError:
            return Path(self.model)

    @property
    def is_local(self) -> bool:
        """Whether it is a local folder, which is cheap to read."""
        return self.folder is not None

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its `config.json`."""
        found = _json(self._file(CONFIG))
        return found if isinstance(found, dict) else {}

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of its tensors."""
        safe = self._indexed(INDEX) or (_safe_names_in(self.folder) if self.folder else self._safe_names_on_hub())
        return frozenset(safe or self._indexed(SAVED_INDEX) or (_saved_names_in(self.folder) if self.folder else ()))

    def _indexed(self, name: str) -> Iterable[str]:
        index = _json(self._file(name))
        weights = index.get("weight_map") if isinstance(index, dict) else None
        return list(map(str, weights)) if isinstance(weights, dict) else ()

    def _file(self, name: str) -> Path | None:
        return self.folder / name if self.folder else self._from_hub(lambda: Path(self._download(name)))

    def _download(self, name: str) -> str:
        from huggingface_hub import hf_hub_download  # noqa: PLC0415 - slow to load, and folders need none of it

        offline = unreachable() is not None
        return hf_hub_download(self.model, name, revision=self.revision, cache_dir=self.cache, local_files_only=offline)

    def _safe_names_on_hub(self) -> Iterable[str]:
        """Fetch the headers of safetensors files, not their weights."""
        from huggingface_hub import get_safetensors_metadata  # noqa: PLC0415

        fetch = lambda: get_safetensors_metadata(self.model, revision=self.revision).weight_map  # noqa: E731
        return () if unreachable() else self._from_hub(fetch) or ()

    def _from_hub(self, fetch: Callable[[], Any]) -> Any:
        try:
            return fetch()
        except client_errors() as error:  # it may be reachable when it is loaded
            logger.debug("%s: %s", self.model, error)
            return None


def _json(path: Path | None) -> Any:
    try:
        return None if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _safe_names_in(folder: Path) -> Iterable[str]:
    return [name for path in sorted(folder.glob("*.safetensors")) for name in _safetensors_names(path)]


def _saved_names_in(folder: Path) -> Iterable[str]:
    return [name for ending in ("*.bin", "*.pt") for path in sorted(folder.glob(ending)) for name in _zipped(path)]


def _safetensors_names(path: Path) -> Iterable[str]:
    """Read the header: its length in 8 bytes, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
    except (OSError, ValueError, struct.error):
        return ()
    return [name for name in header if name != "__metadata__"] if isinstance(header, dict) else ()


def _zipped(path: Path) -> Iterable[str]:
    """Return the strings in what torch pickles of a state dict; nothing is built from them."""
    try:
        with zipfile.ZipFile(path) as archive:
            inner = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
            pickled = archive.read(inner) if inner else b""
        return [arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)] if pickled else ()
    except (OSError, ValueError, zipfile.BadZipFile):
        return ()
