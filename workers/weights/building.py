"""Builds models without weights, under a lock.

`transformers` patches its own classes while it builds a model and restores them afterwards. With two threads the patch
of one could stay, and tied weights would be missing in every later model.
"""

import threading
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from workers.attention.backend import NAME

BUILDING = threading.RLock()


def on_meta(config: Any, dtype: torch.dtype | None = None) -> Any:
    """Return a causal LM of a `transformers` config on the meta device; *dtype* None: the config's."""
    given = {} if dtype is None else {"dtype": dtype}
    with BUILDING, torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation=NAME, **given)
