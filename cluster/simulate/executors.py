"""The executors of replays: the target's tokens come from the log, with and without running the target."""

import gc

import torch

from cluster.simulate.odds import COUPLED
from cluster.simulate.recorded import LoggedDraftSampler, RecordedRule, RecordedTarget
from protos.capacity import settle_blocks
from protos.config.default_shape import for_device
from protos.config.engine import EngineConfig
from protos.interfaces import Executor
from protos.layers import Needs
from protos.messages import WorkerInfo
from protos.progress import ProgressCallback
from workers.build import blocks_of_draft, build_uni, make_draft
from workers.draft.engine import DraftEngine
from workers.draft.load import feature_spec, load_draft
from workers.model.loader import context_length, pick_device
from workers.target_rank import UniExecutor
from workers.threads import choose_threads
from workers.verification.draft_probs import DRAFT_PROBS_SIZE
from workers.weights.hub import read_config


def free_memory() -> None:
    """Free the models of executors that are no longer used: they are part of reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without a device


def needs_of(config: EngineConfig) -> Needs:
    """Return which hidden states of the target the draft of *config* reads."""
    return feature_spec(config).needs


def draft_failure(executor: Executor) -> Exception | None:
    """Return the last failure of the draft of *executor*, if any."""
    draft = _draft_of(executor)
    return None if draft is None else draft.last_failure


def draft_logged_tokens(executor: Executor, rule: str) -> None:
    """Let the draft of *executor* draft the logged tokens of requests with odds, under the acceptance rule *rule*."""
    draft = _draft_of(executor)
    if draft is not None:
        worker = draft.worker
        size = None if rule == COUPLED else DRAFT_PROBS_SIZE
        worker.draft_sampler = LoggedDraftSampler(worker.sampler, worker.draft_sampler, size)


def _draft_of(executor: Executor) -> DraftEngine | None:
    if isinstance(executor, UniExecutor) and isinstance(executor.rank.source, DraftEngine):
        return executor.rank.source
    return executor.draft if isinstance(executor, RecordedTarget) else None


def with_target(config: EngineConfig, report: ProgressCallback) -> Executor:
    """Load and run the target and the draft of *config*."""
    return build_uni(config, report, lambda _speculative, sampler: RecordedRule(sampler))


def without_target(config: EngineConfig, report: ProgressCallback) -> Executor:
    """Load only the draft of *config*, if it has one that runs on a worker."""
    choose_threads(config)
    device = pick_device(config.model.device)
    config = for_device(config, device.type)
    described = read_config(config.model)
    draft = load_draft(config, None, report)
    size, longest = config.cache.block_size, context_length(described, config.model)
    num_blocks = config.cache.num_blocks or config.scheduler.max_num_seqs * -(-longest // size)
    if draft is not None:
        num_blocks = min(num_blocks, blocks_of_draft(config, draft, device))
    info = WorkerInfo(
        num_blocks=num_blocks,
        block_size=size,
        max_model_len=longest,
        vocab_size=int(described["vocab_size"]),
        eos_ids=_ids(described.get("eos_token_id")),
        speculates=True,
        device=device.type,
    )
    info, allocate = settle_blocks(info, {"this process": num_blocks})
    engine = None if draft is None else make_draft(config, draft, allocate, device, report)[0]
    return RecordedTarget(config, info, engine)


def _ids(given: int | list[int] | None) -> tuple[int, ...]:
    return () if given is None else (given,) if isinstance(given, int) else tuple(given)
