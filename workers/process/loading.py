"""What a worker process does between `Setup` and `WorkerReady`: form groups, load weights, allocate, warm up."""

import gc
from typing import TypeVar

import torch

from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from protos.messages import WorkerInfo
from protos.worker_messages import (
    Allocate,
    FormDraftChannel,
    Loaded,
    Port,
    Progress,
    Rejoin,
    Setup,
    Stop,
    StoreAddress,
    WorkerReady,
)
from workers.build import (
    LoadedTarget,
    ReadyTarget,
    blocks_of_draft,
    load_target,
    make_draft,
    make_target,
)
from workers.distributed.groups import Group, Solo
from workers.distributed.renewable import RenewableGroup
from workers.distributed.shm_group import form_with_shared_memory
from workers.distributed.store import address_towards, connect_store
from workers.draft.channel import DraftChannels, join_as_draft, join_as_target
from workers.draft.load import load_draft
from workers.draft.receiver import DraftReceiver
from workers.draft.remote import RemoteDraft
from workers.draft.sender import DraftSender
from workers.draft.wire import most_bytes
from workers.process.draft_rank import DraftRank
from workers.process.heartbeat import HeartbeatThread
from workers.target_rank import TargetRank
from workers.verification.draft_probs import DRAFT_PROBS_SIZE

TP_TIMEOUT_S = 3600.0
"""The controller decides whether a rank hangs; the group itself waits for longer than that takes."""
PACE_TOKENS = 64
"""Steps are measured for up to this many tokens at least, to distinguish a slow round from one that hangs."""

Order = TypeVar("Order", Setup, Allocate)


class StoppedError(Exception):
    """The controller sent `Stop` before the worker was ready."""


def wait_for(port: Port, kind: type[Order]) -> Order:
    """Return the next message, which must be of *kind*. Raises `StoppedError` if it is `Stop`."""
    message = port.receive(None)
    if isinstance(message, kind):
        return message
    if isinstance(message, Stop):
        raise StoppedError
    raise RuntimeError(f"waited for {kind.__name__}, got {type(message).__name__}")


class Loading:
    """What the loading of both roles has in common: reports and the number of KV blocks."""

    def __init__(
        self, port: Port, setup: Setup, config: EngineConfig, device: torch.device, heartbeat: HeartbeatThread
    ) -> None:
        self._port, self._setup, self._config, self._device = port, setup, config, device
        self._heartbeat = heartbeat

    def _settle(self, loaded: Loaded) -> Allocate:
        """Report what was loaded; return how many KV blocks all workers hold."""
        self._port.send(loaded)
        allocate = wait_for(self._port, Allocate)
        self._heartbeat.stage = "warming up"
        return allocate

    def _ready(self, ready: WorkerReady) -> None:
        self._heartbeat.stage = "serving"
        self._port.send(ready)

    def _report(self, text: str) -> None:
        self._port.send(Progress(text))


class DraftLoading(Loading):
    """Loads a draft that is alone in its process."""

    def load(self) -> DraftRank:
        """Load the draft; return it ready for plans."""
        config = self._config
        self._heartbeat.stage = "loading"
        draft = load_draft(config, None, self._report)
        if draft is None:
            raise ConfigError("a draft worker was started, but the configuration names no draft to load")
        size = config.cache.block_size
        fitting = blocks_of_draft(config, draft, self._device)
        allocate = self._settle(Loaded(WorkerInfo(fitting, size, 0, 0), draft.num_bytes))
        engine, measurement = make_draft(config, draft, allocate, self._device, self._report)
        self._ready(WorkerReady(measurement.costs().draft_s))

        def join(order: FormDraftChannel) -> DraftSender:
            return join_as_draft(order, self._port.send, has_features=draft.spec.needs != "none")

        return DraftRank(engine, DraftChannels(self._port.send, join))


