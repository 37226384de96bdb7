"""A replica's figures in Ray's own metrics, so that whoever scrapes Ray sees every replica.

A Serve application has one address for all its replicas: its `/metrics` is that of whichever answers. Ray exports what
is set here from the replica's own node, as `ray_slipstream_...` with the labels application, deployment and replica.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from runtime.metrics.prometheus import Metrics

EVERY_S = 10.0
"""As often as Ray reports to whoever scrapes it."""


class Gauge(Protocol):
    """What is needed of `ray.serve.metrics.Gauge`."""

    def set(self, value: float, tags: dict[str, str] = ...) -> object:
        """Take a new value."""
        ...


MakeGauge = Callable[[str, str, tuple[str, ...]], Gauge]


def _serve_gauge(name: str, text: str, labels: tuple[str, ...]) -> Gauge:
    from ray.serve.metrics import Gauge as ServeGauge  # noqa: PLC0415 - only replicas have Serve loaded

    gauge: Gauge = ServeGauge(name, description=text, tag_keys=labels)  # type: ignore[arg-type] # any number of them
    return gauge


class Mirror:
    """Sets one of Ray's gauges for each sample. All are gauges: Ray would add to counters and histograms by itself.

    Args:
        metrics: of this replica.
        make: makes a gauge out of a name, a text, and the names of its labels.
    """

    def __init__(self, metrics: Metrics, make: MakeGauge = _serve_gauge) -> None:
        self._metrics, self._make = metrics, make
        self._gauges: dict[str, Gauge] = {}

    def copy(self) -> None:
        """Set all gauges to what the figures are now."""
        for text, sample in self._metrics.samples():
            gauge = self._gauges.get(sample.name)
            if gauge is None:
                gauge = self._gauges[sample.name] = self._make(sample.name, text, tuple(sample.labels))
            gauge.set(sample.value, dict(sample.labels))

    async def run(self) -> None:
        """Copy now and then; runs until cancelled."""
        while True:
            self.copy()
            await asyncio.sleep(EVERY_S)
