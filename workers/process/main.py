"""The main function of a worker process: report its node and devices, load its part, warm up, and serve until `Stop`.

The entry point of the process calls `serve` with a `Port` to the controller; `protos.worker_messages` defines the
messages. `workers.target_rank` and `workers.process.draft_rank` run the rounds.
"""

import logging
import os
import socket
import threading
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self, TypeVar

import torch

from protos.config.engine import EngineConfig, from_json
from protos.errors import ConfigError
from protos.messages import WorkerInfo
from protos.worker_messages import (
    Allocate,
    FormDraftChannel,
    Heartbeat,
    Loaded,
    Placed,
    Plan,
    Port,
    Progress,
    Setup,
    Stop,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from workers.build import blocks_that_fit, load_target, make_draft, make_target, measure_draft
from workers.device import set_device
from workers.distributed.groups import LOOPBACK, Group, Solo
from workers.distributed.shm_group import form_with_shared_memory
from workers.distributed.store import address_towards, connect_store, open_store
from workers.draft.channel import DraftChannels, join_as_draft, join_as_target
from workers.draft.deadline import FLOOR_S
from workers.draft.load import load_draft
from workers.draft.receiver import DraftReceiver
from workers.draft.remote import RemoteDraft
from workers.draft.sender import DraftSender
from workers.process.draft_rank import DraftRank
from workers.target_rank import TargetRank

logger = logging.getLogger(__name__)

BEAT_S = 0.5
TP_TIMEOUT_S = 3600.0
"""The controller decides whether a rank hangs; the group itself waits for longer than that takes."""
PACE_TOKENS = 64
"""Steps are measured for up to this many tokens at least, to distinguish a slow round from one that hangs."""

Order = TypeVar("Order", Setup, Allocate)


class StoppedError(Exception):
    """The controller sent `Stop` before the worker was ready."""


class HeartbeatThread:
    """Sends heartbeats from a thread of its own. The worker sets `stage` and `round`, which they carry."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.stage = "starting"
        self.round = -1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._port.send(Heartbeat(self.stage, self.round))


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
        port.send(Placed(host, node or socket.gethostname(), os.getpid(), _devices(), address))
        with HeartbeatThread(port) as heartbeat:
            setup = _wait_for(port, Setup)
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


def _wait_for(port: Port, kind: type[Order]) -> Order:
    message = port.receive(None)
    if isinstance(message, kind):
        return message
    if isinstance(message, Stop):
        raise StoppedError
    raise RuntimeError(f"waited for {kind.__name__}, got {type(message).__name__}")


def _run_worker(port: Port, setup: Setup, heartbeat: HeartbeatThread, floor_s: float) -> None:
    config = _configured(setup)
    device = torch.device(setup.device)
    set_device(device)
    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
    loading = _Loading(port, setup, config, device, heartbeat)
    if setup.worker.role == "draft":
        _serve_draft(port, loading.draft(), heartbeat)
    else:
        _serve_target(port, *loading.target(floor_s), heartbeat)


def _configured(setup: Setup) -> EngineConfig:
    """Return the configuration with the device that this worker got."""
    config = from_json(setup.config)
    kind: Literal["cpu", "cuda"] = "cpu" if setup.device == "cpu" else "cuda"
    return replace(config, model=replace(config.model, device=kind))


def _serve_target(port: Port, rank: TargetRank, remote: RemoteDraft | None, heartbeat: HeartbeatThread) -> None:
    """Run every plan that arrives, until `Stop`."""
    try:
        while not isinstance(message := port.receive(None), Stop):
            if isinstance(message, Plan):
                done = rank.run(message.plan)
                if done is not None:
                    port.send(done)
                    rank.feed_back(message.plan, done)
                heartbeat.round = rank.round
            elif isinstance(message, FormDraftChannel) and remote is not None:
                remote.form(message)
    finally:
        if remote is not None:
            remote.close()
        rank.close()


def _serve_draft(port: Port, rank: DraftRank, heartbeat: HeartbeatThread) -> None:
    """Draft for every plan that arrives and catch up in between, until `Stop`."""
    try:
        while True:
            messages = _receive_all(port, 0.0 if rank.is_catching_up else None)
            if not messages:
                rank.catch_up()
            elif not rank.take(messages):
                return
            heartbeat.round = rank.round
    finally:
        rank.close()


def _receive_all(port: Port, timeout_s: float | None) -> list[ToWorker]:
    """Return all messages that have arrived; wait for the first one."""
    messages: list[ToWorker] = []
    message = port.receive(timeout_s)
    while message is not None:
        messages.append(message)
        message = port.receive(0.0)
    return messages


class _Loading:
    """Loads what a worker of either role needs, from `Setup` until it is ready for plans."""

    def __init__(
        self, port: Port, setup: Setup, config: EngineConfig, device: torch.device, heartbeat: HeartbeatThread
    ) -> None:
        self._port, self._setup, self._config, self._device = port, setup, config, device
        self._heartbeat = heartbeat

    def target(self, floor_s: float) -> tuple[TargetRank, RemoteDraft | None]:
        """Load this rank's share, and the draft in this process if there is one; return when ready for plans."""
        self._heartbeat.stage = "loading"
        tp = self._join()
        try:
            return self._target(tp, floor_s)
        except BaseException:
            tp.close()  # the other ranks must not wait for this one
            raise

    def _target(self, tp: Group, floor_s: float) -> tuple[TargetRank, RemoteDraft | None]:
        config, speculative = self._config, self._config.speculative
        is_local = speculative is not None and speculative.placement == "colocated" and not tp.rank
        loaded = load_target(config, tp, self._report, with_draft=is_local)
        allocate = self._settle(loaded.info(config), loaded.num_bytes)
        ready = make_target(config, loaded, allocate, self._report, pace_tokens=PACE_TOKENS)
        self._ready(WorkerReady(ready.step_s, ready.draft_s))
        if ready.draft is not None or tp.rank:
            return TargetRank(tp, ready.worker, ready.draft), None

        def join(order: FormDraftChannel) -> DraftReceiver:
            return join_as_target(
                order,
                self._port.send,
                self._setup.backend,
                self._device,
                floor_s,
                has_features=loaded.spec.needs != "none",
            )

        has_probs = speculative is not None and speculative.samples_drafts
        remote = RemoteDraft(DraftChannels(self._port.send, join), ready.worker, has_probs=has_probs)
        return TargetRank(tp, ready.worker, remote), remote

    def draft(self) -> DraftRank:
        """Load the draft; return it ready for plans."""
        config = self._config
        self._heartbeat.stage = "loading"
        draft = load_draft(config, None, self._report)
        if draft is None:
            raise ConfigError("a draft worker was started, but the configuration names no draft to load")
        size = config.cache.block_size
        fitting = blocks_that_fit(config.cache, self._device, draft.bytes_per_block(size))
        allocate = self._settle(WorkerInfo(fitting, size, 0, 0), draft.num_bytes)
        engine = make_draft(config, draft, allocate, self._device, self._report)
        self._ready(WorkerReady(measure_draft(config, engine)))

        def join(order: FormDraftChannel) -> DraftSender:
            return join_as_draft(
                order, self._port.send, self._setup.backend, self._device, has_features=draft.spec.needs != "none"
            )

        return DraftRank(engine, DraftChannels(self._port.send, join))

    def _join(self) -> Group:
        """Form the group of all target ranks."""
        setup = self._setup
        if setup.store is None:
            return Solo()
        self._report(f"meeting {setup.world - 1} other target rank{'s' if setup.world > 2 else ''}")
        store, host = connect_store(setup.store), address_towards(setup.store.host)
        return form_with_shared_memory(
            "tp",
            store,
            setup.worker.rank,
            setup.world,
            setup.backend,
            device=self._device,
            host=host,
            timeout_s=TP_TIMEOUT_S,
        )

    def _settle(self, info: WorkerInfo, num_bytes: int) -> Allocate:
        """Report what was loaded; return how many KV blocks all workers hold."""
        self._port.send(Loaded(info, num_bytes))
        allocate = _wait_for(self._port, Allocate)
        self._heartbeat.stage = "warming up"
        return allocate

    def _ready(self, ready: WorkerReady) -> None:
        self._heartbeat.stage = "serving"
        self._port.send(ready)

    def _report(self, text: str) -> None:
        self._port.send(Progress(text))
