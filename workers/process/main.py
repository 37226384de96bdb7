"""The main function of a worker process: report its node and devices, load its part, warm up, and serve until `Stop`.

The entry point of the process calls `serve` with a `Port` to the controller; `protos.worker_messages` defines the
messages. `workers.target_rank` and `workers.process.draft_rank` run the rounds.
"""

import logging
import os
import socket
import time
from dataclasses import replace
from typing import Literal

import torch

from protos.config.default_shape import for_device
from protos.config.engine import EngineConfig, from_json
from protos.errors import StepOutOfMemoryError, TargetOutOfMemoryError
from protos.worker_messages import (
    FormDraftChannel,
    GroupLost,
    Placed,
    Plan,
    Port,
    Rejoin,
    RoundOutOfMemory,
    Setup,
    Stop,
    ToWorker,
    WorkerFailed,
)
from workers.device import set_device
from workers.distributed.groups import LOOPBACK, GroupError
from workers.distributed.store import open_store
from workers.draft.deadline import FLOOR_S
from workers.draft.remote import RemoteDraft
from workers.process.draft_rank import DraftRank
from workers.process.heartbeat import HeartbeatThread
from workers.process.loading import DraftLoading, StoppedError, TargetLoading, wait_for
from workers.target_rank import TargetRank
from workers.threads import ThreadCount, choose_threads

logger = logging.getLogger(__name__)


def serve(port: Port, host: str = LOOPBACK, node: str = "", *, floor_s: float = FLOOR_S) -> None:
    """Run a worker until it receives `Stop`.

    Args:
        port: to the controller.
        host: an address of this machine that the other workers can reach.
        node: the name of this machine, the same for all its workers; its host name if empty.
        floor_s: the shortest deadline of a draft.

    Raises:
        Exception: what ended the worker, after it was reported to the controller.
    """
    try:
        store, address = open_store(host)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        port.send(Placed(host, node or socket.gethostname(), os.getpid(), _devices(), address, visible))
        with HeartbeatThread(port) as heartbeat:
            setup = wait_for(port, Setup)
            if setup.worker.role != "target" or setup.worker.rank:
                del store  # only rank 0's is used
            _run_worker(port, setup, heartbeat, floor_s)
    except StoppedError:
        return
    except Exception as error:
        logger.exception("the worker failed")
        port.send(WorkerFailed(str(error) or type(error).__name__, type(error).__name__))
        raise


def _devices() -> tuple[str, ...]:
    """Return a unique name for each device that this process sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = [torch.cuda.get_device_properties(i) for i in range(count)]
    return tuple(f"{device.name} {getattr(device, 'uuid', i)}" for i, device in enumerate(seen))


def _run_worker(port: Port, setup: Setup, heartbeat: HeartbeatThread, floor_s: float) -> None:
    config = _configured(setup)
    device = torch.device(setup.device)
    set_device(device)
    threads = choose_threads(config)
    if setup.worker.role == "draft":
        _serve_draft(port, DraftLoading(port, setup, config, device, heartbeat).load(), heartbeat, threads)
    else:
        loading = TargetLoading(port, setup, config, device, heartbeat, floor_s=floor_s)
        _serve_target(port, loading, heartbeat, threads)


def _configured(setup: Setup) -> EngineConfig:
    """Return the configuration with the device that this worker got, and the default shape of drafts there."""
    config = from_json(setup.config)
    kind: Literal["cpu", "cuda"] = "cpu" if setup.device == "cpu" else "cuda"
    model = replace(config.model, device=kind, compile_in_background=False)  # a worker says when it is ready
    return for_device(replace(config, model=model), kind)


def _serve_target(port: Port, loading: TargetLoading, heartbeat: HeartbeatThread, threads: ThreadCount | None) -> None:
    """Run every plan that arrives, until `Stop`; form the group again when another rank was replaced."""
    try:
        order = _run_rounds(port, *loading.load(), heartbeat, threads, may_rejoin=loading.may_rejoin)
        while order is not None:
            order = _run_rounds(port, *loading.rejoin(order), heartbeat, threads, may_rejoin=True)
    finally:
        loading.close()


def _run_rounds(
    port: Port,
    rank: TargetRank,
    remote: RemoteDraft | None,
    heartbeat: HeartbeatThread,
    threads: ThreadCount | None,
    *,
    may_rejoin: bool,
) -> Rejoin | None:
    """Run every plan that arrives, until `Rejoin`, which is returned, or `Stop`."""
    is_lost = False
    try:
        while not isinstance(message := port.receive(None), Stop | Rejoin):
            if isinstance(message, Plan) and not is_lost:
                is_lost = not _run_round(port, rank, message, may_rejoin=may_rejoin)
                heartbeat.round = rank.round
                _revise(threads)
            elif isinstance(message, FormDraftChannel) and remote is not None:
                remote.form(message)
    finally:
        if remote is not None:
            remote.close()
        rank.close()
    return message if isinstance(message, Rejoin) else None


def _run_round(port: Port, rank: TargetRank, message: Plan, *, may_rejoin: bool) -> bool:
    """Run a round; return whether the group is intact.

    If it is not and cannot be formed again, this rank waits to be ended: leaving over NCCL may take for ever.
    """
    try:
        done = rank.run(message.plan)
    except GroupError as error:
        port.send(GroupLost(str(error)) if may_rejoin else WorkerFailed(str(error), type(error).__name__))
        return False
    except TargetOutOfMemoryError as shortage:
        port.send(GroupLost(str(shortage), out_of_memory=True))
        if may_rejoin:
            rank.close()  # the other ranks wait for this one
        return False
    except StepOutOfMemoryError as shortage:
        port.send(RoundOutOfMemory(message.plan.round, str(shortage), shortage.keeps_state))
        return True
    if done is not None:
        port.send(done)
        rank.feed_back(message.plan, done)
    return True


def _serve_draft(port: Port, rank: DraftRank, heartbeat: HeartbeatThread, threads: ThreadCount | None) -> None:
    """Draft for every plan that arrives and catch up in between, until `Stop`."""
    try:
        while True:
            messages = _receive_all(port, 0.0 if rank.is_catching_up else None)
            if not messages:
                rank.catch_up()
            elif not rank.take(messages):
                return
            heartbeat.round = rank.round
            _revise(threads)
    finally:
        rank.close()


def _revise(threads: ThreadCount | None) -> None:
    if threads is not None and time.monotonic() >= threads.due:
        threads.revise()


def _receive_all(port: Port, timeout_s: float | None) -> list[ToWorker]:
    """Return all messages that have arrived; wait for the first one."""
    messages: list[ToWorker] = []
    message = port.receive(timeout_s)
    while message is not None:
        messages.append(message)
        message = port.receive(0.0)
    return messages
