"""Starts the compilers of an engine's kernels before torch is imported, so that both take place at once."""

from pathlib import Path

from protos.config.engine import EngineConfig
from workers.native.build import NO_CONTRACTION, start_build

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
    """Return the kernels of *config* on CPUs: the stems of the source files, each with its compiler flags."""
    attention: list[tuple[str, ...]] = [("paged_attention",)]
    if config.model.batch_invariant:
        attention = attention if config.speculative is not None and config.speculative.model is not None else []
        attention += [("invariant_attention", NO_CONTRACTION), ("invariant", NO_CONTRACTION)]
    speculative = None if config.speculative is None else config.speculative.quantization
    quantized = [("quantized", NO_CONTRACTION)] if config.model.quantization or speculative else []
    return [*attention, *quantized, ("sample",)]