class TargetLoading(Loading):
    """Loads a target rank, and makes it anew over the same weights when its group is formed again.

    Args:
        floor_s: the shortest deadline of a draft.
    """

    def __init__(
        self,
        port: Port,
        setup: Setup,
        config: EngineConfig,
        device: torch.device,
        heartbeat: HeartbeatThread,
        *,
        floor_s: float,
    ) -> None:
        super().__init__(port, setup, config, device, heartbeat)
        self._floor_s = floor_s
        self._group = RenewableGroup(setup.worker.rank, setup.world)
        self._loaded: LoadedTarget | None = None
        self._report_of_load: Loaded | None = None

    @property
    def may_rejoin(self) -> bool:
        """Whether this rank can outlive its group. On a GPU its caches would have to be freed, and NCCL aborted."""
        return self._setup.world > 1 and self._setup.backend == "gloo" and self._device.type == "cpu"

    def load(self) -> tuple[TargetRank, RemoteDraft | None]:
        """Load this rank's share, and the draft in this process if there is one; return when ready for plans."""
        config, speculative = self._config, self._config.speculative
        self._heartbeat.stage = "loading"
        group: Group = Solo() if self._setup.store is None else self._form(self._setup.store, self._setup.group)
        is_local = speculative is not None and speculative.placement == "colocated" and not group.rank
        try:
            self._loaded = load_target(config, self._group, self._report, with_draft=is_local)
            self._report_of_load = self._loaded.report(config)
        except BaseException:
            group.close()  # the other ranks must not wait for this one
            raise
        self._group.use(group)
        return self._make(self._loaded, self._report_of_load)

    def rejoin(self, order: Rejoin) -> tuple[TargetRank, RemoteDraft | None]:
        """Form the next group with the loaded weights; return when ready for plans."""
        assert self._loaded is not None, "not loaded"
        assert self._report_of_load is not None, "not loaded"
        self._heartbeat.stage = "loading"
        gc.collect()  # the caches of the last group
        self._group.use(self._form(order.store, order.group))
        return self._make(self._loaded, self._report_of_load)

    def close(self) -> None:
        """Leave the group."""
        self._group.close()

    def _make(self, loaded: LoadedTarget, report: Loaded) -> tuple[TargetRank, RemoteDraft | None]:
        """Allocate and warm up; all ranks of a group do so at once."""
        try:
            allocate = self._settle(report)
            ready = make_target(self._config, loaded, allocate, self._report, pace_tokens=PACE_TOKENS)
        except BaseException:
            self._group.close()
            raise
        self._ready(WorkerReady(ready.costs.target_s, ready.costs.draft_s, ready.rows_ahead))
        if ready.draft is not None or self._group.rank:
            return TargetRank(self._group, ready.worker, ready.draft, ready.rounds), None
        remote = self._remote(ready, loaded)
        return TargetRank(self._group, ready.worker, remote, ready.rounds), remote

    def _remote(self, ready: ReadyTarget, loaded: LoadedTarget) -> RemoteDraft:
        """Return rank 0's end of the channels to a draft in another process."""
        speculative = self._config.speculative
        has_probs = speculative is not None and speculative.samples_drafts
        max_bytes = most_bytes(
            self._config.scheduler.max_num_seqs, self._config.max_draft, DRAFT_PROBS_SIZE if has_probs else 0
        )

        def join(order: FormDraftChannel) -> DraftReceiver:
            return join_as_target(
                order,
                self._port.send,
                self._device,
                self._floor_s,
                max_bytes=max_bytes,
                has_features=loaded.spec.needs != "none",
            )

        return RemoteDraft(DraftChannels(self._port.send, join), ready.worker, has_probs=has_probs)

    def _form(self, store: StoreAddress, number: int) -> Group:
        """Form group *number* of all target ranks."""
        setup = self._setup
        self._report(f"meeting {setup.world - 1} other target rank{'s' if setup.world > 2 else ''}")
        return form_with_shared_memory(
            f"tp/{number}",
            connect_store(store),
            setup.worker.rank,
            setup.world,
            setup.backend,
            device=self._device,
            host=address_towards(store.host),
            timeout_s=TP_TIMEOUT_S,
        )
