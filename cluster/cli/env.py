"""`slipstream env`: the environment for a bug report, without secrets."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from cluster.cli.console import OUT, show_warnings
from protos.config.engine import EngineConfig, to_json

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "pydantic", "msgspec", "pyzmq",
            "numpy", "fastapi", "uvicorn", "ray", "triton")  # fmt: skip
CPU_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
             "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")  # fmt: skip
VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "TOKENIZERS_PARALLELISM",
    "PYTHONPATH",
    "LD_PRELOAD",
)
GIB = 1 << 30
PACKAGE = "slipstream-serve"


def version() -> str:
    """Return the installed version, or "0+checkout" if the package is not installed."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return "0+checkout"


def show(config: EngineConfig) -> None:
    """Print the report."""
    show_warnings()
    for title, rows in report(config).items():
        OUT.print(title, style="bold")
        for name, value in rows.items():
            OUT.print(f"  {name}: {value}", markup=False, highlight=False)


def report(config: EngineConfig) -> dict[str, dict[str, str]]:
    """Return sections of names and values."""
    return {
        "Slipstream": {"version": version(), "python": platform.python_version(), "system": platform.platform()},
        "Packages": dict(_packages()),
        "Processor": dict(_processor()),
        "Devices": dict(_devices()),
        "Ray": dict(_ray()),
        "Tools": {name: shutil.which(name) or "not found" for name in ("g++", "ninja", "nvcc")},
        "Environment": {name: os.environ.get(name, "not set") for name in VARIABLES},
        "Configuration": {"json": to_json(config)},
    }


def _packages() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            yield name, "not installed"


def _processor() -> Iterator[tuple[str, str]]:
    described = _proc("/proc/cpuinfo")
    flags = set((described.get("flags") or described.get("Features") or "").split())
    yield "model", described.get("model name") or platform.processor() or platform.machine()
    yield "cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"
    yield "flags", " ".join(flag for flag in CPU_FLAGS if flag in flags) or "none known"
    memory = _proc("/proc/meminfo")
    yield "memory", f"{memory.get('MemAvailable', '?')} available of {memory.get('MemTotal', '?')}"


def _proc(path: str) -> dict[str, str]:
    """Return the first value of each name in a file of `name: value` lines; empty if there is no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    rows: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        rows.setdefault(name.strip(), value.strip())
    return rows


def _ray() -> Iterator[tuple[str, str]]:
    yield "RAY_ADDRESS", os.environ.get("RAY_ADDRESS", "not set")
    if find_spec("ray") is None:
        return
    from cluster.ray.diagnostics import summary  # noqa: PLC0415 - Ray is loaded only where it is used

    yield "cluster", summary()


def _devices() -> Iterator[tuple[str, str]]:
    try:
        import torch  # noqa: PLC0415 - the report must be made even where it cannot be loaded
    except Exception as error:
        yield "torch", f"cannot be imported: {type(error).__name__}: {error}"
        return
    yield "torch threads", str(torch.get_num_threads())
    yield "CUDA", f"{torch.version.cuda or 'not built in'}, {torch.cuda.device_count()} device(s)"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{device.name}, {device.total_memory / GIB:.1f} GiB, sm_{device.major}{device.minor}"
