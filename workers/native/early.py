"""Starts the compilers of an engine's kernels before torch is imported, so that both take place at once."""

from pathlib import Path

from protos.config.engine import EngineConfig, KVCacheDtype
from workers.native.build import NO_CONTRACTION, QUANTIZED_KV, start_build

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")
"""Where one of these exists, the device "auto" may be a GPU, which needs no kernels. torch would tell, but is slow."""


def start_compilers(config: EngineConfig) -> None:
    """Start compiling the kernels that an engine of *config* in this process loads, where they are missing.

    Returns at once. `workers.native.build.load_function` waits for a kernel.
    """
    if may_be_cpu(config.model.device):
        for kernel in kernels(config):
            start_build(*kernel)


def may_be_cpu(device: str) -> bool:
    """Return False if *device* is a GPU, or may be one."""
    return device == "cpu" or (device == "auto" and not any(Path(name).exists() for name in GPU_FILES))


def kernels(config: EngineConfig) -> list[tuple[str, ...]]:
    """Return the kernels of *config* on CPUs: the stems of the source files, each with its compiler flags.

    A target with a quantised cache is checked over another one first.
    """
    target = ("invariant_attention", NO_CONTRACTION) if config.model.batch_invariant else ("paged_attention",)
    found = [target, (*target, *_variant(config.model.kv_cache_dtype))]
    draft = config.speculative
    if draft is not None and (draft.model is not None or not config.model.batch_invariant):
        found.append(("paged_attention", *_variant(draft.kv_cache_dtype or config.model.kv_cache_dtype)))
    if config.model.batch_invariant:
        found.append(("invariant", NO_CONTRACTION))
    if config.model.quantization or (draft is not None and draft.quantization):
        found.append(("quantized", NO_CONTRACTION))
    return [*dict.fromkeys(found), ("sample",)]


def _variant(dtype: KVCacheDtype) -> tuple[str, ...]:
    """Return the compiler flags of attention over a cache of *dtype*."""
    return (QUANTIZED_KV,) if dtype in ("fp8", "int8") else ()
