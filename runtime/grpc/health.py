"""`grpc.health.v1`: whether the process is worth keeping (the empty name), and whether it takes requests."""

import asyncio
from typing import Any

from grpc_health.v1 import health, health_pb2

from runtime.frontend.client import EngineClient

SERVICE = "slipstream.v1.GenerationService"
"""The service whose health is readiness: whether requests are accepted."""

ALIVE = ""
"""The service name whose health is liveness."""

LOOK_EVERY_S = 0.1
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class EngineHealth:
    """Tells the health of an engine, to those who ask and to those who watch.

    It is alive until it is dead; it is ready while it takes requests and can run them, so not while it loads, drains
    or rebuilds its target. A draft that is away makes it slower, not less ready.
    """

    def __init__(self) -> None:
        self.servicer: Any = health.aio.HealthServicer()
        self._told: dict[str, int] = {}

    async def begin(self) -> None:
        """Be alive, and not ready."""
        await self._tell(ALIVE, True)
        await self._tell(SERVICE, False)

    async def look(self, engine: EngineClient) -> None:
        """Tell the state of *engine* as it is now."""
        await self._tell(ALIVE, engine.state != "dead")
        await self._tell(SERVICE, is_ready(engine))

    async def follow(self, engine: EngineClient) -> None:
        """Tell every change of its state; runs until cancelled."""
        while True:
            await self.look(engine)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _tell(self, name: str, is_well: bool) -> None:
        status = SERVING if is_well else NOT_SERVING
        if self._told.get(name) != status:
            self._told[name] = status
            await self.servicer.set(name, status)


def is_ready(engine: EngineClient) -> bool:
    """Whether requests are taken and run now."""
    return engine.state in ("live", "degraded") and not engine.stats().target_is_lost
