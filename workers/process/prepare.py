"""What a spare process does before it is needed: imports, and what depends on the configuration but not on a device."""

import contextlib
import os

from protos.config.engine import EngineConfig, from_json
from workers.native.early import start_compilers

NO_CUDA_CONTEXT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Lets torch count devices without CUDA's own calls, which would read CUDA_VISIBLE_DEVICES before it is set."""


def prepare(config: str) -> None:
    """Import what a worker of *config*, an `EngineConfig` as JSON, runs. Failures are left to the worker itself."""
    for name, value in NO_CUDA_CONTEXT.items():
        os.environ.setdefault(name, value)
    with contextlib.suppress(Exception):
        parsed = from_json(config)
        start_compilers(parsed)
        import workers.process.main  # noqa: F401, PLC0415 - after the environment is set

        _prepare_model(parsed)


def _prepare_model(config: EngineConfig) -> None:
    """Build the target's modules without weights, and load the native code of a group."""
    from workers.attention.native import NativeAttention  # noqa: PLC0415 - as above
    from workers.native.build import load_function  # noqa: PLC0415
    from workers.weights.building import on_meta  # noqa: PLC0415
    from workers.weights.described import read_language_config  # noqa: PLC0415
    from workers.weights.hub import fetch_model  # noqa: PLC0415

    load_function("exchange", "slipstream_join")
    load_function(*NativeAttention.KERNEL)
    on_meta(read_language_config(fetch_model(config.model)))
