"""Paged attention on CPUs by a small C++ kernel, compiled once for this machine and kept in the user's cache."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import torch

from workers.attention import Options, Rows
from workers.attention_torch import CHUNK, TorchAttention
from workers.kv import KVCache

SOURCE = Path(__file__).parent / "native" / "paged_attention.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-fno-math-errno", "-shared", "-fPIC")
BUILD_SECONDS = 120
DTYPES = (torch.float32, torch.bfloat16)


class KernelUnavailableError(Exception):
    """The kernel cannot be used here; the message says why."""


class _Plan(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("rows", "tasks", "table_stride", "block_size", "tokens", "threads")]
    _fields_ += [(name, ctypes.c_void_p) for name in ("starts", "lengths", "offsets", "tables", "places", "short_rows")]


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("keys", "values")]
    _fields_ += [(name, ctypes.c_int64) for name in ("heads", "kv_heads", "key_size", "value_size", "is_bf16")]


class _Call(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("query", "key", "value", "output")]
    _fields_ += [
        (f"{name}_{axis}", ctypes.c_int64) for name in ("query", "key", "value") for axis in ("head", "token")
    ]
    _fields_ += [("sinks", ctypes.c_void_p), ("scaling", ctypes.c_float), ("softcap", ctypes.c_float)]
    _fields_ += [("window", ctypes.c_int64)]


class NativeAttention:
    """Attends short rows with the kernel; rows with long chunks go through torch, whose matrix products are faster."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._kernel = load_kernel()
        self._torch = TorchAttention(cache)
        self._plan = _Plan(block_size=cache.block_size)
        self._plan_ref = ctypes.byref(self._plan)
        self._call = _Call()
        self._call_ref = ctypes.byref(self._call)
        self._layers = [self._describe(index) for index in range(len(cache.shapes))]
        self._kept: tuple[object, ...] = ()
        self._has_long = False

    def plan(self, rows: Rows) -> None:
        """Point the kernel at this forward's rows."""
        is_long_R = rows.lengths_R > CHUNK
        self._has_long = bool(is_long_R.any())
        short_rows = np.flatnonzero(~is_long_R)
        arrays = {
            "starts": rows.starts_R, "lengths": rows.lengths_R, "offsets": rows.offsets_R,
            "tables": rows.tables_RB, "places": rows.places_T, "short_rows": short_rows,
        }  # fmt: skip
        kept = {name: np.ascontiguousarray(array, np.int64) for name, array in arrays.items()}
        for name, array in kept.items():
            setattr(self._plan, name, array.ctypes.data)
        self._kept = tuple(kept.values())
        plan = self._plan
        plan.rows, plan.table_stride = rows.tables_RB.shape
        plan.tasks, plan.tokens, plan.threads = len(short_rows), len(rows.places_T), torch.get_num_threads()
        if self._has_long:
            self._torch.plan_members(rows, np.flatnonzero(is_long_R))

    def attend(
        self, layer: int, query_HTD: torch.Tensor, key_GTD: torch.Tensor, value_GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        heads, tokens, _ = query_HTD.shape
        output_THE = query_HTD.new_empty(tokens, heads, value_GTE.shape[2])
        call, described = self._call, self._layers[layer]
        described.heads = heads
        call.query, call.key, call.value = query_HTD.data_ptr(), key_GTD.data_ptr(), value_GTE.data_ptr()
        call.output = output_THE.data_ptr()
        call.query_head, call.query_token, _ = query_HTD.stride()
        call.key_head, call.key_token, _ = key_GTD.stride()
        call.value_head, call.value_token, _ = value_GTE.stride()
        sinks_H = None if options.sinks_H is None else options.sinks_H.float().contiguous()
        call.sinks = None if sinks_H is None else sinks_H.data_ptr()
        call.scaling, call.softcap, call.window = options.scaling, options.softcap, options.window
        self._kernel(self._plan_ref, ctypes.byref(described), self._call_ref)
        if self._has_long:
            self._torch.attend_groups_into(output_THE, layer, query_HTD.transpose(0, 1), options)
        return output_THE

    def _describe(self, index: int) -> _Layer:
        shape, keys = self.cache.shapes[index], self.cache.keys[index]
        return _Layer(
            keys=keys.data_ptr(),
            values=self.cache.values[index].data_ptr(),
            kv_heads=shape.kv_heads,
            key_size=shape.key_size,
            value_size=shape.value_size,
            is_bf16=keys.dtype == torch.bfloat16,
        )


@cache
def load_kernel() -> "ctypes._NamedFuncPointer":
    """Return the compiled kernel, building it on first use on this machine (a few seconds).

    Raises:
        KernelUnavailableError: there is no compiler, or it failed.
    """
    try:
        library = ctypes.CDLL(str(_built()))
    except OSError as error:
        raise KernelUnavailableError(f"the attention kernel cannot be loaded: {error}") from error
    kernel = library.slipstream_attention
    kernel.restype = None
    return kernel


def _built() -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise KernelUnavailableError("there is no C++ compiler")
    target = _cache_folder() / f"attention-{_fingerprint(compiler)}.so"
    if not target.is_file():
        _compile(compiler, target)
    return target


def _compile(compiler: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
        except subprocess.CalledProcessError as error:
            reason = (error.stderr.strip().splitlines() or ["no message"])[0]
            raise KernelUnavailableError(f"the C++ compiler failed: {reason}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KernelUnavailableError(f"the C++ compiler failed: {error}") from error
        built.replace(target)


def _cache_folder() -> Path:
    # A folder of the user's own, so that nobody else can put a library there.
    folder = Path("~/.cache/slipstream").expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise KernelUnavailableError(f"{folder} cannot be made: {error}") from error
    if folder.stat().st_uid != os.getuid():
        raise KernelUnavailableError(f"{folder} belongs to somebody else")
    return folder


def _fingerprint(compiler: str) -> str:
    """What the machine code depends on: source, flags, compiler, processor."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    for part in (compiler, *FLAGS, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    lines = info.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(wanted))
