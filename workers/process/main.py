"""The whole life of a worker process of a gang: say where it is, be told who it is, load, warm up, serve until stopped.

Called with a `Port` to the controller by whatever started the process. `DESIGN` section 4; `protos.worker_messages` has
the words.
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

from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from protos.layers import FeatureSpec
from protos.messages import WorkerInfo
from protos.worker_messages import (
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
from workers.attention.kv import bytes_per_block
from workers.build import MEASURED_TOKENS, cache_memory, taps_for
from workers.device import set_device, weight_bytes
from workers.distributed.groups import LOOPBACK, Group, Solo, address_towards, connect_store, open_store
from workers.distributed.shm_group import form_near
from workers.draft.channel import DraftReceiver, DraftSender, Pairing, join_as_draft, join_as_target
from workers.draft.deadline import FLOOR_S
from workers.draft.draft_model import DraftEngine, LoadedDraft, feature_spec, load_draft, wants_costs
from workers.model.loaded import LoadedModel
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.process.draft_rank import DraftRank
from workers.process.target_rank import TargetRank
from workers.sampling.grammar_words import with_grammars
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.verification.draft_probs import DRAFT_PROBS_SIZE
from workers.verification.factory import judge_for

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        draft = load_draft(config, model, self._say) if self._drafts_here(tp) else None
        spec = FeatureSpec() if tp.rank else feature_spec(config)
        slots, sampler, allocate = self._settle(self._target_info(model, draft, spec), model, draft)
        runner = ModelRunner(model, slots, allocate.num_blocks, slots.block_size, taps_for(model, spec))
        if not config.model.enforce_eager:
            self._warm_up()
            self._say(runner.warm_up())
        local = (
            None
            if draft is None
            else DraftEngine.of(draft, config, slots, sampler, num_blocks=allocate.num_blocks, say=self._say)
        )
        step_s = runner.measure(self._measured(config.scheduler.max_num_seqs * (self._max_draft + 1)))
        draft_s = {} if local is None else self._draft_costs(local)
        self._ready(slots, WorkerReady(step_s, draft_s))

        def join(order: FormPair) -> DraftReceiver:
            return join_as_target(
                order, self._port.send, self._pair_backend, self._device, floor_s, has_features=spec.needs != "none"
            )

        grammars = with_grammars(sampler, config.model, model)
        worker = TargetWorker(runner, slots, grammars, spec.needs, judge_for(config.speculative, grammars))
        draws = config.speculative is not None and config.speculative.draws_guesses
        return TargetRank(
            self._port.send,
            tp,
            worker,
            Pairing(self._port.send, join),
            local,
            law_size=DRAFT_PROBS_SIZE if draws else 0,
        )

    def draft(self) -> DraftRank:
        """Load the draft; return it ready for plans."""
        config = self._config
        self._heart.stage = "loading"
        draft = load_draft(config, None, self._say)
        if draft is None:
            raise ConfigError("a draft worker was started, but nothing says what it should load")
        info = WorkerInfo(self._room(draft.bytes_per_block(self._block_size)), self._block_size, 0, 0)
        slots, sampler, allocate = self._settle(info, None, draft)
        self._warm_up()
        side = DraftEngine.of(draft, config, slots, sampler, num_blocks=allocate.num_blocks, say=self._say)
        step_s = self._draft_costs(side)
        self._ready(slots, WorkerReady(step_s))

        def join(order: FormPair) -> DraftSender:
            return join_as_draft(
                order, self._port.send, self._pair_backend, self._device, has_features=draft.spec.needs != "none"
            )

        return DraftRank(self._port.send, side.worker, side.proposer, Pairing(self._port.send, join))

    @property
    def _block_size(self) -> int:
        return self._config.cache.block_size

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
        return form_near(
            "tp",
            store,
            setup.worker.rank,
            setup.world,
            setup.backend,
            device=self._device,
            host=host,
            timeout_s=TP_TIMEOUT_S,
        )

    def _drafts_here(self, tp: Group) -> bool:
        """Whether a draft lives in this process."""
        speculative = self._config.speculative
        return speculative is not None and speculative.placement == "colocated" and not tp.rank

    def _settle(
        self, info: WorkerInfo, model: LoadedModel | None, draft: LoadedDraft | None
    ) -> tuple[SlotTable, Sampler, Allocate]:
        """Say what was loaded, and make the tables as large as all agree."""
        num_bytes = (0 if model is None else weight_bytes(model.model)) + (0 if draft is None else draft.num_bytes)
        self._port.send(Loaded(info, num_bytes))
        allocate = _wait_for(self._port, Allocate)
        slots = SlotTable(
            self._config.scheduler.max_num_seqs, allocate.max_model_len, self._block_size, self._max_draft
        )
        return slots, Sampler(slots, allocate.vocab_size, self._device), allocate

    def _target_info(self, model: LoadedModel, beside: LoadedDraft | None, spec: FeatureSpec) -> WorkerInfo:
        each = bytes_per_block(model.layers, self._block_size, model.dtype)
        room = self._room(each + (0 if beside is None else beside.bytes_per_block(self._block_size)))
        if self._config.cache.num_blocks is None:
            enough = self._config.scheduler.max_num_seqs * -(-model.max_model_len // self._block_size)
            room = min(room, enough)
        return WorkerInfo(
            num_blocks=room,
            block_size=self._block_size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            notes=model.notes,
            draft_needs=spec.needs,
            dtype=str(model.dtype).removeprefix("torch."),
        )

    def _room(self, bytes_each: int) -> int:
        """Return how many blocks of this size fit; a draft without layers has room for any number."""
        cache = self._config.cache
        return cache.num_blocks or cache_memory(cache, self._device) // max(1, bytes_each)

    def _warm_up(self) -> None:
        self._heart.stage = "warming up"
        self._say("warming up")

    def _measured(self, most: int) -> int:
        """Return up to how many tokens steps are measured: far where costs are asked for, else to know a hang."""
        return min(MEASURED_TOKENS if wants_costs(self._config) else PACE_TOKENS, most)

    def _draft_costs(self, side: DraftEngine) -> dict[int, float]:
        """Measure the draft where somebody asks: how long it may take is not judged by it."""
        num_rows = min(MEASURED_TOKENS, self._config.scheduler.max_num_seqs)
        return side.measure(num_rows, self._max_draft) if wants_costs(self._config) else {}

    def _ready(self, slots: SlotTable, ready: WorkerReady) -> None:
        slots.clear()
        self._heart.stage = "serving"
        self._port.send(ready)

    def _say(self, text: str) -> None:
        self._port.send(Progress(text))
