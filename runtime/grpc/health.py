"""`grpc.health.v1`: liveness of the process under the empty name, readiness under the service's name."""

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2

from runtime.frontend.client import EngineClient

SERVICE = "slipstream.v1.GenerationService"
"""The service whose health is readiness: whether requests are accepted."""

ALIVE = ""
"""The service name whose health is liveness."""

POLL_INTERVAL_S = 0.1
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class EngineHealth:
    """Reports the health of an engine to `Check` and `Watch`.

    It is alive until it fails, but for the time in which its controller stands still. It is ready while it accepts and
    runs requests: not while it loads, drains or rebuilds its target. Without its draft worker it is slower, but ready.
    """

    def __init__(self) -> None:
        self.servicer: Any = health.aio.HealthServicer()
        self._reported: dict[str, int] = {}

    async def begin(self) -> None:
        """Report alive and not ready."""
        await self._report(ALIVE, True)
        await self._report(SERVICE, False)

    async def update(self, engine: EngineClient) -> None:
        """Report the current state of *engine*."""
        await self._report(ALIVE, engine.state not in ("stalled", "dead"))
        await self._report(SERVICE, is_ready(engine))

    async def follow(self, engine: EngineClient) -> None:
        """Report every change of state; runs until cancelled."""
        while True:
            await self.update(engine)
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _report(self, name: str, is_serving: bool) -> None:
        status = SERVING if is_serving else NOT_SERVING
        if self._reported.get(name) != status:
            self._reported[name] = status
            await self.servicer.set(name, status)


def is_ready(engine: EngineClient) -> bool:
    """Whether requests are accepted and run now."""
    return engine.state in ("live", "degraded") and not engine.stats().target_is_lost
