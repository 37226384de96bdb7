"""A front end's way to a controller on Ray: takes its place, starts it, and carries messages over ZMQ."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import ray
import zmq
import zmq.asyncio

from cluster.ray import cluster as ray_cluster
from cluster.ray.actors import remote
from cluster.ray.cluster import passed_on
from cluster.ray.controller import ControllerActor
from cluster.ray.placement import CONTROLLER, Placement
from cluster.ray.site import OwnSite, Site
from cluster.ray.workers import Hired, why
from cluster.transport.process_workers import BODY
from cluster.transport.zmq_sockets import BoundSockets, Socket
from protos.config.engine import EngineConfig, to_json
from protos.progress import ProgressCallback
from runtime.frontend.channel import Commands, Failed, LoadProgress, Report
from runtime.frontend.process_channel import STOP_GRACE_S

LAST_REPORTS_MS = 50


class RayChannel:
    """A `runtime.frontend.channel.Channel` to a controller that is a Ray actor. Belongs to one event loop.

    Args:
        config: what to build.
        body: of the workers; see `RayWorkerGroup`.
        site: where the parts go; a placement group of their own where none is given.
    """

    def __init__(self, config: EngineConfig, body: str = BODY, site: Site | None = None) -> None:
        self._config, self._body = config, body
        self._site: Site = OwnSite() if site is None else site
        self._context: zmq.Context[Socket] = zmq.Context()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        self._placement: Placement | None = None
        self._bound: BoundSockets | None = None
        self._up: zmq.asyncio.Socket | None = None
        self._down: Socket | None = None
        self._controller: Hired | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._placing: asyncio.Future[None] | None = None
        self._unwanted = threading.Event()

    @property
    def placement(self) -> Placement | None:
        """Where the replica is, once it has its place."""
        return self._placement

    async def start(self, on_report: Callable[[Report], None]) -> None:
        """See `Channel`. Returns when the replica has its place; raises `PlacementError` where it gets none."""
        loop = asyncio.get_running_loop()

        def say(text: str) -> None:
            loop.call_soon_threadsafe(on_report, LoadProgress(text))

        self._placing = asyncio.ensure_future(asyncio.to_thread(self._place, say))
        await asyncio.shield(self._placing)
        self._bind()
        hired = self._controller = await asyncio.to_thread(self._hire)
        ended: asyncio.Future[None] = loop.create_future()

        def notice(_: "Future[Any]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_settle, ended)

        hired.ended.add_done_callback(notice)
        self._watcher = asyncio.create_task(self._watch(hired, ended, on_report))

    def _place(self, say: ProgressCallback) -> None:
        """Wait for room in the cluster; runs in a thread."""
        self._placement = self._site.take(self._config, say, lambda: not self._unwanted.is_set())

    def _bind(self) -> None:
        assert self._placement is not None
        is_near = self._placement.nodes[CONTROLLER] == ray_cluster.node_id()
        self._up, self._down = zmq.asyncio.Socket(self._context, zmq.PULL), self._context.socket(zmq.PUSH)
        host = None if is_near else ray_cluster.node_address()
        self._bound = BoundSockets(self._context, self._up, self._down, host)

    def _hire(self) -> Hired:
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
                passed_on(),
                self._body,
            )
        )
        return Hired.hire(actor)

    async def _watch(self, hired: Hired, ended: "asyncio.Future[None]", on_report: Callable[[Report], None]) -> None:
        """Deliver reports until the controller is gone, then what it had still sent, then that it is gone."""
        assert self._up is not None
        receiver = asyncio.create_task(self._receive(self._up, on_report))
        try:
            await ended
        finally:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)
        while await self._up.poll(timeout=LAST_REPORTS_MS):
            on_report(self._decoder.decode(await self._up.recv()))
        on_report(Failed(f"the controller is gone: {why(hired.ended)}"))

    async def _receive(self, up: zmq.asyncio.Socket, on_report: Callable[[Report], None]) -> None:
        while True:
            on_report(self._decoder.decode(await up.recv()))
            await asyncio.sleep(0)  # what has come already is received without a pause, and readers need theirs

    def send(self, commands: Commands) -> None:
        """See `Channel`."""
        self._post(commands)

    def _post(self, commands: Commands) -> bool:
        """Whether the controller was there to be sent *commands*."""
        if self._down is None or self._down.closed:
            return False
        try:
            self._down.send(self._encoder.encode(commands), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def close(self) -> None:
        """See `Channel`."""
        self._unwanted.set()
        if self._placing is not None:
            await asyncio.gather(self._placing, return_exceptions=True)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if self._controller is not None and self._post(Commands(stop=True)):
            with contextlib.suppress(Exception):  # however it ends, it ends
                await asyncio.wait_for(asyncio.wrap_future(self._controller.ended), STOP_GRACE_S)
        self._give_back()  # in this thread: an interpreter that exits starts no other
        for socket in (self._up, self._down):
            if socket is not None:
                socket.close()
        if self._bound is not None:
            self._bound.close()
        self._context.term()

    def _give_back(self) -> None:
        """End the controller and give its place back."""
        if not ray.is_initialized():  # somebody has shut Ray down, and everything of ours with it
            return
        if self._controller is not None:
            self._controller.end()
            self._controller.wait_gone()
        self._site.give_back()

    def kill(self) -> None:
        """End the controller at once."""
        self._unwanted.set()
        if self._controller is not None and ray.is_initialized():
            self._controller.end()


def _settle(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
