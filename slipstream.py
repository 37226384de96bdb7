"""Slipstream: serving with lossless speculative decoding. `from slipstream import LLM, SamplingParams`.

Names are imported on first use, so importing this module is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.llm import LLM
    from protos.outputs import CompletionOutput, RequestOutput
    from protos.sampling import SamplingParams
    from protos.structured import StructuredOutputsParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]

_MODULES = {
    "LLM": "cluster.llm",
    "SamplingParams": "protos.sampling",
    "StructuredOutputsParams": "protos.structured",
    "RequestOutput": "protos.outputs",
    "CompletionOutput": "protos.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


if __name__ == "__main__":
    from cluster.cli.main import main

    main()
