"""Shapes of drafts where `speculative_config` has none, by method and kind of device.

On a GPU, scoring 60 tokens takes hardly longer than scoring one, and the authors' own trees pay. On a CPU every scored
token costs, and chains are short: `python -m benchmarks.chain_lengths` compares their lengths.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from protos.config.engine import EngineConfig, SpeculativeConfig

EAGLE_TREE: Mapping[str, int] = {"num_speculative_tokens": 59, "eagle_topk": 10, "num_steps": 8}
"""EAGLE's total_token 60 (with the root), depth 7 (levels that are fed) and top_k 10, for all versions of EAGLE."""
BEAMS: Mapping[str, int] = {"num_speculative_tokens": 40, "eagle_topk": 10, "num_steps": 4}
"""ReDrafter's beam_width 10 and beam_length 5 (with the newest known token)."""
AUTHORS = {"eagle": EAGLE_TREE, "eagle3": EAGLE_TREE, "recurrent": BEAMS}
CPU_LENGTHS = {"eagle": 1, "eagle3": 2, "recurrent": 2}
"""Draft tokens of a chain."""


def for_device(config: EngineConfig, device: str) -> EngineConfig:
    """Return *config* with the default shape of its drafts for *device*, "cpu" or "cuda", unless it has one."""
    speculative = config.speculative
    if speculative is None or not speculative.has_default_shape:
        return config
    return replace(config, speculative=shaped(speculative, device))


def shaped(speculative: SpeculativeConfig, device: str) -> SpeculativeConfig:
    """Return *speculative* with the default shape for *device*."""
    method, wanted = str(speculative.method), speculative.draft_shape
    shape: Mapping[str, Any] = {"draft_shape": "chain"}
    if wanted == "tree" or (wanted == "auto" and device == "cuda"):
        shape = AUTHORS[method]
    elif device != "cuda":
        shape = {**shape, "num_speculative_tokens": CPU_LENGTHS[method]}
    return replace(speculative, **shape, has_default_shape=False)
