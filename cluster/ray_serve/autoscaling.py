"""How many replicas a deployment needs, by its requests and by the KV cache that they take.

Ray Serve's own policy counts requests. A replica can be full with few of them, if their texts are long: then requests
wait, or are preempted, while the count is below its target. Serve's controller imports this module.
"""

import logging
from typing import TYPE_CHECKING, Any

from protos.stats import EngineStats
from protos.validation import shown

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

logger = logging.getLogger("slipstream")

KV_DEMAND = "kv_demand"
"""The name of what replicas report to the policy."""
DEFAULT_TARGET = 0.8


def reported(stats: EngineStats) -> dict[str, float]:
    """Return what a replica reports: `kv_demand`, the share of its KV cache that all its requests would take.

    Waiting requests are taken to need as much as running ones do on average, so this exceeds 1 on a full replica.
    """
    waiting = stats.num_waiting / stats.num_running if stats.num_running else 0.0
    return {KV_DEMAND: stats.kv_usage * (1.0 + waiting)}


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0.0 < value <= 1.0


class LoadPolicy:
    """The larger of two numbers of replicas: by `target_ongoing_requests`, and by the KV cache.

    Ray Serve applies its factors, delays and limits (`upscale_delay_s`, `max_replicas`, ...) to the result.

    Args:
        target_kv_usage: the share of a replica's KV cache that its requests may take, on average; above 0, at most 1.
            With another value, and with unknown arguments, an error is logged: Serve's controller would stop updating
            all applications if this raised one.
    """

    def __init__(self, target_kv_usage: Any = DEFAULT_TARGET, **unknown: Any) -> None:
        self._target = float(target_kv_usage) if _is_share(target_kv_usage) else DEFAULT_TARGET
        if unknown or self._target != target_kv_usage:
            logger.error(
                "policy_kwargs must be target_kv_usage, above 0 and at most 1, got %s; it is taken to be %g",
                shown({"target_kv_usage": target_kv_usage, **unknown}),
                self._target,
            )

    def __call__(self, context: "AutoscalingContext") -> tuple[float, dict[str, Any]]:
        """Return the number of replicas that are needed, and no state."""
        config = context.config
        by_requests = 0.0 if config is None else context.total_num_requests / config.target_ongoing_requests
        demands = (context.aggregated_metrics or {}).get(KV_DEMAND, {})
        return max(by_requests, sum(demands.values()) / self._target), {}
