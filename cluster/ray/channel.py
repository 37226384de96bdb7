"""The channel to a controller on Ray: acquires a placement, starts the actor, exchanges messages over ZMQ."""

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import ray
import zmq
import zmq.asyncio
from ray.exceptions import RayError

from cluster.ray import cluster as ray_cluster
from cluster.ray.actors import remote
from cluster.ray.cluster import forwarded_variables
from cluster.ray.controller import ControllerActor
from cluster.ray.placement import CONTROLLER, Placement
from cluster.ray.placement_provider import OwnPlacementGroup, PlacementProvider
from cluster.ray.processes import returns_within
from cluster.ray.workers import RunningActor, end_reason
from cluster.transport.process_workers import BODY
from cluster.transport.zmq_sockets import BoundSockets, Socket
from protos.config.engine import EngineConfig, to_json
from protos.progress import ProgressCallback
from runtime.frontend.channel import Commands, Failed, LoadProgress, Report
from runtime.frontend.delivery import deliver
from runtime.frontend.process_channel import STOP_GRACE_S

logger = logging.getLogger(__name__)

RELEASE_S = 10.0
"""Ray waits up to minutes for a head that does not answer. An engine that ends does not."""


class RayChannel:
    """A `runtime.frontend.channel.Channel` to a controller that is a Ray actor. Belongs to one event loop.

    Args:
        config: the engine's configuration.
        body: of the workers; see `RayWorkerGroup`.
        provider: of the placement; default: a placement group of its own.
    """

    def __init__(self, config: EngineConfig, body: str = BODY, provider: PlacementProvider | None = None) -> None:
        self._config, self._body = config, body
        self._provider: PlacementProvider = OwnPlacementGroup() if provider is None else provider
        self._context: zmq.Context[Socket] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._placement: Placement | None = None
        self._bound: BoundSockets | None = None
        self._reports: zmq.asyncio.Socket | None = None
        self._commands: Socket | None = None
        self._controller: RunningActor | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._placing: asyncio.Future[None] | None = None
        self._cancelled = threading.Event()

    @property
    def placement(self) -> Placement | None:
        """The replica's placement; None before it is acquired."""
        return self._placement

    async def start(self, on_report: Callable[[Report], None]) -> None:
        """See `Channel`. Returns when the controller has been started; raises `PlacementError` if there is no room."""
        loop = asyncio.get_running_loop()

        def report(text: str) -> None:
            loop.call_soon_threadsafe(on_report, LoadProgress(text))

        self._placing = asyncio.ensure_future(asyncio.to_thread(self._place, report))
        await asyncio.shield(self._placing)
        self._bind()
        controller = self._controller = await asyncio.to_thread(self._start_controller)
        ended: asyncio.Future[None] = loop.create_future()

        def notice(_: "Future[Any]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_settle, ended)

        controller.ended.add_done_callback(notice)
        self._watcher = asyncio.create_task(self._watch(controller, ended, on_report))

    def _place(self, report: ProgressCallback) -> None:
        """Wait for a placement; runs in a thread."""
        self._placement = self._provider.acquire(self._config, report, lambda: not self._cancelled.is_set())

    def _bind(self) -> None:
        assert self._placement is not None
        is_near = self._placement.nodes[CONTROLLER] == ray_cluster.node_id()
        self._reports, self._commands = zmq.asyncio.Socket(self._context, zmq.PULL), self._context.socket(zmq.PUSH)
        host = None if is_near else ray_cluster.node_address()
        self._bound = BoundSockets(self._context, self._reports, self._commands, host)

    def _start_controller(self) -> RunningActor:
        """Start the controller's actor; runs in a thread."""
        assert self._placement is not None
        assert self._bound is not None
        actor = (
            remote(ControllerActor)
            .options(**self._placement.options(CONTROLLER, "controller"))
            .remote(
                to_json(self._config),
                msgspec.msgpack.encode(self._bound.endpoint),
                self._placement,
                forwarded_variables(),
                self._body,
            )
        )
        return RunningActor.start(actor)

    async def _watch(
        self, controller: RunningActor, ended: "asyncio.Future[None]", on_report: Callable[[Report], None]
    ) -> None:
        """Pass on the controller's reports, and `Failed` once it is gone."""
        assert self._reports is not None
        await deliver(self._reports, ended, on_report, self.kill)
        on_report(Failed(f"the controller is gone: {end_reason(controller.ended)}"))

    def send(self, commands: Commands) -> None:
        """See `Channel`."""
        self._post(commands)

    def _post(self, commands: Commands) -> bool:
        """Send *commands*; return False if there is no controller to send to."""
        if self._commands is None or self._commands.closed:
            return False
        try:
            self._commands.send(self._encoder.encode(commands), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def close(self) -> None:
        """See `Channel`."""
        self._cancelled.set()
        if self._placing is not None:
            await asyncio.gather(self._placing, return_exceptions=True)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._controller is not None and self._post(Commands(stop=True)):
            with contextlib.suppress(Exception):  # the actor's error does not matter here
                await asyncio.wait_for(asyncio.wrap_future(self._controller.ended), STOP_GRACE_S)
        self._release()  # in this thread: an interpreter that exits cannot start another
        for socket in (self._reports, self._commands):
            if socket is not None:
                socket.close()
        if self._bound is not None:
            self._bound.close()
        self._context.term()

    def _release(self) -> None:
        """End the controller and release its placement."""
        if not ray.is_initialized():  # Ray was shut down, and its actors with it
            return
        if self._controller is not None:
            self._controller.end()
            self._controller.wait_gone()
        try:
            if returns_within(RELEASE_S, self._provider.release):
                return
            reason = f"no answer within {RELEASE_S:g} s"
        except RayError as error:
            reason = str(error)
        logger.warning("Ray's head did not release the engine's placement group: %s", reason)
        atexit.unregister(ray.shutdown)  # which would wait for the head, too

    def kill(self) -> None:
        """Kill the controller."""
        self._cancelled.set()
        if self._controller is not None and ray.is_initialized():
            self._controller.end()


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
