"""The whole life of a worker process of a gang: say where it is, be told who it is, load, warm up, serve until stopped.

Called with a `Port` to the controller by whatever started the process. `DESIGN` section 4; `protos.gang` has the words.
"""

import logging
import os
import socket
import threading
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self, TypeVar

import torch
from pydantic import TypeAdapter

from proposers import registry
from protos.config import EngineConfig, SpeculativeConfig
from protos.errors import ConfigError
from protos.gang import (
    Allocate,
    FormPair,
    Heartbeat,
    Loaded,
    Placed,
    Port,
    Progress,
    Setup,
    Stop,
    ToWorker,
    WorkerFailed,
    WorkerReady,
)
from protos.messages import WorkerInfo
from workers.build import MEASURED_TOKENS, cache_memory, draft_is_eager, load_draft
from workers.draft import DraftWorker
from workers.draft_rank import DraftRank
from workers.groups import LOOPBACK, Group, Solo, address_towards, connect_store, form, open_store
from workers.kv import bytes_per_block
from workers.loader import LoadedModel, load
from workers.module_runner import ModelForward
from workers.pair import DraftReceiver, DraftSender, Pairing, join_as_draft, join_as_target, set_device
from workers.patience import FLOOR_S
from workers.runner import ModelRunner, weight_bytes
from workers.sampler import Sampler
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.target_rank import LocalDraft, TargetRank

logger = logging.getLogger(__name__)

BEAT_S = 0.5
TP_TIMEOUT_S = 3600.0
"""Whether a rank hangs is for the controller to judge; the group itself waits for longer than that can take."""
PACE_TOKENS = 64
"""Steps are measured up to this many tokens at least, to tell a slow round from one that hangs."""

_CONFIG = TypeAdapter(EngineConfig)
Told = TypeVar("Told", Setup, Allocate)


class StoppedError(Exception):
    """The controller said stop before the worker was ready."""


class Heart:
    """Beats from a thread of its own, saying what the worker does. The worker sets `stage` and `round`."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.stage = "starting"
        self.round = -1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            self._port.send(Heartbeat(self.stage, self.round))


def serve(port: Port, host: str = LOOPBACK, node: str = "", *, floor_s: float = FLOOR_S) -> None:
    """Be a worker; return when told to stop.

    Args:
        port: leads to the controller.
        host: an address of this machine that the other workers reach.
        node: names this machine, the same for all its workers; the host name where empty.
        floor_s: the shortest time that target 0 waits for a draft.

    Raises:
        Exception: whatever ended it, after the controller was told.
    """
    try:
        store, address = open_store(host)
        port.send(Placed(host, node or socket.gethostname(), os.getpid(), _devices(), address))
        with Heart(port) as heart:
            setup = _wait_for(port, Setup)
            if setup.worker.role != "target" or setup.worker.rank:
                del store  # only rank 0's is used
            _live(port, setup, heart, floor_s)
    except StoppedError:
        return
    except Exception as error:
        logger.exception("the worker failed")
        port.send(WorkerFailed(str(error) or type(error).__name__, type(error).__name__))
        raise


def _devices() -> tuple[str, ...]:
    """Return the names of the devices this process sees, unlike ones for unlike devices."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    seen = [torch.cuda.get_device_properties(i) for i in range(count)]
    return tuple(f"{device.name} {getattr(device, 'uuid', i)}" for i, device in enumerate(seen))


def _wait_for(port: Port, kind: type[Told]) -> Told:
    message = port.receive(None)
    if isinstance(message, kind):
        return message
    if isinstance(message, Stop):
        raise StoppedError
    raise RuntimeError(f"waited for {kind.__name__}, got {type(message).__name__}")


def _live(port: Port, setup: Setup, heart: Heart, floor_s: float) -> None:
    config = _configured(setup)
    device = torch.device(setup.device)
    set_device(device)
    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
    loading = _Loading(port, setup, config, device, heart)
    if setup.worker.role == "draft":
        _serve_draft(port, loading.draft(), heart)
    else:
        _serve_target(port, loading.target(floor_s), heart)


def _configured(setup: Setup) -> EngineConfig:
    """Return the configuration with the device that this worker was given."""
    config = _CONFIG.validate_json(setup.config)
    kind: Literal["cpu", "cuda"] = "cpu" if setup.device == "cpu" else "cuda"
    return replace(config, model=replace(config.model, device=kind))


def _serve_target(port: Port, rank: TargetRank, heart: Heart) -> None:
    try:
        goes_on = True
        while goes_on:
            message = port.receive(None)
            goes_on = message is None or rank.take(message)
            heart.round = rank.round
    finally:
        rank.close()


def _serve_draft(port: Port, rank: DraftRank, heart: Heart) -> None:
    try:
        while True:
            messages = _all_mail(port, 0.0 if rank.is_behind else None)
            if not messages:
                rank.catch_up()
            elif not rank.take(messages):
                return
            heart.round = rank.round
    finally:
        rank.close()


def _all_mail(port: Port, timeout_s: float | None) -> list[ToWorker]:
    """Return everything that has come in, waiting for the first of it."""
    messages: list[ToWorker] = []
    message = port.receive(timeout_s)
    while message is not None:
        messages.append(message)
        message = port.receive(0.0)
    return messages


