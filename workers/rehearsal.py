"""Rounds over made-up sequences: what memory the largest ones take, and all kernels loaded before requests come."""

from typing import NamedTuple

import torch

from protos.config.engine import EngineConfig
from protos.draft import Draft
from protos.errors import ConfigError
from protos.messages import Row, Sampling
from protos.progress import ProgressCallback
from workers.device import weight_bytes
from workers.distributed.groups import first_line
from workers.gpu.attention_torch import DeviceAttention
from workers.gpu.sizes import MOST_ROWS, forward_sizes
from workers.gpu.token_counts import TokenCounts
from workers.model.capture import Taps
from workers.model.loaded import LoadedModel
from workers.model.runner import ModelRunner
from workers.recurrent.limits import draft_places
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.target import TargetWorker

GREEDY, DRAWN = Sampling(seed=0, temperature=0.0), Sampling(seed=0)
LIMITED = Sampling(seed=0, top_k=50, top_p=0.9, min_p=0.01)
"""Sampling of the most steps and memory that no request's own options, such as penalties, add to."""
KINDS = (GREEDY, DRAWN, LIMITED)
PROMPTS = (4, 16, 64, 256)
"""Tokens between those of the smallest and the largest rounds: kernels are built for ranges of sizes."""
GIB = 1 << 30


class Rehearsal(NamedTuple):
    """A round of *rows* rows, each of which feeds *length* tokens and a draft of *k*."""

    rows: int
    length: int
    k: int
    sampling: Sampling = LIMITED

    def __str__(self) -> str:
        drafts = f" and {self.k} draft tokens" if self.k else ""
        return f"{self.rows} rows of {self.length} tokens{drafts}"


def largest_rounds(config: EngineConfig, max_model_len: int) -> tuple[Rehearsal, Rehearsal]:
    """Return the rounds that sample at the most positions, and that feed the most tokens."""
    limits, k = config.scheduler, config.max_draft
    rows = max(1, min(limits.max_num_seqs, limits.max_num_batched_tokens // (1 + k)))
    length = min(limits.max_num_batched_tokens, max_model_len)
    prompts = min(limits.max_num_seqs, limits.max_num_batched_tokens // length)
    return Rehearsal(rows, 1, k), Rehearsal(prompts, length, 0)


def rehearse(worker: TargetWorker, *rehearsals: Rehearsal) -> None:
    """Run rounds, all of whose keys and values go to block 0. Every rank of the target calls this, before it serves."""
    slots = worker.slots
    for number, each in enumerate(rehearsals, 2):
        slots.clear()
        slots.known_len[: each.rows] = each.length
        slots.prompt_len[: each.rows] = 1
        slots.generation[: each.rows] = -number  # of no sequence, so that nothing is kept of it
        slots.sampling[: each.rows] = [each.sampling] * each.rows
        rows = [Row(slot, 0, each.length, each.length, each.k) for slot in range(each.rows)]
        drafts = [Draft((0,) * each.k)] * each.rows
        if worker.runner.loaded.group.rank:
            worker.forward_only(rows, drafts)
        else:
            worker.score(rows, drafts)
    slots.clear()


def warm_rounds(worker: TargetWorker, config: EngineConfig) -> None:
    """Load the kernels of every kind of round on a CUDA device, so that no request waits for them."""
    if worker.runner.device.type != "cuda":
        return
    largest = largest_rounds(config, worker.runner.loaded.max_model_len)
    several = min(2, config.scheduler.max_num_seqs)
    small = [Rehearsal(rows, 1, k, how) for rows in {1, several} for k in {0, config.max_draft} for how in KINDS]
    prompts = [Rehearsal(1, length, 0, GREEDY) for length in PROMPTS if length < largest[1].length]
    rehearse(worker, *largest, *small, *prompts)
    torch.cuda.synchronize(worker.runner.device)


def memory_of_steps(config: EngineConfig, model: LoadedModel, taps: Taps | None, report: ProgressCallback) -> int:
    """Return the bytes of a CUDA device that steps take beside weights and caches: those of the largest, and graphs.

    0 on CPUs, and where the size of the cache is configured.

    Raises:
        ConfigError: nothing is left for the cache; with all sizes.
    """
    if model.device.type != "cuda" or (config.cache.num_blocks or config.cache.memory_bytes) is not None:
        return 0
    slots = SlotTable(config.scheduler.max_num_seqs, model.max_model_len, config.cache.block_size, draft_places(config))
    runner = ModelRunner(model, slots, 1, config.cache.block_size, taps)
    worker = TargetWorker(runner, slots, Sampler(slots, model.vocab_size, model.device))
    rounds = largest_rounds(config, model.max_model_len)
    peaks = [_peak(worker, each) for each in rounds]
    step = max(peaks)
    graphs = 0 if config.model.enforce_eager else _peak_of_graphs(worker, config, rounds[0])
    report(_divided(config, model, step, graphs, str(rounds[peaks.index(step)])))
    return step + graphs


def _peak_of_graphs(worker: TargetWorker, config: EngineConfig, largest: Rehearsal) -> int:
    """Return the bytes of whole rounds as graphs, with counts of tokens, and of forwards alone, with their logits."""
    rounds = _peak(worker, largest._replace(rows=min(largest.rows, MOST_ROWS)))
    limits = config.scheduler
    rounds += TokenCounts.num_bytes(limits.max_num_seqs, worker.runner.loaded.vocab_size)
    forwards = forward_sizes(limits.max_num_seqs, limits.max_num_batched_tokens)
    if not forwards or not isinstance(worker.runner.attention, DeviceAttention):
        return rounds
    tokens, rows, wanted = forwards[0]
    logits = wanted * worker.runner.loaded.vocab_size * torch.float32.itemsize
    return rounds + logits + _peak(worker, Rehearsal(rows, tokens // rows, 0))


def _peak(worker: TargetWorker, each: Rehearsal) -> int:
    """Return the bytes that a round takes at most. Raises `ConfigError` where there are too few."""
    device, shortage = worker.runner.device, ""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    try:
        rehearse(worker, each)
    except torch.OutOfMemoryError as error:
        shortage = first_line(error)
    if shortage:
        raise ConfigError(
            f"the largest step, {each}, does not fit beside {weight_bytes(worker.runner.module) / GIB:.2f} GiB of "
            f"weights: lower max_num_batched_tokens or max_num_seqs ({shortage})"
        )
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device) - before


def _divided(config: EngineConfig, model: LoadedModel, step: int, graphs: int, largest: str) -> str:
    """Return a line on what takes the device's memory. Raises `ConfigError` if nothing is left for caches."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    utilization = config.cache.memory_utilization
    left = int(free - (1 - utilization) * total) - step - graphs
    parts = (
        f"of {total / GIB:.2f} GiB, {free / GIB:.2f} are free beside {weight_bytes(model.model) / GIB:.2f} of weights; "
        f"the largest step ({largest}) takes {step / GIB:.2f}, graphs {graphs / GIB:.2f}"
    )
    if left <= 0:
        raise ConfigError(
            f"nothing is left for the KV cache: {parts}, and gpu_memory_utilization {utilization} keeps "
            f"{(1 - utilization) * total / GIB:.2f} free; lower max_num_batched_tokens or max_num_seqs"
        )
    return f"device memory: {parts}, caches may take {left / GIB:.2f}"
