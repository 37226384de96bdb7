"""Exports a replica's metrics through Ray, so that a scrape of Ray covers every replica.

A Serve application has one address for all its replicas: `/metrics` there is that of the replica which answers. Ray
exports these from the replica's own node, as `ray_slipstream_...`, labelled with application, deployment and replica.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.metrics.prometheus import Metrics

if TYPE_CHECKING:
    from ray.serve.metrics import Gauge

EVERY_S = 10.0
"""Ray's own reporting interval."""


def serve_gauge(name: str, description: str, labels: tuple[str, ...]) -> "Gauge":
    """Return one of Ray Serve's gauges."""
    from ray.serve.metrics import Gauge  # noqa: PLC0415 - only replicas have Serve loaded

    return Gauge(name, description=description, tag_keys=labels)  # type: ignore[arg-type] # any number of them


class RayMetrics:
    """Sets one Ray gauge for each sample. All are gauges: Ray would accumulate counters and histograms itself.

    Args:
        metrics: the replica's metrics.
        make: makes a gauge from a name, a description and the names of its labels.
    """

    def __init__(self, metrics: Metrics, make: Callable[[str, str, tuple[str, ...]], "Gauge"] = serve_gauge) -> None:
        self._metrics, self._make = metrics, make
        self._gauges: dict[str, Gauge] = {}

    def copy(self) -> None:
        """Set all gauges to the current values."""
        for text, sample in self._metrics.samples():
            gauge = self._gauges.get(sample.name)
            if gauge is None:
                gauge = self._gauges[sample.name] = self._make(sample.name, text, tuple(sample.labels))
            gauge.set(sample.value, dict(sample.labels))

    async def run(self) -> None:
        """Copy every `EVERY_S` seconds, until cancelled."""
        while True:
            self.copy()
            await asyncio.sleep(EVERY_S)