class _Loading:
    """From setup to readiness: what both roles have in common, and each one's own."""

    def __init__(self, port: Port, setup: Setup, config: EngineConfig, device: torch.device, heart: Heart) -> None:
        self._port, self._setup, self._config, self._device = port, setup, config, device
        self._heart = heart
        self._pair_backend = setup.backend

    def target(self, floor_s: float) -> TargetRank:
        """Load this rank's share, and the draft beside it if it lives here; return it ready for plans."""
        self._heart.stage = "loading"
        tp = self._join()
        try:
            return self._target(tp, floor_s)
        except BaseException:
            tp.close()  # the other ranks must not wait for this one
            raise

    def _target(self, tp: Group, floor_s: float) -> TargetRank:
        config = self._config
        self._say(f"loading {config.model.model}")
        model = load(config.model, tp)
        speculative = self._local_speculation(tp)
        draft = None if speculative is None else load_draft(config.model, speculative, self._say)
        slots, sampler, allocate = self._settle(model, draft)
        runner = ModelRunner(model, slots, allocate.num_blocks, slots.block_size)
        local = None
        if draft is not None and speculative is not None:
            local = self._local(ModelRunner(draft, slots, allocate.num_blocks, slots.block_size), slots, sampler,
                                speculative)
        max_rows = config.scheduler.max_num_seqs * (self._max_draft + 1)
        self._ready(runner, max_rows, stay_eager=config.model.enforce_eager)

        def join(order: FormPair) -> DraftReceiver:
            return join_as_target(order, self._port.send, self._pair_backend, self._device, floor_s)

        return TargetRank(self._port.send, tp, TargetWorker(runner, slots, sampler),
                          Pairing(self._port.send, join), local)

    def draft(self) -> DraftRank:
        """Load the draft; return it ready for plans."""
        config, speculative = self._config, self._config.speculative
        if speculative is None:
            raise ConfigError("a draft worker was started, but nothing says what it should load")
        self._heart.stage = "loading"
        model = load_draft(config.model, speculative, self._say)
        slots, sampler, allocate = self._settle(model, None)
        runner = ModelRunner(model, slots, allocate.num_blocks, slots.block_size)
        worker = DraftWorker(ModelForward(runner), slots, sampler, config.scheduler.max_num_batched_tokens)
        proposer = registry.create(speculative, worker)
        self._ready(runner, config.scheduler.max_num_seqs, stay_eager=draft_is_eager(config.model, speculative))

        def join(order: FormPair) -> DraftSender:
            return join_as_draft(order, self._port.send, self._pair_backend, self._device)

        return DraftRank(self._port.send, worker, proposer, Pairing(self._port.send, join))

    @property
    def _max_draft(self) -> int:
        return self._config.speculative.num_speculative_tokens if self._config.speculative else 0

    def _join(self) -> Group:
        """Meet the other target ranks."""
        setup = self._setup
        if setup.store is None:
            return Solo()
        self._say(f"meeting {setup.world - 1} other target rank{'s' if setup.world > 2 else ''}")
        store, host = connect_store(setup.store), address_towards(setup.store.host)
        return form("tp", store, setup.worker.rank, setup.world, setup.backend, device=self._device, host=host,
                    timeout_s=TP_TIMEOUT_S)

    def _local_speculation(self, tp: Group) -> SpeculativeConfig | None:
        """Return what a draft in this process is to be, None where none is."""
        speculative = self._config.speculative
        if speculative is None or speculative.placement != "colocated" or tp.rank:
            return None
        return speculative if registry.worker_method(speculative) is not None else None

    def _local(self, runner: ModelRunner, slots: SlotTable, sampler: Sampler,
               speculative: SpeculativeConfig) -> LocalDraft:
        if not draft_is_eager(self._config.model, speculative):
            self._say(f"draft: {runner.warm_up()}")
        worker = DraftWorker(ModelForward(runner), slots, sampler, self._config.scheduler.max_num_batched_tokens)
        return LocalDraft(worker, registry.create(speculative, worker))

    def _settle(self, model: LoadedModel, beside: LoadedModel | None) -> tuple[SlotTable, Sampler, Allocate]:
        """Say what was loaded, and make the tables as large as all agree."""
        models = [model] if beside is None else [model, beside]
        num_bytes = sum(weight_bytes(loaded.model) for loaded in models)
        self._port.send(Loaded(self._info(models), num_bytes))
        allocate = _wait_for(self._port, Allocate)
        slots = SlotTable(self._config.scheduler.max_num_seqs, allocate.max_model_len, self._config.cache.block_size,
                          self._max_draft)
        return slots, Sampler(slots, allocate.vocab_size, self._device), allocate

    def _info(self, models: list[LoadedModel]) -> WorkerInfo:
        cache, model = self._config.cache, models[0]
        each = sum(bytes_per_block(loaded.layers, cache.block_size, loaded.dtype) for loaded in models)
        room = cache.num_blocks or cache_memory(cache, self._device) // each
        if cache.num_blocks is None and self._setup.worker.role == "target":
            enough = self._config.scheduler.max_num_seqs * -(-model.max_model_len // cache.block_size)
            room = min(room, enough)
        return WorkerInfo(num_blocks=room, block_size=cache.block_size, max_model_len=model.max_model_len,
                          vocab_size=model.vocab_size, eos_ids=model.eos_ids, notes=model.notes)

    def _ready(self, runner: ModelRunner, max_tokens: int, *, stay_eager: bool) -> None:
        """Warm up, and say how long steps take."""
        if not stay_eager:
            self._heart.stage = "warming up"
            self._say("warming up")
            self._say(runner.warm_up())
        wanted = min(PACE_TOKENS, max_tokens) if stay_eager else min(MEASURED_TOKENS, max_tokens)
        step_s = runner.measure(wanted)
        self._heart.stage = "serving"
        self._port.send(WorkerReady(step_s))

    def _say(self, text: str) -> None:
        self._port.send(Progress(text))
