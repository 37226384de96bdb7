"""The controller as a Ray actor in bundle 0. It owns the workers' actors, so they die with it."""

import logging
import os

import msgspec
import ray
import zmq

from cluster import assemble
from cluster.ray.actors import ActorBase, this_process
from cluster.ray.cluster import set_missing_variables
from cluster.ray.placement import Placement
from cluster.ray.spares import Spares
from cluster.ray.workers import RayWorkerGroup
from cluster.transport.process_workers import BODY
from cluster.transport.zmq_sockets import Endpoint, Socket, connect
from protos.config.engine import EngineConfig, from_json, to_json
from protos.interfaces import Executor
from protos.progress import ProgressCallback
from runtime.core.controller import Controller
from runtime.frontend.channel import Report
from runtime.frontend.controller_loop import serve_controller
from runtime.frontend.controller_process import SocketInbox
from runtime.frontend.silence import signs_of_life
from runtime.metrics.logs import log_to_stderr
from runtime.supervision.distributed_executor import DistributedExecutor

LAST_REPORTS_MS = 1000


class ControllerActor(ActorBase):
    """Builds an engine and runs its controller loop for one frontend.

    Args:
        config: the `EngineConfig`, as JSON.
        endpoint: of the frontend's sockets, as msgpack.
        placement: the replica's bundles.
        environment: variables to set if they are unset.
        body: of the workers; see `RayWorkerGroup`.
    """

    def __init__(
        self, config: str, endpoint: bytes, placement: Placement, environment: dict[str, str], body: str = BODY
    ) -> None:
        set_missing_variables(environment)
        self._config = from_json(config)
        log_to_stderr(self._config.log_format)
        self._endpoint = msgspec.msgpack.decode(endpoint, type=Endpoint)
        self._placement, self._body = placement, body

    @ray.method(concurrency_group="serve")
    def run(self) -> None:
        """Build the engine and serve until stopped; exit the process with an error after a failure."""
        context: zmq.Context[Socket] = zmq.Context()
        commands = context.socket(zmq.PULL)
        connect(commands, self._endpoint.commands, self._endpoint)

        def connect_reports() -> Socket:
            made = context.socket(zmq.PUSH)
            connect(made, self._endpoint.reports, self._endpoint)
            return made

        reports = connect_reports()
        encoder, inbox = msgspec.msgpack.Encoder(), SocketInbox(commands)

        def post(report: Report) -> None:
            reports.send(encoder.encode(report))

        with signs_of_life(connect_reports):
            succeeded = serve_controller(lambda report: self._build(inbox, report), inbox, post)
        reports.close(linger=LAST_REPORTS_MS)
        commands.close()
        context.term()
        if not succeeded:
            logging.shutdown()
            os._exit(1)  # the frontend must see a failure

    def _build(self, inbox: SocketInbox, report: ProgressCallback) -> Controller:
        return assemble.build_controller(self._config, inbox, report, self._make_executor)

    def _make_executor(self, config: EngineConfig, report: ProgressCallback) -> Executor:
        spares = Spares(self._placement, config.parallel.spare_workers, to_json(config))
        workers = RayWorkerGroup(self._placement, self._body, spares)
        # A worker with a fraction of a GPU shares it with others.
        may_share = self._placement.plan.worker.get("GPU", 1.0) < 1.0
        return DistributedExecutor(workers, config, report, machine=this_process().machine, may_share_devices=may_share)
