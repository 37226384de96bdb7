"""Loads models and makes what runs them, for every kind of worker: target rank, draft rank, engine in one process.

Loading has two steps, because all workers hold the same number of KV blocks: `load_target` and `load_draft` read
weights and find out how many blocks fit; once the number is settled, `make_target` and `make_draft` allocate.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec import structs

from protos.capacity import kv_summary, settle_blocks
from protos.config.default_shape import for_device
from protos.config.engine import CacheConfig, EngineConfig, SpeculativeConfig
from protos.layers import FeatureSpec
from protos.messages import StepCosts, WorkerInfo
from protos.progress import ProgressCallback
from protos.worker_messages import Allocate, Loaded
from workers.attention.kv import bytes_per_block
from workers.compiled.warming import Compilable, Swap, Warm, warm_up
from workers.compiled.warming import load as load_entry
from workers.device import cache_bytes, weight_bytes
from workers.distributed.groups import Group, Solo
from workers.draft.engine import DraftEngine, make_engine
from workers.draft.load import LoadedDraft, feature_spec, load_draft
from workers.gpu.build import capture_forwards, graph_drafts, make_rounds
from workers.gpu.rounds import DeviceRounds
from workers.invariant import ops
from workers.model.capture import Taps
from workers.model.loaded import LoadedModel
from workers.model.loader import load, pick_device
from workers.model.runner import ModelRunner
from workers.model.self_check import self_check
from workers.recurrent.limits import blocks_beside, check_speculation, draft_places, states_beside
from workers.recurrent.pool import NO_STATES, bytes_per_slot
from workers.rehearsal import memory_of_steps, warm_rounds
from workers.sampling.grammar_masks import load_grammar_masks
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.step_costs import Measurement, needs_step_costs
from workers.target import TargetWorker
from workers.target_rank import TargetRank, UniExecutor
from workers.threads import ThreadCount, choose_threads
from workers.verification.acceptance import AcceptanceRule
from workers.verification.factory import make_acceptance_rule
from workers.weights.partition import splits

logger = logging.getLogger(__name__)

MakeRule = Callable[[SpeculativeConfig | None, Sampler], AcceptanceRule]


@dataclass(frozen=True)
class LoadedTarget:
    """One rank's share of the target, and the draft in the same process, if there is one.

    Attributes:
        model: the share.
        spec: which features of the target a draft is fed, in this process or another.
        draft: None if no draft runs in this process.
        taps: capture the features that `spec` names; None if there are none.
        beside: bytes of the device's memory that steps take beside weights and caches, as measured.
    """

    model: LoadedModel
    spec: FeatureSpec
    draft: LoadedDraft | None = None
    taps: Taps | None = None
    beside: int = 0

    @property
    def num_bytes(self) -> int:
        """Of all weights."""
        return weight_bytes(self.model.model) + (0 if self.draft is None else self.draft.num_bytes)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one KV block, with those of the draft in this process."""
        each = bytes_per_block(self.model.layers, block_size, self.model.kv_dtype)
        return each if self.draft is None else each + self.draft.bytes_per_block(block_size)

    def report(self, config: EngineConfig) -> Loaded:
        """Return what the controller is told once the weights are loaded."""
        ranks = splits(self.model.model.config) if self.model.ranks > 1 else ()
        if config.model.batch_invariant:
            ranks = tuple(n for n in ranks if ops.SHARDS % n == 0)
        free = cache_bytes(config.cache, self.model.device, self.beside)
        return Loaded(self.info(config), self.num_bytes, free, self.block_bytes(config.cache.block_size), ranks)

    def info(self, config: EngineConfig) -> WorkerInfo:
        """Return the description of this rank for the controller, with the number of KV blocks that fit."""
        model, size = self.model, config.cache.block_size
        each, places = self.block_bytes(size), draft_places(config)
        both = (model.recurrent, self.draft.recurrent if self.draft else NO_STATES)
        slot_bytes = sum(bytes_per_slot(shapes, places) for shapes in both)
        fitting = blocks_that_fit(config.cache, model.device, each, self.beside)
        fitting = blocks_beside(config, slot_bytes, fitting, each)
        states = None
        if model.recurrent:
            fitting, states = states_beside(config, model, fitting, each)
        if config.cache.num_blocks is None:
            fitting = min(fitting, config.scheduler.max_num_seqs * -(-model.max_model_len // size))
        return WorkerInfo(
            num_blocks=fitting,
            block_size=size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            eos_ids=model.eos_ids,
            notes=model.notes,
            speculates=config.speculative is not None,
            draft_needs=self.spec.needs,
            dtype=str(model.dtype).removeprefix("torch."),
            kv_cache_dtype=str(model.kv_dtype).removeprefix("torch."),
            device=model.device.type,
            prefix_states=states,
        )


class ReadyTarget(NamedTuple):
    """A target rank that can run rounds, its local draft if there is one, and the seconds that their steps take.

    `costs` are empty where they were not measured. `swap` is None unless something is compiled in the background.
    `rounds` runs whole rounds on a GPU; None where steps run eager. `rows_ahead`: see `WorkerInfo`.
    """

    worker: TargetWorker
    draft: DraftEngine | None
    costs: StepCosts
    swap: Swap | None
    rounds: DeviceRounds | None = None
    rows_ahead: int = 0


def load_target(config: EngineConfig, tp: Group, report: ProgressCallback, *, with_draft: bool) -> LoadedTarget:
    """Load this rank's share of the target; with *with_draft* also the draft that runs in this process.

    Raises:
        ModelError, ConfigError: with what is wrong and the numbers.
    """
    report(f"loading {config.model.model}")
    model = load(config.model, tp)
    if model.recurrent:
        check_speculation(config, model)
    if not config.model.skip_self_check:
        self_check(model, config.model.model)
    if tp.rank == 0:
        for note in model.notes:
            report(note)
    draft = load_draft(config, model, report) if with_draft else None
    own = FeatureSpec() if tp.rank else feature_spec(config)
    spec = own if draft is None else draft.spec
    taps = None if spec.needs == "none" else Taps(model.model, spec)
    return LoadedTarget(model, spec, draft, taps, memory_of_steps(config, model, taps, report))


def make_target(
    config: EngineConfig,
    loaded: LoadedTarget,
    allocate: Allocate,
    report: ProgressCallback,
    *,
    pace_tokens: int = 0,
    make_rule: MakeRule | None = None,
) -> ReadyTarget:
    """Allocate caches, compile where that pays, and measure steps. May be called again with the same *loaded*.

    Args:
        config: a parsed configuration.
        loaded: what `load_target` returned.
        allocate: the settled number of KV blocks.
        report: called with a line for each stage.
        pace_tokens: steps are measured for up to this many tokens even where no threshold is derived from them.
        make_rule: makes the acceptance rule; None: the one that is configured.
    """
    slots = make_slots(config, allocate)
    sampler = Sampler(slots, allocate.vocab_size, loaded.model.device)
    runner = ModelRunner(
        loaded.model, slots, allocate.num_blocks, slots.block_size, loaded.taps, prefix_states=allocate.prefix_states
    )
    parts: dict[str, Compilable] = {} if config.model.enforce_eager else {"target": runner}
    draft = None
    if loaded.draft is not None:
        draft = make_engine(loaded.draft, config, slots, sampler, num_blocks=allocate.num_blocks, target=runner)
        if not loaded.draft.is_eager:
            parts["draft"] = draft.worker.forward
    if parts:
        report("warming up")
    if not config.model.enforce_eager and runner.key() is None:
        report(f"target: {runner.warm_up()}")
    warm = warm_up(config, allocate, parts, report)
    capture_forwards(parts, config.scheduler.max_num_batched_tokens, report)
    measurement = Measurement(config, runner, draft, pace_tokens, warm.keys)
    costs = measurement.costs() if warm.swap is None else StepCosts({}, {})
    slots.clear()
    model = loaded.model
    masked = sampler.with_grammars(load_grammar_masks(config.model, slots, model.vocab_size, model.eos_ids))
    rule = (make_rule or make_acceptance_rule)(config.speculative, masked)
    worker = TargetWorker(runner, slots, masked, loaded.spec.needs, rule)
    warm_rounds(worker, config)
    rounds = None if config.model.enforce_eager else make_rounds(worker, draft, config.max_draft, report)
    rows_ahead = 0 if rounds is None or not config.scheduler.async_scheduling else rounds.rows_ahead
    return ReadyTarget(worker, draft, costs, warm.swap, rounds, rows_ahead)


def make_draft(
    config: EngineConfig, draft: LoadedDraft, allocate: Allocate, device: torch.device, report: ProgressCallback
) -> tuple[DraftEngine, Measurement]:
    """Make the engine of a draft that is alone in its process, and what measures its steps."""
    slots = make_slots(config, allocate)
    sampler = Sampler(slots, allocate.vocab_size, device)
    engine = make_engine(draft, config, slots, sampler, num_blocks=allocate.num_blocks)
    parts: dict[str, Compilable] = {} if draft.is_eager else {"draft": engine.worker.forward}
    warm = warm_up(config, allocate, parts, report)
    capture_forwards(parts, config.scheduler.max_num_batched_tokens, report)
    if not draft.is_eager:
        graph_drafts(engine, config.max_draft, report)
    return engine, Measurement(config, None, engine, keys=warm.keys)


def build_uni(
    config: EngineConfig, report: ProgressCallback = logger.info, make_rule: MakeRule | None = None
) -> UniExecutor:
    """Load everything *config* names into this process. *make_rule* makes the acceptance rule.

    Raises:
        ModelError, ConfigError: with what is wrong and the numbers.
    """
    threads = choose_threads(config)
    config = for_device(config, pick_device(config.model.device).type)
    tp = Solo()
    loaded = load_target(config, tp, report, with_draft=True)
    info = loaded.info(config)
    info, allocate = settle_blocks(info, {"this process": info.num_blocks})
    for note in (*info.notes[len(loaded.model.notes) :], kv_summary(info)):
        report(note)
    ready = make_target(config, loaded, allocate, report, make_rule=make_rule)
    costs = ready.costs if needs_step_costs(config) and ready.swap is None else None
    later = None if ready.swap is None else _compiled_later(config, loaded, allocate, ready, threads)
    rank = TargetRank(tp, ready.worker, ready.draft, ready.rounds)
    info = structs.replace(info, costs=costs, rows_ahead=ready.rows_ahead)
    return UniExecutor(info, rank, threads, later)


def _compiled_later(
    config: EngineConfig, loaded: LoadedTarget, allocate: Allocate, ready: ReadyTarget, threads: ThreadCount | None
) -> Iterator[StepCosts | None]:
    """Swap in what is compiled in the background, and measure steps: a little at a time, between two steps.

    Yields None, and at the end the costs.
    """
    assert ready.swap is not None
    try:
        while not ready.swap.is_ready:
            yield None
        warm = ready.swap.finish()
    finally:
        ready.swap.stop()
    if threads is not None:
        threads.forget()  # the compiler, which took cores, has ended; steps are measured with all threads
    if needs_step_costs(config):
        runner = ready.worker.runner
        draft = None if loaded.draft is None else _spare_engine(config, loaded.draft, allocate, warm, runner)
        yield from Measurement(config, runner, draft, keys=warm.keys).stages()


def _spare_engine(
    config: EngineConfig, draft: LoadedDraft, allocate: Allocate, warm: Warm, target: ModelRunner
) -> DraftEngine:
    """Return an engine over the same weights for trial proposals, while another one drafts for requests."""
    slots = make_slots(config, allocate)
    sampler = Sampler(slots, allocate.vocab_size, torch.device("cpu"))
    engine = make_engine(draft, config, slots, sampler, num_blocks=1, target=target)
    if warm.keys is not None and not draft.is_eager:
        load_entry("trial draft", engine.worker.forward, warm.keys[-1], logger.debug)
    return engine


def make_slots(config: EngineConfig, allocate: Allocate) -> SlotTable:
    """Return the slot table of a worker."""
    slots = config.scheduler.max_num_seqs
    return SlotTable(slots, allocate.max_model_len, config.cache.block_size, draft_places(config))


def blocks_that_fit(cache: CacheConfig, device: torch.device, bytes_each: int, beside: int = 0) -> int:
    """Return how many KV blocks of *bytes_each* fit; a draft without attention layers has room for any number."""
    return cache.num_blocks or cache_bytes(cache, device, beside) // max(1, bytes_each)


def blocks_of_draft(config: EngineConfig, draft: LoadedDraft, device: torch.device) -> int:
    """Return how many KV blocks fit in the process of a draft that is alone in it. Raises `ConfigError`: none."""
    each = draft.bytes_per_block(config.cache.block_size)
    fitting = blocks_that_fit(config.cache, device, each)
    return blocks_beside(config, bytes_per_slot(draft.recurrent, draft_places(config)), fitting, each)
