"""Builds the `uni` executor: loads the models, sizes the KV cache, warms up."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from msgspec import structs

from proposers import registry
from protos.config import CacheConfig, EngineConfig, ModelConfig, SpeculativeConfig
from protos.errors import ConfigError
from protos.messages import StepCosts, WorkerInfo
from workers.draft import DraftWorker
from workers.kv import bytes_per_block
from workers.loader import LoadedModel, load
from workers.module_runner import ModelForward
from workers.runner import ModelRunner, free_memory
from workers.sampler import Sampler
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.uni import UniExecutor

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 4 << 30  # where nothing is said, at most this much of main memory, as vLLM does
MEASURED_TOKENS = 512  # step costs are measured up to this many tokens
Say = Callable[[str], None]


def build_uni(config: EngineConfig, say: Say = logger.info) -> UniExecutor:
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
    speculative = config.speculative
    on_worker = speculative is not None and registry.worker_method(speculative) is not None
    draft = load_draft(config.model, speculative, say) if speculative and on_worker else None
    info, notes = _size(config, target, draft)
    max_draft = speculative.num_speculative_tokens if speculative else 0
    slots = SlotTable(config.scheduler.max_num_seqs, info.max_model_len, info.block_size, max_draft)
    sampler = Sampler(slots, target.vocab_size, target.device)
    for note in (*target.notes, *notes):
        say(note)
    runner = ModelRunner(target, slots, info.num_blocks, info.block_size)
    max_rows = config.scheduler.max_num_seqs
    target_s = warm_up("target", runner, max_rows * (max_draft + 1), config.model.enforce_eager, say)
    executor = UniExecutor(info, slots, TargetWorker(runner, slots, sampler))
    draft_s: dict[int, float] = {}
    if draft is not None and speculative is not None:
        runner = ModelRunner(draft, slots, info.num_blocks, info.block_size)
        draft_s = warm_up("draft", runner, max_rows, draft_is_eager(config.model, speculative), say)
        executor.draft = DraftWorker(ModelForward(runner), slots, sampler, config.scheduler.max_num_batched_tokens)
        executor.proposer = registry.create(speculative, executor.draft)
    if target_s and (draft_s or draft is None):
        executor.info = structs.replace(info, costs=StepCosts(target_s, draft_s))
    return executor


def warm_up(name: str, runner: ModelRunner, max_tokens: int, stay_eager: bool, say: Say) -> dict[int, float]:
    """Compile where that wins; return the measured seconds of a forward by tokens fed, none where eager was asked for.

    Nothing larger than `MEASURED_TOKENS` is run: beyond, costs grow in proportion.
    """
    if stay_eager:
        return {}
    say(f"warming up the {name}")
    say(f"{name}: {runner.warm_up()}")
    return runner.measure(min(max_tokens, MEASURED_TOKENS))


def load_draft(target: ModelConfig, speculative: SpeculativeConfig, say: Say) -> LoadedModel:
    """Load the draft, with the target's settings where it has none of its own."""
    if speculative.model is None:
        raise ConfigError(f"speculative method {speculative.method!r} needs a draft: set 'model' in speculative_config")
    say(f"loading the draft {speculative.model}")
    dtype = target.dtype if speculative.dtype == "auto" else speculative.dtype
    return load(replace(target, model=speculative.model, revision=speculative.revision, dtype=dtype,
                        max_model_len=speculative.max_model_len))


def draft_is_eager(target: ModelConfig, speculative: SpeculativeConfig) -> bool:
    """Whether the draft is not to be compiled."""
    return target.enforce_eager if speculative.enforce_eager is None else speculative.enforce_eager


def _size(config: EngineConfig, target: LoadedModel, draft: LoadedModel | None) -> tuple[WorkerInfo, tuple[str, ...]]:
    """Return the block count that all models' caches share, and the context length it leaves."""
    size = config.cache.block_size
    each = bytes_per_block(target.layers, size, target.dtype)
    if draft is not None:
        each += bytes_per_block(draft.layers, size, draft.dtype)
    enough = config.scheduler.max_num_seqs * -(-target.max_model_len // size)
    num_blocks = config.cache.num_blocks or min(enough, cache_memory(config.cache, target.device) // each)
    if num_blocks < 2:
        raise ConfigError(f"the KV cache holds {num_blocks} blocks of {size} tokens ({each} bytes each); "
                          "it needs 2 at least: give it more memory")
    held = num_blocks * size
    max_model_len = min(target.max_model_len, held)
    notes = [f"KV cache: {num_blocks} blocks of {size} tokens, {held} tokens, {num_blocks * each / 2**20:.0f} MiB; "
             f"{held / max_model_len:.1f} sequences of {max_model_len} tokens at once"]
    if max_model_len < target.max_model_len:
        notes.append(f"max_model_len is cut from {target.max_model_len} to {max_model_len}, what the KV cache holds")
    info = WorkerInfo(
        num_blocks=num_blocks, block_size=size, max_model_len=max_model_len, vocab_size=target.vocab_size,
        eos_ids=target.eos_ids, speculates=config.speculative is not None,
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
