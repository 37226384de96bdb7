"""Speculation policies of tests."""

from collections.abc import Mapping
from typing import Any


def always(speculative: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `speculative_config` for draft tokens in every step, where it does not choose another policy.

    The default policy follows measured times, so that which steps have draft tokens would differ from run to run.
    """
    if not speculative:
        return None
    chooses = {"policy", "disable_by_batch_size", "num_speculative_tokens_per_batch_size"} & set(speculative)
    return {**speculative} if chooses else {**speculative, "policy": "fixed"}
