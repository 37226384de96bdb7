"""Names of the dtypes in which K and V are stored."""

from typing import Any

ALIASES = {
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
    "bf16": "bfloat16",
    # vLLM's names for 8-bit caches with a scale for each token and head, which is what both are here.
    "fp8_per_token_head": "fp8",
    "int8_per_token_head": "int8",
}


def canonical(value: Any) -> str:
    """Return the name under which the configuration knows *value*, which may be a `torch.dtype`; else its text."""
    word = str(value).removeprefix("torch.")
    return ALIASES.get(word, word)
