"""Builds the `uni` executor: loads the models, sizes the KV cache, warms up."""

import logging

import torch
from msgspec import structs

from protos.config.engine import CacheConfig, EngineConfig
from protos.errors import ConfigError
from protos.layers import FeatureSpec
from protos.messages import StepCosts, WorkerInfo
from protos.progress import ProgressCallback
from workers.attention.kv import bytes_per_block
from workers.device import free_memory
from workers.draft.draft_model import DraftEngine, LoadedDraft, load_draft, wants_costs
from workers.model.capture import Taps
from workers.model.loaded import LoadedModel
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.sampling.grammar_words import with_grammars
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.uni import UniExecutor
from workers.verification.factory import judge_for

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30  # where nothing is said, at most this much of main memory, as vLLM does
MEASURED_TOKENS = 512  # step costs are measured up to this many tokens


def build_uni(config: EngineConfig, say: ProgressCallback = logger.info) -> UniExecutor:
    """Load everything *config* names into this process.

    Args:
        config: a parsed configuration.
        say: told, in a line each, what is being done.

    Raises:
        ModelError, ConfigError: with what is wrong and the numbers.
    """
    if config.model.num_threads:
        torch.set_num_threads(config.model.num_threads)
    say(f"loading {config.model.model}")
    target = load(config.model)
    draft = load_draft(config, target, say)
    info, notes = _size(config, target, draft)
    for note in (*target.notes, *notes):
        say(note)
    max_draft = config.speculative.num_speculative_tokens if config.speculative else 0
    slots = SlotTable(config.scheduler.max_num_seqs, info.max_model_len, info.block_size, max_draft)
    sampler = Sampler(slots, target.vocab_size, target.device)
    spec = FeatureSpec() if draft is None else draft.spec
    runner = ModelRunner(target, slots, info.num_blocks, info.block_size, taps_for(target, spec))
    if not config.model.enforce_eager:
        say("warming up the target")
        say(f"target: {runner.warm_up()}")
    side = None if draft is None else DraftEngine.of(draft, config, slots, sampler, num_blocks=info.num_blocks, say=say)
    costs = measure(config, runner, side)
    slots.clear()
    grammars = with_grammars(sampler, config.model, target)
    worker = TargetWorker(runner, slots, grammars, spec.needs, judge_for(config.speculative, grammars))
    return UniExecutor(structs.replace(info, costs=costs), slots, worker, side)


def taps_for(target: LoadedModel, spec: FeatureSpec) -> Taps | None:
    """Return what catches the states that a draft is fed; None where it is fed none."""
    return None if spec.needs == "none" else Taps(target.model, spec)


def measure(config: EngineConfig, runner: ModelRunner, side: DraftEngine | None) -> StepCosts | None:
    """Measure what steps cost where somebody asks. Nothing larger than `MEASURED_TOKENS` is run: beyond, costs grow
    in proportion.
    """
    speculative = config.speculative
    if speculative is None or not wants_costs(config):
        return None
    k, max_rows = speculative.num_speculative_tokens, config.scheduler.max_num_seqs
    target_s = runner.measure(min(max_rows * (k + 1), MEASURED_TOKENS))
    return StepCosts(target_s, {} if side is None else side.measure(min(max_rows, MEASURED_TOKENS), k))


def _size(config: EngineConfig, target: LoadedModel, draft: LoadedDraft | None) -> tuple[WorkerInfo, tuple[str, ...]]:
    """Return the block count that all models' caches share, and the context length it leaves."""
    size = config.cache.block_size
    each = bytes_per_block(target.layers, size, target.dtype)
    if draft is not None:
        each += draft.bytes_per_block(size)
    enough = config.scheduler.max_num_seqs * -(-target.max_model_len // size)
    num_blocks = config.cache.num_blocks or min(enough, cache_memory(config.cache, target.device) // each)
    if num_blocks < 2:
        raise ConfigError(
            f"the KV cache holds {num_blocks} blocks of {size} tokens ({each} bytes each); "
            "it needs 2 at least: give it more memory"
        )
    held = num_blocks * size
    max_model_len = min(target.max_model_len, held)
    notes = [
        f"KV cache: {num_blocks} blocks of {size} tokens, {held} tokens, {num_blocks * each / 2**20:.0f} MiB; "
        f"{held / max_model_len:.1f} sequences of {max_model_len} tokens at once"
    ]
    if max_model_len < target.max_model_len:
        notes.append(f"max_model_len is cut from {target.max_model_len} to {max_model_len}, what the KV cache holds")
    info = WorkerInfo(
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=max_model_len,
        vocab_size=target.vocab_size,
        eos_ids=target.eos_ids,
        speculates=config.speculative is not None,
        draft_needs="none" if draft is None else draft.spec.needs,
        dtype=str(target.dtype).removeprefix("torch."),
    )
    return info, tuple(notes)


def cache_memory(cache: CacheConfig, device: torch.device) -> int:
    """Return the bytes the KV caches may take."""
    if cache.memory_bytes is not None:
        return cache.memory_bytes
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - (1 - cache.memory_utilization) * total)
    return min(CPU_CACHE_BYTES, int(free_memory() * cache.memory_utilization))
